"""Rank 0's runner: sends each batch to the other ranks, then computes its own part."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from cbrs.errors import EngineDeadError
from cbrs.parallel.message import StepWriter

if TYPE_CHECKING:
    from torch import Tensor

    from cbrs.parallel.ranks import Ranks
    from cbrs.runner.model_runner import Runner


class ParallelRunner:
    """Runs batches on all ranks; a step that fails on one of them ends the engine.

    A Ctrl-C between two exchanges would leave this rank behind the others for good. Handlers of
    signals run in the main thread only, so a step that is asked for there is computed in another.
    """

    def __init__(self, local: Runner, ranks: Ranks) -> None:
        """`local` computes the part of this rank, with the exchanges of `ranks.group`."""
        self._local = local
        self._ranks = ranks
        self._writer = StepWriter()
        self._thread: ThreadPoolExecutor | None = None

    def forward(self, batch: Any) -> Tensor:
        """Returns float32 logits `[num_logits, vocab_size]`.

        Raises:
            EngineDeadError: a rank is lost, or failed.
        """
        if threading.current_thread() is not threading.main_thread():
            return self._forward(batch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "cbrs-rank-0")
        return _finished(self._thread.submit(self._forward, batch))

    def skip(self, batch: Any) -> None:
        """Tells the others what a batch that is not run changes in the block tables.

        Twice is as good as once, and after a step that was run, too.

        Raises:
            EngineDeadError: a rank is lost.
        """
        try:
            self._ranks.send(self._writer.write_changes(batch))
        except OSError as error:
            raise self._ranks.lost(error) from error

    def _forward(self, batch: Any) -> Tensor:
        try:
            self._ranks.send(self._writer.write(batch))
            return self._local.forward(batch)
        except EngineDeadError:
            raise
        except BaseException as error:
            raise self._ranks.lost(error) from error


def _finished(step: Future[Tensor]) -> Tensor:
    """Returns the result of a step that has been begun; a Ctrl-C counts when it has ended."""
    try:
        return step.result()
    except BaseException:
        while not step.done():
            try:
                wait([step])
            except KeyboardInterrupt:
                continue
        raise
