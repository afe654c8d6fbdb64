"""A small scheduler, and what every test of it does."""

import numpy as np

from cbrs import Scheduler, SchedulerConfig

VOCAB_SIZE = 100


def make_scheduler(**options):
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_blocks": 32,
        "max_model_len": 64,
        "block_size": 4,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (0,),
    }
    return Scheduler(SchedulerConfig(**(defaults | options)))


def run(scheduler, batch=None, token=7, max_steps=1000):
    """Answers every sample from `batch` on with `token`; returns the events of each request."""
    events = {}
    batch = scheduler.step() if batch is None else batch
    for _ in range(max_steps):
        collect(batch.outputs, events)
        scheduler.check_invariants()
        if batch.num_seqs == 0:
            return events
        batch = scheduler.step(np.full(len(batch.sample_index), token, np.int32))
    raise AssertionError(f"not finished after {max_steps} steps")


def collect(outputs, events):
    for index, request in enumerate(outputs.request_ids.tolist()):
        token, reason = int(outputs.token_ids[index]), outputs.finish_reason(index)
        events.setdefault(request, []).append((token, reason))


def assert_drained(scheduler):
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == scheduler.config.num_blocks
