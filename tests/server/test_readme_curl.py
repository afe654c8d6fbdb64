"""The `curl` examples of the documents work, with the port of a server that runs.

A block of a document is run as it stands, but for the port and the commands that start a server.
What is no example to run says so in the line before its fence: `<!-- not run: why -->`.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_kit import address_of
from server_kit import Client, parse_events, serving
from wire_tap import Tap, tapped

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "smollm2-135m-instruct"
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(
    r"(?P<marker><!-- not run: (?P<reason>[^>]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(document: Path) -> Iterator[tuple[str, re.Match[str]]]:
    """All blocks of a document, with the language of each."""
    text = document.read_text(encoding="utf-8")
    return ((block["language"], block) for block in BLOCK.finditer(text))


def curl_blocks() -> list[Any]:
    """The blocks with a command that begins with `curl`, named by document and line."""
    found = []
    for document in DOCUMENTS:
        for language, block in blocks(document):
            has_curl = re.search(r"^curl ", block["code"], re.MULTILINE)
            if language in ("", "sh", "bash", "console") and has_curl:
                line = block.string.count("\n", 0, block.start("code")) + 1
                name = f"{document.relative_to(ROOT)}:{line}"
                marks = [pytest.mark.skip(block["reason"])] if block["marker"] else []
                found.append(pytest.param(block["code"], id=name, marks=marks))
    return found


@pytest.fixture(scope="module")
def named() -> Iterator[Client]:
    """A server that is called by the name that the examples use."""
    with serving(served_model_names=(MODEL,)) as (_, server):
        yield Client(server.url)


@pytest.fixture
def tap(named: Client) -> Iterator[Tap]:
    with tapped(address_of(named)) as tap:
        yield tap
        tap.check()


def test_the_documents_have_examples() -> None:
    names = [str(block.id) for block in curl_blocks()]
    assert any(name.startswith("README.md") for name in names)
    assert any(name.startswith("docs/serving.md") for name in names)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("code", curl_blocks())
def test_the_block_of_commands_works(tap: Tap, code: str, tmp_path: Path) -> None:
    assert ADDRESS in code, f"an example asks {ADDRESS}; mark it if it is not to be run"
    commands = re.sub(r"^cbrs serve .*\n", "", code, flags=re.MULTILINE).replace(ADDRESS, tap.url)
    # An error status fails the block.
    (tmp_path / ".curlrc").write_text("fail\nsilent\nshow-error\nmax-time 60\n")
    done = subprocess.run(
        ["bash", "-euc", commands],
        env={**os.environ, "CURL_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    exchanges = tap.settled()
    assert len(exchanges) == len(re.findall(r"^curl ", commands, re.MULTILINE))
    for exchange in exchanges:
        assert exchange.answer.decode() in done.stdout
        if (exchange.body or {}).get("stream"):
            assert parse_events(exchange.answer.decode())
        elif "json" in exchange.answer_headers["content-type"]:
            assert json.loads(exchange.answer)


def test_the_readmes_client_in_python_works(capsys: pytest.CaptureFixture[str]) -> None:
    readme = [block["code"] for language, block in blocks(DOCUMENTS[0]) if language == "python"]
    (code,) = [code for code in readme if "openai" in code]
    exec(compile(code.replace(MODEL, "null"), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(" The quick brown fox")
