"""`docs/cases.md` and the tests agree: every fault in its table has a test that bears its id."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_NAME = re.compile(r"(?:fn |def test_)(?P<id>[a-j]\d\d)_")


def ids_in_document() -> set[str]:
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:[A-J]\d\d(?:, )?)+) \|", text, re.MULTILINE)
    return {name for row in rows for name in row.split(", ")}


def ids_of_tests() -> set[str]:
    sources = [
        *(ROOT / "tests").rglob("*.py"),
        *(path for path in (ROOT / "rust").rglob("*.rs") if "target" not in path.parts),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return {match["id"].upper() for match in TEST_NAME.finditer(text)}


def test_every_fault_has_a_test_or_a_reason() -> None:
    documented = ids_in_document()
    assert len(documented) > 60
    without_test = {name for name in documented if not name.startswith("J")} - ids_of_tests()
    assert without_test == set()


def test_every_test_of_a_fault_is_in_the_table() -> None:
    assert ids_of_tests() - ids_in_document() == set()
