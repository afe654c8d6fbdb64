"""`cbrs info` tells what is there, with and without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cbrs
from cbrs._core import cpu_features
from cbrs.cli import main


def info(capsys: Any, *options: str) -> str:
    assert main(["info", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return str(captured.out)


def test_the_json_says_what_the_modules_say(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from cbrs.loading import choose_device, choose_dtype

    monkeypatch.setenv("CBRS_CACHE", str(tmp_path))
    monkeypatch.setenv("CBRS_OFFLINE", "1")
    found = json.loads(info(capsys, "--json"))
    features = cpu_features()
    assert found["version"] == cbrs.__version__
    assert found["cpu"]["num_cpus"] == found["num_threads"] == len(os.sched_getaffinity(0))
    assert found["cpu"]["features"]["avx2"] is features["avx2"]
    assert found["kernels"] == {
        "isa": features["isa"],
        "attention": features["kernel"],
        "int8": features["int8"],
    }
    assert found["torch"]["version"] == torch.__version__
    device = choose_device("auto")
    dtype = str(choose_dtype("auto", device, False)).removeprefix("torch.")
    assert (found["torch"]["device"], found["torch"]["dtype"]) == (str(device), dtype)
    assert found["cache"] == str(tmp_path)
    assert found["offline"] == "CBRS_OFFLINE=1"


def test_the_text_says_the_same(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBRS_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = json.loads(info(capsys, "--json"))
    lines = dict(line.split(maxsplit=1) for line in info(capsys).splitlines())
    assert lines["cbrs"] == found["version"]
    assert lines["attention"].startswith(found["kernels"]["attention"])
    assert lines["threads"].startswith(str(found["num_threads"]))
    assert lines["torch"].startswith(found["torch"]["version"])
    assert lines["cache"] == found["cache"]
    assert lines["offline"] == "no"


def test_it_works_without_torch_and_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None  # what a missing package looks like to an import
from cbrs.cli import main
main(["info", "--json"])
sys.exit(main(["info"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, *text = result.stdout.splitlines()
    assert json.loads(first)["torch"] is None
    (line,) = [line for line in text if line.startswith("torch ")]
    assert "not installed" in line
    assert "cbrs[engine]" in line


def test_an_offline_variable_of_the_hub_is_named(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CBRS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "yes (HF_HUB_OFFLINE=1)" in info(capsys)
