"""API keys and policy of `cbrs serve`: read at the start, and again at a SIGHUP."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cbrs.api_keys import KeyFile, environment_key, read_api_keys
from cbrs.cli.effective import effective, told
from cbrs.config import POLICY_FIELDS, EngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbrs.base import BaseLLM
    from cbrs.cli.settings import Value
    from cbrs.serving import RunningServer

logger = logging.getLogger("cbrs")

POLICY = "fair"
"""The policy of a server for which nothing is chosen."""


@dataclass(frozen=True)
class Access:
    """What decides who may ask for what: keys, and the engine's options with their tenants."""

    keys: KeyFile | None
    engine_options: dict[str, Any]

    @property
    def policy(self) -> dict[str, Any]:
        """Of the engine's options those that are the policy."""
        names = ("policy", *POLICY_FIELDS)
        return {name: self.engine_options[name] for name in names if name in self.engine_options}


def read_access(values: Mapping[str, Value], environ: Mapping[str, str]) -> Access:
    """Reads the keys that the settings name, and makes the engine's options of both.

    Raises:
        ValueError: names the file and what is wrong in it.
    """
    path = values["api_keys"].value
    if path == "":
        raise ValueError("api_keys names no file; leave it out for a server without keys")
    files = [file for file in (environment_key(environ), path and read_api_keys(path)) if file]
    names = [key.name for file in files for key in file.keys]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: a key has the name of the one in the environment; rename it")
    if len(frozenset().union(*(file.digests for file in files))) < len(names):
        raise ValueError(f"{path}: a key has the secret of the one in the environment")
    tenants = {name: limits for file in files for name, limits in file.tenants.items()}
    warnings = [warning for file in files for warning in file.warnings]
    known = {item.name for item in fields(EngineConfig)}
    given = {name: item.value for name, item in values.items() if name in known}
    options = {name: value for name, value in given.items() if value is not None}
    options.setdefault("policy", POLICY)
    if tenants:
        options["tenants"] = tenants
    all_keys = [key for file in files for key in file.keys]
    return Access(KeyFile(all_keys, tenants, warnings) if files else None, options)


class Reloader:
    """Reads keys and policy again, and puts both in force or neither."""

    def __init__(
        self,
        llm: BaseLLM,
        server: RunningServer,
        values: Mapping[str, Value],
        environ: Mapping[str, str],
    ) -> None:
        """Reads nothing yet."""
        self._llm = llm
        self._server = server
        self._values = values
        self._environ = dict(environ)

    def reload(self) -> bool:
        """Reads the files; returns whether what they say is in force. What is wrong is logged."""
        files = self._files()
        if not files:
            logger.info(
                "SIGHUP: there is neither a file of API keys nor one of the policy to reload"
            )
            return True
        try:
            access = read_access(self._values, self._environ)
            # The keys were checked, so that nothing can go wrong after the policy.
            self._set_policy(access)
            if access.keys is not None:
                self._server.set_api_keys(access.keys.keys)
        except Exception as error:  # whatever is in the files, the server goes on
            logger.error("SIGHUP: nothing was reloaded, all stays as it was: %s", error)
            return False
        for warning in access.keys.warnings if access.keys else ():
            logger.warning("%s", warning)
        logger.info("SIGHUP: reloaded %s", " and ".join(files))
        return True

    def _files(self) -> list[str]:
        policy = self._values["policy"].value
        path = self._values["api_keys"].value
        is_file = isinstance(policy, str | os.PathLike) and os.fspath(policy).endswith(".toml")
        return [str(file) for file, is_there in ((path, path), (policy, is_file)) if is_there]

    def _set_policy(self, access: Access) -> None:
        policy = access.policy
        if policy == {"policy": "static"} and self._llm.config().policy == "static":
            return  # It has no rules.
        self._llm.set_policy(policy.pop("policy"), **policy)
        self._server.tell_settings(told(effective(self._values, self._llm, self._server)))
