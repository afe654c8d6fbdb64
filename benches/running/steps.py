"""An engine in which a fixed number of sequences decode."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from cbrs import LLM

PREFILL_TOKENS = 2048
MARGIN_STEPS = 64


class Steady:
    """`--batch` sequences of about `--context` tokens that decode for as long as is asked."""

    def __init__(self, options: argparse.Namespace, num_threads: int) -> None:
        """Runs the prompts."""
        steps = 2 * options.rounds * options.num_steps + MARGIN_STEPS
        self._batch = options.batch
        # The context that is asked for is that of the middle of the steps.
        prompt_tokens = max(1, options.context - steps // 2)
        self._llm = LLM(
            options.model,
            dtype=options.dtype,
            num_threads=num_threads,
            max_num_seqs=options.batch,
            max_model_len=prompt_tokens + steps,
            max_num_batched_tokens=max(PREFILL_TOKENS, 2 * options.batch),
            enable_prefix_caching=False,
        )
        shape = (options.batch, prompt_tokens)
        for index, prompt in enumerate(np.random.default_rng(0).integers(2, 300, shape, np.int32)):
            self._llm.engine.processor.submit(
                prompt, index=index, max_tokens=steps, ignore_eos=True, temperature=0.0
            )
        while self._llm.engine.step().num_decodes < options.batch:
            pass

    def step_ms(self, num_steps: int) -> float:
        """Milliseconds of the median step of so many."""
        times = []
        for _ in range(num_steps):
            started_s = time.perf_counter()
            batch = self._llm.engine.step()
            times.append(time.perf_counter() - started_s)
            if batch.num_decodes != self._batch:
                raise RuntimeError("sequences ended before the bench did")
        return 1e3 * statistics.median(times)

    def close(self) -> None:
        """Ends all sequences."""
        self._llm.engine.close()
