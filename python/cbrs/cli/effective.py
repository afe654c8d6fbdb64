"""The settings of `cbrs serve` as they are in effect: in its log, and in `/version`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cbrs.cli.limits import limits_by_option
from cbrs.cli.settings import DEFAULT, Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbrs.base import BaseLLM
    from cbrs.serving import RunningServer

logger = logging.getLogger("cbrs")


def effective(values: Mapping[str, Value], llm: BaseLLM, server: RunningServer) -> dict[str, Value]:
    """Returns the settings with what engine, server and log made of those that nobody gave."""
    in_effect: dict[str, Any] = {**asdict(llm.config()), **limits_by_option(server.limits)}
    in_effect["http_threads"] = server.worker_threads
    in_effect["served_model_name"] = server.served_model_names
    in_effect["log_level"] = logging.getLevelName(logger.getEffectiveLevel()).lower()
    return {
        name: Value(in_effect.get(name, item.value), DEFAULT) if item.source == DEFAULT else item
        for name, item in values.items()
    }


def told(values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    """Returns the settings as `/version` tells them."""
    return {name: {"value": item.value, "source": item.source} for name, item in values.items()}
