"""Runs the Python blocks of the documentation, each in a process and a folder of its own.

A block that cannot run on its own says so in the line before its fence: `<!-- not run: why -->`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?P<marker><!-- not run: (?P<reason>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


def python_blocks() -> list:
    """The blocks to run, named by document and line."""
    blocks = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            name = f"{document.relative_to(ROOT)}:{line}"
            marks = [pytest.mark.skip(block["reason"])] if block["marker"] else []
            blocks.append(pytest.param(block["code"], id=name, marks=marks))
    return blocks


@pytest.mark.parametrize("code", python_blocks())
def test_python_block_runs(code: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = {match["target"] for match in LINK.finditer(text)}
    missing = sorted(target for target in targets if not (document.parent / target).exists())
    assert missing == []


def test_every_make_target_named_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", document.read_text(encoding="utf-8")))
        assert named <= targets, f"{document.name} names unknown targets: {named - targets}"
