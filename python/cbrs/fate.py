"""Why an engine cannot go on, known to all who use it before anything of it is taken down."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbrs.errors import EngineDeadError


class Fate:
    """What ended an engine from outside of its loop, such as a lost process of its model.

    It is set by whoever notices, in any thread, before the scheduler is closed: a request that ends
    with the scheduler finds the reason here.
    """

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._error: EngineDeadError | None = None

    @property
    def error(self) -> EngineDeadError | None:
        """What ended the engine; None while nothing did."""
        return self._error

    def end(self, error: EngineDeadError) -> None:
        """Says why; the first reason stays."""
        self._error = self._error or error
