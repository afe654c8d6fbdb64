"""Uses langchain-openai as its users do; prints what came back as JSON.

usage: langchain_client.py BASE_URL
"""

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI


def chat_model(base_url: str, **options: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": "null", "max_retries": 0, "max_tokens": 9, **options}
    return ChatOpenAI(base_url=base_url, api_key="none", **settings)


def error_of(call: Any, *arguments: Any) -> dict[str, Any]:
    try:
        call(*arguments)
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code, "param": error.param}
    raise AssertionError("it was not refused")


def main(base_url: str) -> None:
    question = "What does the fox do?"
    chat = chat_model(base_url, temperature=0.0, seed=1)
    answer = chat.invoke([("system", "Be brief."), ("user", question)])
    chunks = list(chat.stream(question, stream_usage=True))
    text_model = OpenAI(
        model="null", base_url=base_url, api_key="none", max_retries=0, max_tokens=9
    )
    long = "word " * 2000
    result = {
        "text": answer.content,
        "usage": answer.usage_metadata,
        "metadata": answer.response_metadata,
        "pieces": [chunk.content for chunk in chunks],
        "stream_usage": next(c.usage_metadata for c in chunks if c.usage_metadata),
        "async": asyncio.run(chat.ainvoke(question)).content,
        "batch": [each.content for each in chat.batch([question] * 3)],
        "stopped": chat.invoke(question, stop=[" brown"]).content,
        "completion": text_model.invoke("One"),
        "completion_pieces": list(text_model.stream("One")),
        "too_long": error_of(chat.invoke, long),
        "too_long_stream": error_of(lambda: list(chat.stream(long))),
        "unknown": error_of(chat_model(base_url, model="other").invoke, question),
        "tools": error_of(
            chat.bind_tools([{"name": "f", "description": "d", "parameters": {}}]).invoke, question
        ),
    }
    print(json.dumps(result))


main(sys.argv[1])
