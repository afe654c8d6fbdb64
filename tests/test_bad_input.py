"""Bad input gives one clear line and exit code 2, never a traceback."""

import json
import re
import sys

import pytest

from cbrs.cli import main


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; returns its one line on stderr."""

    def run(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        errors = [line for line in captured.err.splitlines() if line.startswith("cbrs: error: ")]
        assert len(errors) == 1, captured.err
        assert captured.err.splitlines()[-1] == errors[0], "the error is the last line"
        assert "Traceback" not in captured.err
        return errors[0]

    return run


def test_a_model_that_is_no_file(refused, tmp_path):
    assert "missing.gguf" in refused("generate", tmp_path / "missing.gguf", "--prompt", "a")


def test_a_missing_folder_that_could_be_a_hub_id(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = refused("generate", "data/missing", "--prompt", "a")
    assert "data/missing: no such file or folder" in line
    assert 'pip install "cbrs[hub]"' in line


def test_a_hub_that_does_not_have_it(refused, monkeypatch):
    class Client:
        @staticmethod
        def snapshot_download(repository, allow_patterns, local_files_only=False):
            raise OSError("404 not found")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Client)
    line = refused("generate", "data/missing", "--prompt", "a")
    assert "data/missing: " in line
    assert "no such file or folder" in line
    assert "404 not found" in line


def test_an_unknown_model_name_lists_the_known_ones(refused):
    for command in (["generate", "gpt-17", "--prompt", "a"], ["pull", "gpt-17"]):
        line = refused(*command)
        assert "gpt-17" in line
        assert "smollm2-135m-instruct" in line


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"x" * 99]
)
def test_a_truncated_or_foreign_gguf_file(refused, tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert "model.gguf" in refused("generate", file, "--prompt", "a")


def test_a_folder_without_config(refused, tmp_path):
    assert "config.json" in refused("generate", tmp_path, "--prompt", "a")


def test_a_folder_without_weights(refused, tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    assert "safetensors" in refused("generate", tmp_path, "--prompt", "a")


def test_truncated_weights(refused, tiny, tmp_path):
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    assert "model.safetensors" in refused("generate", tmp_path, "--prompt", "a")


def test_an_empty_prompt(refused):
    assert "empty" in refused("generate", "null", "--prompt", "")


def test_a_prompt_longer_than_the_context(refused):
    line = refused("generate", "null", "--max-model-len", "16", "--prompt", "word " * 100)
    assert "16" in line
    assert "max_model_len" in line


def test_a_prompt_that_is_not_unicode(refused):
    assert "Unicode" in refused("generate", "null", "--prompt", "a\udcff")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "temperature is -1"),
        ("--temperature", "nan", "temperature is NaN"),
        ("--top-p", "0", "top_p is 0"),
        ("--top-k", "-5", "top_k is -5"),
        ("--max-tokens", "0", "max_tokens is 0"),
        ("--max-tokens", "9" * 30, "max_tokens"),
        ("--dtype", "int3", "dtype is 'int3'"),
        ("--device", "tpu", "device is 'tpu'"),
        ("--policy", "lifo", "lifo"),
        ("--policy", "/nowhere/rules.toml", "cannot be read"),
        ("--target-itl-ms", "0", "target_itl_ms is 0"),
        ("--num-blocks", "0", "num_blocks is 0"),
        ("--num-blocks", "-1", "num_blocks is -1"),
        ("--block-size", "0", "block_size is 0"),
        ("--max-num-seqs", "0", "max_num_seqs is 0"),
        ("--max-model-len", "100000", "max_model_len is 100000"),
    ],
)
def test_an_option_out_of_range(refused, option, value, message):
    assert message in refused("generate", "null", "--prompt", "a", option, value)


def test_a_prompt_file_that_cannot_be_read(refused, tmp_path):
    assert "No such file" in refused("generate", "null", "--file", tmp_path / "none.txt")
    assert "directory" in refused("generate", "null", "--file", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"good\n\xff\xfe\n", "not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        (b'{"prompt": "a"}\n[1]\n', "line 2: a JSON list"),
        (b'{"prompt": 5}\n', "line 1: prompt is a int"),
        (b'{"prompt": "a", "messages": []}\n', "line 1: give either"),
        (b'{"id": 3}\n', "line 1: give either"),
        (b'{"prompt": "a", "best_of": 3}\n', "line 1: unknown key 'best_of'"),
        (b'{"messages": []}\n', "line 1: messages must be"),
        (b'{"messages": [{"role": "user", "content": [1]}]}\n', "line 1: messages must be"),
        (b'{"prompt": "\\ud800"}\n', "line 1: the prompt is not valid Unicode"),
        (b'{"prompt": "a", "temperature": "hot"}\n', "temperature"),
        (b'{"prompt": "a", "max_tokens": -3}\n', "max_tokens"),
        (b'{"prompt": "a", "stop": [""]}\n', "stop"),
    ],
)
def test_a_malformed_prompt_file_names_the_line(refused, tmp_path, content, message):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert message in refused("generate", "null", "--file", file)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "null", "--port", "many"],
        ["generate"],
        ["generate", "null"],
        ["generate", "null", "--prompt", "a", "--file", "b"],
        ["generate", "null", "--prompt", "a", "--max-tokens", "many"],
        ["generate", "null", "--prompt", "a", "--best-of", "2"],
        ["pull"],
        ["pull", "--list", "smollm2-135m-instruct"],
        ["info", "null"],
        ["chat"],
        ["bench", "--url"],
    ],
)
def test_wrong_arguments_are_one_line_that_names_the_help(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cbrs: error: ")
    assert re.search(r"see `cbrs( [a-z]+)? --help`$", line)


def test_a_template_that_refuses_the_messages(refused, tiny, tmp_path):
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "roles must alternate" in refused("generate", tmp_path, "--chat", "--prompt", "a")
