"""An engine inside somebody else's program: made and dropped, Ctrl-C, exit, fork, signals, the GIL.

Short forms run with every change, long ones in `make soak`.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from async_kit import GREEDY, final, started

from cbrs import LLM, AsyncLLM, SamplingParams

OPTIONS = {"dtype": "float32", "num_threads": 2, "max_model_len": 64, "num_blocks": 16}
ENDLESS = SamplingParams(max_tokens=4000, output_kind="delta")


def resident_kib():
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def counts():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def wait_for_counts(expected):
    """Joined threads leave the system's list a moment later."""
    deadline = time.monotonic() + 10
    while counts() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counts() == expected


def use_and_close(model):
    with LLM(model, **OPTIONS) as llm:
        return llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def use_and_drop(model):
    return LLM(model, **OPTIONS).generate([1, 2], GREEDY, False)[0].outputs[0].token_ids


def use_in_asyncio_and_close(model):
    async def main():
        async with AsyncLLM(model, **OPTIONS) as llm:
            return (await final(llm.generate([1, 2], GREEDY))).outputs[0].token_ids

    return asyncio.run(main())


def use_in_asyncio_and_drop(model):
    async def main():
        # With a request that is running when the engine is dropped.
        llm = AsyncLLM(model, **OPTIONS)
        running = await started(llm.generate([5], SamplingParams(max_tokens=50)))
        token_ids = (await final(llm.generate([1, 2], GREEDY))).outputs[0].token_ids
        del running
        return token_ids

    return asyncio.run(main())


USES = [use_and_close, use_and_drop, use_in_asyncio_and_close, use_in_asyncio_and_drop]


def make_use_and_destroy(model, num_cycles):
    for use in USES:
        expected = use(model)  # warm-up: pools of the allocator, of torch, of the interpreter
    for use in USES:
        use(model)
    gc.collect()
    time.sleep(0.2)
    threads_and_descriptors, before = counts(), resident_kib()
    for cycle in range(num_cycles):
        assert USES[cycle % len(USES)](model) == expected
    gc.collect()
    wait_for_counts(threads_and_descriptors)
    assert resident_kib() - before < 16 * 1024


def test_engines_made_used_and_destroyed_leave_nothing_behind(tiny):
    make_use_and_destroy(tiny, 12)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_200_engines_made_used_and_destroyed_leave_nothing_behind(tiny):
    make_use_and_destroy(tiny, 200)


def test_eight_threads_make_use_and_destroy_engines_at_once(tiny):
    expected = use_and_close(tiny)
    results = []

    def work(number):
        for use in (USES[number % 4], USES[(number + 1) % 4]):
            results.append(use(tiny))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 16


def test_an_engine_made_inside_a_running_loop_serves_it(tiny):
    async def main():
        first = AsyncLLM(tiny, **OPTIONS)
        second = AsyncLLM(tiny, **OPTIONS)
        streams = [llm.generate([1, 2], GREEDY) for llm in (first, second) * 3]
        outputs = await asyncio.gather(*map(final, streams))
        await first.aclose()
        assert (await final(second.generate([1, 2], GREEDY))).outputs == outputs[0].outputs
        await second.aclose()
        return [output.outputs[0].token_ids for output in outputs]

    assert asyncio.run(main()) == [use_and_close(tiny)] * 6


PRELUDE = """
    import asyncio, json, os, signal, sys, threading, time, warnings
    warnings.simplefilter("ignore")
    import cbrs.async_llm, cbrs.llm
    from cbrs import LLM, AsyncLLM, SamplingParams
    from cbrs.errors import EngineClosedError

    SHORT = SamplingParams(max_tokens=5)
    LONG = SamplingParams(max_tokens=8000, output_kind="delta")
    kept = []

    def say_now():
        os.write(to_parent, f"{time.monotonic()} ".encode())

    def interrupt_soon():
        def interrupt():
            say_now()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, interrupt).start()

    async def read(llm, params=LONG):
        return [output async for output in llm.generate([1], params)]

    def start_three(model="null:0.02", is_reading_on=False):
        llm, streams = AsyncLLM(model, max_model_len=8192), []

        async def main():
            for _ in range(3):
                streams.append(llm.generate([1], LONG))
                await anext(streams[-1])
            if is_reading_on:
                await read(llm)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        kept.append((llm, streams, loop))

    def start_one(model):
        llm = AsyncLLM(model)

        async def main():
            kept.append(asyncio.create_task(anext(llm.generate([1]))))
            await asyncio.sleep(0.2)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        kept.append((llm, loop))

    def in_thread(function, *arguments):
        threading.Thread(target=function, args=arguments, daemon=True).start()
"""

CHILDREN = """
    results = {}
    for name, code in CODES.items():
        from_child, to_parent = os.pipe()
        child = os.fork()
        if child == 0:
            exec(code)
            say_now()
            sys.exit(0)  # here at the top, the interpreter ends as it does after any script
        os.close(to_parent)
        ended, deadline = 0, time.monotonic() + 30
        while not ended and time.monotonic() < deadline:
            time.sleep(0.001)
            ended, status = os.waitpid(child, os.WNOHANG)
        now = time.monotonic()
        if not ended:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        said = os.read(from_child, 1000).split()
        os.close(from_child)
        results[name] = os.waitstatus_to_exitcode(status), now - float(said[0] if said else 0)
    print(json.dumps(results))
"""

INTERRUPTS = {
    "generate": """
        llm = LLM("null:0.002")
        interrupt_soon()
        try:
            llm.generate([1], LONG)
        except KeyboardInterrupt:
            assert llm.generate([1], SHORT)[0].finished
            sys.exit(5)
    """,
    "pause": """
        llm = LLM("null:0.002")
        in_thread(llm.generate, [1], LONG)
        time.sleep(0.1)
        interrupt_soon()
        try:
            llm.pause()
        except KeyboardInterrupt:
            llm.resume()
            assert llm.generate([1], SHORT)[0].finished
            sys.exit(5)
    """,
    "asyncio": """
        llm = AsyncLLM("null:0.002")
        interrupt_soon()
        try:
            asyncio.run(read(llm))
        except KeyboardInterrupt:
            assert asyncio.run(read(llm, SHORT))[-1].finished
            sys.exit(5)
    """,
}

EXITS = {
    "the end of the main thread": "start_three()",
    "sys.exit": "start_three(); say_now(); sys.exit(0)",
    "an engine in a cycle": "start_three(); kept.append(kept)",
    "loops in other threads": """
        for _ in range(3):
            in_thread(start_three, "null:0.02", True)
        time.sleep(0.3)
    """,
    "a step of 30 s": "start_one('null:30')",
    "LLM in another thread": """
        in_thread(LLM("null:0.02").generate, [1])
        time.sleep(0.3)
    """,
    "an engine closed right before": """
        async def use():
            async with AsyncLLM(MODEL) as llm:
                await read(llm, SHORT)

        asyncio.run(use())
    """,
    "an engine dropped right before": "asyncio.run(read(AsyncLLM(MODEL), SHORT))",
    "a forked child of its own": """
        start_three()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """,
}

SIGNALS = """
    handlers = {}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number not in (32, 33):  # those of the C library
            handlers[number] = lambda *_: None
            signal.signal(number, handlers[number])

    def are_untouched():
        return all(signal.getsignal(number) is handlers[number] for number in handlers)

    async def use():
        async with AsyncLLM("null") as llm:
            assert (await read(llm, SHORT))[-1].finished
            assert are_untouched()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(use())
    loop.close()
    with LLM("null") as llm:
        llm.generate([1], SHORT)
        assert are_untouched()
    assert are_untouched()
    assert signal.set_wakeup_fd(-1) == -1
"""

FORK = """
    llm, async_llm = LLM("null"), AsyncLLM("null:0.002")

    def uses(llm):
        messages = [{"role": "user", "content": "a"}]
        return [
            llm.config, llm.stats, llm.reset_prefix_cache, llm.resume, llm.pause,
            lambda: llm.encode("a"), lambda: llm.decode([1]), lambda: llm.score("a", "b"),
            lambda: llm.generate("a"), lambda: llm.chat(messages),
            lambda: llm.engine, lambda: llm.tokenizer,
        ]

    async def in_child():
        num_refusals = 0
        # A stream that the parent began refuses as a new one does.
        others = [lambda: async_llm.cancel("x"), lambda: stream]
        for use in [*uses(llm), *uses(async_llm), *others]:
            try:
                value = use()
                await (anext(value) if hasattr(value, "__anext__") else value)
            except EngineClosedError as error:
                assert "belongs to process" in str(error), error
                num_refusals += 1
        assert num_refusals == 12 + 12 + 2, num_refusals
        await async_llm.aclose()
        llm.close()

    llm.generate([1], SHORT)
    loop = asyncio.new_event_loop()
    stream = async_llm.generate([1], LONG, "x")
    loop.run_until_complete(anext(stream))
    child = os.fork()
    if child == 0:
        asyncio.run(in_child())
        del stream, llm, async_llm
        # The end of the interpreter would close the loop, which asyncio shares with the parent.
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loop.run_until_complete(anext(stream))
    assert llm.generate([1], SHORT)[0].finished
    assert async_llm.cancel("x")
    loop.run_until_complete(async_llm.aclose())
    loop.close()
"""


@pytest.fixture(scope="module")
def children(tiny):
    """Exit code of each child, and the seconds from its first `say_now()` to its end.

    They are forks of one program: what takes long is loading torch.
    """
    codes = {"nothing": "", "signals": SIGNALS, "fork": FORK, **INTERRUPTS, **EXITS}
    codes = {name: textwrap.dedent(code) for name, code in codes.items()}
    script = textwrap.dedent(PRELUDE) + f"MODEL, CODES = {str(tiny)!r}, {codes!r}\n"
    script += textwrap.dedent(CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr
    print(result.stderr, file=sys.stderr)  # shown where a test fails
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("call", INTERRUPTS)
def test_ctrl_c_ends_a_blocking_call_and_leaves_the_engine_usable(children, call):
    exit_code, seconds = children[call]
    assert exit_code == 5
    assert seconds - children["nothing"][1] < 10


@pytest.mark.parametrize("ending", EXITS)
def test_the_interpreter_exits_with_requests_running(children, ending):
    exit_code, seconds = children[ending]
    assert exit_code == 0
    assert seconds - children["nothing"][1] < 10


def test_e14_a_host_keeps_its_signal_handlers_whatever_it_does_with_engines(children):
    assert children["signals"][0] == 0


def test_a_forked_child_gets_typed_errors_from_everything_and_ends(children):
    assert children["fork"][0] == 0


@pytest.fixture(scope="module")
def sleepy():
    """An `LLM` whose steps take 0.1 s."""
    with LLM("null:0.1", max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def sleepy_async():
    """An `AsyncLLM` whose steps take 0.4 s."""
    llm = AsyncLLM("null:0.4", max_model_len=64)
    yield llm
    asyncio.run(llm.aclose())


def in_another_thread(llm, num_tokens):
    params = SamplingParams(max_tokens=num_tokens)
    thread = threading.Thread(target=llm.generate, args=([1], params, False))
    thread.start()
    time.sleep(0.05)
    return thread


def wait_for_another_thread(llm, _):
    other = in_another_thread(llm, 6)
    llm.generate([1], SamplingParams(max_tokens=3), use_tqdm=False)
    other.join()


def wait_for_a_pause(llm, _):
    other = in_another_thread(llm, 6)
    llm.pause()
    llm.resume()
    other.join()


def wait_for_results(llm, _):
    assert llm.engine.processor.wait_finished(0.4) == []


def wait_for_news(llm, _):
    timer = threading.Timer(0.4, llm.engine.processor.submit, ([1],), {"index": 0})
    timer.start()
    llm.engine.step(block=True)
    timer.join()
    llm.engine.scheduler.close()
    llm.close()


def wait_in_an_event_loop(_, llm):
    asyncio.run(final(llm.generate([1], SamplingParams(max_tokens=2))))


def wait_for_work(_, llm):
    assert llm.stats()["num_running"] == 0
    time.sleep(0.4)


def wait_for_the_last_step(_, llm):
    async def main():
        task = asyncio.create_task(anext(llm.generate([1], ENDLESS)))
        await asyncio.sleep(0.05)
        await llm.aclose()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


# The last of each kind closes its engine.
WAITS = [
    wait_for_another_thread,
    wait_for_a_pause,
    wait_for_results,
    wait_for_news,
    wait_in_an_event_loop,
    wait_for_work,
    wait_for_the_last_step,
]


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_lets_other_threads_run(sleepy, sleepy_async, wait):
    """Another thread looks at the clock: the longest gap says how long nobody else could run."""
    gaps, is_over, is_looking = [0.0], threading.Event(), threading.Event()

    def look_at_the_clock():
        last = time.monotonic()
        is_looking.set()
        while not is_over.is_set():
            time.sleep(0.0005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=look_at_the_clock)
    watcher.start()
    is_looking.wait()
    wait(sleepy, sleepy_async)
    is_over.set()
    watcher.join()
    # Each waits for 0.4 s and more; one that kept the interpreter's lock would be one gap.
    assert max(gaps) < 0.25, "nobody could run for so long"
    assert len(gaps) > 20
