"""`cbrs bench`: its figures, its closed loop, and what the command does with its options."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from cbrs.async_llm import AsyncLLM
from cbrs.cli import main
from cbrs.cli.bench.closed_loop import run_level
from cbrs.cli.bench.figures import ClientTimes, Level, to_table
from cbrs.cli.bench.workload import BenchRequest, RandomWorkload, ordinary_ids
from cbrs.models.null import NullRunner
from cbrs.sampling_params import SamplingParams

BASE = ["bench", "null", "--concurrency", "1,3", "--input-len", "5", "--output-len", "4"]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing has been fetched, so `null` takes single bytes as tokens."""
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "empty"))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that the command made: their settings, and the requests they got."""
    made: list[Any] = []
    init, generate = AsyncLLM.__init__, AsyncLLM.generate

    def remember(self: AsyncLLM, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(SimpleNamespace(config=self.config(), requests=[]))

    def note(self: AsyncLLM, prompt: Any, params: Any) -> Any:
        made[-1].requests.append((list(prompt), params))
        return generate(self, prompt, params)

    monkeypatch.setattr(AsyncLLM, "__init__", remember)
    monkeypatch.setattr(AsyncLLM, "generate", note)
    return made


@pytest.fixture
def bench(capsys: Any) -> Callable[..., tuple[int, list[str], str]]:
    """Runs a command; returns exit code, the lines of stdout, and stderr."""

    def run(*arguments: object) -> tuple[int, list[str], str]:
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out.splitlines(), captured.err

    return run


def times(sent_s: float, *arrivals: tuple[float, int], error: str | None = None) -> ClientTimes:
    return ClientTimes(10, sent_s, list(arrivals), error)


def test_the_times_of_one_request():
    request = times(1.0, (1.5, 1), (1.75, 1), (2.5, 2))
    assert request.num_output_tokens == 4
    assert request.time_to_first_token_s == 0.5
    assert request.end_to_end_latency_s == 1.5
    assert request.inter_token_latencies_s() == [0.25, 0.75, 0.0]
    assert request.time_per_output_token_s == pytest.approx(1.0 / 3)


def test_a_single_token_has_no_time_per_token():
    request = times(0.0, (0.5, 1))
    assert request.time_per_output_token_s is None
    assert request.inter_token_latencies_s() == []


def test_the_figures_of_a_level_count_what_ended_well():
    requests = [
        times(0.0, (1.0, 1), (2.0, 1)),
        times(0.0, (3.0, 1), (6.0, 1)),
        times(0.0, (9.0, 5), error="no power"),
    ]
    level = Level(concurrency=3, duration_s=4.0, requests=requests)
    found = level.to_dict()
    assert (found["num_requests"], found["num_failed"]) == (3, 1)
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (20, 4)
    assert found["requests_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 1.0
    assert found["total_tokens_per_s"] == 6.0
    assert found["ttft_ms"] == {"mean": 2000, "p50": 2000, "p90": 2800, "p99": 2980}
    assert found["itl_ms"] == found["tpot_ms"]
    assert found["itl_ms"] == {"mean": 2000, "p50": 2000, "p90": 2800, "p99": 2980}
    assert found["e2e_ms"] == {"mean": 4000, "p50": 4000, "p90": 5600, "p99": 5960}
    assert level.errors == ["no power"]


def test_a_level_without_any_result_has_rates_of_0_and_no_latency():
    level = Level(2, 1.0, [times(0.0, error="no power")])
    assert level.to_dict()["output_tokens_per_s"] == 0
    assert level.to_dict()["ttft_ms"] == {}
    rows = dict(to_table([level]))
    assert rows["output tokens/s"] == "0.0"
    assert rows["time to first token p50, ms"] == "-"


class CountingLLM:
    """Stands for an engine: gives two tokens a request and counts who is inside."""

    def __init__(self, failing: int = -1) -> None:
        self.num_inside = self.max_inside = 0
        self.prompts: list[list[int]] = []
        self.failing = failing

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        self.prompts.append(prompt)
        try:
            for token in range(2):
                await asyncio.sleep(0)
                if prompt == [self.failing]:
                    raise RuntimeError("refused")
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])], error=None)
        finally:
            self.num_inside -= 1


@pytest.mark.parametrize(("num_requests", "concurrency"), [(1, 1), (7, 1), (7, 3), (7, 7)])
def test_a_closed_loop_keeps_as_many_inside_as_it_has_clients(num_requests, concurrency):
    llm, done = CountingLLM(), []
    requests = [BenchRequest([i], SamplingParams()) for i in range(num_requests)]
    level = asyncio.run(run_level(llm, requests, concurrency, lambda: done.append(1)))
    assert llm.max_inside == concurrency
    assert sorted(llm.prompts) == [[i] for i in range(num_requests)]
    assert len(level.requests) == len(done) == num_requests
    assert all(request.num_output_tokens == 2 for request in level.requests)


def test_a_refusal_ends_the_whole_loop():
    llm = CountingLLM(failing=4)
    requests = [BenchRequest([i], SamplingParams()) for i in range(100)]
    with pytest.raises(RuntimeError, match="refused"):
        asyncio.run(run_level(llm, requests, 3, lambda: None))
    assert len(llm.prompts) < 20
    assert llm.num_inside == 0


def random_prompts(model: Path | str, seed: int, concurrency: int) -> list[list[int]]:
    async def make() -> list[list[int]]:
        async with AsyncLLM(model, num_threads=1) as llm:
            workload = RandomWorkload(llm, input_len=50, output_len=4, seed=seed)
            return [request.prompt for request in workload.requests(20, concurrency)]

    return asyncio.run(make())


def test_random_prompts_follow_from_seed_and_level():
    prompts = random_prompts("null", 1, 4)
    assert random_prompts("null", 1, 4) == prompts
    for other in (random_prompts("null", 2, 4), random_prompts("null", 1, 8)):
        assert not any(prompt in prompts for prompt in other)


def test_random_prompts_have_no_special_tokens_and_no_padding(tiny):
    import kit

    async def make() -> list[int]:
        async with AsyncLLM(tiny, num_threads=1) as llm:
            tokenizer = llm.tokenizer
            special = {tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<user>")}
            ids = ordinary_ids(llm).tolist()
            assert not special & set(ids)
            assert tokenizer.token_to_id("<extra_0>") in ids
            return ids

    ids = asyncio.run(make())
    assert max(ids) < kit.NUM_TOKENS
    assert {token for prompt in random_prompts(tiny, 0, 1) for token in prompt} <= set(ids)


def test_a_model_without_tokenizer_takes_any_id(tiny, tmp_path):
    for file in tiny.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = {token for prompt in random_prompts(tmp_path, 0, 1) for token in prompt}
    assert max(tokens) >= 300


def test_the_json_is_the_last_line_and_counts_every_token(bench):
    exit_code, lines, err = bench(*BASE, "--num-requests", 6, "--json")
    found = json.loads(lines[-1])
    assert exit_code == 0
    assert (found["model"], found["input_len"], found["output_len"]) == ("null", 5, 4)
    assert found["engine"]["max_num_seqs"] == 3
    assert [level["concurrency"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        assert (level["num_requests"], level["num_failed"]) == (6, 0)
        assert (level["num_prompt_tokens"], level["num_output_tokens"]) == (30, 24)
        assert 0 < level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"] <= level["e2e_ms"]["p99"]
    assert "concurrency 1: 6 requests in" in err
    assert lines[0].split() == ["concurrency", "1", "3"]
    assert len(lines) == 5 + 4 * 3 + 1


def test_the_warm_up_is_in_no_figure_and_random_prompts_meet_no_cache(bench, engines):
    bench(*BASE, "--num-requests", 4)
    (engine,) = engines
    assert engine.config.enable_prefix_caching is False
    warm_up, measured = engine.requests[:3], engine.requests[3:]
    assert len(measured) == 2 * 4
    assert all(params.max_tokens == 4 and params.ignore_eos for _, params in measured)
    assert len(warm_up) == 3


def test_the_number_of_requests_grows_with_the_clients(bench):
    _, lines, _ = bench(*BASE, "--concurrency", "6,2", "--json")
    levels = json.loads(lines[-1])["levels"]
    assert [(level["concurrency"], level["num_requests"]) for level in levels] == [(2, 8), (6, 12)]


def test_engine_options_reach_the_engine(bench, engines):
    bench(*BASE, "--max-num-seqs", 2, "--block-size", 8, "--max-model-len", 64)
    config = engines[0].config
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (2, 8, 64)


def test_the_prompts_of_a_file_are_used_in_turn_with_their_parameters(bench, engines, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "abc"},
        {"prompt": "de", "max_tokens": 2, "min_tokens": 2, "temperature": 0.5},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["bench", "null", "--concurrency", "1", "--output-len", "3", "--num-requests", "4"]
    exit_code, out, _ = bench(*command, "--file", file, "--json")
    assert exit_code == 0
    (engine,) = engines
    assert engine.config.enable_prefix_caching is True
    prompts, params = zip(*engine.requests[1:], strict=True)  # the first is the warm-up
    assert [bytes(prompt) for prompt in prompts[:2]] == [b"abc", b"de"]
    assert b"Hi" in bytes(prompts[2])
    assert prompts[3] == prompts[0]
    assert [each.max_tokens for each in params] == [3, 2, 3, 3]
    assert [each.temperature for each in params] == [0, 0.5, 0, 0]
    found = json.loads(out[-1])
    assert found["file"] == str(file)
    assert found["levels"][0]["num_output_tokens"] == 3 + 2 + 3 + 3


def test_failed_requests_are_counted_and_the_exit_code_tells(bench, monkeypatch):
    forward, steps = NullRunner.forward, []

    def fail_late(runner: NullRunner, batch: Any) -> Any:
        steps.append(batch.num_seqs)
        if len(steps) > 30:
            raise RuntimeError("no power")
        return forward(runner, batch)

    monkeypatch.setattr(NullRunner, "forward", fail_late)
    exit_code, lines, err = bench(*BASE, "--num-requests", 20, "--json")
    first, second = json.loads(lines[-1])["levels"]
    assert exit_code == 1
    assert 0 < first["num_failed"] + second["num_failed"] < 40
    assert "requests failed, the first with: RuntimeError: no power" in err


def test_the_plot_is_written(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    exit_code, lines, _ = bench(*BASE, "--plot", tmp_path / "sweep.png")
    assert exit_code == 0
    assert lines[-1] == f"plot: {tmp_path / 'sweep.png'}"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_can_be_drawn_of_levels_without_results(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from cbrs.cli.bench.plot import draw_plot

    draw_plot([Level(1, 1.0, [times(0.0, error="no power")])], "nothing", tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_without_matplotlib_a_plot_is_refused_before_the_measurement(bench, monkeypatch, engines):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    exit_code, lines, err = bench(*BASE, "--plot", "a.png")
    assert (exit_code, lines, engines) == (1, [], [])
    assert 'pip install "cbrs[viz]"' in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-requests", "2"], "--num-requests 2 cannot keep 3 clients busy; give 3 or more"),
        (["--file", "a.txt"], "--input-len is for random prompts"),
        (["--plot", "a.jpeg"], "give a file that ends in .png, .svg, .pdf"),
        (["--plot", "missing/a.png"], "there is no folder missing"),
        (["--max-model-len", "8"], "make 9 tokens, but the context holds 8"),
        (["--block-size", "0"], "block_size is 0"),
    ],
)
def test_bad_options_are_one_line(bench, options, message):
    exit_code, lines, err = bench(*BASE, *options)
    assert (exit_code, lines) == (2, [])
    (line,) = [line for line in err.splitlines() if line.startswith("cbrs: error: ")]
    assert message in line


@pytest.mark.parametrize("value", ["", "0", "1,", "a", "1,-2"])
def test_a_concurrency_that_is_no_number_is_one_line(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "null", "--concurrency", value])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--concurrency" in line


def test_several_outputs_of_one_prompt_are_refused(bench, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "n": 2}')
    exit_code, _, err = bench("bench", "null", "--concurrency", "1", "--file", file)
    assert exit_code == 2
    assert "a benchmark needs one output each" in err


@pytest.mark.parametrize("content", ["", '{"prompt": 1}', '{"prompt": "a", "top_k": "many"}'])
def test_a_file_that_cannot_be_used_is_bad_input(bench, tmp_path, content):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    exit_code, _, err = bench("bench", "null", "--concurrency", "1", "--file", file)
    assert exit_code == 2
    assert "Traceback" not in err
