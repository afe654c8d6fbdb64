"""Clients below the level of an HTTP library: raw connections, processes that can be killed."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_kit import Client

from cbrs import AsyncLLM

COMPLETIONS = "/v1/completions"

# Sends a request over each of several connections and reads until it is killed; it says of how many
# something was read.
_READER = """
import selectors, socket, sys
address, count = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
request = sys.stdin.buffer.read()
selector = selectors.DefaultSelector()
for _ in range(count):
    connection = socket.create_connection(address)
    connection.sendall(request)
    selector.register(connection, selectors.EVENT_READ)
seen = set()
while True:
    for key, _ in selector.select():
        key.fileobj.recv(1 << 16)
        seen.add(key.fd)
    print(len(seen), flush=True)
"""


def request_bytes(body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> bytes:
    """A whole POST request."""
    payload = json.dumps(body).encode()
    fields = {"host": "127.0.0.1", "content-length": str(len(payload)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


def send(address: tuple[str, int], body: dict[str, Any], **headers: str) -> socket.socket:
    """Sends a request over a connection of its own."""
    connection = socket.create_connection(address, timeout=30)
    connection.sendall(request_bytes(body, **headers))
    return connection


def read_chunked(connection: socket.socket) -> bytes:
    """Reads one chunked response from its first to its last byte; returns its body.

    What comes after the last byte of the response is an error, except in a later read.
    """
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        received = connection.recv(1 << 16)
        assert received, data[-200:]
        data += received
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower(), head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length:]
        assert rest.startswith(b"\r\n")
        rest = rest[2:]
        if length == 0:
            assert rest == b"", rest
    return body


@contextmanager
def reader_process(
    address: tuple[str, int], body: dict[str, Any], count: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that has sent `count` requests; it is killed at the end."""
    command = [sys.executable, "-S", "-c", _READER, address[0], str(address[1]), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(request_bytes(body))
            process.stdin.close()
            yield process
        finally:
            process.kill()


@contextmanager
def server_program(**options: Any) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A server with any options of the engine, in a process of its own; it is killed at the end."""
    program = Path(__file__).parent / "server" / "programs" / "server.py"
    command = [sys.executable, str(program), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, Client(server.stdout.readline().strip())
        finally:
            server.kill()


def address_of(client: Client) -> tuple[str, int]:
    """Host and port of the server that a client asks."""
    url = client.http.base_url
    assert url.port is not None
    return url.host, url.port


def resident_kib(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1])


def fail_at_token(monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM, number: int) -> None:
    """The step that would bring token `number` (from 0) of the first request fails, once."""
    runner = llm.engine._runner
    forward = runner.forward
    left = number

    def failing(batch: Any) -> Any:
        nonlocal left
        if batch.num_seqs > 0:
            left -= 1
            if left == -1:
                raise MemoryError("out of memory in this step")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", failing)
