"""Connections whose every byte a test chooses."""

import http.client
import json
import socket
from types import TracebackType
from typing import Any

from server_kit import TIMEOUT_S

from cbrs.serving import RunningServer

COMPLETIONS = "/v1/completions"


class Answer:
    """One response: its status, its headers in lower case, its body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    def error(self) -> dict[str, Any]:
        """The error object, which must be well-formed."""
        assert self.headers["content-type"] == "application/json"
        envelope = json.loads(self.body)
        assert list(envelope) == ["error"]
        error: dict[str, Any] = envelope["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error


class Raw:
    """A connection of its own to a server."""

    def __init__(
        self, server: RunningServer, source: str = "127.0.0.1", receive_buffer: int | None = None
    ) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_buffer is not None:
            # Before the connection is made: later it does not shrink the window.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.bind((source, 0))
        self.socket.connect((server.host, server.port))

    def __enter__(self) -> "Raw":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: str | bytes) -> "Raw":
        self.socket.sendall(data.encode("latin-1") if isinstance(data, str) else data)
        return self

    def answer(self) -> Answer:
        """The next response; nothing may follow it at once."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return Answer(response)

    def is_closed(self) -> bool:
        """Whether the server ends the connection, without another byte, before the time-out."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def get(path: str, *fields: str) -> str:
    """A request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *fields, "", ""])


def post(body: dict[str, Any] | bytes, *fields: str, path: str = COMPLETIONS) -> bytes:
    """A request with a body, which is JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-length: {len(data)}",
        *fields,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + data
