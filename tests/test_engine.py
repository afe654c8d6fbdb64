"""`Engine.step`: schedule, forward, sample, commit; and what happens when one of them fails."""

import numpy as np
import pytest

from cbrs import SamplingParams
from cbrs.engine import Engine
from cbrs.sampled import SampledTokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def submit(engine, prompt, index=0, **parameters):
    parameters = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **parameters}
    return engine.processor.submit(prompt, index=index, **parameters)


def drain(engine, max_steps=10_000):
    """Steps until every live request has been handed over; returns the outputs by index."""
    finished = {}
    for _ in range(max_steps):
        batch = engine.step()
        is_done = engine.processor.num_live == 0
        for result in engine.processor.take_finished():
            finished[result.index] = result.outputs[0]
        if is_done:
            return finished
        if batch.num_seqs == 0:
            for result in engine.processor.wait_finished(0.01):
                finished[result.index] = result.outputs[0]
    raise AssertionError("the engine does not come to an end")


class Faulty:
    """Wraps a runner or sampler: calls `hook` with the number of the call before each."""

    def __init__(self, inner, hook):
        self._inner, self._hook, self.num_calls = inner, hook, 0

    def _call(self, method, *arguments):
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self._hook(number)
        return method(*arguments)

    def forward(self, batch):
        return self._call(self._inner.forward, batch)

    def sample(self, logits, batch):
        return self._call(self._inner.sample, logits, batch)


def raise_at(step, error):
    def hook(number):
        if number == step:
            raise error

    return hook


def test_a_step_runs_the_first_chunk_and_then_one_token_per_sequence(make_llm, tiny):
    engine = make_llm(tiny).engine
    submit(engine, [1, 2, 3], max_tokens=3)
    batches = [engine.step() for _ in range(4)]
    assert [batch.num_tokens for batch in batches] == [3, 1, 1, 0]
    assert len(drain(engine)[0].token_ids) == 3


def test_a_step_with_nothing_to_do_returns_an_empty_batch(make_llm, tiny):
    engine = make_llm(tiny).engine
    assert engine.step().num_seqs == 0
    assert engine.step().num_seqs == 0


@pytest.mark.parametrize("part", ["_runner", "_sampler"])
def test_a_failed_step_fails_its_requests_and_no_others(make_llm, tiny, part):
    llm = make_llm(tiny, max_num_seqs=2)
    (expected,) = llm.generate([7, 8, 9], GREEDY)
    engine = llm.engine
    inner = getattr(engine, part)
    setattr(engine, part, Faulty(inner, raise_at(2, RuntimeError("the device is on fire"))))
    for index, prompt in enumerate([[1, 2], [3, 4], [7, 8, 9]]):
        submit(engine, prompt, index)
    finished = drain(engine)
    for index in (0, 1):
        assert finished[index].finish_reason == "error"
        assert "RuntimeError: the device is on fire" in finished[index].error
    assert finished[2].finish_reason == "length"
    assert finished[2].token_ids.tolist() == expected.outputs[0].token_ids


@pytest.mark.parametrize("step", range(5))
def test_an_interrupt_in_forward_is_raised_and_leaves_the_engine_usable(make_llm, tiny, step):
    llm = make_llm(tiny)
    (expected,) = llm.generate([7, 8, 9], GREEDY)
    engine = llm.engine
    engine._runner = Faulty(engine._runner, raise_at(step, KeyboardInterrupt()))
    submit(engine, [1, 2])
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert drain(engine)[0].finish_reason == "error"
    (again,) = llm.generate([7, 8, 9], GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_result_of_the_wrong_length_fails_the_step_only(make_llm, tiny, num_tokens):
    llm = make_llm(tiny)
    engine = llm.engine
    sampler = engine._sampler

    class WrongLength:
        def sample(self, logits, batch):
            return SampledTokens(np.zeros(num_tokens, dtype=np.int32))

    engine._sampler = WrongLength()
    submit(engine, [1, 2])
    assert drain(engine)[0].finish_reason == "error"
    engine._sampler = sampler
    (output,) = llm.generate([1, 2], GREEDY)
    assert output.outputs[0].finish_reason == "length"


def test_a_batch_that_an_interrupt_left_without_result_is_failed_not_committed(make_llm, tiny):
    llm = make_llm(tiny, max_num_batched_tokens=4)
    engine = llm.engine
    submit(engine, list(range(1, 11)))
    engine._schedule()  # an interrupt right after the plan: the chunk has not been run
    assert drain(engine)[0].finish_reason == "error"
    assert llm.stats()["num_cached_blocks"] == 0


def test_an_unusable_row_fails_that_request_only(make_llm, tiny):
    llm = make_llm(tiny)
    engine = llm.engine
    runner = engine._runner

    class OneBadRow:
        def forward(self, batch):
            logits = runner.forward(batch).clone()
            logits[np.flatnonzero(batch.request_ids == bad)] = float("nan")
            return logits

    (expected,) = llm.generate([7, 8, 9], GREEDY)
    engine._runner = OneBadRow()
    bad = submit(engine, [1, 2], index=0)
    submit(engine, [7, 8, 9], index=1)
    finished = drain(engine)
    assert finished[0].finish_reason == "error"
    assert finished[1].token_ids.tolist() == expected.outputs[0].token_ids


def test_the_loop_reads_as_schedule_forward_sample(make_llm):
    """The engine needs nothing but the four calls: a runner and sampler in a few lines will do."""
    llm = make_llm("null")
    calls = []

    class Recorder:
        def forward(self, batch):
            calls.append(("forward", batch.step_id))

        def sample(self, logits, batch):
            calls.append(("sample", batch.step_id))
            return SampledTokens(np.full(len(batch.sample_index), 65, dtype=np.int32))

    recorder = Recorder()
    engine = Engine(llm.config(), llm.engine.scheduler, llm.engine.processor, recorder, recorder)
    submit(engine, [1], max_tokens=2)
    assert drain(engine)[0].token_ids.tolist() == [65, 65]
    steps = [step for name, step in calls if name == "forward"]
    assert calls == [(name, step) for step in steps for name in ("forward", "sample")]
