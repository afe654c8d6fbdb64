"""Long runs: after any number of requests nothing is left behind, and memory does not grow.

`make soak` runs them; `CBRS_SOAK_REQUESTS` (default 200,000) is the number of requests that go
through the scheduler alone, a tenth of it through an `LLM`.
"""

import gc
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cbrs import LLM, SamplingParams, Scheduler, SchedulerConfig

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

NUM_REQUESTS = int(os.environ.get("CBRS_SOAK_REQUESTS", "200000"))
MAX_GROWTH_KIB = 1024
"""For every 10^5 requests; a shorter run is allowed as much, since an allocator grows in steps."""

VOCAB_SIZE = 50
STOP_ID = 7
NUM_LIVE = 48
"""More than the 16 rows of the scheduler, so that some always wait."""


class Memory:
    """Resident memory from the end of the warm-up on."""

    def __init__(self) -> None:
        self.start_kib = resident_kib()

    def check(self, num_requests: int) -> None:
        growth_kib = resident_kib() - self.start_kib
        assert growth_kib < MAX_GROWTH_KIB * max(1.0, num_requests / 1e5)


def resident_kib() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def salt(choose: random.Random, number: int) -> str | None:
    """A salt that is absent, shared, or of this request alone: the last must be forgotten."""
    return choose.choice([None, "a", "b", f"own-{number}"])


class SchedulerLoad:
    """Feeds a scheduler with random short requests, and holds it to one end for each."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.tokens = np.random.default_rng(seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=64,
                num_blocks=40,
                max_model_len=64,
                block_size=4,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(0,),
            )
        )
        self.live: dict[int, None] = {}
        self.num_submitted = 0
        self.ends: Counter[str] = Counter()

    def run(self, num_requests: int) -> None:
        last = self.num_submitted + num_requests
        result = None
        while self.live or self.num_submitted < last:
            while len(self.live) < NUM_LIVE and self.num_submitted < last:
                self.submit()
            if self.live and self.choose.random() < 0.2:
                self.scheduler.cancel(self.choose.choice(list(self.live)))
            batch = self.scheduler.step(result)
            self.take_ends(batch.outputs)
            samples = len(batch.sample_index)
            result = self.tokens.integers(VOCAB_SIZE, size=samples, dtype=np.int32)
            result = result if batch.num_seqs > 0 else None

    def submit(self) -> None:
        choose = self.choose
        # Few tokens and a shared start, so that prefixes are found.
        prompt = [1, 2, 3, 4] * choose.randrange(4) + [
            choose.randrange(1, 4) for _ in range(choose.randint(1, 12))
        ]
        request = self.scheduler.submit(
            prompt,
            max_tokens=choose.randint(1, 16),
            stop_token_ids=choose.choice([None, [STOP_ID]]),
            ignore_eos=choose.random() < 0.5,
            tenant=choose.choice([None, "tenant"]),
            cache_salt=salt(choose, self.num_submitted),
        )
        self.live[request] = None
        self.num_submitted += 1

    def take_ends(self, outputs) -> None:
        for index in np.flatnonzero(outputs.finish_reasons).tolist():
            del self.live[int(outputs.request_ids[index])]  # fails at a second end
            self.ends[outputs.finish_reason(index)] += 1


def assert_drained(scheduler: Scheduler) -> None:
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == scheduler.config.num_blocks


def test_a_scheduler_ends_every_request_once_and_does_not_grow() -> None:
    load = SchedulerLoad(seed=1)
    load.run(NUM_REQUESTS // 4)
    memory = Memory()
    load.run(NUM_REQUESTS)
    memory.check(NUM_REQUESTS)
    assert load.ends.total() == load.num_submitted
    assert set(load.ends) == {"stop", "length", "cancelled"}
    stats = load.scheduler.stats()
    assert min(stats["num_preemptions"], stats["num_cached_prompt_tokens"]) > 0
    assert_drained(load.scheduler)


class LLMLoad:
    """Runs random short texts through an `LLM`, and cancels some of them while they run."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.choose = random.Random(seed)
        self.ends: Counter[str | None] = Counter()
        self.num_ends_of_core = 0
        self.num_submitted = 0
        self._step = llm.engine.step
        llm.engine.step = self.step

    def step(self):
        batch = self._step()
        self.num_ends_of_core += np.count_nonzero(batch.outputs.finish_reasons)
        if batch.num_seqs > 0 and self.choose.random() < 0.2:
            request = self.choose.choice(batch.request_ids.tolist())
            self.llm.engine.scheduler.cancel(request)
        return batch

    def run(self, num_requests: int) -> None:
        last = self.num_submitted + num_requests
        while self.num_submitted < last:
            count = min(500, last - self.num_submitted)
            prompts = ["word " * self.choose.randint(1, 30) for _ in range(count)]
            params = [self.params(self.num_submitted + index) for index in range(count)]
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            assert len({output.request_id for output in outputs}) == count
            self.ends.update(output.outputs[0].finish_reason for output in outputs)
            self.num_submitted += count

    def params(self, number: int) -> SamplingParams:
        choose = self.choose
        return SamplingParams(
            max_tokens=choose.randint(1, 48),
            stop=choose.choice([None, "brown fox", ["jumps", "never"]]),
            stop_token_ids=choose.choice([None, [self.fourth_token]]),
            cache_salt=salt(choose, number),
        )

    @property
    def fourth_token(self) -> int:
        return int(self.llm.engine._runner._script[3])


def test_an_llm_ends_every_request_once_and_does_not_grow() -> None:
    num_requests = NUM_REQUESTS // 10
    with LLM("null", max_num_seqs=16, num_blocks=12, max_model_len=128) as llm:
        load = LLMLoad(llm, seed=2)
        load.run(num_requests // 4)
        memory = Memory()
        load.run(num_requests)
        memory.check(num_requests)
        assert load.ends.total() == load.num_ends_of_core == load.num_submitted
        assert set(load.ends) == {"stop", "length", "cancelled"}
        stats = llm.stats()
        assert min(stats["num_evicted_blocks"], stats["num_cached_prompt_tokens"]) > 0
        assert_drained(llm.engine.scheduler)
