"""A server on the null model, and readers of what it sends.

What a `Client` reads is held to the schema facts of OpenAI's API where they are here.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import httpx2
from openai_schema import check_answer, check_error, check_event

from cbrs import AsyncLLM
from cbrs.serving import RunningServer

TIMEOUT_S = 30.0
MESSAGES = [{"role": "user", "content": "What does the fox do?"}]


class Client:
    """Asks one server, and holds what it says to what all answers have in common."""

    open: ClassVar[list["Client"]] = []

    def __init__(self, url: str) -> None:
        self.http = httpx2.Client(base_url=url, timeout=TIMEOUT_S)
        self.open.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Closes the connections of all clients there are."""
        while cls.open:
            cls.open.pop().http.close()

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers=headers)

    def get(self, path: str) -> httpx2.Response:
        return self.http.get(path)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        body = {"model": "null", **body}
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        answer: dict[str, Any] = response.json()
        check_answer(path, body, answer)
        return answer

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.ok("/v1/completions", **body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.ok("/v1/chat/completions", **{"messages": MESSAGES, **body})

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream but the last, which must be `[DONE]`."""
        body = {"model": "null", "stream": True, **body}
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            events = parse_events(response.read().decode())
        for event in events:
            check_event(path, event)
        return events

    def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a request that must fail."""
        return error_of(self.post(path, body), status)


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object of a response, which must be well-formed."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    envelope = response.json()
    assert list(envelope) == ["error"]
    check_error(envelope)
    error: dict[str, Any] = envelope["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream without the final `[DONE]`, which comes once."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(event) for event in data[:-1]]


@contextmanager
def serving(model: str = "null", **options: Any) -> Iterator[tuple[AsyncLLM, RunningServer]]:
    """A server on a model of its own; at the end nothing may be left in the engine."""
    import asyncio

    names = options.pop("served_model_names", ("null",))
    limits = options.pop("limits", None)
    llm = AsyncLLM(model, **{"max_model_len": 512, "max_num_seqs": 16, **options})
    server = RunningServer(llm, served_model_names=names, limits=limits)
    try:
        yield llm, server
        wait_until(lambda: server.num_active == 0)
        if not llm.is_closed:
            wait_until(lambda: is_idle(llm))
            llm.engine.scheduler.check_invariants()
    finally:
        server.close()
        asyncio.run(llm.aclose())


def is_idle(llm: AsyncLLM) -> bool:
    """Whether nothing waits, runs or holds a block."""
    stats = llm.stats()
    return not any(stats[name] for name in ("num_running", "num_waiting", "num_used_blocks"))


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for something that must come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.002)
