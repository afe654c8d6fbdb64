"""cbrs: one call a step, with all arrays of the batch and of its outputs fetched."""

from __future__ import annotations

from typing import Any

import numpy as np
from scheduling.arrays import check_that_all_are_fetched, fetch

import cbrs

from .harness import Limits


class Peer:
    version = cbrs.__version__
    measured = "Scheduler.step() with every array of the batch and its outputs fetched"

    def __init__(self, limits: Limits) -> None:
        self.scheduler = cbrs.Scheduler(
            cbrs.SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                vocab_size=limits.vocab_size,
            )
        )
        self.batch = self.scheduler.step()
        check_that_all_are_fetched(self.batch)
        self.tokens = np.full(limits.max_num_batched_tokens, 7, dtype=np.int32)
        self.result = self.tokens[:0]

    def prepare(self, prompt: list[int]) -> Any:
        return np.asarray(prompt, dtype=np.int32)

    def submit(self, prompt: Any, max_tokens: int) -> None:
        self.scheduler.submit(prompt, max_tokens, ignore_eos=True)

    def schedule(self) -> None:
        """Commits the last step and plans this one: both in the same call."""
        self.batch = self.scheduler.step(self.result)
        fetch(self.batch)

    def sample(self) -> None:
        self.result = self.tokens[: len(self.batch.sample_index)]

    def update(self) -> tuple[int, int]:
        """What the last step brought: the tokens of this one come with the next call."""
        outputs = self.batch.outputs
        return len(outputs), int(np.count_nonzero(outputs.finish_reasons))
