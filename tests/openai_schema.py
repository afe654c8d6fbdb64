"""Holds JSON values to the schema facts of OpenAI's API, in the shape of the shared test data."""

import functools
import json
import os
from pathlib import Path
from typing import Any

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

NULLS = frozenset(
    {
        "usage",
        "choices[].finish_reason",
        "choices[].logprobs.token_logprobs[]",
        "choices[].logprobs.top_logprobs[]",
    }
)
"""Where the schemas know no null and the documented API has one: a running choice has no reason
yet, chunks before the usage say so, the first token of a prompt has no probability."""

_WHOLE = {
    COMPLETIONS: "CreateCompletionResponse",
    CHATS: "CreateChatCompletionResponse",
    "/v1/models": "ListModelsResponse",
}
_CHUNK = {COMPLETIONS: "CreateCompletionResponse", CHATS: "CreateChatCompletionStreamResponse"}

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


@functools.cache
def schemas() -> Schemas | None:
    """The facts, if the shared data is here."""
    folder = os.environ.get("CBRS_DATA")
    return Schemas(Path(folder) / "conformance" / "openai_schema_facts.json") if folder else None


def check_answer(path: str, body: Any, answer: Any) -> None:
    """Holds a whole answer to its schema, if there is one and the facts are here."""
    facts = schemas()
    name = _WHOLE.get(path, "Model" if path.startswith("/v1/models/") else None)
    if facts is not None and name is not None:
        has_nulls = isinstance(body, dict) and body.get("echo")
        assert facts.errors(name, answer, NULLS if has_nulls else frozenset()) == [], answer


def check_event(path: str, event: Any) -> None:
    """Holds an event of a stream to its schema, if the facts are here."""
    facts = schemas()
    if "error" in event:
        check_error(event)
    elif facts is not None:
        assert facts.errors(_CHUNK[path], event, NULLS) == [], event


def check_error(envelope: Any) -> None:
    """Holds the body of an error to its schema, if the facts are here."""
    facts = schemas()
    assert facts is None or facts.errors("ErrorResponse", envelope) == [], envelope
