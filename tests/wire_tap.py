"""A tap on the wire between a client, whatever it is, and a server: every exchange is kept.

What went over it is then held to the schema facts of OpenAI's API, whichever program asked.
"""

import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai_schema import check_answer, check_error, check_event
from server_kit import parse_events, wait_until


@dataclass
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    sent_at: float
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""

    def check(self) -> None:
        """Holds the answer to OpenAI's schemas."""
        if self.answer_headers["content-type"].startswith("text/event-stream"):
            for event in self.events:
                check_event(self.path, event)
            return
        assert self.answer_headers["content-type"] == "application/json"
        answer = json.loads(self.answer)
        if self.status == 200:
            check_answer(self.path, self.body, answer)
        else:
            check_error(answer)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, which ends as it should."""
        return parse_events(self.answer.decode())


class Tap:
    """Forwards connections to a server and keeps what went over them."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._num_open = 0
        self.exchanges: list[Exchange] = []
        """Those that are over, in the order of their ends."""
        self._start(self._accept)

    @property
    def url(self) -> str:
        """Where clients find the tap."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Resets all connections and takes no more, as if the server had been killed."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, and what is left of its connections."""
        self.cut()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def settled(self) -> list[Exchange]:
        """All exchanges, once every answer that has begun is over."""
        wait_until(lambda: self._num_open == 0)
        return list(self.exchanges)

    def check(self) -> list[Exchange]:
        """All exchanges; each must fit the schemas."""
        exchanges = self.settled()
        for exchange in exchanges:
            exchange.check()
        return exchanges

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream, timeout=60) as server:
            self._sockets += (client, server)
            requests = client.makefile("rb")
            answers = server.makefile("rb")
            # One of the two may go; closing tells the other.
            with contextlib.suppress(OSError, http.client.HTTPException):
                while (head := requests.readline()) not in (b"", b"\r\n"):
                    self._exchange(head, requests, answers, client, server)

    def _exchange(
        self, head: bytes, requests: Any, answers: Any, client: socket.socket, server: socket.socket
    ) -> None:
        with self._lock:
            self._num_open += 1
        try:
            exchange = _read_request(head, requests, server)
            _forward_answer(exchange, answers, client)
            with self._lock:
                self.exchanges.append(exchange)
        finally:
            with self._lock:
                self._num_open -= 1


def _read_request(first: bytes, requests: Any, server: socket.socket) -> Exchange:
    head = [first]
    while head[-1] != b"\r\n":
        head.append(requests.readline())
    fields = http.client.parse_headers(io.BytesIO(b"".join(head[1:])))
    body = requests.read(int(fields.get("content-length", 0)))
    method, path, _ = first.decode().split(" ")
    headers = {name.lower(): value for name, value in fields.items()}
    exchange = Exchange(method, path, headers, json.loads(body) if body else None, time.monotonic())
    server.sendall(b"".join(head) + body)
    return exchange


class _Forwarding(io.RawIOBase):
    """Reads from the server, and gives each piece to the client before it is looked at."""

    def __init__(self, source: Any, client: socket.socket) -> None:
        self._source, self._client = source, client

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read1(len(buffer))
        self._client.sendall(data)
        buffer[: len(data)] = data
        return len(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)


def _forward_answer(exchange: Exchange, answers: Any, client: socket.socket) -> None:
    response = http.client.HTTPResponse(_Forwarding(answers, client), method=exchange.method)  # type: ignore[arg-type]
    response.begin()
    exchange.status = response.status
    exchange.answer_headers = {name.lower(): value for name, value in response.getheaders()}
    exchange.answer = response.read()


@contextmanager
def tapped(address: tuple[str, int]) -> Iterator[Tap]:
    """A tap in front of a server."""
    tap = Tap(address)
    try:
        yield tap
    finally:
        tap.close()
