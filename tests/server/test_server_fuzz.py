"""No body brings the server or the engine down."""

import http.client
import json
import random
from collections import Counter

import fuzz_kit
import pytest
from server_kit import Client, is_idle, serving, wait_until

from cbrs.serving import RunningServer


def fuzz(server: RunningServer, seed: int, count: int) -> Counter[int]:
    """Sends `count` bodies one after the other; returns how often which status came."""
    choose = random.Random(seed)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    statuses: Counter[int] = Counter()
    for _ in range(count):
        path, body = fuzz_kit.body(choose)
        connection.request("POST", path, body)
        response = connection.getresponse()
        data = response.read()
        statuses[response.status] += 1
        place = f"seed {seed}, {path}, {body!r}: {response.status} {data!r}"
        if response.status == 504:
            assert json.loads(data)["error"]["code"] == "deadline_exceeded", place
        elif response.status == 200:
            check_answer(data, place)
        else:
            assert response.status in (400, 404, 429), place
            assert json.loads(data)["error"]["message"], place
    connection.close()
    return statuses


def check_answer(data: bytes, place: str) -> None:
    """An answer is JSON without NaN, or ends as a stream does; its only errors are deadlines."""

    def no_number(literal: str) -> None:
        raise AssertionError(f"{literal} in {place}")

    if not data.startswith(b"data: "):
        json.loads(data, parse_constant=no_number)
        return
    assert data.endswith(b"data: [DONE]\n\n"), place
    for event in data.split(b"\n\n")[:-2]:
        chunk = json.loads(event.removeprefix(b"data: "), parse_constant=no_number)
        assert chunk.get("error", {}).get("code") in (None, "deadline_exceeded"), place


def check_fuzz(seeds: range, count: int) -> None:
    with serving() as (llm, server):
        client = Client(server.url)
        expected = client.complete(prompt="One", max_tokens=9)["choices"]
        statuses: Counter[int] = Counter()
        for seed in seeds:
            statuses += fuzz(server, seed, count)
            wait_until(lambda: is_idle(llm))
            stats = llm.stats()
            assert stats["num_free_blocks"] + stats["num_cached_blocks"] == llm.config().num_blocks
            assert client.complete(prompt="One", max_tokens=9)["choices"] == expected
        print(f"{sum(statuses.values())} bodies: {dict(sorted(statuses.items()))}")
        assert statuses[200] > 0.2 * statuses.total()
        assert statuses[400] > 0.3 * statuses.total()


def test_no_body_brings_the_server_down() -> None:
    check_fuzz(range(2), 1000)


@pytest.mark.soak
def test_no_body_of_a_hundred_thousand_brings_the_server_down() -> None:
    check_fuzz(range(100, 200), 1000)
