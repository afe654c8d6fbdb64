"""The benches of serving: checkpoints that other engines read, and engines under the same load."""

import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BENCHES = Path(__file__).resolve().parent.parent / "benches"
LATENCIES = {"ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"}
FORMS = {"bf16": "bf16", "fp32": "fp32", "model-bf16.gguf": "bf16", "model-f16.gguf": "f16"}
QUANTIZED_FORMS = ("model-q8_0.gguf", "model-q4_1.gguf")


@pytest.fixture(autouse=True)
def _benches_are_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))


def run(program, *arguments):
    """A bench in a process of its own: what it printed as its last line."""
    command = [sys.executable, str(BENCHES / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def run_here(program, *arguments):
    """The same in this process, which has torch already."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.syspath_prepend(str(BENCHES))
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        runpy.run_path(str(BENCHES / program), run_name="__main__")
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def gguf_source(tmp_path_factory):
    """A random checkpoint as a GGUF file, and its tensors by their Hugging Face names."""
    import gguf_kit
    import kit

    config = kit.tiny_config(tie_word_embeddings=False)
    tensors = kit.tensors_of(config, seed=3)
    file = tmp_path_factory.mktemp("source") / "tiny.gguf"
    return gguf_kit.write_gguf(file, config, tensors), tensors


@pytest.fixture(scope="module")
def made(gguf_source, tmp_path_factory):
    """A folder with every form of it, and what the bench said."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_here("make_checkpoint.py", folder, "--model", gguf_source[0], "--json")


def rounded_to(form, values):
    """The values of a tensor in the type of a form, as float32."""
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "f16": torch.float16}
    return torch.from_numpy(values).to(kinds[form]).float().numpy()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_checkpoint_has_the_weights_of_its_source(name, made, gguf_source):
    import kit

    from cbrs.loading import load_model

    folder, _ = made
    loaded = load_model(folder / name, dtype="float32", device="cpu", num_threads=1, pack=False)
    tensors = gguf_source[1]
    embedding = rounded_to(FORMS[name], tensors["model.embed_tokens.weight"])
    assert np.array_equal(loaded.module.embedding.plain.numpy(), embedding)
    assert loaded.tokenizer is not None
    assert loaded.eos_token_ids == (kit.EOS,)
    assert loaded.config.bos_token_id == kit.BOS


def test_every_form_of_a_checkpoint_computes_the_same(made):
    import gguf_kit

    folder, _ = made
    logits = {name: gguf_kit.logits_of(folder / name) for name in (*FORMS, *QUANTIZED_FORMS)}
    for name, values in logits.items():
        # Rounded weights move logits; query rows in the wrong order would by more than 1.
        most = {"fp32": 1e-4, "model-q8_0.gguf": 0.5, "model-q4_1.gguf": 0.5}.get(name, 0.2)
        difference = (values - logits["fp32"]).abs()
        assert float(difference.mean() if "q4" in name else difference.max()) < most, name
    assert float(logits["fp32"].abs().max()) > 1


def test_transformers_reads_the_folder_alike(made):
    transformers = pytest.importorskip("transformers")
    import gguf_kit

    path = made[0] / "fp32"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([gguf_kit.TOKENS])).logits[0, -1]
    assert float((gguf_kit.logits_of(path)[-1] - expected).abs().max()) < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.decode(tokenizer.encode("some words")).endswith("some words")


def test_the_bench_says_what_it_wrote_and_finds_what_differs(made, gguf_source, tmp_path):
    from comparing import checkpoint

    folder, report = made
    assert [check["ok"] for check in report["checks"]] == [True] * 6
    forms = ["bf16", "fp32", "bf16.gguf", "f16.gguf", "q8_0.gguf", "q4_1.gguf"]
    assert list(report["results"]) == forms
    source = checkpoint.Source(gguf_source[0])
    # Weights of bfloat16 are not those of float32, but norms are: all of them are in GGUF files.
    other = checkpoint.different_tensors(source, folder / "bf16", "fp32")
    assert set(other) == set(source.names)
    assert checkpoint.different_tensors(source, folder / "bf16", "bf16") == []


def test_a_checkpoint_with_windows_is_refused(tmp_path):
    import gguf_kit
    import kit

    config = kit.tiny_config()
    window = {"llama.attention.sliding_window": 32}
    file = gguf_kit.write_gguf(tmp_path / "w.gguf", config, kit.tensors_of(config), window)
    with pytest.raises(SystemExit, match="sliding windows are not copied"):
        run_here("make_checkpoint.py", tmp_path / "out", "--model", file)


SMALL = ["--prompt-tokens", "12", "--output-tokens", "8", "--vocab-size", "300", "--runs", "1"]
SMALL += ["--threads", "1", "--json"]


@pytest.mark.usefixtures("one_torch_thread")
def test_serving_is_measured_against_the_number_of_clients(tiny_checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    arguments = ["--model", tiny_checkpoint, "--dtype", "float32", "--concurrency", 1, 4]
    report = run_here("serving.py", *arguments, *SMALL, "--plot", plot)
    assert report["bench"] == "serving"
    assert list(report["results"]) == ["1", "4"]
    # Linears and the tied head of `tiny`; 8 tokens of a client are 8 steps.
    matrices = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96) + 320 * 64
    one, four = report["results"].values()
    assert one["weight_bytes_per_token"] == pytest.approx(4 * matrices, rel=1e-3)
    assert four["weight_bytes_per_token"] == pytest.approx(matrices, rel=0.25)
    for point in (one, four):
        assert point["tokens_per_s"] > 0
        assert all(point[name] > 0 for name in LATENCIES)
    assert [check["name"] for check in report["checks"]] == [
        "1 client: steps to tokens of a client",
        "4 clients: steps to tokens of a client",
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_engines_are_compared_and_those_that_cannot_run_are_named(tmp_path):
    """cbrs with the null model, a peer that sleeps, and two that are not there."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    report = run(
        "compare_serving.py",
        *("--only", "cbrs", "scripted", "vllm", "llama", "--concurrency", 1, 32),
        *("--model", "cbrs=null", "--model", "scripted=20", *SMALL, "--plot", plot),
        *("--peer-python", f"vllm={tmp_path / 'none'}", "--leave-out", 0),
    )
    results = report["results"]
    contenders = results["contenders"]
    assert "No such file" in contenders["vllm"]["absent"]
    assert "--llama-server" in contenders["llama"]["absent"]
    assert contenders["vllm"]["points"] == contenders["llama"]["points"] == {}
    assert "cbrs_http" not in contenders
    sleeping = contenders["scripted"]["points"]
    # Nobody sleeps for less than was asked for; how much longer depends on the machine.
    assert 0 < sleeping["1"]["tokens_per_s"] <= 1 / 0.020
    assert sleeping["1"]["tokens_per_s"] < sleeping["32"]["tokens_per_s"] <= 32 / 0.020
    assert min(point[name] for point in sleeping.values() for name in LATENCIES) >= 20
    ours = contenders["cbrs"]["points"]["32"]["tokens_per_s"]
    ratio = results["ratios"]["scripted"]["32"]["tokens_per_s"]
    assert ratio == pytest.approx(ours / sleeping["32"]["tokens_per_s"], rel=1e-2)
    assert results["best_peers"] == {"1": "scripted", "32": "scripted"}
    assert [check["name"] for check in report["checks"]] == [
        "cbrs, 1 client: tokens/s to the best peer's",
        "cbrs, 32 clients: tokens/s to the best peer's",
        "cbrs, 32 clients: ITL p99 to that of the peer with the most tokens/s",
        "cbrs, 32 clients: TTFT p99 to that of the peer with the most tokens/s",
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def llama_server(folder):
    """A program that is told what llama.cpp's server is told; it becomes a server of cbrs."""
    program = folder / "llama-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "if sys.argv[1:] == ['--version']:\n"
        "    sys.exit('version: 7 (abc)')\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert given['-np'] == '2' and given['-c'] == '1024' and given['-m'] == 'null'\n"
        "command = [sys.executable, '-m', 'cbrs', 'serve', 'null', '--port', given['--port']]\n"
        "os.execv(sys.executable, [*command, '--served-model-name', 'model'])\n"
    )
    program.chmod(0o755)
    return program


def test_a_server_is_held_against_the_server_of_cbrs(tmp_path):
    program = llama_server(tmp_path)
    report = run(
        *("compare_serving.py", "--only", "cbrs_http", "llama", "--llama-server", program),
        *("--model", "cbrs_http=null", "--model", "llama=null"),
        *("--concurrency", 2, *SMALL),
    )
    results = report["results"]
    contenders = results["contenders"]
    assert contenders["llama"]["version"] == "7 (abc)"
    rates = {name: one["points"]["2"]["tokens_per_s"] for name, one in contenders.items()}
    ratio = results["ratios"]["llama"]["2"]["tokens_per_s"]
    assert ratio == pytest.approx(rates["cbrs_http"] / rates["llama"], rel=1e-2)


def outcome_of(latencies, **rates):
    """Figures at 32 clients by contender; latencies are p99 of ITL and TTFT."""
    outcome = {}
    for name, rate in rates.items():
        itl, ttft = latencies.get(name, (100, 900))
        point = {"tokens_per_s": float(rate), "itl_p99_ms": itl, "ttft_p99_ms": ttft}
        outcome[name] = {"points": {"32": point}}
    return outcome


def test_the_goals_are_held_against_the_right_peer():
    from comparing import results

    latencies = {"cbrs": (40, 1000), "cbrs_http": (50, 900), "llama": (90, 800)}
    outcome = outcome_of(latencies, cbrs=1000, cbrs_http=900, llama=500, openvino=900)
    checks = results.checks(outcome, [8, 32])
    assert [(check["value"], check["ok"]) for check in checks] == [
        (pytest.approx(1000 / 900, rel=1e-3), False),
        (pytest.approx(40 / 100), True),
        (pytest.approx(1000 / 900, rel=1e-3), False),
    ]
    # A server is held against the server.
    ratios = results.ratios(outcome, [8, 32])
    assert ratios["llama"]["32"]["tokens_per_s"] == pytest.approx(900 / 500)
    assert set(ratios) == {"llama", "openvino"}


def test_int8_is_held_against_every_peer_and_16_bits_against_16_bits():
    from comparing import results

    rates = {"cbrs": 1000, "cbrs_int8": 1500, "openvino": 500, "openvino_q4": 1200}
    outcome = outcome_of({}, **rates)
    checks = results.checks(outcome, [32], {"32": 1250.0})
    throughput = {check["name"]: check for check in checks if "tokens/s to" in check["name"]}
    assert {name: (check["value"], check["ok"]) for name, check in throughput.items()} == {
        "cbrs, 32 clients: tokens/s to the best peer's": (2.0, True),
        "cbrs int8, 32 clients: tokens/s to the best peer's": (1.25, False),
        "32 clients: tokens/s to the bound of the same run (aim)": (0.8, False),
    }
    assert results.best_peers(outcome, [32]) == {"32": "openvino"}
    assert results.best_peers(outcome, [32], "cbrs_int8") == {"32": "openvino_q4"}
    table = results.table(
        {name: {"version": "1", **one} for name, one in outcome_with_latencies(outcome).items()},
        [32],
    )
    rows = [line for line in table.splitlines() if "OpenVINO" in line]
    assert ["(2.00x)" in rows[0], "(1.25x)" in rows[1]] == [True, True]


def outcome_with_latencies(outcome):
    """The same with the medians that a table shows as well."""
    medians = {"ttft_p50_ms": 1.0, "itl_p50_ms": 1.0}
    return {
        name: {"points": {"32": one["points"]["32"] | medians}} for name, one in outcome.items()
    }


def test_the_bound_is_what_bytes_and_multiply_adds_allow(tiny_checkpoint):
    from types import SimpleNamespace

    from comparing.bound import Work
    from running.rates import Rates

    work = Work.of(str(tiny_checkpoint), "bfloat16")
    layers = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    assert (work.layers, work.head) == (layers, 320 * 64)
    load = SimpleNamespace(prompt_tokens=10, output_tokens=20)
    # Reading alone: all weights in each step, 2 layers x 2 x 2 heads of 16 for each token of 20.
    slow_memory = Rates(flops_per_s=1e18, bytes_per_s=1e6)
    step_bytes = 2 * (layers + 320 * 64) + 4 * 20 * 2 * 2 * 2 * 16 * 2
    assert work.tokens_per_s(4, load, slow_memory) == pytest.approx(4e6 / step_bytes, rel=1e-6)
    slow_arithmetic = Rates(flops_per_s=1e6, bytes_per_s=1e18)
    decode = 2 * (layers + 320 * 64) + 4 * 2 * 4 * 16 * 20
    prompt = 10 * (2 * layers + 4 * 2 * 4 * 16 * 5) + 2 * 320 * 64
    expected = 20 * 1e6 / (20 * decode + prompt)
    assert work.tokens_per_s(4, load, slow_arithmetic) == pytest.approx(expected, rel=1e-6)
    assert Work.of("null", "bfloat16") is None


@pytest.mark.parametrize("is_native", [False, True])
def test_the_faster_arithmetic_counts_where_the_cpu_has_both(is_native, monkeypatch):
    from types import SimpleNamespace

    from running import rates

    kernels = SimpleNamespace(num_threads=1, measure_rates=lambda repeat: (5.0, 7.0))
    monkeypatch.setattr(rates, "native_bfloat16", lambda: is_native)
    for product, expected in ((4.0, 5.0), (9.0, 9.0 if is_native else 5.0)):
        monkeypatch.setattr(rates, "matmul_flops", lambda *_, value=product: value)
        assert rates.measure_rates(kernels) == rates.Rates(expected, 7.0)


def test_peers_are_held_against_the_fastest_peer_of_their_weights():
    from comparing import results

    rates = {"cbrs": 9000, "cbrs_int8": 9999, "llama": 100, "vllm": 20, "llama_q4": 400}
    parts = results.parts_of_fastest(outcome_of({}, **rates, llama_q8=80), 32)
    assert parts == {"llama": 1.0, "vllm": 0.2, "llama_q4": 1.0, "llama_q8": 0.2}
    assert results.parts_of_fastest(outcome_of({}, cbrs=1000), 32) == {}


def test_peers_that_are_far_behind_are_left_out_of_longer_runs(tmp_path):
    report = run(
        *("compare_serving.py", "--only", "llama", "scripted", "--concurrency", 1, 2),
        *("--llama-server", llama_server(tmp_path)),
        *("--model", "llama=null", "--model", "scripted=200", *SMALL),
    )
    contenders = report["results"]["contenders"]
    assert list(contenders["scripted"]["points"]) == ["1"]
    assert contenders["scripted"]["left_out"].startswith("above 1, where it has 0.0")
    assert list(contenders["llama"]["points"]) == ["1", "2"]


def test_figures_count_tokens_that_came_together_and_refuse_short_outputs():
    from peers.serving import harness

    load = harness.Load(1, 2, 4, 3, 300, 0)
    seen = [
        harness.Seen(0.0, [(1.0, 1), (1.5, 2)]),
        harness.Seen(2.0, [(4.0, 1), (4.1, 1), (5.1, 1)]),
    ]
    figures = harness.figures(seen, 6.0, load)
    assert figures["tokens_per_s"] == pytest.approx(1.0)
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["ttft_p99_ms"] == pytest.approx(2000)
    # Gaps: 0.5, 0, 0.1 and 1 s.
    assert figures["itl_p50_ms"] == pytest.approx(100)
    assert figures["itl_p99_ms"] == pytest.approx(1000)
    seen[1].arrivals.pop()
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        harness.figures(seen, 6.0, load)


def test_a_contender_that_breaks_or_takes_too_long_is_named(tmp_path):
    from comparing.contender import Contender

    settings = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 1, "max_model_len": 64}
    load = {"concurrency": 1, "num_requests": 1, "prompt_tokens": 1, "output_tokens": 2}
    load |= {"vocab_size": 300, "seed": 0}

    def start(model):
        return Contender("scripted", sys.executable, {"model": model, **settings}, False)

    broken = start("no number")
    assert "could not convert" in broken.problem["failed"]
    assert broken.measure(load, 10.0) is None
    slow = start("60000")
    assert slow.problem is None
    assert slow.measure(load, 0.2) is None
    assert slow.problem == {"failed": "no end within 0.2 s"}
    slow.close()
