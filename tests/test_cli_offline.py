"""A cached model never touches the network; offline, one that is not cached is one clear error."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cbrs import hub
from cbrs.cli import main

KNOWN = "smollm2-135m-instruct"
BLOCKED = "the network was touched"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be offline; the tests say themselves where they are."""
    monkeypatch.delenv("CBRS_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a connection, a name look-up nor a program (pip) can be started."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail(BLOCKED)

    for owner, name in (
        (socket.socket, "connect"),
        (socket.socket, "connect_ex"),
        (socket, "getaddrinfo"),
        (socket, "create_connection"),
        (subprocess, "Popen"),
        (subprocess, "run"),
    ):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache in which nothing lies."""
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "empty"))
    return tmp_path / "empty"


def generate(model: object, *options: str) -> list[str]:
    return ["generate", str(model), "--prompt", "a", "--max-tokens", "2", *options]


def test_the_block_works(no_network: None) -> None:
    with pytest.raises(pytest.fail.Exception, match=BLOCKED):
        socket.create_connection(("127.0.0.1", 9))
    with pytest.raises(pytest.fail.Exception, match=BLOCKED):
        subprocess.run([sys.executable, "-m", "pip"], check=False)


@pytest.mark.parametrize("options", [(), ("--offline",)])
def test_a_cached_known_model_loads_without_the_network(
    options: tuple[str, ...], smollm2_gguf: Path, no_network: None, capsys: Any
) -> None:
    assert main(generate(KNOWN, *options, "--max-model-len", "64", "--num-threads", "1")) == 0
    assert main(["pull", KNOWN, *options]) == 0
    assert capsys.readouterr().out.endswith(f"{smollm2_gguf}\n")


@pytest.mark.parametrize("options", [(), ("--offline",)])
def test_a_cached_snapshot_loads_without_the_network(
    options: tuple[str, ...], tiny: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        @staticmethod
        def snapshot_download(name: str, *, allow_patterns: Any, local_files_only: bool) -> str:
            assert local_files_only
            return str(tiny)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Client)
    assert main(generate("owner/model", *options)) == 0


def test_the_real_hub_client_loads_its_cached_snapshot_without_the_network(
    tiny: Path, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub", reason="the hub's own client is not installed")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--owner--model"
    shutil.copytree(tiny, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = """
        import socket, sys
        def refuse(*_, **__):
            print("touched the network", file=sys.stderr)
            raise OSError("no network")
        socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
        from cbrs.cli import main
        sys.exit(main(["generate", sys.argv[1], "--prompt", "a", "--max-tokens", "2"]))
    """
    program = "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())
    for name, variables, expected in (
        ("owner/model", {}, 0),
        ("owner/model", {"CBRS_OFFLINE": "1"}, 0),
        ("owner/other", {"HF_HUB_OFFLINE": "1"}, 2),
    ):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, name],
            env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == expected, result.stderr
        assert "touched the network" not in result.stderr
    assert "offline mode (HF_HUB_OFFLINE=1)" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [generate(KNOWN), ["pull", KNOWN], ["demo", "--model", KNOWN]],
    ids=lambda command: command[0],
)
def test_an_uncached_model_is_one_line_that_says_what_to_do(
    command: list[str],
    empty_cache: Path,
    no_network: None,
    capsys: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--offline"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line == (
        f"cbrs: error: {KNOWN}: model: not in the cache; offline mode (CBRS_OFFLINE=1) forbids "
        f"fetching it: run `cbrs pull {KNOWN}` where there is a network, or leave offline mode"
    )
    assert "CBRS_OFFLINE" not in os.environ


def test_an_llm_reads_the_environment(
    empty_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbrs import LLM
    from cbrs.errors import ModelLoadError

    monkeypatch.setenv("CBRS_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="offline mode"):
        LLM(KNOWN)


def test_the_list_tells_what_is_here_and_where_the_rest_would_lie(
    empty_cache: Path, no_network: None, capsys: Any
) -> None:
    def listed() -> dict[str, Any]:
        assert main(["pull", "--list", "--json"]) == 0
        entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
        assert entries.keys() == hub.KNOWN_MODELS.keys()
        return dict(entries[KNOWN])

    entry = listed()
    path = Path(entry["path"])
    assert (entry["num_bytes"], entry["is_cached"]) == (98_362_432, False)
    assert path.is_relative_to(empty_cache)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry["num_bytes"])
    assert listed() == {**entry, "is_cached": True}
    assert main(["pull", "--list"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "STATE", "PATH"]
    assert line.split() == [KNOWN, "98.4", "MB", "cached", str(path)]
