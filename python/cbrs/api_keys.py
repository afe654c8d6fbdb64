"""API keys of a server: a TOML file of them, or one in the environment.

Secrets are hashed as soon as they are read. What is kept, shown and logged of a key is its name,
and no message quotes a value of the file.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbrs._core import ApiKey, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbrs._core import Priority

ENVIRONMENT_KEY = "CBRS_API_KEY"
"""The variable with one key that has all rights."""

MIN_SECRET_LENGTH = 16
"""Shorter secrets may be guessed: `KeyFile.warnings` names their keys."""

_MAX_SECRET_LENGTH = 1024
_MAX_NAME_LENGTH = 128
# As the core has it: the name of a key is its tenant's, unless it says otherwise.
_MAX_NAME_BYTES = 256
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_KEY_SETTINGS = ("name", "key", "sha256", "tenant", "max_priority", "priority", "admin")
_CLASSES = ("interactive", "standard", "batch")


@dataclass(frozen=True)
class KeyFile:
    """What a file of keys says; `tenants` is as the setting `tenants` of the policy has it."""

    keys: list[ApiKey]
    tenants: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    digests: frozenset[bytes] = field(default=frozenset(), repr=False)


def read_api_keys(path: str | os.PathLike[str]) -> KeyFile:
    """Reads a file with `[[keys]]`, each with a `name` and a `key` or its `sha256`.

    Further settings are `tenant` (its name, unless given), `max_priority`, `priority`, `admin`, and
    all that the policy has for a tenant.

    Raises:
        ValueError: names the file, the key and what is wrong with it; never a secret.
    """
    shown = os.fspath(path)
    if os.sep not in shown and not shown.endswith(".toml") and not os.path.exists(path):
        # A secret where the name of a file belongs is not shown.
        raise ValueError("the API keys cannot be read: there is no file of the name that was given")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"the API keys cannot be read from {shown}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{shown} is no TOML file: it is nested too deeply") from None
    except ValueError as error:
        # The parser tells the place; whatever it quotes must not be shown.
        place = re.search(r"\(at [^()]*\)\Z", str(error))
        where = f" {place[0]}" if place else ""
        raise ValueError(f"{shown} is no TOML file in UTF-8{where}") from None
    entries = table.get("keys")
    if list(table) != ["keys"] or not isinstance(entries, list) or not entries:
        raise ValueError(f"{shown}: a file of API keys has tables [[keys]] and nothing else")
    reader = _Reader(shown)
    for number, entry in enumerate(entries, 1):
        reader.add(number, entry)
    if any("key" in entry for entry in entries) and mode & (stat.S_IRGRP | stat.S_IROTH):
        reader.warnings.append(f"{shown} has secrets, and others than its owner may read it")
    digests = frozenset(reader.keys)
    return KeyFile(list(reader.keys.values()), reader.tenants, reader.warnings, digests)


def environment_key(environ: Mapping[str, str]) -> KeyFile | None:
    """Returns the key of `CBRS_API_KEY`, which has all rights; None if there is none.

    Raises:
        ValueError: it can be no key.
    """
    secret = environ.get(ENVIRONMENT_KEY, "")
    if not secret:
        return None
    _check_secret(secret, ENVIRONMENT_KEY)
    digest = _digest(secret)
    key = ApiKey(ENVIRONMENT_KEY, digest, is_admin=True)
    warnings = _weakness(secret, ENVIRONMENT_KEY)
    return KeyFile([key], warnings=warnings, digests=frozenset({digest}))


class _Reader:
    """Reads entries one by one; what two of them say must not contradict."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.keys: dict[bytes, ApiKey] = {}
        self.tenants: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self._tenant_settings = _tenant_settings()

    def add(self, number: int, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise ValueError(f"{self.file}: keys[{number}] is no table")
        name = _text(entry, "name", f"{self.file}: keys[{number}]")
        place = f"{self.file}: the key {name!r}"
        if any(key.name == name for key in self.keys.values()):
            raise ValueError(f"{place} is there twice; give each a name of its own")
        self._check_settings(entry, place)
        digest = self._digest(entry, place)
        if digest in self.keys:
            other = self.keys[digest].name
            raise ValueError(f"{place} has the secret of {other!r}; give each its own")
        tenant = _text(entry, "tenant", place) if "tenant" in entry else name
        self._add_tenant(tenant, entry, place)
        self.keys[digest] = _make_key(name, digest, tenant, entry, place)

    def _check_settings(self, entry: dict[str, Any], place: str) -> None:
        known = (*_KEY_SETTINGS, *self._tenant_settings)
        for setting in entry:
            if setting not in known:
                near = difflib.get_close_matches(setting, known, 1, 0.6)
                # One that resembles nothing may be anything, a secret in the wrong place too.
                told = f"{setting!r}; did you mean {near[0]!r}?" if near else "unknown"
                raise ValueError(f"{place} has a setting that there is not: {told}")

    def _digest(self, entry: dict[str, Any], place: str) -> bytes:
        if ("key" in entry) == ("sha256" in entry):
            raise ValueError(f"{place} needs either key or sha256")
        if "sha256" in entry:
            digest = entry["sha256"]
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise ValueError(f"{place}: sha256 must be 64 hexadecimal digits")
            return bytes.fromhex(digest)
        secret = entry["key"]
        _check_secret(secret, place)
        self.warnings.extend(_weakness(secret, place))
        return _digest(secret)

    def _add_tenant(self, tenant: str, entry: dict[str, Any], place: str) -> None:
        settings = {name: entry[name] for name in self._tenant_settings if name in entry}
        if not settings:
            return
        known = self.tenants.setdefault(tenant, {})
        for name, value in settings.items():
            if known.setdefault(name, value) != value:
                raise ValueError(f"{place}: another key of tenant {tenant!r} has another {name}")


def _make_key(name: str, digest: bytes, tenant: str, entry: dict[str, Any], place: str) -> ApiKey:
    max_priority: Priority = _class(entry, "max_priority", place) or "interactive"
    priority = _class(entry, "priority", place)
    if priority is not None and _CLASSES.index(priority) < _CLASSES.index(max_priority):
        raise ValueError(f"{place}: priority is above max_priority")
    is_admin = entry.get("admin", False)
    if not isinstance(is_admin, bool):
        raise ValueError(f"{place}: admin must be true or false")
    # All rights, and no tenant: its requests are whose they say they are.
    has_tenant = not is_admin or "tenant" in entry
    return ApiKey(
        name,
        digest,
        tenant=tenant if has_tenant else None,
        max_priority=max_priority,
        priority=priority,
        is_admin=is_admin,
    )


def _tenant_settings() -> tuple[str, ...]:
    """What the policy has for a tenant; its `priority` is a setting of each key."""
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=1, num_blocks=1, max_model_len=2, policy="fair"
    )
    settings = config.policy_settings["default_tenant"]
    return tuple(name for name in settings if name != "priority")


def _class(entry: dict[str, Any], setting: str, place: str) -> Any:
    value = entry.get(setting)
    if value is not None and value not in _CLASSES:
        raise ValueError(f"{place}: {setting} must be one of {', '.join(_CLASSES)}")
    return value


def _text(entry: dict[str, Any], setting: str, place: str) -> str:
    value = entry.get(setting)
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or not 1 <= len(value) <= _MAX_NAME_LENGTH
        or len(value.encode()) > _MAX_NAME_BYTES
    ):
        limit = f"1 to {_MAX_NAME_LENGTH} printable characters of {_MAX_NAME_BYTES} bytes at most"
        raise ValueError(f"{place}: {setting} must be {limit}")
    return value


def _check_secret(secret: Any, place: str) -> None:
    is_sendable = isinstance(secret, str) and secret.isascii() and secret.isprintable()
    if not is_sendable or " " in secret or not 1 <= len(secret) <= _MAX_SECRET_LENGTH:
        limit = f"1 to {_MAX_SECRET_LENGTH} visible ASCII characters without spaces"
        raise ValueError(f"{place}: a secret must be {limit}")


def _weakness(secret: str, place: str) -> list[str]:
    if len(secret) >= MIN_SECRET_LENGTH:
        return []
    return [f"{place}: the secret has less than {MIN_SECRET_LENGTH} characters; it may be guessed"]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
