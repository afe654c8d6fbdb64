"""The command `cbrs`: inputs, outputs, exit codes, and that the examples of the help work."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cbrs
from cbrs.cli import main
from cbrs.logprobs import Logprob
from cbrs.outputs import CompletionOutput, RequestMetrics, RequestOutput

COMMANDS = ["generate", "chat", "serve", "bench", "pull", "info", "demo"]


def run_cli(*arguments, stdin=None, timeout_s=120, cwd=None, env=None):
    return subprocess.run(
        [sys.executable, "-m", "cbrs", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def generate(capsys):
    """Runs `cbrs generate null …` in this process; returns exit code and stdout."""

    def run(*arguments):
        exit_code = main(["generate", "null", "--max-tokens", "4", *arguments])
        return exit_code, capsys.readouterr().out

    return run


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def answer(*texts, logprobs=None, prompt_logprobs=None):
    """What `LLM.generate` gives for one prompt."""
    choices = [
        CompletionOutput(i, text, [i], None, logprobs, "length") for i, text in enumerate(texts)
    ]
    metrics = RequestMetrics(0.0, 0.0, 0.1, 0.2, [])
    return RequestOutput(
        "1", None, [7, 8], choices, True, 0, metrics, prompt_logprobs=prompt_logprobs
    )


def has_known_model():
    from cbrs import hub

    return hub.cached("smollm2-135m-instruct") is not None


def test_the_version_is_printed():
    result = run_cli("--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"cbrs {cbrs.__version__}")


def examples_of(*command):
    help_text = run_cli(*command, "--help").stdout
    return re.search(r"^examples?:\n((?:  cbrs .+\n?)+)\Z", help_text, re.MULTILINE)[1].split("\n")


# That of `serve`, which runs until it is told to end, is in tests/server/test_server_cli.py.
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_the_example_of_each_help_works(command, tmp_path):
    example, *_ = examples_of(command)
    arguments = shlex.split(example)[1:]
    assert arguments[0] == command
    if "smollm2" in example and not has_known_model():
        pytest.skip("smollm2-135m-instruct is not in the cache; `cbrs pull` fetches it")
    result = run_cli(*arguments, cwd=tmp_path, timeout_s=280, stdin="Hello\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_help_lists_every_command_with_its_example():
    help_text = run_cli("--help").stdout
    listed = re.findall(r"^    ([a-z]+) ", help_text, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    examples = [line for line in examples_of() if line]
    assert [example.split()[1] for example in examples] == listed


def test_one_prompt_prints_its_text_alone(generate):
    exit_code, one = generate("--prompt", "Hello")
    assert exit_code == 0
    assert one.endswith("\n")
    assert "[1]" not in one


@pytest.mark.parametrize(("max_model_len", "expected"), [(4096, 256), (32, 31)])
def test_without_max_tokens_the_output_is_bounded(capsys, max_model_len, expected):
    arguments = ["--prompt", "a", "--json", "--max-model-len", str(max_model_len)]
    assert main(["generate", "null", *arguments]) == 0
    assert len(json_lines(capsys.readouterr().out)[0]["token_ids"]) == expected


def test_several_prompts_print_which_text_is_whose(generate):
    _, out = generate("--prompt", "Hello", "--prompt", "World")
    assert re.match(r"\[1\] Hello\n.*\n\[2\] World\n", out)


def test_json_gives_one_object_per_prompt_in_order(generate):
    _, out = generate("--prompt", "a", "--prompt", "b", "--json")
    first, second = json_lines(out)
    assert (first["prompt"], second["prompt"]) == ("a", "b")
    assert (first["index"], second["index"]) == (0, 1)
    assert len(first["token_ids"]) == 4
    assert first["finish_reason"] == "length"
    assert first["error"] is None
    assert 0 <= first["queue_time_s"] <= first["time_to_first_token_s"]


def test_a_text_file_holds_one_prompt_a_line(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nzweite ü\r\n{not json\n")
    _, out = generate("--file", str(file), "--json")
    assert [item["prompt"] for item in json_lines(out)] == ["first", "zweite ü", "{not json"]


def test_a_jsonl_file_holds_prompts_messages_and_parameters(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "two\nlines", "id": "x7"},
        {"prompt": "short", "max_tokens": 2},
        {"prompt": "stop", "stop": ["quick"], "max_tokens": 20},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, out = generate("--file", str(file), "--json")
    first, second, third = json_lines(out)
    assert (first["prompt"], first["id"], len(first["token_ids"])) == ("two\nlines", "x7", 4)
    assert len(second["token_ids"]) == 2
    assert (third["finish_reason"], third["stop_reason"]) == ("stop", "quick")


def test_messages_and_chat_go_through_the_template(tiny, tmp_path, capsys):
    messages = [{"role": "user", "content": "Hi"}]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    base = ["generate", str(tiny), "--max-tokens", "4", "--temperature", "0", "--json"]
    assert main([*base, "--file", str(file)]) == 0
    assert main([*base, "--chat", "--prompt", "Hi"]) == 0
    from_file, from_option = json_lines(capsys.readouterr().out)
    assert from_file["messages"] == from_option["messages"] == messages
    assert from_file["token_ids"] == from_option["token_ids"]
    assert from_file["num_prompt_tokens"] == from_option["num_prompt_tokens"] == 5


def test_stdin_is_read_for_a_dash():
    result = run_cli(
        "generate", "null", "--max-tokens", "3", "--file", "-", "--json", stdin="a\nb\n"
    )
    assert [item["prompt"] for item in json_lines(result.stdout)] == ["a", "b"]
    assert result.returncode == 0


def test_progress_goes_to_stderr_and_results_to_stdout():
    result = run_cli("generate", "null", "--prompt", "a", "--max-tokens", "3", "--json")
    assert len(json_lines(result.stdout)) == 1
    assert "null is ready" in result.stderr
    assert "tokens/s" in result.stderr


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--max-prefill-chunk-tokens", "max_prefill_chunk_tokens", 17),
        ("--block-size", "block_size", 8),
        ("--num-blocks", "num_blocks", 33),
        ("--max-num-seqs", "max_num_seqs", 3),
        ("--max-num-batched-tokens", "max_num_batched_tokens", 100),
        ("--max-model-len", "max_model_len", 128),
        ("--num-threads", "num_threads", 1),
        ("--dtype", "dtype", "float32"),
        ("--kv-cache-dtype", "kv_cache_dtype", "int8"),
        ("--quantization", "quantization", "int8"),
        ("--policy", "policy", "static"),
        ("--target-itl-ms", "target_itl_ms", 40.0),
        ("--no-prefix-caching", "enable_prefix_caching", False),
    ],
)
def test_every_engine_option_reaches_the_engine(monkeypatch, generate, option, field, value):
    seen = []
    run = cbrs.LLM.generate
    monkeypatch.setattr(
        cbrs.LLM,
        "generate",
        lambda llm, *rest: seen.append(llm.config()) or run(llm, *rest),
    )
    arguments = [option] if value is False else [option, str(value)]
    exit_code, _ = generate("--prompt", "a", *arguments)
    assert exit_code == 0
    assert getattr(seen[0], field) == value


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.25),
        ("seed", 0),
        ("min_tokens", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("n", 2),
        ("logprobs", 3),
    ],
)
def test_every_sampling_option_reaches_the_request(monkeypatch, generate, option, value):
    seen = []
    monkeypatch.setattr(
        cbrs.LLM, "generate", lambda llm, prompts, p: seen.extend(p) or [answer("x")]
    )
    generate("--prompt", "a", "--json", "--" + option.replace("_", "-"), str(value))
    assert getattr(seen[0], option) == value


def test_bad_words_reach_the_request(monkeypatch, generate):
    seen = []
    monkeypatch.setattr(
        cbrs.LLM, "generate", lambda llm, prompts, p: seen.extend(p) or [answer("x")]
    )
    generate("--prompt", "a", "--bad-word", "b", "--bad-word", "c d")
    assert seen[0].bad_words == ["b", "c d"]


def test_several_outputs_of_a_prompt_are_all_printed(monkeypatch, generate):
    monkeypatch.setattr(cbrs.LLM, "generate", lambda llm, prompts, p: [answer("x", "y")])
    assert generate("--prompt", "a", "--n", "2")[1] == "(1) x\n(2) y\n"
    (item,) = json_lines(generate("--prompt", "a", "--n", "2", "--json")[1])
    assert (item["text"], item["token_ids"]) == ("x", [0])
    assert [(choice["text"], choice["token_ids"]) for choice in item["outputs"]] == [
        ("x", [0]),
        ("y", [1]),
    ]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_of_a_line_without_json_are_refused(capsys, tmp_path, name):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", name: 0}))
    arguments = ["generate", "null", "--max-tokens", "4", "--file", str(file)]
    assert main(arguments) == 2
    assert f"{name} of prompt 2 needs --json" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 0
    assert name in json_lines(capsys.readouterr().out)[1]


def test_the_option_logprobs_without_json_is_refused(capsys):
    assert main(["generate", "null", "--prompt", "a", "--logprobs", "0"]) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_logprobs_are_in_the_json(monkeypatch, generate):
    likely = Logprob(-0.25, 1, "x")
    drawn = Logprob(-2.0, 5, "y")
    output = answer("y", logprobs=[{5: drawn, 3: likely}], prompt_logprobs=[None, {8: likely}])
    monkeypatch.setattr(cbrs.LLM, "generate", lambda llm, prompts, p: [output])
    (item,) = json_lines(generate("--prompt", "a", "--logprobs", "1", "--json")[1])
    expected = {"token_id": 3, "logprob": -0.25, "rank": 1, "decoded_token": "x"}
    assert item["logprobs"] == [
        [{"token_id": 5, "logprob": -2.0, "rank": 5, "decoded_token": "y"}, expected]
    ]
    assert item["prompt_logprobs"] == [None, [{**expected, "token_id": 8}]]
    assert "outputs" not in item


@pytest.mark.parametrize(("truncate", "max_tokens"), [(None, 14), (4, 28), (100, 14), (-1, 14)])
def test_the_default_bound_knows_a_truncated_prompt(monkeypatch, tmp_path, truncate, max_tokens):
    seen = []
    monkeypatch.setattr(
        cbrs.LLM, "generate", lambda llm, prompts, p: seen.extend(p) or [answer("x")]
    )
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path))  # a token is a byte
    line = {"prompt": "a" * 18, "truncate_prompt_tokens": truncate}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({key: line[key] for key in line if line[key] is not None}))
    assert main(["generate", "null", "--max-model-len", "32", "--file", str(file)]) == 0
    assert seen[0].max_tokens == max_tokens


def test_stop_and_ignore_eos_reach_the_request(generate):
    arguments = ["--prompt", "a", "--json", "--stop", "quick", "--stop", "brown", "--ignore-eos"]
    exit_code, out = generate(*arguments, "--max-tokens", "9")
    assert exit_code == 0
    assert json_lines(out)[0]["stop_reason"] == "quick"


def test_a_failure_while_running_exits_with_1(monkeypatch, generate, capsys):
    from cbrs.models.null import NullRunner

    def fail(runner, batch):
        raise RuntimeError("no power")

    monkeypatch.setattr(NullRunner, "forward", fail)
    assert generate("--prompt", "a")[0] == 1


def test_a_ctrl_c_exits_with_130_and_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "cbrs", "generate", "null:0.01", "--prompt", "a"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "is ready" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_a_reader_that_goes_away_is_no_traceback():
    prompts = "a\n" * 2000  # more output than the pipe holds
    options = ["--json", "--file", "-", "--max-tokens", "40"]
    with subprocess.Popen(
        [sys.executable, "-m", "cbrs", "generate", "null", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(prompts)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(60) == 1
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """Nothing has been fetched, so `null` has to make a tokenizer of its own."""
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "empty"))


def test_null_chats_without_any_model_in_the_cache(empty_cache, capsys):
    from cbrs.models.null import SCRIPT

    with cbrs.LLM("null") as llm:
        params = cbrs.SamplingParams(max_tokens=len(SCRIPT))
        (output,) = llm.chat([{"role": "user", "content": "Hi ü"}], params)
    expected = "<|im_start|>user\nHi ü<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == expected
    assert output.prompt_token_ids == list(expected.encode())
    assert output.outputs[0].text == SCRIPT
    assert main(["generate", "null", "--chat", "--prompt", "a", "--max-tokens", "1"]) == 0
    assert "null: the tokenizer is one of single bytes" in capsys.readouterr().err


def test_the_demo_of_null_runs_without_any_model_in_the_cache(empty_cache, tmp_path, capsys):
    assert main(["demo", "--model", "null", "--out", str(tmp_path / "demo")]) == 0
    assert "36 of 36" in capsys.readouterr().out


def test_null_says_which_tokenizer_it_uses(capsys):
    if not has_known_model():
        pytest.skip("smollm2-135m-instruct is not in the cache; `cbrs pull` fetches it")
    assert main(["generate", "null", "--prompt", "a", "--max-tokens", "1"]) == 0
    assert "null: the tokenizer is the one of smollm2-135m-instruct" in capsys.readouterr().err


def test_pull_prints_the_path_of_the_cached_file():
    if not has_known_model():
        pytest.skip("smollm2-135m-instruct is not in the cache; `cbrs pull` fetches it")
    result = run_cli("pull", "smollm2-135m-instruct")
    assert result.returncode == 0
    assert Path(result.stdout.strip()).stat().st_size == 98_362_432
