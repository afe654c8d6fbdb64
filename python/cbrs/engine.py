"""The engine loop: schedule, forward, sample, commit.

The scheduler decides what runs, the runner computes logits, the sampler picks tokens. Nothing here
looks at single requests: a batch is flat arrays from end to end.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cbrs._core import StepResult
from cbrs.errors import EngineDeadError, StepError, is_failure
from cbrs.fate import Fate
from cbrs.interrupts import append_results

if TYPE_CHECKING:
    from cbrs._core import Batch, OutputProcessor, Scheduler
    from cbrs.config import EffectiveConfig
    from cbrs.parallel.ranks import Ranks
    from cbrs.runner.model_runner import Runner, TokenSampler

logger = logging.getLogger("cbrs")


@runtime_checkable
class SkipsBatches(Protocol):
    """A runner that follows the block tables by what each batch changes in them."""

    def skip(self, batch: Batch) -> None:
        """Takes note of a batch that is not run, or perhaps was; it is the last that was planned.

        Raises:
            EngineDeadError: a process of the model is lost.
        """


class Engine:
    """One model under one scheduler, run step by step by one thread at a time.

    A step whose model run raises fails the requests of its batch and no others.
    """

    def __init__(
        self,
        config: EffectiveConfig,
        scheduler: Scheduler,
        processor: OutputProcessor,
        runner: Runner,
        sampler: TokenSampler,
        ranks: Ranks | None = None,
    ) -> None:
        """Joins the parts; `config` is what they were made from.

        `ranks` are the other processes of the model, which end with the engine and it with them.
        """
        self.config = config
        self.scheduler = scheduler
        self.processor = processor
        self._runner = runner
        self._sampler = sampler
        self._ranks = ranks
        self.fate = Fate() if ranks is None else ranks.fate
        # The batch in flight, if any, is the last one; a list, so that no interrupt can lose it.
        self._batches: list[Batch] = []
        self._result: StepResult | None = None

    def step(self, block: bool = False) -> Batch:
        """Runs one iteration and returns what ran; `num_seqs` is 0 if there was nothing to run.

        With `block` it first waits, without the GIL, until there is something to run or to report.
        What the batch computed is committed by the next call. If the model run raises, the requests
        of the batch end with finish reason `error`; the exception is logged, and raised again if it
        is no failure but a demand to stop (a Ctrl-C).

        Raises:
            EngineDeadError: a process of the model is lost.
        """
        death = self.fate.error
        if death is not None:
            raise death
        batch = self._schedule(block)
        if batch.num_seqs > 0:
            try:
                logits = self._runner.forward(batch)
                sampled = self._sampler.sample(logits, batch)
                self._result = StepResult(
                    batch.step_id,
                    sampled.token_ids,
                    row_error=sampled.row_error,
                    logprobs=sampled.logprobs,
                    prompt_logprobs=sampled.prompt_logprobs,
                )
            except BaseException as error:
                self._fail(batch, error)
                if not is_failure(error) or isinstance(error, EngineDeadError):
                    raise
                logger.error("step %d failed: %s", batch.step_id, error, exc_info=error)
        return batch

    def close(self) -> None:
        """Ends every request as cancelled, refuses new ones and joins the text thread."""
        self.scheduler.close()
        self.processor.close()
        if self._ranks is not None:
            self._ranks.close()

    def _schedule(self, block: bool = False) -> Batch:
        """Commits the last result and plans the next batch, in one call of the core."""
        unanswered = self._unanswered()
        if unanswered is not None:
            if isinstance(self._runner, SkipsBatches):
                self._runner.skip(unanswered)
            self._fail(unanswered, RuntimeError("the model run was interrupted"))
        try:
            append_results(self._batches, [partial(self.scheduler.step, self._result, block)])
        except StepError as error:
            if not self._batches:
                raise
            logger.error("the result does not fit its batch: %s", error)
            self._fail(self._batches[-1], error)
            append_results(self._batches, [self.scheduler.step])
        self._result = None
        del self._batches[:-1]
        return self._batches[-1]

    def _unanswered(self) -> Batch | None:
        """Returns the batch in flight if an interrupt kept it from getting a result."""
        if not self._batches or self._batches[-1].num_seqs == 0:
            return None
        batch = self._batches[-1]
        answered = self._result is not None and self._result.step_id == batch.step_id
        return None if answered else batch

    def _fail(self, batch: Batch, error: BaseException) -> None:
        # The core may have been told already, if an interrupt came right after that.
        with suppress(StepError):
            self.scheduler.fail(batch.step_id, f"{type(error).__name__}: {error}")
        self._result = None
        self._batches.clear()
