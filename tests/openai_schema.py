"""Holds JSON values to the schema facts of OpenAI's API, in the shape of the shared test data."""

import json
from pathlib import Path
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class Schemas:
    """The schemas by name."""

    def __init__(self, file: Path) -> None:
        self.by_name: dict[str, Any] = json.loads(file.read_text())["schemas"]

    def errors(self, name: str, value: Any, may_be_null: frozenset[str] = frozenset()) -> list[str]:
        """What is wrong with `value`; `may_be_null` are paths at which the schema knows no null."""
        found: list[str] = []
        self._object(self.by_name[name], value, "", may_be_null, found)
        return found

    def _object(
        self, schema: Any, value: Any, path: str, may_be_null: frozenset[str], found: list[str]
    ) -> None:
        if not isinstance(value, dict):
            found.append(f"{path}: no object")
            return
        for name in schema.get("required") or ():
            if name not in value:
                found.append(f"{path}.{name}: missing")
        for name, item in value.items():
            known = (schema.get("properties") or {}).get(name)
            if known is not None:
                self._value(known, item, f"{path}.{name}".lstrip("."), may_be_null, found)

    def _value(
        self, schema: Any, value: Any, path: str, may_be_null: frozenset[str], found: list[str]
    ) -> None:
        if value is None and (schema.get("nullable") or path in may_be_null):
            return
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            attempts: list[list[str]] = []
            for option in options:
                attempts.append([])
                self._value(option, value, path, may_be_null, attempts[-1])
            if all(attempts):
                found.extend(min(attempts, key=len))
        elif "type" not in schema and schema.get("ref") in self.by_name:
            self._object(self.by_name[schema["ref"]], value, path, may_be_null, found)
        else:
            self._typed(schema, value, path, may_be_null, found)

    def _typed(
        self, schema: Any, value: Any, path: str, may_be_null: frozenset[str], found: list[str]
    ) -> None:
        kind = schema.get("type")
        if kind is not None and not _is(value, kind):
            found.append(f"{path}: {value!r} is no {kind}")
        elif "enum" in schema and value not in schema["enum"]:
            found.append(f"{path}: {value!r} is none of {schema['enum']}")
        elif kind == "object":
            self._object(schema, value, path, may_be_null, found)
        elif kind == "array" and "items" in schema:
            for item in value:
                self._value(schema["items"], item, f"{path}[]", may_be_null, found)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _TYPES[kind])
