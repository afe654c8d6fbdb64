"""Why an engine cannot go on, known to all who use it before anything of it is taken down."""

from __future__ import annotations

from cbrs.errors import EngineDeadError


class Fate:
    """What ended an engine from outside of its loop, such as a lost process of its model.

    It is set by whoever notices, in any thread, before the scheduler is closed: a request that ends
    with the scheduler finds the reason here.
    """

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._reason: str | None = None

    @property
    def error(self) -> EngineDeadError | None:
        """A new exception that says what ended the engine; None while nothing did."""
        return None if self._reason is None else EngineDeadError(self._reason)

    def end(self, reason: str) -> None:
        """Says why; the first reason stays."""
        self._reason = self._reason or reason
