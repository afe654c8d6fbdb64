"""Engines on two ranks over gloo: the same tokens as one, and the end of all with any of them."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import kit
import pytest
import torch
from async_kit import collect, final, started
from server_kit import wait_until
from server_process import server_process

from cbrs import LLM, AsyncLLM, SamplingParams
from cbrs.errors import EngineDeadError, ModelLoadError
from cbrs.parallel.ranks import Ranks
from cbrs.parallel.runner import ParallelRunner

OPTIONS = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 4,
    # Prompts are cut, and wait for room.
    "max_num_batched_tokens": 48,
    "num_blocks": 40,
}
PROMPTS = [[2 + (7 * i + j) % 290 for j in range(n)] for i, n in enumerate((1, 5, 17, 100, 60, 33))]
PARAMS = [
    SamplingParams(
        max_tokens=20,
        temperature=0.0 if i % 2 else 0.9,
        seed=i,
        logprobs=2,
        prompt_logprobs=1 if i == 4 else None,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]
ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, output_kind="delta")

LOOP = """
import sys
from cbrs import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", num_threads=1, tensor_parallel_size=2)
params = SamplingParams(max_tokens=100, ignore_eos=True)
print(*llm.engine._ranks.pids, flush=True)
while True:
    llm.generate([[2, 3]], params, use_tqdm=False)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where ranks have their folder."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    return path


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def whole_tokens(model, params=PARAMS):
    with LLM(model, **OPTIONS) as llm:
        return tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))


def is_running(pid):
    """Whether a process runs, which may be a zombie of ours."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ranks_of(pid):
    """The processes that `pid` has started as ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and b"cbrs.parallel.worker" in command:
                found.append(int(entry.name))
    return found


def test_two_ranks_give_the_tokens_of_one_and_end_when_one_is_lost(tmp_path, folder):
    model = kit.tiny(tmp_path / "model", seed=7, tie_word_embeddings=False)
    before = os.environ.copy()
    expected = whole_tokens(model)
    with LLM(model, tensor_parallel_size=2, **OPTIONS) as llm:
        assert os.environ == before
        (pid,) = llm.engine._ranks.pids
        assert is_running(pid)
        assert (folder / next(folder.iterdir())).stat().st_mode & 0o777 == 0o700
        assert llm.config().tensor_parallel_size == 2
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert tokens_of(found) == expected
        assert len(found[4].prompt_logprobs) == 60
        # In the middle of steps, over and over: no rank is left behind.
        for _ in range(8):
            timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[5, 6]] * 50, SamplingParams(max_tokens=200, ignore_eos=True))
            timer.join()
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert tokens_of(again) == expected
        llm.engine.scheduler.check_invariants()
        # While nothing runs.
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: llm.engine.fate.error is not None)
        assert time.monotonic() - killed < 1.0
        lost = rf"rank 1 of 2 is lost: its process {pid} ended with SIGKILL"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=lost):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert list(folder.iterdir()) == []
    assert not is_running(pid)
    names = ("cbrs-ranks", "cbrs-rank-0")
    wait_until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()))


def test_a_rank_that_is_killed_in_mid_step_ends_every_stream(tmp_path, folder):
    model = kit.family(tmp_path / "model", "qwen3")
    greedy = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    expected = whole_tokens(model, greedy)
    llm = AsyncLLM(model, tensor_parallel_size=2, **OPTIONS)
    (pid,) = llm.engine._ranks.pids

    async def main():
        streams = [llm.generate(*item) for item in zip(PROMPTS, greedy, strict=True)]
        outputs = await asyncio.gather(*map(final, streams))
        running = [await started(llm.generate([9, i], ENDLESS)) for i in range(4)]
        waiting = [asyncio.ensure_future(collect(llm.generate([9], ENDLESS))) for _ in range(3)]
        await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        reads = asyncio.gather(*map(collect, running), *waiting, return_exceptions=True)
        ends = await asyncio.wait_for(reads, 10)
        took = time.monotonic() - killed
        for use in (llm.stats, llm.config, lambda: llm.cancel("x")):
            with pytest.raises(EngineDeadError, match="rank 1 of 2 is lost"):
                use()
        with pytest.raises(EngineDeadError):
            await anext(llm.generate([1]))
        await llm.aclose()
        return outputs, ends, took

    outputs, ends, took = asyncio.run(main())
    assert tokens_of(outputs) == expected
    assert took < 2.0
    for end in ends:
        if isinstance(end, list):  # it was part of the step that failed
            assert end[-1].outputs[0].finish_reason == "error"
            assert "rank 1 of 2 is lost" in end[-1].error
        else:
            assert isinstance(end, EngineDeadError)
    assert len(ends) == 7
    assert list(folder.iterdir()) == []


def test_a_rank_ends_with_rank_0_whatever_ends_that(tiny, folder):
    command = [sys.executable, "-c", LOOP, str(tiny)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert ranks_of(process.pid) == [pid]
        process.kill()
        wait_until(lambda: not is_running(pid), 3.0)
    assert list(folder.iterdir()) == []


def test_a_server_on_two_ranks_leaves_nothing_behind(tiny, folder):
    options = ("--dtype", "float32", "--num-threads", "1", "--tensor-parallel-size", "2")
    with server_process(str(tiny), "--port", "0", *options) as server:
        (pid,) = ranks_of(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not is_running(pid)
    assert list(folder.iterdir()) == []
    assert "Traceback" not in server.output


def test_a_rank_that_cannot_start_says_why(tmp_path, tiny, folder):
    missing = str(tmp_path / "nothing")
    settings = {"name_or_path": missing, "dtype": "float32", "device": "cpu", "num_threads": 1}
    ranks = Ranks(2, settings)
    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 .*no such file") as raised:
        ranks.await_loaded()
    assert raised.value.file == missing
    ranks.close()
    killed = Ranks(3, settings)
    os.kill(killed.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 3 did not start: .*SIGKILL"):
        killed.await_loaded()
    killed.close()
    assert not any(map(is_running, killed.pids))
    late = Ranks(2, settings | {"name_or_path": str(tiny)})
    late.await_loaded()
    late.connect(torch.device("cpu"))
    late.make_runners({"kv_cache_dtype": "auto", "num_blocks": 0, "block_size": 16})
    with pytest.raises(
        EngineDeadError, match=r"rank 1 of 2 .*num_blocks must be at least 1, got 0"
    ):
        late.await_ready()
    late.close()
    assert list(folder.iterdir()) == []


def test_a_checkpoint_that_rank_0_refuses_leaves_no_process(tmp_path, folder):
    with pytest.raises(ValueError, match="does not divide the model's 4 attention heads"):
        LLM(kit.tiny(tmp_path / "model"), tensor_parallel_size=3, **OPTIONS)
    assert ranks_of(os.getpid()) == []
    assert list(folder.iterdir()) == []
    with pytest.raises(ValueError, match="null has no weights to split"):
        LLM("null", tensor_parallel_size=2)
    assert ranks_of(os.getpid()) == []


def test_a_step_that_fails_on_rank_0_alone_ends_the_engine(folder):
    ranks = Ranks(1, {"device": "cpu"})

    class Failing:
        def forward(self, batch):
            raise MemoryError("no room")

    class Batch:
        pass

    runner = ParallelRunner(Failing(), ranks)
    runner._writer.write = lambda batch: memoryview(b"")
    with pytest.raises(EngineDeadError, match="rank 0 of 1 failed in a step: MemoryError: no room"):
        runner.forward(Batch())
    with pytest.raises(EngineDeadError, match="no room"):
        runner.forward(Batch())
    ranks.close()


@pytest.mark.parametrize("size", [0, -1])
def test_less_than_one_rank_is_refused(size):
    message = f"tensor_parallel_size is {size}; give a number >= 1"
    with pytest.raises(ValueError, match=message):
        LLM("null", tensor_parallel_size=size)


def test_int8_weights_are_not_divided():
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but weights in int8"):
        LLM("null", tensor_parallel_size=2, quantization="int8")
