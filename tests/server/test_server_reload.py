"""Signals, and what a server process holds and leaves behind."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_kit import Client, error_of, parse_events, wait_until
from server_process import ServerProcess, server_process

PATH = "/v1/completions"
RING = "sk-environment-0123456789"
OLD, NEW = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"
SLOW = ("null:0.01", "--port", "0", "--served-model-name", "null")


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o600)
    return file


def key(secret: str, **settings: Any) -> str:
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    return "\n".join(["[[keys]]", "name = 'a'", f"key = '{secret}'", *lines, ""])


def client(server: ServerProcess, secret: str | None = None) -> Client:
    made = Client(server.url)
    if secret is not None:
        made.http.headers["authorization"] = f"Bearer {secret}"
    return made


def stream_body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "null", "prompt": "One", "max_tokens": max_tokens, "stream": True}
    return {**body, **fields}


def test_sighup_reloads_keys_tenants_and_policy(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.toml", key(OLD))
    policy = write(
        tmp_path / "policy.toml", "target_itl_ms = 500\n[classes.batch]\nmax_tokens = 200\n"
    )
    options = ("--api-keys", str(keys), "--policy", str(policy))
    with server_process(*SLOW, *options, CBRS_API_KEY=RING) as server:
        old, new = client(server, OLD), client(server, NEW)
        assert new.get("/version").status_code == 401
        with old.http.stream("POST", PATH, json=stream_body(150, priority="batch")) as stream:
            wait_until(lambda: client(server, OLD).get("/stats").json()["num_running"] == 1)
            write(keys, key(NEW, requests_per_min=3))
            write(policy, "target_itl_ms = 400\n[classes.batch]\nmax_tokens = 20\n")
            server.reload(f"reloaded {keys} and {policy}")
            assert client(server, OLD).get("/version").status_code == 401
            told = new.get("/version").json()["engine"]
            assert told["policy_settings"]["classes"]["batch"]["max_tokens"] == 20
            assert told["target_itl_ms"] == 400, "what the start made of the first file is no flag"
            settings = new.get("/version").json()["server"]
            assert settings["target_itl_ms"] == {"value": 400, "source": "default"}
            # What was running goes on under the terms that it came with.
            assert len(parse_events(stream.read().decode())) == 150
        refused = new.post(PATH, stream_body(150, priority="batch"))
        assert "class" in error_of(refused, 400)["message"]
        # The one that was refused after its prompt had been tokenized counts.
        for _ in range(2):
            assert new.complete(prompt="One", max_tokens=2)["choices"]
        refused = new.post(PATH, stream_body(2))
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"

        for keys_text, policy_text, part in [
            (key(OLD), "order = 'fcfs'", "order"),
            (key(OLD), "admission = 'guaranteed'", "admission"),
            (key(OLD), "aged_share = 7", "aged_share"),
            (key(OLD), "[classes.batch]\nmax_tokns = 1", "did you mean max_tokens"),
            (key(OLD, weight=-1), "", "weight"),
            (key(OLD) * 2, "", "there twice"),
            (key(OLD, weight=9) + key(RING).replace("'a'", "'b'"), "", "in the environment"),
            ("a = " + "[" * 5000, "", "too deeply"),
            ("", "", "[[keys]]"),
        ]:
            write(keys, keys_text)
            write(policy, policy_text)
            server.reload("nothing was reloaded")
            # Lines of the access log come when they come.
            assert part in server.output.rsplit("SIGHUP", 1)[1]
            assert new.get("/version").status_code == 200
            assert old.get("/version").status_code == 401
        told = new.get("/version").json()["engine"]["policy_settings"]
        assert (told["order"], told["classes"]["batch"]["max_tokens"]) == ("edf", 20)
        admin = client(server, RING).get("/version").json()["engine"]
        assert admin["tenants"]["a"]["requests_per_min"] == 3, "of the last good file"
        keys.unlink()
        server.reload("nothing was reloaded")

        write(keys, key(OLD))
        write(policy, "")
        server.reload("reloaded")
        for _ in range(4):
            assert old.complete(prompt="One", max_tokens=2)["choices"]
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def sockets(pid: int) -> list[tuple[str, int, int, str]]:
    """Protocol, local and remote port, and state of each network socket of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        table = Path(f"/proc/{pid}/net/{protocol}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, remote, state, *rest = line.split()
            if rest[5] in inodes:
                ports = [int(address.rsplit(":", 1)[1], 16) for address in (local, remote)]
                found.append((protocol, ports[0], ports[1], state))
    return found


ESTABLISHED, LISTEN = "01", "0A"


def send(port: int, body: dict[str, Any]) -> socket.socket:
    """Sends a request over a connection of its own, which ends with the answer."""
    payload = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def read(connection: socket.socket) -> str:
    """All that comes until the end of a connection."""
    with connection, connection.makefile("r", newline="", encoding="utf-8") as answer:
        return answer.read()


def test_fifty_streams_finish_after_sigterm() -> None:
    num_streams, num_tokens = 50, 200
    with server_process(*SLOW, "--max-num-seqs", "64") as server:
        port = int(server.url.rsplit(":", 1)[1])
        other = client(server)
        asked = [send(port, stream_body(num_tokens)) for _ in range(num_streams)]
        wait_until(lambda: other.get("/stats").json()["num_active_responses"] == num_streams)
        # One socket listens, all others are of clients: nobody is called from here.
        held = sockets(server.process.pid)
        assert [row for row in held if row[3] == LISTEN] == [("tcp", port, 0, LISTEN)]
        assert {row[:2] for row in held} == {("tcp", port)}
        assert len([row for row in held if row[3] == ESTABLISHED]) >= num_streams
        server.signal(signal.SIGTERM)
        wait_until(lambda: other.get("/ready").status_code == 503)
        assert other.get("/stats").json()["num_active_responses"] == num_streams
        assert error_of(other.post(PATH, stream_body(2)), 503)
        for connection in asked:
            answer = read(connection)
            assert answer.startswith("HTTP/1.1 200 OK")
            assert answer.count("data: {") == num_tokens
            assert answer.count("data: [DONE]") == 1
            assert '"error"' not in answer
        assert server.end() == 0


def test_what_is_left_after_the_drain_timeout_is_cut() -> None:
    with server_process(*SLOW, "--drain-timeout", "0.2") as server:
        # There is nothing to reload, and nothing happens.
        server.reload("neither")
        http = client(server).http
        with http.stream("POST", PATH, json=stream_body(4000)) as stream:
            other = client(server)
            wait_until(lambda: other.get("/stats").json()["num_running"] == 1)
            server.signal(signal.SIGTERM)
            events = parse_events(stream.read().decode())
        assert events[-1]["error"]["type"] == "service_unavailable"
        assert server.end() == 1


def children(pid: int) -> str:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return "".join((task / "children").read_text() for task in tasks)


def test_a_killed_server_leaves_nothing_behind(tmp_path: Path) -> None:
    with server_process(*SLOW, TMPDIR=str(tmp_path)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        http = client(server).http
        with http.stream("POST", PATH, json=stream_body(4000)) as stream:
            lines = stream.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            assert children(server.process.pid) == ""
            server.process.kill()
            assert server.end() == -signal.SIGKILL
            with pytest.raises(httpx2.HTTPError):
                list(lines)
        assert list(tmp_path.iterdir()) == []
        # As a server does that starts again at once.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
