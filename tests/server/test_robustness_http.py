"""Clients that cancel and die, servers that are killed or told to end, far too much load.

Afterwards the engine lives, nothing runs, and every block is free or cached (`serving` checks it).
The short forms run with every change, the long ones in `make soak`.
"""

import asyncio
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from http_kit import (
    COMPLETIONS,
    address_of,
    read_chunked,
    reader_process,
    request_bytes,
    resident_kib,
    send,
    server_program,
)
from server_kit import Client, error_of, is_idle, parse_events, serving, wait_until
from server_process import server_process

from cbrs import AsyncLLM
from cbrs._core import run_load
from cbrs.serving import RunningServer

soak = [pytest.mark.soak, pytest.mark.timeout(0)]
ENDLESS: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400}

CUTS = ["never", "at once", "soon", "after the first bytes"]
WAYS = ["close", "reset", "cancel"]


class Storm:
    """Requests of all kinds, 64 at a time, each left alone or cut at a random moment."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self.address = address
        self.choose = random.Random(seed)
        self.ends: Counter[str] = Counter()
        """How requests ended: by the way they were cut, and what was said to those still there."""

    async def run(self, count: int) -> None:
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await self.one(f"storm-{number}")

        await asyncio.gather(*(work() for _ in range(64)))

    async def one(self, name: str) -> None:
        choose = self.choose
        prompt = [choose.randrange(200) for _ in range(choose.randint(1, 120))]
        body: dict[str, Any] = {"model": "null", "prompt": prompt, "stream": choose.random() < 0.7}
        body |= {"max_tokens": choose.randint(1, 24), "n": choose.choice([1, 1, 3])}
        cut, way = choose.choice(CUTS), choose.choice(WAYS)
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(request_bytes(body, x_request_id=name, connection="close"))
        await writer.drain()
        received = b""
        if cut == "soon":
            await asyncio.sleep(choose.random() * 0.02)
        elif cut == "after the first bytes":
            received = await reader.read(1 << 16)
        if cut != "never" and way != "cancel":
            self.ends[way] += 1
            if way == "reset":
                writer.transport.abort()
            writer.close()
            return
        if cut != "never":
            await self.cancel(name)
        received += await reader.read()
        writer.close()
        self.ends[self.end_of(received, body)] += 1

    async def cancel(self, name: str) -> None:
        reader, writer = await asyncio.open_connection(*self.address)
        request = request_bytes({}, f"/v1/requests/{name}/cancel", connection="close")
        writer.write(request)
        answer = await reader.read()
        writer.close()
        # It may not have begun, or be over.
        assert answer.split(b" ", 2)[1] in (b"200", b"404"), answer

    def end_of(self, received: bytes, body: dict[str, Any]) -> str:
        """How an answer that was read to its end has ended."""
        head, _, rest = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            assert status == 499, received
            assert json.loads(rest)["error"]["code"] == "cancelled"
            return "cancelled"
        if not body["stream"]:
            choices = json.loads(rest)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["length"] * body["n"]
            return "length"
        assert rest.count(b"data: [DONE]") == 1
        assert rest.endswith(b"\r\n0\r\n\r\n")
        if b'"error"' in rest:
            assert b'"code":"cancelled"' in rest
            return "cancelled"
        assert rest.count(b'"finish_reason":"length"') == body["n"]
        return "length"


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=soak)])
def test_a_storm_of_cancels_leaves_nothing_behind(count: int) -> None:
    with serving("null:0.0005", max_num_batched_tokens=64) as (llm, server):
        storm = Storm((server.host, server.port), seed=count)
        asyncio.run(storm.run(500))
        wait_until(lambda: is_idle(llm) and server.num_active == 0)
        start_kib, start = resident_kib(), time.monotonic()
        if count > 500:
            asyncio.run(storm.run(count))
            wait_until(lambda: is_idle(llm) and server.num_active == 0)
            grown_kib = resident_kib() - start_kib
            print(f"\n{count} requests in {time.monotonic() - start:.1f} s, {grown_kib} KiB more")
            print(dict(storm.ends))
            assert grown_kib < 4096
        assert set(storm.ends) == {"close", "reset", "cancelled", "length"}
        assert sum(storm.ends.values()) == count + 500 * (count > 500)
        stats = llm.stats()
        assert stats["num_error_requests"] == 0
        # Storms cancel requests that wait, that run, and after their ends.
        assert stats["num_cancelled_requests"] > count // 20
        assert Client(server.url).complete(prompt="One", max_tokens=2)["choices"]


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=soak)])
def test_clients_that_are_killed_in_mid_stream_leave_nothing_behind(rounds: int) -> None:
    with serving("null:0.005", max_num_seqs=32) as (llm, server):
        address = (server.host, server.port)
        for number in range(rounds):
            before = llm.stats()["num_cancelled_requests"]
            with (
                reader_process(address, {**ENDLESS, "stream": True}, 12) as streaming,
                reader_process(address, ENDLESS, 4) as collecting,
            ):
                assert streaming.stdout is not None
                while int(streaming.stdout.readline()) < 12:
                    pass
                wait_until(lambda: llm.stats()["num_running"] == 16)
                streaming.kill()
                collecting.kill()
                wait_until(lambda: is_idle(llm) and server.num_active == 0)
            assert llm.stats()["num_cancelled_requests"] - before == 16, number
        assert Client(server.url).complete(prompt="One", max_tokens=2)["choices"]


def test_a_killed_server_is_a_lost_connection_and_its_port_is_free_at_once() -> None:
    with server_program(model="null:0.005") as (process, client), ExitStack() as stack:
        address = address_of(client)
        streams = [
            stack.enter_context(send(address, {**ENDLESS, "stream": True, "max_tokens": 4000}))
            for _ in range(8)
        ]
        whole = stack.enter_context(send(address, {**ENDLESS, "max_tokens": 4000}))
        for stream in streams:
            assert stream.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        for connection in [*streams, whole]:
            assert b"[DONE]" not in read_to_the_end(connection)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        llm = AsyncLLM("null")
        with RunningServer(llm, port=address[1], served_model_names=("null",)) as server:
            assert Client(server.url).complete(prompt="One", max_tokens=2)["choices"]
        asyncio.run(llm.aclose())


def read_to_the_end(connection: socket.socket) -> bytes:
    """What comes until the other side has gone, by closing or by a reset."""
    data = b""
    try:
        while received := connection.recv(1 << 16):
            data += received
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=soak)])
def test_50_streams_finish_after_sigterm(rounds: int) -> None:
    for _ in range(rounds):
        finish_50_streams_after_sigterm()


def finish_50_streams_after_sigterm() -> None:
    options = ["--port", "0", "--served-model-name", "null", "--max-num-seqs", "32"]
    with server_process("null:0.01", *options) as server, ExitStack() as stack:
        client = Client(server.url)
        # More than run at once, so that some wait when the signal comes.
        body = {**ENDLESS, "stream": True, "max_tokens": 60}
        streams = [stack.enter_context(send(address_of(client), body)) for _ in range(50)]
        wait_until(lambda: client.get("/stats").json()["num_active_responses"] == 50)
        server.signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        refused = client.post(COMPLETIONS, body)
        assert error_of(refused, 503)["type"] == "service_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        for stream in streams:
            events = parse_events(read_chunked(stream).decode())
            assert len(events) == 60
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address_of(client))


OVERLOADED: dict[str, Any] = {"model": "null:0.01", "max_num_seqs": 8, "queue_capacity": 64}
LOAD: dict[str, Any] = {"model": "null", "prompt_tokens": 8, "output_tokens": 16, "vocab_size": 200}


class Prober:
    """Looks at an overloaded server from outside, over connections of its own."""

    def __init__(self, client: Client, pid: int | str) -> None:
        self.client, self.pid = client, pid
        self.num_refusals = 0
        self.most_waiting = 0
        self.resident_kib: list[int] = []
        self.failures: list[BaseException] = []
        self._is_over = threading.Event()

    def _run(self) -> None:
        body = {**ENDLESS, "max_tokens": 16, "stream": True}
        try:
            while not self._is_over.wait(0.02):
                stats = self.client.get("/stats").json()
                self.most_waiting = max(self.most_waiting, stats["num_waiting"])
                self.resident_kib.append(resident_kib(self.pid))
                assert self.client.get("/health").status_code == 200
                self._ask(body)
        except BaseException as error:
            self.failures.append(error)

    def _ask(self, body: dict[str, Any]) -> None:
        """A stream is refused as a whole, before its first event, or it is answered."""
        with self.client.http.stream("POST", COMPLETIONS, json=body) as response:
            if response.status_code == 200:
                assert len(parse_events(response.read().decode())) == 16
                return
            response.read()
        assert error_of(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"].isdigit()
        assert int(response.headers["retry-after"]) >= 1
        assert "data:" not in response.text
        self.num_refusals += 1

    @contextmanager
    def probing(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join(60)
        assert self.failures == []


def load(client: Client, **more: Any) -> dict[str, Any]:
    """What the load generator measures."""
    report: dict[str, Any] = run_load({"url": str(client.http.base_url), **LOAD, **more})
    return report


def overload(client: Client, pid: int | str, peak_s: float, duration_s: float) -> tuple[Any, ...]:
    """The peak of a closed loop, then ten times as many requests in an open one."""
    peak = load(client, concurrency=2 * OVERLOADED["max_num_seqs"], duration_s=peak_s)
    assert set(peak["statuses"]) == {"200"}
    prober = Prober(Client(str(client.http.base_url)), pid)
    with prober.probing():
        report = load(client, rate=10 * peak["requests_per_s"], duration_s=duration_s, seed=1)
    assert set(report["statuses"]) == {"200", "429"}
    assert report["statuses"]["429"] > report["statuses"]["200"]
    assert prober.num_refusals > 0
    assert 0 < prober.most_waiting <= OVERLOADED["queue_capacity"]
    wait_until(lambda: client.get("/stats").json()["num_running"] == 0)
    assert client.complete(prompt="One", max_tokens=2)["choices"]
    return peak, report, prober


def test_an_overload_of_ten_times_is_refused_with_a_time_to_come_back() -> None:
    options = dict(OVERLOADED)
    with serving(options.pop("model"), **options, policy="fair") as (llm, server):
        overload(Client(server.url), "self", 1.0, 4.0)
        wait_until(lambda: is_idle(llm))
        assert llm.stats()["num_error_requests"] == 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_an_overload_of_ten_times_for_three_minutes_costs_neither_memory_nor_goodput() -> None:
    with server_program(**OVERLOADED, policy="fair") as (process, client):
        peak, report, prober = overload(client, process.pid, 20.0, 180.0)
        num_samples = len(prober.resident_kib)
        early = max(prober.resident_kib[num_samples // 10 : num_samples // 4])
        late = max(prober.resident_kib[num_samples // 2 :])
        goodput = report["output_tokens_per_s"] / peak["output_tokens_per_s"]
        statuses, refusal = report["statuses"], report["refusal_ms"]
        print(f"\npeak {peak['requests_per_s']:.0f} requests/s, then {statuses} in an open loop")
        print(f"goodput {100 * goodput:.1f} % of the peak, refusals {refusal} ms")
        print(f"resident: {early} KiB early, {late} KiB late; {prober.most_waiting} waited at most")
        assert late - early < 4096
        assert goodput >= 0.95
        assert refusal["p99"] <= 50.0
        stats = client.get("/stats").json()
        assert stats["num_used_blocks"] == stats["num_active_responses"] == 0
