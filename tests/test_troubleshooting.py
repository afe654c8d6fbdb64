"""`docs/troubleshooting.md` knows every error class and every refusal of the core."""

import re
from pathlib import Path

from cbrs import errors

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Messages that users of the engine never see: a caller of the block pool would.
INTERNAL = {"BlockNotHeld"}


def refusals() -> dict[str, str]:
    """The longest fixed part of each message of the core's `Error`, by variant."""
    source = (ROOT / "rust" / "core" / "src" / "error.rs").read_text(encoding="utf-8")
    pattern = re.compile(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"\s*\)\]\s*(\w+)', re.DOTALL)
    found = {}
    for message, variant in pattern.findall(source):
        joined = re.sub(r"\\\n\s*", "", message).replace('\\"', '"')
        found[variant] = max(re.split(r"\{[^}]*\}", joined), key=len).strip()
    return found


def test_every_error_class_is_explained() -> None:
    assert {name for name in errors.__all__ if f"`{name}`" not in TEXT} == set()


def test_every_refusal_of_the_core_is_explained() -> None:
    messages = refusals()
    assert len(messages) > 20
    unknown = {v: m for v, m in messages.items() if v not in INTERNAL and m not in TEXT}
    assert unknown == {}
