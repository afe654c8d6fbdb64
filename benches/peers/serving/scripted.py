"""A stand-in for an engine, to try the comparison itself: it sleeps.

Its model's name is the milliseconds of a step. All requests run at once; each step brings one token
to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from .harness import Event, Settings, SteppedPeer


class Peer(SteppedPeer):
    version = "1"
    measured = "nothing but sleep"

    def __init__(self, settings: Settings) -> None:
        self._step_s = float(settings.model) / 1e3
        self._left: dict[int, int] = {}

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        self._left[number] = num_output_tokens

    def step(self) -> Iterator[Event]:
        time.sleep(self._step_s)
        now_s = time.perf_counter()
        for number, left in list(self._left.items()):
            self._left[number] = left - 1
            if left == 1:
                del self._left[number]
            yield number, now_s, 1, left == 1
