"""Cancels in all states, faults at random steps, clocks that jump: nothing hangs, leaks or differs.

The short forms run with every change, the long ones in `make soak`.
"""

import asyncio
import gc
import os
import random
import re
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from async_kit import final, is_idle, live_ids, started, until
from scheduler_kit import make_scheduler

from cbrs import SamplingParams, _core
from cbrs.errors import EngineClosedError, EngineDeadError

ROOT = Path(__file__).parents[1]


def resident_kib():
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def num_threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


CUTS = ["never", "at once", "soon", "while it runs", "after its end"]
WAYS = ["name", "aclose", "task", "drop"]


class Storm:
    """Requests of all kinds, 64 at a time, each left alone or cut at a random moment."""

    def __init__(self, llm, seed):
        self.llm = llm
        self.choose = random.Random(seed)
        self.ends = Counter()
        """How requests ended, by way: a finish reason, or "gone" if nobody was told."""
        self.cuts = Counter()
        """How many were cut, by way and by the state they were in."""

    async def run(self, count):
        numbers = iter(range(count))

        async def work():
            for number in numbers:
                await self.one(f"storm-{number}")

        await asyncio.gather(*(work() for _ in range(64)))
        await until(lambda: is_idle(self.llm))

    async def one(self, name):
        # Outputs of 1 to 24 tokens, one to three of them.
        params = SamplingParams(
            max_tokens=self.choose.randint(1, 24),
            n=self.choose.choice([1, 1, 1, 3]),
            truncate_prompt_tokens=120,
            output_kind=self.choose.choice(["delta", "cumulative", "final_only"]),
        )
        cut, way = self.choose.choice(CUTS), self.choose.choice(WAYS)
        run = self.drop if way == "drop" else self.read_and_cut
        await run(self.start(params, name), params.n, cut, way)
        assert not self.llm.cancel(name), "the id is free again"

    def start(self, params, name):
        """A stream; texts and conversations are prepared by a thread, ids are not."""
        kind, letter = self.choose.choice(["ids", "text", "chat"]), self.choose.choice("abc")
        # Prompts of up to 8 chunks, some alike.
        length = self.choose.choice([1, 5, 40, 120])
        if kind == "ids":
            return self.llm.generate([ord(letter)] * length, params, name)
        if kind == "text":
            return self.llm.generate(letter * (length + 2_048), params, name)
        return self.llm.chat([{"role": "user", "content": letter * length}], params, name)

    async def read_and_cut(self, stream, num_choices, cut, way):
        has_begun = asyncio.Event()
        task = asyncio.create_task(self.read(stream, has_begun))
        if cut == "while it runs":
            await has_begun.wait()
        elif cut in ("never", "after its end"):
            await asyncio.wait([task])
        else:
            await asyncio.sleep(0 if cut == "at once" else self.choose.uniform(0, 0.01))
        if cut != "never":
            self.cuts[way, state_of(stream)] += 1
            if way == "name":
                assert self.llm.cancel(stream.request_id) == (state_of(stream) != "over")
            elif way == "aclose":
                await stream.aclose()
            else:
                task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert way == "task"
            self.ends[way, "gone"] += 1
        else:
            self.count_end(way, task.result(), num_choices)

    async def read(self, stream, has_begun):
        """The outputs of a stream; `has_begun` is set with one of them, or at the end."""
        outputs, num_before = [], self.choose.randint(1, 8)
        try:
            async for output in stream:
                outputs.append(output)
                if len(outputs) == num_before:
                    has_begun.set()
        finally:
            has_begun.set()
        return outputs

    async def drop(self, stream, num_choices, cut, way):
        """Drops the only reference to a stream, and to the wait for its next output if any."""
        outputs, waiting = [], None
        num_before = {"at once": 0, "soon": 0, "while it runs": self.choose.randint(1, 8)}.get(cut)
        while len(outputs) != num_before and not (outputs and outputs[-1].finished):
            outputs.append(await anext(stream))
        if num_before == 0:
            # As a task does it, which would keep the stream.
            waiting = stream.__anext__()
            waiting.send(None)
            await asyncio.sleep(0 if cut == "at once" else self.choose.uniform(0, 0.01))
        if cut != "never":
            self.cuts[way, state_of(stream)] += 1
        gone = weakref.ref(stream)
        del stream, waiting
        gc.collect(0)
        assert gone() is None
        if outputs and outputs[-1].finished:
            self.count_end(way, outputs, num_choices)
        else:
            self.ends[way, "gone"] += 1

    def count_end(self, way, outputs, num_choices):
        if not outputs or not outputs[-1].finished:
            assert way == "aclose", "every other way tells its reader"
            self.ends[way, "gone"] += 1
            return
        ends = [c for output in outputs for c in output.outputs if c.finish_reason is not None]
        # A cumulative output repeats the ends of those before it.
        reasons = {(completion.index, completion.finish_reason) for completion in ends}
        assert sorted(index for index, _ in reasons) == list(range(num_choices))
        self.ends[way, ends[-1].finish_reason] += 1


def state_of(stream):
    """Whether a request is being prepared, submitted or over."""
    if stream._is_over or stream._inbox.is_over:
        return "over"
    return "being prepared" if stream._assembler is None else "submitted"


def storm(llm, count):
    """Runs `count` requests after a warm-up; nothing may be left of them."""
    load = Storm(llm, seed=count)
    asyncio.run(load.run(max(100, count // 10)))
    before, counts = resident_kib(), num_threads_and_descriptors()
    accepted = llm.stats()["num_accepted_requests"]
    load.ends.clear()
    load.cuts.clear()
    asyncio.run(load.run(count))
    assert resident_kib() <= before * 1.02 + 4096
    assert num_threads_and_descriptors() == counts
    assert live_ids(llm) == 0
    assert llm.engine.processor.num_live == 0
    assert llm.stats()["num_accepted_requests"] > accepted
    for way in WAYS:
        for state in ("being prepared", "submitted", "over"):
            assert load.cuts[way, state] >= count // 300, (way, state, load.cuts)
        for end in ("length", "cancelled" if way == "name" else "gone"):
            assert load.ends[way, end] >= count // 300, (way, end, load.ends)
    assert {way for way, end in load.ends if end == "cancelled"} == {"name"}
    assert sum(load.ends.values()) == count


def make_stormy(make_async_llm):
    return make_async_llm(
        "null", max_num_seqs=16, max_prefill_chunk_tokens=16, num_blocks=64, max_model_len=256
    )


def test_a_storm_of_cancels_in_all_states_leaves_nothing_behind(make_async_llm):
    storm(make_stormy(make_async_llm), 600)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_storm_of_10000_cancels_in_all_states_leaves_nothing_behind(make_async_llm):
    storm(make_stormy(make_async_llm), 10_000)


class FaultAt:
    """A part of the engine that fails in one call, before or after it has done its work."""

    def __init__(self, function, call, is_before, error):
        self._function, self._left = function, call
        self._is_before, self._error = is_before, error

    def __call__(self, *arguments):
        self._left -= 1
        if self._left == 0 and self._is_before:
            raise self._error
        result = self._function(*arguments)
        if self._left == 0:
            raise self._error
        return result


def fail_at_random_steps(llm, monkeypatch, count):
    """Runs the same eight requests `count` times, each time with a fault at another place."""
    choose = random.Random(count)
    prompts = [[5 + number] * (3 + 9 * number) for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs for output in llm.generate(prompts, params)]
    engine, outcomes = llm.engine, Counter()
    parts = [(engine._runner, "forward"), (engine._sampler, "sample")]
    for _ in range(count):
        part, method = choose.choice(parts)
        fault = FaultAt(
            getattr(part, method), choose.randint(1, 20), choose.random() < 0.5, OSError("a fault")
        )
        with monkeypatch.context() as patch:
            patch.setattr(part, method, fault)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, completions in zip(outputs, expected, strict=True):
            outcomes[output.outputs[0].finish_reason] += 1
            if output.error is None:
                assert output.outputs == completions
            else:
                assert output.error == "OSError: a fault"
                assert output.outputs[0].finish_reason == "error"
                got = output.outputs[0].token_ids
                assert got == completions[0].token_ids[: len(got)]
        engine.scheduler.check_invariants()
        assert llm.generate([prompts[3]], params, False)[0].outputs == expected[3]
    assert set(outcomes) == {"length", "error"}


def test_a_fault_at_any_step_fails_what_it_touched_and_nothing_else(make_llm, tiny, monkeypatch):
    llm = make_llm(tiny, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=40)
    fail_at_random_steps(llm, monkeypatch, 20)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_1000_faults_at_random_steps_fail_what_they_touched(make_llm, tiny, monkeypatch):
    llm = make_llm(tiny, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=40)
    fail_at_random_steps(llm, monkeypatch, 1000)


def test_the_wall_clock_may_jump(make_llm, make_async_llm, monkeypatch):
    """Patched to jump by an hour at every look, forth and back."""
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 + 3600.0 * (-1) ** next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    params = SamplingParams(max_tokens=20)
    (output,) = make_llm("null:0.001").generate([1], params, use_tqdm=False)
    streamed = asyncio.run(final(make_async_llm("null:0.001").generate([1], params)))
    for metrics in (output.metrics, streamed.metrics):
        assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s < metrics.total_time_s
        assert metrics.total_time_s < 60
        assert all(latency >= 0 for latency in metrics.inter_token_latencies_s)


def test_nothing_but_dates_that_are_shown_reads_the_wall_clock():
    """The date of chat templates, the `created` of answers, the times of logs and of events.

    The kernel's clock cannot be set in a test: that nobody else looks at it can be seen.
    """
    wall_clock = re.compile(
        r"\bSystemTime\b|\bUNIX_EPOCH\b|\btime\.time(_ns)?\(|\bdatetime\.|\btime\.(local|gm)time\b"
    )
    sources = [*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("python/cbrs/**/*.py")]
    if not sources:
        pytest.skip("the sources are not here")
    assert any("Instant" in path.read_text(encoding="utf-8") for path in sources)
    readers = {path.name for path in sources if wall_clock.search(path.read_text(encoding="utf-8"))}
    logs = {"logs.py", "line.rs", "record.rs"}
    assert readers == {"template.rs", "strftime.rs", "app.rs", *logs}


def break_core(scheduler):
    """Panics inside the scheduler, while its lock is held."""
    _core._arm_panic("check_invariants")
    scheduler.check_invariants()


def test_a_panic_in_the_core_is_a_typed_error_at_every_entrance():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3])
    batch = scheduler.step()
    with pytest.raises(BaseException, match="injected") as caught:
        break_core(scheduler)
    assert type(caught.value).__name__ == "PanicException"
    dead = [
        scheduler.step,
        lambda: scheduler.step(np.array([5], dtype=np.int32)),
        lambda: scheduler.step(block=True),
        lambda: scheduler.fail(batch.step_id, "x"),
        scheduler.reset_prefix_cache,
        scheduler.check_invariants,
    ]
    for use in dead:
        with pytest.raises(EngineDeadError, match="create a new one"):
            use()
    with pytest.raises(EngineClosedError):
        scheduler.submit([1])
    # What takes no lock of the core goes on, and nothing waits for ever.
    for use in (scheduler.stats, scheduler.time_ns, scheduler.resume, scheduler.pause):
        use()
    assert scheduler.cancel(0) in (True, False)
    scheduler.close()


def test_a_panic_in_the_core_ends_every_call_of_an_llm(make_llm):
    llm = make_llm("null:0.001", max_model_len=4096)
    errors = []

    def generate():
        try:
            llm.generate([[1]] * 3, SamplingParams(max_tokens=4000), use_tqdm=False)
        except EngineDeadError as error:
            errors.append(error)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    while llm.stats()["num_running"] < 9:
        time.sleep(0.001)
    with pytest.raises(BaseException, match="injected"):
        break_core(llm.engine.scheduler)
    for thread in threads:
        thread.join(30)
    assert len(errors) == 3
    with pytest.raises((EngineDeadError, EngineClosedError)):
        llm.generate([1])
    llm.close()


def test_a_panic_in_the_core_ends_every_stream(make_async_llm):
    llm = make_async_llm("null:0.001", max_model_len=4096)

    async def main():
        streams = [await started(llm.generate([1], SamplingParams())) for _ in range(3)]
        with pytest.raises(BaseException, match="injected"):
            break_core(llm.engine.scheduler)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await final(stream)
        with pytest.raises(EngineDeadError):
            await final(llm.generate([1]))
        await llm.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("part", ["runner", "sampler", "processor"])
def test_a_python_fault_in_any_part_is_typed_and_hangs_nobody(make_async_llm, monkeypatch, part):
    llm = make_async_llm("null:0.001", max_model_len=4096)
    engine = llm.engine

    class Panic(BaseException):
        __module__ = "pyo3_runtime"

    def fail(*arguments, **keywords):
        raise Panic("the native part broke")

    async def main():
        stream = await started(llm.generate([1], SamplingParams(max_tokens=4000)))
        if part == "processor":
            # What hands requests over: nothing is submitted, and what runs is not affected.
            monkeypatch.setattr(engine, "processor", BrokenProcessor(engine.processor, fail))
            with pytest.raises(Panic):
                await final(llm.generate([1], SamplingParams(max_tokens=3)))
            assert llm.cancel(stream.request_id)
            assert (await final(stream)).outputs[0].finish_reason == "cancelled"
            monkeypatch.undo()
        else:
            target = engine._runner if part == "runner" else engine._sampler
            method = "forward" if part == "runner" else "sample"
            with monkeypatch.context() as patch:
                patch.setattr(target, method, fail)
                output = await final(stream)
            assert output.outputs[0].finish_reason == "error"
            assert output.error == "Panic: the native part broke"
        assert live_ids(llm) == 0
        assert (await final(llm.generate([1], SamplingParams(max_tokens=3)))).finished

    asyncio.run(main())


class BrokenProcessor:
    """An output processor that refuses what is submitted with `fail`."""

    def __init__(self, processor, fail):
        self._processor, self.submit, self.submit_text = processor, fail, fail

    def __getattr__(self, name):
        return getattr(self._processor, name)
