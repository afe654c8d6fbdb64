"""Typed reading of configuration values.

Every value that a checkpoint states passes through here once: present or absent, of the right
type, finite, inside its limits. A refusal is a `ModelLoadError` that names the file and the field.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbrs.errors import ModelLoadError

MAX_JSON_BYTES = 8 << 20
"""A configuration file above this size is refused before it is read."""

MAX_JSON_DEPTH = 64
"""Deepest nesting of a configuration file."""


def load_error(file: str | Path, field: str, detail: str) -> ModelLoadError:
    """Make the error for `field` of `file`; `detail` says what is wrong and the limit."""
    error = ModelLoadError(f"{file}: {field}: {detail}")
    error.file = str(file)
    error.field = field
    return error


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a small UTF-8 text file, refusing one that is too large, unreadable or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise load_error(path, "file", f"{size} bytes, above the limit of {max_bytes}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise load_error(path, "file", f"not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise load_error(path, "file", error.strerror or str(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; NaN, infinities and deep nesting are refused."""
    text = read_text(path)

    def refuse(literal: str) -> float:
        raise load_error(path, "file", f"{literal} is not a JSON number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        detail = f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise load_error(path, "file", detail) from None
    except (RecursionError, ValueError):
        raise load_error(path, "file", "not JSON: nested too deep or a number too long") from None
    if not isinstance(value, dict):
        raise load_error(path, "file", f"a JSON {type(value).__name__}, not an object")
    if _depth(value) > MAX_JSON_DEPTH:
        raise load_error(path, "file", f"nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_JSON_DEPTH:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


class Fields:
    """The values of one mapping in one file, read by type.

    A key that is absent or null gives `default`; without a default it is an error. `prefix` is put
    before the key to look it up and in messages, so that GGUF keys keep their full name.
    """

    def __init__(self, values: Mapping[str, Any], file: str | Path, prefix: str = "") -> None:
        """Read `values`, which come from `file`."""
        self.values = values
        self.file = file
        self.prefix = prefix

    def error(self, key: str, detail: str) -> ModelLoadError:
        """Make the error for one key of this file."""
        return load_error(self.file, self.prefix + key, detail)

    def get(self, key: str) -> Any:
        """Return the raw value; None when absent or null."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Read an integer in `[low, high]`."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, f"missing; an integer from {low} to {high} is needed")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"{value!r} is not an integer")
        if not low <= value <= high:
            raise self.error(key, f"{value} is outside {low} to {high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Read an integer in `[low, high]`, or None when it is absent or null."""
        return None if self.get(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Read a finite number in `[low, high]`."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, f"missing; a number from {low:g} to {high:g} is needed")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"{value!r} is not a number")
        if not math.isfinite(value):
            raise self.error(key, f"{value} is not finite")
        if not low <= value <= high:
            raise self.error(key, f"{value:g} is outside {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Read a finite number in `[low, high]`, or None when it is absent or null."""
        return None if self.get(key) is None else self.number(key, low, high)

    def boolean(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "missing; a string is needed")
            return default
        if not isinstance(value, str):
            raise self.error(key, f"{value!r} is not a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Read one token id or a list of them, each in the vocabulary; `()` when absent."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.error(key, f"{token_id!r} is not a token id")
            if not 0 <= token_id < vocab_size:
                raise self.error(key, f"{token_id} is outside the vocabulary of {vocab_size}")
        return tuple(dict.fromkeys(ids))
