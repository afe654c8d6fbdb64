"""Keeps results safe from a Ctrl-C.

Python runs signal handlers between two instructions of the main thread. A `KeyboardInterrupt`
raised right after a call returns, and before its result is stored, loses that result: a request
that nobody can cancel, a batch that nobody answers.
"""

from collections.abc import Callable, Iterable
from operator import call
from typing import TypeVar

T = TypeVar("T")


def append_results(target: list[T], functions: Iterable[Callable[[], T]]) -> None:
    """Calls native functions and appends each result, up to the first that raises.

    No signal handler runs between a call and its append: `extend`, `map` and `call` are one native
    loop. A Python function (a lambda) would open the gap again; bind arguments with `partial`.
    """
    target.extend(map(call, functions))
