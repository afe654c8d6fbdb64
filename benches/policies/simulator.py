"""Drives a scheduler through virtual time with a runner that only says how long a step took.

The clock is the simulation's. A request is submitted at its arrival time, in the middle of the step
that runs then, so the next plan is the first that can know of it. A step ends after the time that
the profile gives; requests end with EOS at their own length, which the scheduler is not told.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import cbrs
from cbrs.errors import OverloadedError

from .profiles import BLOCK_SIZE, NUM_ROWS, TOKEN_BUDGET, Profile
from .run import NEVER, Requests, Run, Steps
from .workload import SECOND_NS, Stream

VOCAB_SIZE = 32_000
EOS, OTHER = 0, 1
NUM_BLOCKS = 32_768
MAX_MODEL_LEN = 16_384
# Plans in a row that run nothing although requests wait: something is stuck.
MAX_EMPTY_PLANS = 10_000
EMPTY_PLAN_NS = 1_000_000
SLOT_BITS = (1 << 32) - 1


def config(**settings: Any) -> cbrs.SchedulerConfig:
    """A configuration as the benches of the policy have it; `settings` add to it or replace."""
    defaults: dict[str, Any] = {
        "max_num_seqs": NUM_ROWS,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "num_blocks": NUM_BLOCKS,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [EOS],
        "clock": "manual",
    }
    return cbrs.SchedulerConfig(**{**defaults, **settings})


class Simulator:
    """One simulation; `run` may be called once.

    `watch` names figures of `stats()` that are kept for each step. With `returns`, a request that
    is refused comes back once, at the time that it was promised.
    """

    def __init__(
        self,
        settings: cbrs.SchedulerConfig,
        profile: Profile,
        streams: Sequence[Stream],
        *,
        watch: Sequence[str] = (),
        returns: bool = False,
    ) -> None:
        self.scheduler = cbrs.Scheduler(settings)
        self.profile, self.streams = profile, list(streams)
        self.watch, self.returns = tuple(watch), returns
        self.requests = Requests(self.streams)
        self.steps = Steps(watched={name: [] for name in watch})
        self.now_ns, self.num_plans, self.num_live = 0, 0, 0
        self.refusal_ns: list[int] = []
        self.events: list[np.ndarray] = []
        self.event_ns: list[int] = []
        self.owner = np.full(settings.max_num_seqs, NEVER, dtype=np.int64)
        num_slots = 2 * (settings.queue_capacity + settings.max_num_seqs) + 1024
        self.request_of_slot = np.full(num_slots, NEVER, dtype=np.int64)
        self._prepare_arrivals()

    def _prepare_arrivals(self) -> None:
        """A heap of (time, request), and for each closed loop the requests still to come."""
        first = np.cumsum([0, *map(len, self.streams)])
        # Parts of one array serve as prompts: each starts elsewhere, so no two share a block.
        longest = int(self.requests.num_prompt_tokens.max())
        random = np.random.default_rng(12345)
        size = longest + len(self.requests.stream)
        self.tokens = random.integers(2, VOCAB_SIZE, size=size, dtype=np.int32)
        self.arrivals: list[tuple[int, int]] = []
        self.to_come: list[list[int]] = [[] for _ in self.streams]
        for number, stream in enumerate(self.streams):
            indices = range(int(first[number]), int(first[number + 1]))
            if stream.num_in_flight:
                self.to_come[number] = list(reversed(indices))
                self.arrivals += [(0, index) for index in indices[: stream.num_in_flight]]
                del self.to_come[number][-stream.num_in_flight :]
            else:
                self.arrivals += zip(stream.arrival_ns.tolist(), indices, strict=True)
        self.arrivals.sort()
        self.max_tokens: list[int | None] = []
        for stream in self.streams:
            each = stream.max_tokens
            of_each = each.tolist() if isinstance(each, np.ndarray) else [each] * len(stream)
            self.max_tokens += of_each

    def run(self, until_s: float = float("inf"), until_ended: str | None = None) -> Run:
        """Simulates until a time, or until all requests, or those of one stream, have ended."""
        until_ns = until_s * SECOND_NS
        awaited = None if until_ended is None else self._indices(until_ended)
        self._submit_arrived(0)
        batch = self._step(None)
        num_empty_plans = 0
        while self.now_ns < until_ns:
            if awaited is not None and (self.requests.ended_ns[awaited] != NEVER).all():
                break
            if batch.num_seqs:
                num_empty_plans = 0
                batch = self._run_batch(batch)
                continue
            if self.num_live:
                num_empty_plans += 1
                assert num_empty_plans < MAX_EMPTY_PLANS, "requests wait and nothing runs"
            elif not self.arrivals:
                break
            next_ns = self.now_ns + EMPTY_PLAN_NS if self.num_live else self.arrivals[0][0]
            self._submit_arrived(next_ns)
            self.now_ns = next_ns
            batch = self._step(None)
        return self._finish()

    def _indices(self, name: str) -> np.ndarray:
        return self.requests.of([stream.name for stream in self.streams].index(name))

    def _run_batch(self, batch: cbrs.Batch) -> cbrs.Batch:
        num_kv_tokens = int(batch.seq_lens.sum())
        duration_ns = self.profile.step_ns(batch.num_tokens, num_kv_tokens)
        steps = self.steps
        steps.start_ns.append(self.now_ns)
        steps.duration_ns.append(duration_ns)
        steps.num_tokens.append(batch.num_tokens)
        steps.num_seqs.append(batch.num_seqs)
        steps.num_held_rows.append(int(np.count_nonzero(self.owner != NEVER)))
        if self.watch:
            stats = self.scheduler.stats()
            for name in self.watch:
                steps.watched[name].append(stats[name])
        sampled = self.owner[batch.sample_rows]
        is_last = self.requests.num_tokens[sampled] + 1 >= self.requests.length[sampled]
        tokens = np.where(is_last, EOS, OTHER).astype(np.int32)
        result = cbrs.StepResult(batch.step_id, tokens, step_time_ns=duration_ns)
        end_ns = self.now_ns + duration_ns
        self._submit_arrived(end_ns)
        self.now_ns = end_ns
        return self._step(result)

    def _step(self, result: cbrs.StepResult | None) -> cbrs.Batch:
        self.scheduler.set_time_ns(self.now_ns)
        batch = self.scheduler.step(result)
        if len(batch.outputs):
            self._note_outputs(batch.outputs)
        self._note_plan(batch)
        return batch

    def _note_outputs(self, outputs: cbrs.StepOutput) -> None:
        requests = self.requests
        indices = self.request_of_slot[(outputs.request_ids & SLOT_BITS).astype(np.int64)]
        reasons = outputs.finish_reasons
        told = indices[outputs.token_ids >= 0]
        is_first = requests.num_tokens[told] == 0
        requests.first_token_ns[told[is_first]] = self.now_ns
        requests.num_tokens[told] += 1
        self.events.append(told)
        self.event_ns.append(self.now_ns)
        ended = indices[reasons != 0]
        if not len(ended):
            return
        requests.ended_ns[ended] = self.now_ns
        requests.is_expired[indices[reasons == cbrs.StepOutput.ERROR]] = True
        self.num_live -= len(ended)
        for stream in requests.stream[ended].tolist():
            if self.to_come[stream]:
                heapq.heappush(self.arrivals, (self.now_ns, self.to_come[stream].pop()))

    def _note_plan(self, batch: cbrs.Batch) -> None:
        self.num_plans += 1
        self.owner[batch.freed_rows] = NEVER
        if not batch.num_seqs:
            return
        requests, step, rows = self.requests, self.num_plans, batch.row_ids
        ids = (batch.request_ids & SLOT_BITS).astype(np.int64)
        indices = self.request_of_slot[ids]
        last = requests.last_step[indices]
        requests.last_step[indices] = step
        if (last < step - 1).any():
            is_same_row = self.owner[rows] == indices
            is_first = last == NEVER
            first = indices[is_first]
            requests.first_step[first] = step
            requests.first_planned_ns[first] = self.now_ns
            gap = np.where(is_first, 0, step - last - 1)
            longest = requests.longest_absence
            longest[indices] = np.maximum(longest[indices], gap)
            gap = np.where(is_same_row & (requests.num_tokens[indices] > 0), gap, 0)
            requests.longest_pause[indices] = np.maximum(requests.longest_pause[indices], gap)
        self.owner[rows] = indices

    def _submit_arrived(self, until_ns: int) -> None:
        while self.arrivals and self.arrivals[0][0] <= until_ns:
            at_ns, index = heapq.heappop(self.arrivals)
            self.scheduler.set_time_ns(at_ns)
            self._submit(index, at_ns)

    def _submit(self, index: int, at_ns: int) -> None:
        requests = self.requests
        stream = self.streams[requests.stream[index]]
        prompt = self.tokens[index : index + requests.num_prompt_tokens[index]]
        max_tokens = self.max_tokens[index]
        parameters: dict[str, Any] = dict(stream.parameters)
        started = time.perf_counter_ns()
        try:
            request_id = self.scheduler.submit(prompt, max_tokens, **parameters)
        except OverloadedError as refused:
            self.refusal_ns.append(time.perf_counter_ns() - started)
            self._note_refusal(index, at_ns, refused.retry_after_s)
            return
        self.request_of_slot[request_id & SLOT_BITS] = index
        requests.submitted_ns[index] = at_ns
        requests.submitted_step[index] = self.num_plans
        self.num_live += 1

    def _note_refusal(self, index: int, at_ns: int, retry_after_s: float | None) -> None:
        requests = self.requests
        if requests.refused_ns[index] != NEVER:
            requests.is_refused_again[index] = True
            return
        assert retry_after_s is not None, "a refusal without a time to come back"
        requests.refused_ns[index] = at_ns
        requests.promised_ns[index] = at_ns + int(retry_after_s * SECOND_NS)
        if self.returns:
            heapq.heappush(self.arrivals, (int(requests.promised_ns[index]), index))

    def _finish(self) -> Run:
        held = self.owner[self.owner != NEVER]
        held = held[self.requests.num_tokens[held] > 0]
        pauses = self.requests.longest_pause
        pauses[held] = np.maximum(pauses[held], self.num_plans - self.requests.last_step[held])
        stats = self.scheduler.stats()
        self.scheduler.close()
        sizes = list(map(len, self.events))
        none = np.zeros(0, dtype=np.int64)
        return Run(
            self.streams,
            self.requests,
            self.steps,
            np.concatenate([none, *self.events]),
            np.repeat(np.asarray(self.event_ns, dtype=np.int64), sizes),
            self.now_ns,
            dict(stats),
            np.asarray(self.refusal_ns, dtype=np.int64),
        )


def simulate(
    settings: cbrs.SchedulerConfig,
    profile: Profile,
    streams: Sequence[Stream],
    *,
    until_s: float = float("inf"),
    until_ended: str | None = None,
    watch: Sequence[str] = (),
    returns: bool = False,
) -> Run:
    """Runs one simulation from an idle scheduler, as `Simulator` says."""
    simulator = Simulator(settings, profile, streams, watch=watch, returns=returns)
    return simulator.run(until_s, until_ended)
