"""An engine inside somebody else's program: made and dropped, Ctrl-C, exit, fork, signals, the GIL.

Short forms run with every change, long ones in `make soak`.
"""

import asyncio
import gc
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


def run_script(code, timeout_s=60):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


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


def test_e14_a_host_keeps_its_signal_handlers_whatever_it_does_with_engines(tiny):
    code = f"""
        import asyncio, signal
        handlers = {{}}
        for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:
            if number not in (32, 33):  # those of the C library
                handlers[number] = lambda *_: None
                signal.signal(number, handlers[number])
        wakeup = signal.set_wakeup_fd(-1)

        def are_untouched():
            return all(signal.getsignal(number) is handlers[number] for number in handlers)

        from cbrs import LLM, AsyncLLM, SamplingParams
        params = SamplingParams(max_tokens=2)

        async def main():
            async with AsyncLLM({str(tiny)!r}, max_model_len=64) as llm:
                async for _ in llm.generate([1], params):
                    assert are_untouched() or signal.getsignal(signal.SIGINT)

        assert are_untouched()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        assert are_untouched()
        with LLM({str(tiny)!r}, max_model_len=64) as llm:
            llm.generate([1], params)
            assert are_untouched()
        assert are_untouched()
        assert signal.set_wakeup_fd(-1) == wakeup
        print("fine")
    """
    result = run_script(code)
    assert result.stdout.strip() == "fine", result.stderr


BLOCKING_CALLS = {
    "generate": "llm.generate([1], params)",
    "pause": "llm.pause()",
    "asyncio": "asyncio.run(stream(async_llm))",
}


@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_ctrl_c_ends_a_blocking_call_at_once_and_leaves_the_engine_usable(call):
    code = f"""
        import asyncio, os, signal, threading, time
        from cbrs import LLM, AsyncLLM, SamplingParams
        params = SamplingParams(max_tokens=8000)
        short = SamplingParams(max_tokens=5)
        llm = LLM("null:0.002", max_num_seqs=4)
        async_llm = AsyncLLM("null:0.002", max_num_seqs=4)

        async def stream(llm):
            async for output in llm.generate([1], params):
                pass

        async def again(llm):
            return [output async for output in llm.generate([1], short)][-1].finished

        if {call!r} == "pause":
            threading.Thread(target=llm.generate, args=([1], params), daemon=True).start()
            time.sleep(0.1)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            {BLOCKING_CALLS[call]}
        except KeyboardInterrupt:
            print("interrupted")
        interrupted = time.monotonic()
        if {call!r} == "pause":
            llm.resume()
        assert llm.generate([1], short)[0].finished
        assert asyncio.run(again(async_llm))
        print("after" if time.monotonic() - interrupted < 2 else "too late")
    """
    result = run_script(code)
    assert result.stdout.split() == ["interrupted", "after"], result.stderr


EXITS = {
    "the end of the main thread": "",
    "sys.exit": "sys.exit(0)",
    "an unclosed engine in a cycle": "cycle = [llm]; cycle.append(cycle); del llm",
    "a loop in another thread": "threading.Thread(target=loop_forever, daemon=True).start(); "
    "time.sleep(0.3)",
    "a forked child before": "os.waitpid(fork_and_exit(), 0)",
}


@pytest.mark.parametrize("ending", EXITS)
def test_the_interpreter_exits_with_requests_running(ending):
    code = f"""
        import asyncio, os, sys, threading, time, warnings
        warnings.simplefilter("ignore")
        from cbrs import AsyncLLM, SamplingParams
        llm = AsyncLLM("null:0.02", max_model_len=8000)
        params = SamplingParams(output_kind="delta")

        async def start(streams):
            for _ in range(3):
                streams.append(llm.generate([1], params))
                await anext(streams[-1])

        def loop_forever():
            async def main():
                streams = []
                await start(streams)
                async for _ in streams[0]:
                    pass
            asyncio.run(main())

        def fork_and_exit():
            child = os.fork()
            if child == 0:
                sys.exit(0)
            return child

        streams = []
        loop = asyncio.new_event_loop()
        loop.run_until_complete(start(streams))
        print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
        {EXITS[ending]}
    """
    result = run_script(code, timeout_s=30)
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert result.returncode == 0, result.stderr
    assert ended - float(result.stdout.split()[0]) < 2 + 0.5
    assert "Traceback" not in result.stderr


def test_a_step_that_takes_long_does_not_keep_the_interpreter_from_exiting():
    code = """
        import asyncio, time
        from cbrs import AsyncLLM, SamplingParams
        llm = AsyncLLM("null:30")
        streams = [llm.generate([1])]

        async def start():
            task = asyncio.create_task(anext(streams[0]))
            await asyncio.sleep(0.2)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(start())
        print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
    """
    result = run_script(code, timeout_s=25)
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert result.returncode == 0, result.stderr
    assert ended - float(result.stdout.split()[0]) < 2 + 0.5


def test_a_forked_child_gets_typed_errors_from_everything_and_ends(tiny):
    code = f"""
        import asyncio, os, sys, warnings
        warnings.simplefilter("ignore")
        from cbrs import LLM, AsyncLLM, SamplingParams
        from cbrs.errors import EngineClosedError
        options = dict(max_model_len=64, num_threads=2)
        params = SamplingParams(max_tokens=2)
        llm, async_llm = LLM({str(tiny)!r}, **options), AsyncLLM({str(tiny)!r}, **options)

        def uses(llm):
            messages = [{{"role": "user", "content": "a"}}]
            return [
                llm.config, llm.stats, llm.reset_prefix_cache, llm.resume, llm.pause,
                lambda: llm.encode("a"), lambda: llm.decode([1]), lambda: llm.score("a", "b"),
                lambda: llm.generate("a"), lambda: llm.chat(messages),
                lambda: llm.engine, lambda: llm.tokenizer,
            ]

        async def result_of(value):
            if hasattr(value, "__anext__"):
                value = anext(value)
            if hasattr(value, "__await__"):
                await value

        async def in_child():
            refusals = 0
            for use in [*uses(llm), *uses(async_llm), lambda: async_llm.cancel("x")]:
                try:
                    await result_of(use())
                except EngineClosedError as error:
                    assert "belongs to process" in str(error), error
                    refusals += 1
            assert refusals == 12 + 12 + 1, refusals
            await async_llm.aclose()
            llm.close()

        async def in_parent(stream):
            return len([output async for output in stream])

        loop = asyncio.new_event_loop()
        stream = async_llm.generate("a", SamplingParams(max_tokens=40, output_kind="delta"))
        loop.run_until_complete(anext(stream))
        child = os.fork()
        if child == 0:
            asyncio.run(in_child())
            del stream, llm, async_llm
            print("child is done", flush=True)
            sys.exit(7)
        print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert loop.run_until_complete(in_parent(stream)) >= 1
        assert llm.generate("a", params)
        loop.run_until_complete(async_llm.aclose())
        loop.close()
        print("parent is done")
    """
    result = run_script(code)
    assert "child is done\nexit code 7\nparent is done" in result.stdout, result.stderr


def wait_in_generate():
    with LLM("null:0.3", max_model_len=64) as llm:
        llm.generate([1], SamplingParams(max_tokens=2), use_tqdm=False)


def wait_for_another_thread():
    with LLM("null:0.05", max_model_len=64) as llm:
        first = threading.Thread(
            target=llm.generate, args=([1], SamplingParams(max_tokens=8), False)
        )
        first.start()
        time.sleep(0.05)
        llm.generate([1], SamplingParams(max_tokens=3), use_tqdm=False)
        first.join()


def wait_for_a_pause():
    with LLM("null:0.05", max_model_len=64) as llm:
        first = threading.Thread(
            target=llm.generate, args=([1], SamplingParams(max_tokens=8), False)
        )
        first.start()
        time.sleep(0.05)
        llm.pause()
        first.join()


def wait_in_an_event_loop():
    async def main():
        async with AsyncLLM("null:0.3", max_model_len=64) as llm:
            await final(llm.generate([1], SamplingParams(max_tokens=3)))

    asyncio.run(main())


def wait_for_the_end_of_a_step():
    async def main():
        llm = AsyncLLM("null:0.3", max_model_len=64)
        task = asyncio.create_task(anext(llm.generate([1], ENDLESS)))
        await asyncio.sleep(0.05)
        await llm.aclose()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def wait_for_work():
    async def main():
        async with AsyncLLM("null", max_model_len=64) as llm:
            await asyncio.sleep(0.4)
            await final(llm.generate([1], SamplingParams(max_tokens=3)))

    asyncio.run(main())


def wait_for_results_and_for_news():
    with LLM("null", max_model_len=64) as llm:
        assert llm.engine.processor.wait_finished(0.3) == []
        timer = threading.Timer(0.3, llm.engine.processor.submit, ([1],), {"index": 0})
        timer.start()
        llm.engine.step(block=True)
        timer.join()


WAITS = [
    wait_in_generate,
    wait_for_another_thread,
    wait_for_a_pause,
    wait_in_an_event_loop,
    wait_for_the_end_of_a_step,
    wait_for_work,
    wait_for_results_and_for_news,
]


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_lets_other_threads_run(wait):
    """Another thread looks at the clock: the longest gap says how long nobody else could run."""
    wait()  # warm-up: what is loaded on first use
    gaps, is_over, is_counting = [0.0], threading.Event(), threading.Event()

    def look_at_the_clock():
        last = time.monotonic()
        is_counting.set()
        while not is_over.is_set():
            time.sleep(0.0005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=look_at_the_clock)
    watcher.start()
    is_counting.wait()
    wait()
    is_over.set()
    watcher.join()
    # The waits take 0.3 s and more; one that kept the interpreter's lock would be one gap.
    assert max(gaps) < 0.2, "nobody could run for so long"
    assert len(gaps) > 20
