"""langchain-openai and litellm get along with the server, and all that they are sent fits.

Each runs in a process of its own: they take seconds to import, and set up much when they are.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_kit import address_of
from server_kit import Client
from wire_tap import Tap, tapped

PROGRAMS = Path(__file__).parent / "programs"
# litellm would ask the network for its table of prices.
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TEXT = " The quick brown fox jumps over the lazy dog"


@pytest.fixture
def tap(client: Client) -> Iterator[Tap]:
    """A tap in front of the server; what went over it is held to the schemas at the end."""
    with tapped(address_of(client)) as tap:
        yield tap
        assert len(tap.settled()) > 10
        tap.check()


def run(program: str, tap: Tap) -> dict[str, Any]:
    """What one of the programs prints."""
    command = [sys.executable, str(PROGRAMS / program), f"{tap.url}/v1"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_langchain(tap: Tap) -> None:
    result = run("langchain_client.py", tap)
    assert result["text"] == result["async"] == "".join(result["pieces"]) == TEXT
    assert result["batch"] == [TEXT] * 3
    assert sum(map(bool, result["pieces"])) == 9
    assert result["usage"]["output_tokens"] == result["stream_usage"]["output_tokens"] == 9
    assert result["metadata"]["finish_reason"] == "length"
    assert result["metadata"]["id"].startswith("chatcmpl-")
    assert result["stopped"] == " The quick"
    assert result["completion"] == "".join(result["completion_pieces"]) == TEXT
    too_long = {"status": 400, "code": "context_length_exceeded", "param": "messages"}
    assert result["too_long"] == result["too_long_stream"] == too_long
    assert result["unknown"] == {"status": 404, "code": "model_not_found", "param": "model"}
    assert result["tools"] == {"status": 400, "code": "unsupported_parameter", "param": "tools"}


def test_litellm(tap: Tap) -> None:
    result = run("litellm_client.py", tap)
    assert result["text"] == result["async"] == "".join(result["pieces"]) == TEXT
    assert result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 9
    assert result["stopped"] == " The quick"
    assert result["choices"] == [TEXT] * 3
    assert result["completion"] == "".join(result["completion_pieces"]) == TEXT
    refused = {"class": "BadRequestError", "status": 400}
    assert result["too_long"] == result["wrong"] == result["wrong_stream"] == refused
    assert result["unknown"] == {"class": "NotFoundError", "status": 404}
