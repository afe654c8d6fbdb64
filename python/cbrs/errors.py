"""What cbrs raises; every class derives from `CbrsError`.

`InvalidRequestError` and `StepError` are also `ValueError`s. `InvalidRequestError` has `param`,
`OverloadedError` has `retry_after_s` and `reason`, `ModelLoadError` has `file` and `field`.
"""

import os
from typing import TypeVar

from cbrs._core import (
    CbrsError,
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PromptTooLongError,
    StepError,
)

__all__ = [
    "CbrsError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "OverloadedError",
    "PromptTooLongError",
    "StepError",
]

Refusal = TypeVar("Refusal", bound=Exception)


def is_failure(error: BaseException) -> bool:
    """Tells failures, panics of the native code included, from demands to stop such as a Ctrl-C."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def request_error(message: str) -> CbrsError:
    """Returns the exception for a request that ended with finish reason `error`."""
    # How the core begins the message of a request whose deadline passed, and of no other.
    is_late = message.startswith("the deadline passed")
    return DeadlineExceededError(message) if is_late else CbrsError(message)


def closed_error(name: str) -> EngineClosedError:
    """Returns what use of a `name` after `close` raises."""
    return EngineClosedError(f"this {name} is closed; create a new one")


def forked_error(name: str, pid: int) -> EngineClosedError:
    """Returns what use of a `name` of process `pid` in a forked child raises."""
    return EngineClosedError(
        f"this {name} belongs to process {pid} and cannot be used in its forked child "
        f"{os.getpid()}; create a new one here"
    )


def placed(error: Refusal, place: str) -> Refusal:
    """Returns the same refusal with the place in the caller's input before its message."""
    message = "; ".join([str(error), *getattr(error, "__notes__", ())])
    copy = type(error)(f"{place}: {message}")
    if isinstance(error, InvalidRequestError) and isinstance(copy, InvalidRequestError):
        copy.param = error.param
    return copy
