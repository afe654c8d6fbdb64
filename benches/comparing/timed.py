"""Stop-watches for the parts of an engine."""

from __future__ import annotations

import time
from typing import Any


class Timed:
    """Stands before a runner or sampler and adds up the time of its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seconds = 0.0

    def forward(self, batch: Any) -> Any:
        return self._call(self.inner.forward, batch)

    def sample(self, logits: Any, batch: Any) -> Any:
        return self._call(self.inner.sample, logits, batch)

    def _call(self, method: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = method(*arguments)
        self.seconds += time.perf_counter() - started
        return result
