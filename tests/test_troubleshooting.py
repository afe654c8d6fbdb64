"""`docs/troubleshooting.md` knows every error class, every refusal of the core and of Python."""

import ast
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
    pattern = re.compile(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"[^"]*?\)\]\s*(\w+)', re.DOTALL)
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


def fixed_parts(node: ast.expr) -> list[str]:
    """The texts of a string or an f-string; [] for anything else."""
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in fixed_parts(value)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def raised_messages() -> set[str]:
    """The longest fixed part of each message that a module of `cbrs` gives a typed error."""
    found = set()
    for file in (ROOT / "python" / "cbrs").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            # `load_error` makes a `ModelLoadError` of a file, a field and a message.
            position = {"load_error": 2}.get(node.func.id, 0)
            if node.func.id in {*errors.__all__, "load_error"} and len(node.args) > position:
                parts = fixed_parts(node.args[position])
                found |= {max(parts, key=len).strip()} if parts else set()
    return found


def test_every_message_of_a_typed_error_is_explained() -> None:
    messages = raised_messages()
    assert len(messages) > 20
    assert {message for message in messages if message not in TEXT} == set()
