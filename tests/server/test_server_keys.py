"""API keys, the `Host` header, and what other origins are told."""

import asyncio
import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_kit import MESSAGES, Client, error_of, parse_events, wait_until
from server_process import server_process

from cbrs import AsyncLLM
from cbrs._core import ApiKey
from cbrs.serving import RunningServer

ALICE, BOB, ROOT = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef", "sk-root-0123456789"
PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 2}
ENDLESS = {**BODY, "max_tokens": 400, "stream": True}
ROUTES = [
    ("POST", PATH),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/null"),
    ("POST", "/v1/requests/x/cancel"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/stats"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/no/such/path"),
    ("OPTIONS", PATH),
]


def key(name: str, secret: str, **options: Any) -> ApiKey:
    return ApiKey(name, hashlib.sha256(secret.encode()).digest(), **options)


def keys() -> list[ApiKey]:
    alice = key("alice", ALICE, tenant="gold", max_priority="standard")
    return [alice, key("bob", BOB, tenant="bob"), key("root", ROOT, is_admin=True)]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("null:0.005", policy="fair", max_model_len=512, max_num_seqs=16)
    yield llm
    llm.engine.scheduler.check_invariants()
    asyncio.run(llm.aclose())


@contextmanager
def serving(llm: AsyncLLM, **options: Any) -> Iterator[RunningServer]:
    """A server; `policy` is what it changes of the policy of `llm` while it serves."""
    llm.set_policy("fair", **options.pop("policy", {}))
    with RunningServer(llm, served_model_names=["null"], **options) as server:
        yield server
    llm.set_policy("fair")


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[RunningServer]:
    with serving(llm, api_keys=keys()) as server:
        yield server


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client() as client:
        yield client


def asks(server: RunningServer, secret: str | None) -> Client:
    """A client with this key."""
    client = Client(server.url)
    if secret is not None:
        client.http.headers["authorization"] = f"Bearer {secret}"
    return client


@pytest.fixture
def alice(server: RunningServer) -> Client:
    return asks(server, ALICE)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(
    server: RunningServer, http: httpx2.Client, method: str, path: str
) -> None:
    for headers in ({}, {"authorization": "Bearer no"}):
        response = http.request(method, server.url + path, headers=headers)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    headers = {"authorization": f"Bearer {ALICE}"}
    allowed = http.request(method, server.url + path, headers=headers)
    assert allowed.status_code != 401


def test_probes_need_none(server: RunningServer, http: httpx2.Client) -> None:
    for path in ("/health", "/ready"):
        assert http.get(server.url + path).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE}0",
        f"Bearer {ALICE.upper()}",
        f"Bearer {ALICE} {BOB}",
        f"Basic {ALICE}",
        ALICE,
        "Bearer",
        "Bearer " + hashlib.sha256(ALICE.encode()).hexdigest(),
        "Bearer " + "x" * 10_000,
    ],
)
def test_what_is_nearly_a_key_is_none(
    server: RunningServer, http: httpx2.Client, header: str
) -> None:
    response = http.get(f"{server.url}/v1/models", headers={"authorization": header})
    error = error_of(response, 401)
    assert not any(part in json.dumps(error) for part in (ALICE[:-1], BOB, "x" * 100))


def test_two_headers_are_none(server: RunningServer, http: httpx2.Client) -> None:
    headers = [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")]
    assert error_of(http.get(f"{server.url}/v1/models", headers=headers), 401)


def test_figures_need_a_key_unless_they_are_open(llm: AsyncLLM, http: httpx2.Client) -> None:
    with serving(llm, api_keys=keys(), open_metrics=True) as server:
        assert http.get(f"{server.url}/stats").status_code == 200
        assert http.get(f"{server.url}/metrics").status_code != 401
        assert http.get(f"{server.url}/v1/models").status_code == 401


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("claim", "param"),
    [
        ({"tenant": "bob"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"priority": "interactive"}, "priority"),
        ({"service_tier": "priority"}, "service_tier"),
    ],
)
def test_a_claim_beyond_the_key_is_refused(
    alice: Client, path: str, claim: dict[str, str], param: str
) -> None:
    body = {"model": "null", "max_tokens": 2, **claim}
    body |= {"prompt": "One"} if path == PATH else {"messages": MESSAGES}
    error = alice.error(path, body, 403)
    assert (error["type"], error["param"]) == ("permission_error", param)
    assert param in error["message"]


@pytest.mark.parametrize(
    "claim",
    [
        {"tenant": "gold"},
        {"priority": "standard"},
        {"priority": "batch"},
        {"service_tier": "flex"},
        {"service_tier": "auto"},
    ],
)
def test_what_the_key_permits_is_done(alice: Client, claim: dict[str, str]) -> None:
    assert alice.complete(**BODY, **claim)["choices"]


def test_all_rights_claim_what_they_like(server: RunningServer) -> None:
    root = asks(server, ROOT)
    assert root.complete(**BODY, tenant="gold", priority="interactive")["choices"]


def test_another_keys_request_does_not_exist(server: RunningServer) -> None:
    alice, bob, root = (asks(server, secret) for secret in (ALICE, BOB, ROOT))
    mine = {"x-request-id": "mine"}
    with alice.http.stream("POST", PATH, json=ENDLESS, headers=mine) as stream:
        lines = stream.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        for known in (name, "mine"):
            refused = bob.http.post(f"/v1/requests/{known}/cancel")
            unknown = bob.http.post(f"/v1/requests/{known}0/cancel")
            error = error_of(refused, 404)
            assert error["code"] == "request_not_found"
            assert error["message"] == error_of(unknown, 404)["message"].replace(f"{known}0", known)
        with bob.http.stream("POST", PATH, json=ENDLESS, headers=mine) as other:
            others = other.iter_lines()
            assert json.loads(next(others).removeprefix("data: "))["id"] != name
            # One name, two requests: each key ends its own.
            assert asks(server, ALICE).ok("/v1/requests/mine/cancel") == {"cancelled": [name]}
            assert "cancelled" in [line for line in lines if line][-2]
            assert next(line for line in others if line)
            cancelled = root.http.post("/v1/requests/mine/cancel")
            assert cancelled.status_code == 200
            assert "cancelled" in [line for line in others if line][-2]
        wait_until(lambda: server.num_active == 0)


def test_a_key_gives_the_tenant_whose_rates_hold(llm: AsyncLLM) -> None:
    tenants = {"gold": {"requests_per_min": 2}}
    with serving(llm, api_keys=keys(), policy={"tenants": tenants}) as server:
        alice = asks(server, ALICE)
        for _ in range(2):
            alice.complete(**BODY)
        refused = alice.post(PATH, BODY)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert asks(server, BOB).complete(**BODY)["choices"]


def test_a_key_gives_the_class(llm: AsyncLLM) -> None:
    classes = {"batch": {"max_tokens": 3}}
    low = key("low", ALICE, tenant="low", max_priority="batch")
    usual = key("usual", BOB, tenant="usual", priority="batch")
    body = {**BODY, "max_tokens": 4}
    with serving(llm, api_keys=[low, usual], policy={"classes": classes}) as server:
        for secret in (ALICE, BOB):
            error = asks(server, secret).error(PATH, body)
            assert "class" in error["message"]
        assert asks(server, BOB).complete(**body, priority="standard")["choices"]


def test_a_tenant_is_told_nothing_of_others(llm: AsyncLLM) -> None:
    tenants = {"gold": {"weight": 2}, "secret-partner": {"weight": 3}}
    with serving(llm, api_keys=keys(), policy={"tenants": tenants}) as server:
        told = asks(server, ALICE).get("/version").text
        assert "secret-partner" not in told
        assert json.loads(told)["engine"]["max_num_seqs"] == 16
        assert "secret-partner" in asks(server, ROOT).get("/version").text


def test_other_keys_hold_for_what_comes_afterwards(llm: AsyncLLM) -> None:
    with serving(llm, api_keys=keys()) as server:
        alice = asks(server, ALICE)
        with alice.http.stream("POST", PATH, json={**ENDLESS, "max_tokens": 60}) as stream:
            wait_until(lambda: server.num_active == 1)
            server.set_api_keys([key("alice", "sk-alice-2", tenant="gold"), keys()[1]])
            assert alice.get("/v1/models").status_code == 401
            assert asks(server, BOB).get("/v1/models").status_code == 200
            assert len(parse_events(stream.read().decode())) == 60
        with pytest.raises(ValueError, match="two API keys are called"):
            server.set_api_keys([key("a", "x"), key("a", "y")])
        assert asks(server, "sk-alice-2").get("/v1/models").status_code == 200


def test_a_request_stays_its_keys_when_the_secret_changes(llm: AsyncLLM) -> None:
    with (
        serving(llm, api_keys=keys()) as server,
        asks(server, ALICE).http.stream(
            "POST", PATH, json=ENDLESS, headers={"x-request-id": "mine"}
        ) as stream,
    ):
        wait_until(lambda: server.num_active == 1)
        server.set_api_keys([key("alice", "sk-alice-2", tenant="gold"), keys()[1]])
        bob, alice = asks(server, BOB), asks(server, "sk-alice-2")
        assert bob.http.post("/v1/requests/mine/cancel").status_code == 404
        assert alice.http.post("/v1/requests/mine/cancel").status_code == 200
        stream.read()


def test_a_public_address_needs_keys(llm: AsyncLLM, http: httpx2.Client) -> None:
    with (
        pytest.raises(ValueError, match="loopback"),
        serving(llm, host="0.0.0.0"),
    ):
        pass
    with serving(llm, host="0.0.0.0", api_keys=keys()) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert http.get(f"{url}/v1/models").status_code == 401
        probe = http.get(f"{url}/health", headers={"host": "10.1.2.3:8000"})
        assert probe.status_code == 200


@pytest.mark.parametrize(
    ("digest", "name", "part"),
    [(b"short", "x", "32"), (bytes(32), "", "empty name")],
)
def test_unusable_keys_are_refused(llm: AsyncLLM, digest: bytes, name: str, part: str) -> None:
    with pytest.raises(ValueError, match=part), serving(llm, api_keys=[ApiKey(name, digest)]):
        pass


def test_a_key_shows_its_name_only() -> None:
    shown = repr(keys()[0])
    assert shown == 'ApiKey(name="alice")'


def raw(server: RunningServer, *lines: str) -> str:
    """The status line of the answer to a request of these lines."""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode())
        with connection.makefile("r", encoding="latin-1") as answer:
            return answer.readline().rstrip()


@pytest.fixture(scope="module")
def loopback(llm: AsyncLLM) -> Iterator[RunningServer]:
    with serving(llm, allowed_hosts=["My.Box"]) as server:
        yield server


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000", "my.box", "MY.BOX:80"]
)
def test_names_of_loopback_are_answered(loopback: RunningServer, host: str) -> None:
    assert raw(loopback, "GET /v1/models HTTP/1.1", f"host: {host}") == "HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    "lines",
    [
        ["GET /v1/models HTTP/1.1", "host: evil.example"],
        ["GET /health HTTP/1.1", "host: evil.example:8000"],
        ["GET /v1/models HTTP/1.1", "host: localhost.evil.example"],
        ["GET /v1/models HTTP/1.1", "host: localhost", "host: evil.example"],
        ["GET http://evil.example/v1/models HTTP/1.1", "host: localhost"],
        ["POST /v1/completions HTTP/1.1", "host: 192.168.0.7", "content-length: 2", "", "{}"],
    ],
)
def test_another_name_is_refused(loopback: RunningServer, lines: list[str]) -> None:
    assert raw(loopback, *lines).startswith("HTTP/1.1 421 ")


def test_open_figures_are_told_under_any_name_on_the_network_only(llm: AsyncLLM) -> None:
    options: dict[str, Any] = {"api_keys": keys(), "allowed_hosts": ["api.example"]}
    asked = [f"GET {path} HTTP/1.1" for path in ("/metrics", "/stats", "/health", "/v1/models")]
    for address, is_open, statuses in (
        ("0.0.0.0", True, ["200", "200", "200", "421"]),
        ("0.0.0.0", False, ["421", "421", "200", "421"]),
        ("127.0.0.1", True, ["421"] * 4),
    ):
        with serving(llm, host=address, open_metrics=is_open, **options) as server:
            found = [raw(server, line, "host: 10.0.0.7:8000").split()[1] for line in asked]
        assert found == statuses, (address, is_open)


@pytest.mark.parametrize(
    ("origin_name", "statuses"),
    [
        ("http://localhost:3000", [405, 200, 200, 404, 200, 200, 400]),
        ("http://evil.example", [403] * 7),
        ("null", [403] * 7),
    ],
)
def test_no_answer_permits_anything_to_another_origin(
    loopback: RunningServer, http: httpx2.Client, origin_name: str, statuses: list[int]
) -> None:
    origin = {"origin": origin_name}
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    asked = [
        http.options(loopback.url + PATH, headers={**origin, **wish}),
        http.get(f"{loopback.url}/v1/models", headers=origin),
        http.get(f"{loopback.url}/health", headers=origin),
        http.get(f"{loopback.url}/nothing", headers=origin),
        http.post(loopback.url + PATH, headers=origin, json=BODY),
        http.post(loopback.url + PATH, headers=origin, json={**BODY, "stream": True}),
        http.post(loopback.url + PATH, headers=origin, content=b"no"),
    ]
    assert [response.status_code for response in asked] == statuses
    for response in asked:
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_nothing_that_is_told_has_a_secret(tmp_path: Path, http: httpx2.Client) -> None:
    ring = "sk-environment-0123456789"
    file = tmp_path / "keys.toml"

    def write(text: str) -> None:
        file.write_text(text)
        file.chmod(0o600)

    good = f"[[keys]]\nname = 'alice'\nkey = '{ALICE}'\n"
    write(good)
    arguments = ("null", "--port", "0", "--verbose", "--api-keys", str(file))
    told = []
    with server_process(*arguments, CBRS_API_KEY=ring) as server:
        for secret in (ALICE, ring, ALICE + "x", BOB):
            headers = {"authorization": f"Bearer {secret}"}
            for method, path in ROUTES:
                response = http.request(method, server.url + path, headers=headers, json=BODY)
                told += [response.text, str(response.headers)]
        for bad in (
            f"{good}tenant = '{BOB}\n",
            f"{good}{BOB} = 1\n",
            f"{good}[[keys]]\nname = 'bob'\nkey = '{ALICE}'\n",
            f"{good}[[keys]]\nname = 'bob'\nkey = '{BOB} {BOB}'\n",
            f"{good}[[keys]]\nname = 'bob'\nsha256 = '{BOB}'\n",
            f"alice = '{BOB}'\n",
            BOB,
        ):
            write(bad)
            server.reload("nothing was reloaded")
        write(good)
        server.reload("reloaded")
        headers = {"authorization": f"Bearer {ring}"}
        assert http.get(f"{server.url}/version", headers=headers).status_code == 200
    everything = "".join([*told, server.output])
    for secret in (ALICE, BOB, ring):
        assert secret not in everything
        assert hashlib.sha256(secret.encode()).hexdigest() not in everything
    assert "settings:" in server.output
