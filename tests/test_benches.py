"""The benchmarks still run and say what they ought to: tiny loads, and no figure is looked at."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
PROGRAMS = sorted(path.name for path in BENCHES.glob("*.py") if path.name != "hardware.py")
# Benches that import torch before they look at their options.
NEED_TORCH = [
    *("capacity.py", "cpu_attention.py", "cpu_step.py", "cpu_threads.py", "engine_policy.py"),
    *("sampling.py", "step_model.py"),
]
SMALL = [
    *("--num-steps", "5", "--runs", "1", "--num-seqs", "1", "64", "--growth-num-seqs", "64", "256"),
    *("--context", "48", "--long-context", "600", "--waiting", "100", "--pool-blocks", "2000"),
    *("--in-flight", "16", "--num-tenants", "8", "--json"),
]
# All but `memory`, which has a test of its own.
PARTS = [
    *("steady", "busy", "mixed", "growth", "context", "waiting", "tenants", "pool"),
    *("submit", "prefix", "publish", "cancel"),
]
EXPECTED_CHECKS = [
    "steady decode, 1 sequences, median",
    "steady decode, 1 sequences, p99",
    "steady decode, 64 sequences, median",
    "steady decode, 64 sequences, p99",
    "p99 with a busy Python thread to p99 without, 64 sequences",
    "mixed load, 16 in flight, submit and step",
    "mixed load, 16 in flight, p99.9 of a step",
    "exponent of time, 64 to 256 sequences",
    "step of 64 sequences, context 600 to 512",
    "step of 64 sequences, 100 to 10 waiting",
    "steady decode, 64 sequences, 8 tenants and 3 classes to one of each",
    "mixed load, 8 tenants and 3 classes to one of each",
    "mixed load, steps alone, 8 tenants and 3 classes to one of each",
    "step of 24 sequences, pool of 2000 to 1000 blocks",
    "submit, 512 tokens as int32 array",
    "submit, 512 tokens as list of int",
    "prefix look-up, 4096 cached tokens",
    "publication of a block",
    "cancel, 10000 to 10 live",
    "step that ends 10 waiters, 10000 to 10 live",
]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHES / program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def document(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_bench_explains_its_options(program, monkeypatch, capsys):
    """In this process, which may have imported torch already."""
    if program in NEED_TORCH:
        pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(BENCHES / program), run_name="__main__")
    assert "--json" in capsys.readouterr().out


def test_the_attention_bench_holds_each_type_against_reading_and_products():
    pytest.importorskip("torch")
    arguments = ["--batches", "1", "--contexts", "64", "1024", "--prefill", "2048"]
    small = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--seconds", "0.01"]
    report = document(run("cpu_attention.py", *arguments, *small, "--json"))
    assert report["bench"] == "cpu_attention"
    rows = report["results"]
    assert {row["kv"] for row in rows} == {"float32", "bfloat16", "int8"}
    assert all(row["us"] > 0 and row["to_reading"] > 0 for row in rows)
    assert len(rows) == 2 * 3 * 3
    names = [check["name"] for check in report["checks"]]
    assert sum(name.startswith("prompt of 2,048") for name in names) == 6
    assert names[-1] == "decode at 1024 or more, int8 to bfloat16: median of the worst context"


def test_int8_attention_is_held_against_bfloat16_at_its_worst_context(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    module = runpy.run_path(str(BENCHES / "cpu_attention.py"))
    place = {"heads": "mha", "queries": 1, "kv_mib": 1.0}
    rows = [
        place | {"batch": batch, "context": context, "kv": kv, "us": us}
        for context, times in ((192, (9, 9, 9)), (1024, (3, 0.9, 1.1)), (8192, (0.5, 0.5, 0.5)))
        for batch, int8_us in enumerate(times)
        for kv, us in (("bfloat16", 1.0), ("int8", int8_us))
    ]
    (check,) = module["checks"](rows)
    assert (check["value"], check["ok"]) == (1.1, False)


def test_a_step_is_held_against_arithmetic_unless_weights_are_quantized(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    checks = runpy.run_path(str(BENCHES / "cpu_step.py"))["checks"]
    row = {"batch": 8, "by_bytes_ms": 1.0, "by_flops_ms": 2.0, "to_bytes": 2.2, "to_bound": 1.1}
    rows = [{**row, "quantization": mode} for mode in (None, "int8")]
    held = [(check["name"], check["value"], check["ok"]) for check in checks(rows)]
    assert held == [
        ("step of 8 sequences to its bound (by arithmetic)", 1.1, True),
        ("int8 step of 8 sequences to its bound (by bytes)", 2.2, False),
    ]


def test_int8_steps_are_held_against_those_without(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    checks = runpy.run_path(str(BENCHES / "cpu_step.py"))["checks"]
    row = {"quantization": "int8", "by_bytes_ms": 1.0, "by_flops_ms": 1.0, "to_bytes": 1.0}
    rows = [{**row, "batch": batch, "times_as_fast": 1.4} for batch in (1, 2, 64)]
    held = [(check["name"], check["ok"]) for check in checks(rows) if "fast" in check["name"]]
    assert held == [
        ("int8 step of 1: times as fast as without", False),
        ("int8 step of 64: times as fast as without", True),
    ]


def test_the_bound_of_a_step_counts_keys_and_values_of_their_own_type(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    from running.rates import Rates

    bounds = runpy.run_path(str(BENCHES / "cpu_step.py"))["bounds"]
    bench = SimpleNamespace(
        shape=SimpleNamespace(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
        options=SimpleNamespace(context=40),
        config=SimpleNamespace(dtype="float32", quantization=None),
        decoder=SimpleNamespace(weight_bytes=4000),
    )
    for dtype, row_bytes in ((torch.float32, 64), (torch.bfloat16, 32), (torch.int8, 18)):
        bench.kv_dtype = dtype
        found = bounds(bench, 3, Rates(flops_per_s=1e3, bytes_per_s=1e3))
        assert found["by_bytes_ms"] == 4000 + 3 * 40 * 2 * 2 * 2 * row_bytes
        assert found["by_flops_ms"] == 2 * 3 * (1000 + 2 * 2 * 4 * 16 * 40)


def test_a_step_is_timed_beside_its_bounds(tmp_path):
    pytest.importorskip("torch")
    import kit

    small = ["--batches", "1", "8", "--context", "40", "--num-steps", "4", "--rounds", "1"]
    small += ["--num-threads", "1", "--dtype", "float32", "--kv-cache-dtype", "int8", "--json"]
    small += ["--quantization", "none", "int8"]
    report = document(run("cpu_step.py", "--model", str(kit.tiny(tmp_path / "model")), *small))
    kinds = [(row["batch"], row["quantization"]) for row in report["results"]]
    assert kinds == [(1, None), (1, "int8"), (8, None), (8, "int8")]
    assert all(row["step_ms"] > 0 and row["to_bound"] > 0 for row in report["results"])
    names = [check["name"].split(" (by ")[0] for check in report["checks"]]
    assert names == [
        "int8 step of 1: times as fast as without",
        "step of 8 sequences to its bound",
        "int8 step of 8 sequences to its bound",
    ]


def test_the_scheduler_bench_reports_every_check_and_only_json():
    result = run("scheduler.py", "--only", *PARTS, *SMALL)
    report = document(result)
    assert len(result.stdout.splitlines()) == 1
    assert report["bench"] == "scheduler"
    assert list(report["results"]) == PARTS
    assert [check["name"] for check in report["checks"]] == EXPECTED_CHECKS
    for check in report["checks"]:
        assert set(check) == {"name", "value", "unit", "goal", "ok"}
        # A look-up or a publication is a difference of two times, which noise may turn around.
        if check["name"] not in ("prefix look-up, 4096 cached tokens", "publication of a block"):
            assert check["value"] > 0, check


def test_block_boundaries_are_staggered_and_contexts_equal(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from scheduling import load

    steady = load.steady(160, 40, context=40)
    for _ in range(16):
        steady.steps(1)
        batch = steady.batch
        assert len(batch.block_table_updates[0]) == 160 // 16
        assert batch.max_seq_len - batch.seq_lens.min() == 15
    steady.close()


def test_the_mixed_load_shares_the_heads_of_its_prompts():
    loop = ["--only", "mixed", "--in-flight", "128", "--num-steps", "40", "--runs", "1", "--json"]
    (mixed,) = document(run("scheduler.py", *loop))["results"]["mixed"]["runs"]
    assert mixed["cached_tokens_per_request"] == 256
    # All of them end within 128 steps or a little more, and others take their place.
    assert mixed["admitted_per_step"] == pytest.approx(1, rel=0.35)


def test_the_memory_bench_sees_sequences_and_blocks_and_no_growth(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from scheduling import memory

    monkeypatch.setattr(memory, "NUM_SEQS", (16, 8192))
    (few, _), (many, lent) = (
        memory.in_fresh_process(memory.bytes_with_seqs, n) for n in (16, 8192)
    )
    assert many - few > 8000 * 256
    # Two sets: ten arrays about sequences and samples, one of 8 bytes, and five about events.
    assert lent == 2 * (8 + 9 * 4 + (8 + 4 + 4 + 1 + 4))
    few, many = (memory.in_fresh_process(memory.bytes_with_blocks, n) for n in (1024, 65_536))
    assert many - few > 64_000 * 64
    before, after = memory.in_fresh_process(memory.growth_over_requests, 2048)
    assert after - before < 4 << 20
    result = {
        "bytes_per_sequence": 401,
        "bytes_per_block": 100,
        "num_requests": 9,
        "growth_bytes": 0,
    }
    assert [check["ok"] for check in memory.memory_checks(result)] == [False, True, True]


def test_schedulers_are_compared_and_missing_peers_are_skipped(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        "compare_schedulers.py",
        *("--only", "cbrs", "vllm", "--peer-python", f"vllm={tmp_path / 'none'}"),
        *("--num-seqs", "1", "32", "--num-steps", "5", "--in-flight", "8"),
        *("--num-mixed-steps", "40", "--json", "--plot", str(tmp_path / "plot.png")),
    )
    report = document(result)
    ours = report["results"]["cbrs"]
    assert list(ours["steady"]) == ["1", "32"]
    assert ours["mixed"]["us_per_output_token"] > 0
    assert "No such file" in report["results"]["vllm"]["skipped"]
    assert report["results"]["ratios"] == {}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# Names of checks, without the profile. Goals are not looked at: quick figures mean little.
POLICY_CHECKS = {
    "fairness.py": [
        "polite beside a flood: first chunk, p99",
        "polite beside a flood: TTFT p99 to (alone p99 + 2 loaded steps)",
        "weights 1:2:4: largest error of a share",
        "flood: throughput to fcfs",
        "weights: throughput to fcfs",
    ],
    "priority.py": [
        "interactive: first chunk, p99",
        "interactive: TTFT p99 to (alone p99 + 2 loaded steps)",
        "interactive: ITL p99 to target 25 ms",
        "batch: longest pause of a decode",
        "batch: later admissions before an aged request to the bound W",
        "rows held over time",
        "batch alone: throughput to saturated",
    ],
    "itl.py": [
        "target 50 ms: ITL p99 to target",
        "target 50 ms: prompt tokens/s to the best fixed budget",
        "target 50 ms: median error of the predicted step",
        "target 50 ms, 50,000 tokens join: longest ITL to target",
    ],
    "overload.py": [
        "goodput at 10x to its peak",
        "queue to its bounds",
        "burst: admitted of the refused that came back when told",
        "a refusal, p99",
        "burst: until TTFT is as before",
    ],
    "admission.py": [
        "synthetic: KV use to the best rule's",
        "synthetic: tokens computed again to prompt only",
    ],
}


@pytest.mark.parametrize("program", POLICY_CHECKS)
def test_a_bench_of_the_policy_reports_every_check_and_draws(program, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("CBRS_DATA", raising=False)
    plot = tmp_path / "plot.png"
    quick = ["--quick", "--profile", "gpu", "--seeds", "0", "--json", "--plot", str(plot)]
    result = run(program, *quick)
    report = document(result)
    assert len(result.stdout.splitlines()) == 1
    assert report["bench"] == program.removesuffix(".py")
    assert list(report["results"]) == ["gpu"]
    names = [f"gpu, {name}" for name in POLICY_CHECKS[program]]
    assert [check["name"] for check in report["checks"]] == names
    assert all(set(check) == {"name", "value", "unit", "goal", "ok"} for check in report["checks"])
    assert plot.read_bytes().startswith(b"\x89PNG")


# Of the benches that run a model: checks and results. The model is a tiny one here.
ENGINE_BENCHES = {
    "step_model.py": (
        ["--seeds", "0"],
        ["0"],
        [
            "median error of the predicted step after 20 steps, worst run",
            "time of a step in stats() to a stop-watch's, median difference",
        ],
    ),
    "engine_policy.py": (
        [],
        ["priority", "fairness", "target"],
        [
            "priority: longest TTFT of the interactive, fair to fcfs",
            "fairness: longest TTFT of the polite tenant, fair to fcfs",
            "target: ITL p99, with to without",
        ],
    ),
}


@pytest.mark.parametrize("program", ENGINE_BENCHES)
def test_a_bench_of_the_engine_reports_every_check_and_draws(program, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    import kit

    arguments, results, checks = ENGINE_BENCHES[program]
    model = kit.tiny(tmp_path / "model", max_position_embeddings=2048)
    plot = tmp_path / "plot.png"
    quick = ["--quick", "--threads", "1", "--model", str(model), "--json", "--plot", str(plot)]
    report = document(run(program, *quick, *arguments))
    assert report["bench"] == program.removesuffix(".py")
    assert list(report["results"]) == results
    assert [check["name"] for check in report["checks"]] == checks
    assert all(check["value"] > 0 for check in report["checks"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_capacity_of_a_pool_is_shown_step_by_step(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    import kit

    model, plot = kit.tiny(tmp_path / "model"), tmp_path / "plot.png"
    report = document(
        run(
            *("capacity.py", "--model", str(model), "--dtype", "float32", "--runs", "1"),
            *("--pool-tokens", "512", "--max-model-len", "256", "--shared-tokens", "64"),
            *("--prompt-tokens", "16", "--output-tokens", "16", "--seconds", "0.2"),
            *("--threads", "1", "--json", "--plot", str(plot)),
        )
    )
    ways, factors = report["results"]["ways"], report["results"]["factors"]
    assert list(ways) == ["contiguous", "paged", "shared", "int8"]
    # Two pieces of 256 tokens; blocks of about 96 tokens; all of them with 64 in common.
    assert ways["contiguous"]["num_running"] == pytest.approx(2, abs=0.1)
    assert 3 < ways["paged"]["num_running"] < 7 < ways["shared"]["num_running"]
    assert ways["shared"]["num_running"] < ways["int8"]["num_running"]
    # All pools are the same but for the part of a block that is over.
    pool_bytes = 512 * 2 * 2 * 2 * 16 * 4
    assert all(0.99 * pool_bytes < way["pool_bytes"] <= pool_bytes for way in ways.values())
    product = np.prod([value for name, value in factors["num_running"].items() if name in ways])
    assert factors["num_running"]["product"] == pytest.approx(product, rel=0.01)
    names = [f"{name}: sequences that run, to the way before" for name in list(ways)[1:]]
    names.append("all together: tokens/s to contiguous reservation")
    assert [check["name"] for check in report["checks"]] == names
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_capacity_refuses_a_pool_that_holds_nothing():
    pytest.importorskip("torch")
    result = run("capacity.py", "--pool-tokens", "100", "--max-model-len", "200")
    assert result.returncode == 2
    assert "--pool-tokens 100 holds no sequence" in result.stderr


def test_threads_neighbours_and_idling_are_measured(tmp_path):
    pytest.importorskip("torch")
    import kit

    model = kit.tiny(tmp_path / "model")
    report = document(
        run(
            *("cpu_threads.py", "--model", str(model), "--batch", "4", "--context", "40"),
            *("--num-steps", "2", "--rounds", "1", "--threads", "2", "--seconds", "0.5"),
            *("--settle-s", "0.2", "--json"),
        )
    )
    assert list(report["results"]) == ["scaling", "busy", "idle"]
    assert all(check["value"] > 0 for check in report["checks"][:2])
    assert report["results"]["idle"]["seconds"] >= 0.5
    assert [check["name"] for check in report["checks"]] == [
        "1 to 2 threads, 4 sequences: times as fast",
        "beside a busy process: step to that alone",
        "no requests: processor time",
    ]


def test_the_start_is_timed_and_its_memory_looked_at(tmp_path):
    pytest.importorskip("torch")
    import kit

    model = kit.tiny(tmp_path / "model")
    line = run("running/first_token.py", str(model), "auto", "64")
    figures = document(line)
    assert 0 < figures["first_token_s"] <= figures["end_s"]
    assert figures["pool_bytes"] == 64 * 16 * 2 * 2 * 2 * 16 * 4
    assert figures["weight_bytes"] > 64 * 320 * 4
    assert figures["peak_bytes"] > 0


def test_the_bench_of_the_front_end_reports_its_checks():
    """Two of its parts: each starts a process or two."""
    pytest.importorskip("torch")
    arguments = ["--runs", "1", "--seconds", "0.2", "--rate", "40", "--connections", "20"]
    report = document(run("frontend.py", "--only", "latency", "idle", "--json", *arguments))
    assert report["bench"] == "frontend"
    assert [check["name"] for check in report["checks"]] == [
        "p99 of the added latency, half load",
        "20 idle connections",
    ]
    latency, idle = report["results"]["latency"], report["results"]["idle"]
    assert latency["num_failed"] == 0
    assert latency["engine_p50_ms"] > 0
    assert 0 < latency["p50_ms"] <= latency["p99_ms"]
    assert idle["num_connections"] == 20


def test_the_best_fit_of_steps_is_found_beside_outliers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    pytest.importorskip("torch")
    module = runpy.run_path(str(BENCHES / "step_model.py"))
    random = np.random.default_rng(0)
    features = np.column_stack([np.ones(200), random.integers(1, 1000, (200, 3))])
    coefficients = np.array([5e6, 3e4, 4e3, 1e4])
    times = features @ coefficients
    times[::10] *= 5
    assert module["best_fit"](features, times) == pytest.approx(coefficients, rel=0.01)


def simulate(monkeypatch, streams, **settings):
    monkeypatch.syspath_prepend(str(BENCHES))
    from policies import profiles, simulator

    return simulator.simulate(simulator.config(**settings), profiles.PROFILES["gpu"], streams)


def stream(arrival_ms, num_prompt_tokens, num_output_tokens, **fields):
    from policies import workload

    arrays = (np.asarray(values) for values in (num_output_tokens, num_prompt_tokens))
    return workload.Stream("all", np.asarray(arrival_ms) * 1_000_000, *arrays, **fields)


def test_a_simulated_step_costs_what_the_profile_says(monkeypatch):
    """5 ms, 0.03 ms a token, 40 ns a token of context; the second comes during the first step."""
    monkeypatch.syspath_prepend(str(BENCHES))
    result = simulate(monkeypatch, [stream([0, 3], [100, 50], [2, 1])])
    first = 5 + 0.03 * 100 + 40e-6 * 100
    second = 5 + 0.03 * (1 + 50) + 40e-6 * (101 + 50)
    assert result.steps.duration_ns == pytest.approx([1e6 * first, 1e6 * second], abs=1)
    assert result.ttft_s(np.arange(2)) == pytest.approx(
        [first / 1e3, (first + second - 3) / 1e3], abs=1e-8
    )
    assert result.first_chunk_steps(np.arange(2)).tolist() == [1, 1]
    assert result.itl_s(np.arange(2)) == pytest.approx([second / 1e3], abs=1e-8)
    assert result.output_tokens() == 3
    assert result.service("all", 0, result.end_ns) == 150 + 2 * 3


def test_a_closed_loop_is_simulated_to_its_end(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    lengths = np.arange(1, 41)
    loop = stream(np.zeros(40, dtype=np.int64), np.full(40, 20), lengths, num_in_flight=4)
    result = simulate(monkeypatch, [loop], max_num_seqs=2)
    assert result.output_tokens() == lengths.sum()
    assert result.requests.num_tokens.tolist() == lengths.tolist()
    assert (result.requests.ended_ns > 0).all()
    assert max(result.steps.num_held_rows) == 2
    # Two run and two wait: never more than four that came and have not ended.
    at = np.sort(result.requests.submitted_ns)
    ended = np.sort(result.requests.ended_ns)
    assert all(np.searchsorted(ended, when, "right") >= n - 3 for n, when in enumerate(at))


def test_overtaking_of_aged_requests_is_counted(monkeypatch):
    """One waits for 30 s and is aged after 10: one of the two later ones starts after that."""
    monkeypatch.syspath_prepend(str(BENCHES))
    from policies import aging

    seconds = {"submitted_ns": [0, 1, 2], "first_planned_ns": [30, 5, 12]}
    requests = {name: np.array(values) * 10**9 for name, values in seconds.items()}
    run = SimpleNamespace(requests=SimpleNamespace(**requests), end_ns=40 * 10**9)
    figures = aging.overtakes_to_bound(run, 10.0, 20)
    assert figures == {
        "num_aged": 1,
        "overtakes_to_bound": 1 / 20,
        "most_overtakes": 1,
        "aged_before_it": 0,
    }
