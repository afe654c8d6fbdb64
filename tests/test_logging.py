"""The logger `cbrs`: no handler of its own, no output of its own, and never a word of a prompt."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbrs import LLM, SamplingParams
from cbrs.cli import main
from cbrs.errors import InvalidRequestError, PromptTooLongError
from cbrs.models.null import NullRunner

MARKER = "Xyzzy7f3a"
# The same as token ids of the byte tokenizer that `null` builds, as they would be printed.
MARKER_IDS = ", ".join(map(str, MARKER.encode()))
GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Lines(logging.Handler):
    """Keeps every record as a usual formatter writes it, traceback included."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))
        # A formatter of the user's may print the arguments and all else that a record carries.
        self.text.append(repr(record.__dict__))


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What arrives at the root logger while `cbrs` logs everything."""
    handler, root, logger = Lines(), logging.getLogger(), logging.getLogger("cbrs")
    level = logger.level
    root.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes `null` models with a tokenizer of single bytes."""
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "empty"))
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM("null", **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def assert_quiet_about_prompts(lines: Lines) -> None:
    text = "\n".join(lines.text)
    assert "loading" in text, "nothing was logged at all, so nothing was tested"
    assert MARKER not in text
    assert MARKER_IDS not in text


def test_the_marker_would_be_found(lines: Lines) -> None:
    logging.getLogger("cbrs").debug("loading %s", list(f"a {MARKER}".encode()))
    with pytest.raises(AssertionError):
        assert_quiet_about_prompts(lines)


def test_requests_that_end_well(lines: Lines, null: Callable[..., LLM]) -> None:
    llm = null()
    llm.generate([f"a {MARKER}", list(MARKER.encode())], GREEDY)
    llm.chat([{"role": "user", "content": MARKER}], GREEDY)
    llm.generate("a", SamplingParams(stop=[MARKER], max_tokens=4))
    assert_quiet_about_prompts(lines)


def test_requests_that_are_refused(lines: Lines, null: Callable[..., LLM]) -> None:
    llm = null(max_model_len=64)
    with pytest.raises(PromptTooLongError):
        llm.generate(MARKER * 100, GREEDY)
    with pytest.raises(InvalidRequestError):
        llm.generate([[*MARKER.encode(), 10_000]], GREEDY)
    with pytest.raises(InvalidRequestError):
        llm.generate(MARKER, SamplingParams(temperature=-1))
    with pytest.raises(TypeError):
        llm.generate([MARKER, 1.5], GREEDY)  # type: ignore[list-item]
    llm.close()
    assert_quiet_about_prompts(lines)


def test_requests_whose_step_fails(
    lines: Lines, null: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: NullRunner, batch: Any) -> Any:
        raise RuntimeError("no power")

    llm = null()
    monkeypatch.setattr(NullRunner, "forward", fail)
    (output,) = llm.generate(MARKER, GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert any(line.startswith("ERROR step") and "no power" in line for line in lines.text)
    assert_quiet_about_prompts(lines)


def test_a_sampler_whose_result_does_not_fit(
    lines: Lines, null: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = null()
    sample = NullRunner.sample
    monkeypatch.setattr(
        NullRunner,
        "sample",
        lambda runner, logits, batch: (sample(runner, logits, batch)[0][:0], None),
    )
    (output,) = llm.generate(MARKER, GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert_quiet_about_prompts(lines)


def test_a_template_that_quotes_the_message(
    lines: Lines, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception(messages[0].content) }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(tmp_path, num_threads=1) as llm, pytest.raises(InvalidRequestError, match=MARKER):
        llm.chat([{"role": "user", "content": MARKER}], GREEDY)
    assert_quiet_about_prompts(lines)
    handlers: list[Lines] = []

    def handler() -> Lines:
        handlers.append(Lines())
        return handlers[-1]

    monkeypatch.setattr(logging, "StreamHandler", handler)  # what the command shows its log with
    assert main(["generate", str(tmp_path), "--chat", "--prompt", MARKER, "--verbose"]) == 2
    assert MARKER in capsys.readouterr().err
    assert_quiet_about_prompts(handlers[0])


def test_the_command_line_logs_no_prompt(
    lines: Lines, null: Callable[..., LLM], capsys: Any
) -> None:
    command = ["generate", "null", "--prompt", MARKER, "--max-tokens", "2", "--verbose"]
    assert main(command) == 0
    assert "cbrs: loading null" in capsys.readouterr().err
    assert main([*command, "--temperature", "-1"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert MARKER not in err


def test_without_any_set_up_nothing_is_printed_and_no_handler_added(tmp_path: Path) -> None:
    code = """
import logging
import cbrs
with cbrs.LLM("null") as llm:
    llm.generate("a", cbrs.SamplingParams(max_tokens=2), use_tqdm=False)
print(logging.getLogger("cbrs").handlers, logging.getLogger().handlers)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("[] []\n", "")
