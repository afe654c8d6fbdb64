"""A bug in the native code, at every public entry: an exception, never an abort, never a hang.

The extension that the tests run has points at which a test can make it panic, once. Wherever that
happens the caller gets an exception within seconds, locks stay usable, and what cannot go on says
so: `EngineDeadError`, or finish reason `error`. A process that aborts would end this test run.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from scheduler_kit import make_scheduler

from cbrs import LLM, AsyncLLM, SamplingParams, _core
from cbrs._core import GgufFile, IncrementalDetokenizer, OutputChannel, OutputProcessor, Tokenizer
from cbrs.errors import CbrsError, EngineDeadError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
DEADLINE_S = 20.0


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    """Arm a point; at the end nothing stays armed."""
    assert hasattr(_core, "_arm_panic"), "the tests need an extension with debug assertions"
    yield _core._arm_panic
    _core._arm_panic("")


def within_deadline(function: Callable[[], Any]) -> BaseException | None:
    """What `function` raised, in a thread of its own; it must end within seconds."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a call hangs"
    return raised[0] if raised else None


def is_panic(error: BaseException | None) -> bool:
    return type(error).__name__ == "PanicException" and "injected" in str(error)


def tokens(batch: Any) -> Any:
    return np.full(len(batch.sample_index), 5, dtype=np.int32)


SCHEDULER_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "submit": lambda s: s.submit([1, 2, 3], max_tokens=2),
    "cancel": lambda s: s.cancel(1),
    "finish": lambda s: s.finish(1, 0, 1),
    "stats": lambda s: s.stats(),
    "close": lambda s: s.close(),
    "pause": lambda s: s.pause(),
}
"""Entries of other threads, which hold no lock of the scheduler."""


@pytest.mark.parametrize("point", SCHEDULER_ENTRIES)
def test_a_panic_beside_the_scheduler_leaves_it_working(point: str, arm: Any) -> None:
    scheduler = make_scheduler()
    arm(point)
    assert is_panic(within_deadline(lambda: SCHEDULER_ENTRIES[point](scheduler)))
    request = scheduler.submit([1, 2, 3], max_tokens=2)
    batch = scheduler.step()
    assert batch.request_ids.tolist() == [request]
    scheduler.step(tokens(batch))
    assert scheduler.step(tokens(batch)).outputs.finish_reason(0) == "length"
    scheduler.check_invariants()


@pytest.mark.parametrize("point", ["step: commit", "step: plan", "fail", "reset_prefix_cache"])
def test_a_panic_inside_the_scheduler_ends_it_and_blocks_nobody(point: str, arm: Any) -> None:
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2)
    batch = scheduler.step()
    inside = {
        "fail": lambda: scheduler.fail(batch.step_id, "x"),
        "reset_prefix_cache": scheduler.reset_prefix_cache,
    }.get(point, lambda: scheduler.step(tokens(batch)))
    arm(point)
    assert is_panic(within_deadline(inside))
    for entry in (
        scheduler.step,
        lambda: scheduler.fail(batch.step_id, "x"),
        scheduler.reset_prefix_cache,
        scheduler.check_invariants,
    ):
        assert isinstance(within_deadline(entry), EngineDeadError)
    # The dead scheduler takes nothing more, and statistics can be read.
    assert isinstance(within_deadline(lambda: scheduler.submit([1])), CbrsError)
    assert scheduler.stats()["num_accepted_requests"] == 1
    assert within_deadline(scheduler.close) is None


def test_a_broken_invariant_is_told_and_ends_the_scheduler(arm: Any) -> None:
    scheduler = make_scheduler()
    arm("check_invariants")
    assert is_panic(within_deadline(scheduler.check_invariants))
    assert isinstance(within_deadline(scheduler.step), EngineDeadError)


def test_a_panic_in_the_text_layer_is_an_exception(arm: Any, smollm2_gguf: Path) -> None:
    tokenizer = GgufFile(smollm2_gguf)
    source = Tokenizer(tokenizer.tokenizer_json(), chat_template="{{ messages[0].content }}")
    stream, channel = IncrementalDetokenizer(source), OutputChannel()
    entries: dict[str, Callable[[], Any]] = {
        "encode": lambda: source.encode("hello"),
        "decode": lambda: source.decode([1, 2]),
        "render": lambda: source.apply_chat_template([{"role": "user", "content": "x"}]),
        "stream: push": lambda: stream.push(5),
        "channel: take": channel.take,
        "load": lambda: GgufFile(smollm2_gguf),
    }
    for point, entry in entries.items():
        arm(point)
        assert is_panic(within_deadline(entry)), point
        assert within_deadline(entry) is None, f"{point}: the next call works"


def test_a_panic_while_submitting_text_blocks_neither_the_engine_nor_others(arm: Any) -> None:
    scheduler = make_scheduler(vocab_size=None)
    processor = OutputProcessor(scheduler, None)
    for point in ("text: submit", "submit", "text: take"):
        arm(point)
        entry = processor.take_finished
        if point != "text: take":
            entry = lambda: processor.submit([1, 2], index=0, max_tokens=1)  # noqa: E731
        assert is_panic(within_deadline(entry)), point
    processor.submit([1, 2], index=7, max_tokens=1)
    scheduler.step(tokens(scheduler.step()))
    (finished,) = processor.wait_finished(DEADLINE_S)
    assert finished.index == 7
    assert within_deadline(processor.close) is None


@pytest.mark.parametrize("point", ["kernels: write_kv", "kernels: attention", "kernels: sample"])
def test_a_panic_of_a_kernel_fails_its_step_only(
    point: str, arm: Any, make_llm: Any, tiny: Path
) -> None:
    llm = make_llm(tiny)
    expected = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    arm(point)
    (failed,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "injected" in str(failed.error)
    (again,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == expected


@pytest.mark.parametrize("point", ["step: commit", "step: plan"])
def test_a_panic_of_the_loop_ends_an_llm_with_a_typed_error(
    point: str, arm: Any, tiny: Path
) -> None:
    llm = LLM(tiny, dtype="float32", num_threads=1, num_blocks=64)
    arm(point)
    for _ in range(2):
        error = within_deadline(lambda: llm.generate([[5, 6]], GREEDY, use_tqdm=False))
        assert isinstance(error, EngineDeadError)
    assert within_deadline(llm.close) is None


@pytest.mark.parametrize("point", ["step: commit", "step: plan"])
def test_a_panic_of_the_loop_ends_every_stream(point: str, arm: Any, tiny: Path) -> None:
    async def use() -> list[Any]:
        async with AsyncLLM(tiny, dtype="float32", num_threads=1, num_blocks=64) as llm:

            async def read(prompt: list[int]) -> None:
                async for _ in llm.generate(prompt, SamplingParams(max_tokens=50, ignore_eos=True)):
                    arm(point)

            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.gather(read([5, 6]), read([7]), return_exceptions=True)

    assert [type(error) for error in asyncio.run(use())] == [EngineDeadError] * 2


def test_a_panic_of_the_text_thread_ends_every_request_with_an_error(
    arm: Any, tmp_path: Path
) -> None:
    llm = LLM(kit.tiny(tmp_path), dtype="float32", num_threads=1, num_blocks=64)
    arm("text: consumer")
    outcome: list[Any] = []
    error = within_deadline(
        lambda: outcome.extend(llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False))
    )
    if error is None:
        assert {o.outputs[0].finish_reason for o in outcome} == {"error"}
    else:
        assert isinstance(error, CbrsError)
    assert isinstance(
        within_deadline(lambda: llm.generate([[5]], GREEDY, use_tqdm=False)), CbrsError
    )
    assert within_deadline(llm.close) is None
