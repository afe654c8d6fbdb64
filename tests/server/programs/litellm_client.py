"""Uses litellm as its users do; prints what came back as JSON.

usage: litellm_client.py BASE_URL
"""

import asyncio
import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "What does the fox do?"}]


def error_of(call: Any, **fields: Any) -> dict[str, Any]:
    try:
        answer = call(**fields)
        if fields.get("stream"):
            list(answer)
    except litellm.exceptions.APIError as error:
        return {"class": type(error).__name__, "status": error.status_code}
    except (litellm.exceptions.BadRequestError, litellm.exceptions.NotFoundError) as error:
        return {"class": type(error).__name__, "status": error.status_code}
    raise AssertionError("it was not refused")


def main(base_url: str) -> None:
    common: dict[str, Any] = {"api_base": base_url, "api_key": "none", "num_retries": 0}
    common |= {"model": "openai/null", "max_tokens": 9, "max_retries": 0}
    chat = {**common, "messages": MESSAGES}
    answer = litellm.completion(**chat, temperature=0, seed=1)
    options = {"include_usage": True}
    chunks = list(litellm.completion(**chat, stream=True, stream_options=options))
    texts = {**common, "model": "text-completion-openai/null", "prompt": "One"}
    long = [{"role": "user", "content": "word " * 2000}]
    result = {
        "text": answer.choices[0].message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "usage": answer.usage.model_dump(),
        "pieces": [
            chunk.choices[0].delta.content or "" if chunk.choices else "" for chunk in chunks
        ],
        "async": asyncio.run(litellm.acompletion(**chat)).choices[0].message.content,
        "stopped": litellm.completion(**{**chat, "max_tokens": 60}, stop=[" brown"])
        .choices[0]
        .message.content,
        "choices": [each.message.content for each in litellm.completion(**chat, n=3).choices],
        "completion": litellm.text_completion(**texts).choices[0].text,
        "completion_pieces": [
            chunk.choices[0].text or "" for chunk in litellm.text_completion(**texts, stream=True)
        ],
        "too_long": error_of(litellm.completion, **{**chat, "messages": long}),
        "wrong": error_of(litellm.completion, **chat, temperature=3),
        "wrong_stream": error_of(litellm.completion, **chat, temperature=3, stream=True),
        "unknown": error_of(litellm.completion, **{**chat, "model": "openai/other"}),
    }
    print(json.dumps(result))


main(sys.argv[1])
