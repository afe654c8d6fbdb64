"""`cbrs chat`: through a pipe, in a terminal, and when something stops an answer."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from cbrs.async_llm import AsyncLLM
from cbrs.cli import chat, main
from cbrs.cli.conversation import Conversation
from cbrs.models.null import SCRIPT, NullRunner


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing has been fetched, so `null` takes single bytes as tokens."""
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "empty"))


class Lines(io.TextIOBase):
    """Stands for stdin; entries that are functions are called on the way to the next line."""

    def __init__(self, *entries: str | Callable[[], None]) -> None:
        self._entries = list(entries)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        while self._entries:
            entry = self._entries.pop(0)
            if isinstance(entry, str):
                return entry + "\n"
            entry()
        return ""


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs `cbrs chat null …` on lines of stdin; returns exit code, stdout and stderr."""

    def run(*lines: str | Callable[[], None], options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(sys, "stdin", Lines(*lines))
        exit_code = main(["chat", "null", "--max-tokens", "4", *options])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every turn."""
    seen: list[list[dict[str, str]]] = []
    messages = Conversation.messages
    monkeypatch.setattr(
        Conversation,
        "messages",
        lambda self, text: seen.append(messages(self, text)) or seen[-1],
    )
    return seen


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[AsyncLLM]:
    """The engines that the command made."""
    made: list[AsyncLLM] = []
    init = AsyncLLM.__init__

    def remember(self: AsyncLLM, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(AsyncLLM, "__init__", remember)
    return made


def said(*texts: str) -> list[dict[str, str]]:
    """Messages whose roles take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_every_line_of_a_pipe_is_a_turn_and_stdout_has_the_answers_only(talk, asked):
    exit_code, out, _ = talk("Hello", "", "ü and more")
    assert (exit_code, out) == (0, " The\n The\n")
    assert asked == [said("Hello"), said("Hello", " The", "ü and more")]


def test_the_last_line_may_lack_its_end(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert main(["chat", "null", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == " The\n"


def test_reset_forgets_what_was_said_but_not_the_system_message(talk, asked):
    talk("a", "/reset", "b", options=("--system", "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert asked == [[system, *said("a")], [system, *said("b")]]


def test_the_system_message_can_be_changed_and_taken_away(talk, asked):
    talk("/system Be brief, please.", "a", "/system", "b")
    first, second = asked
    assert first == [{"role": "system", "content": "Be brief, please."}, *said("a")]
    assert second == said("a", " The", "b")


def test_quit_ends_and_help_lists_the_commands(talk, asked):
    exit_code, out, err = talk("/help", "/quit", "never")
    assert (exit_code, out, asked) == (0, "", [])
    for command in ("/reset", "/system", "/help", "/quit"):
        assert command in err


def test_an_unknown_command_is_told_and_a_path_is_no_command(talk, asked):
    exit_code, out, err = talk("/rest", "/etc/hosts", " /reset")
    assert exit_code == 1
    assert "cbrs: /rest is not a command; /help lists them\n" in err
    assert [messages[-1]["content"] for messages in asked] == ["/etc/hosts", " /reset"]
    assert out == " The\n The\n"


def test_sampling_options_reach_the_request_and_a_stop_string_never_leaks(talk, monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr(chat, "_show", pieces.append)
    stop = "brown fox"
    expected = SCRIPT[: SCRIPT.index(stop)]
    exit_code, _, err = talk("a", options=("--max-tokens", "60", "--stop", stop))
    assert exit_code == 0
    assert "".join(pieces) == expected
    assert len(pieces) > 1
    assert "cut off" not in err


def test_the_length_of_a_cut_answer_is_told(talk):
    assert "cut off after 4 tokens" in talk("a")[2]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_the_speed_is_told_only_if_asked_for(talk, is_verbose):
    _, _, err = talk("a", options=("--verbose",) if is_verbose else ())
    assert bool(re.search(r"^4 tokens, first after .* tokens/s$", err, re.MULTILINE)) is is_verbose


def test_a_conversation_that_no_longer_fits_is_a_message(talk, asked):
    # "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n" is 47 bytes, so 47 tokens.
    options = ("--max-model-len", "96")
    exit_code, out, err = talk("Hello", "and then?", "/reset", "Hello", options=options)
    assert exit_code == 1
    assert out == " The\n The\n"
    assert re.search(
        r"^cbrs: the conversation has grown to \d+ tokens, and the context holds 96, "
        r"the answer included; /reset starts a new one$",
        err,
        re.MULTILINE,
    )
    assert asked[-1] == said("Hello")


def test_an_answer_is_cut_where_the_context_ends(talk):
    options = ("--max-model-len", "64", "--max-tokens", "500")
    exit_code, out, err = talk("Hello", options=options)
    assert exit_code == 0
    assert SCRIPT.startswith(out.rstrip("\n"))
    assert "cut off after" in err


def test_a_failed_answer_is_forgotten_and_the_next_one_comes(talk, asked, monkeypatch):
    forward, batches = NullRunner.forward, []

    def fail_second_step(runner, batch):
        if batch.num_seqs:
            batches.append(batch.step_id)
        if len(batches) == 2:
            raise RuntimeError("no power")
        return forward(runner, batch)

    monkeypatch.setattr(NullRunner, "forward", fail_second_step)
    exit_code, out, err = talk("first", "second")
    assert exit_code == 1
    assert "cbrs: the answer failed and is forgotten: RuntimeError: no power\n" in err
    assert out.endswith("\n The\n")
    assert asked[-1] == said("second")


def test_a_wrong_sampling_parameter_is_bad_input(talk):
    exit_code, out, err = talk("a", "b", options=("--temperature", "-1"))
    assert (exit_code, out) == (2, "")
    assert err.splitlines()[-1].startswith("cbrs: error: temperature")
    assert err.count("error") == 1


def test_text_that_is_no_unicode_is_refused(talk):
    exit_code, _, err = talk("a \udcff b")
    assert exit_code == 1
    assert "cbrs: refused: " in err


def test_stdin_that_is_not_utf8_is_one_line():
    result = subprocess.run(
        [sys.executable, "-m", "cbrs", "chat", "null"],
        input=b"\xff\xfe\n",
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert result.returncode == 2
    assert b"cbrs: error: stdin is not UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_ctrl_c_stops_the_answer_in_the_engine_and_keeps_its_beginning(
    talk, asked, engines, monkeypatch
):
    show, pieces = chat._show, []

    def interrupt_at_third_piece(text: str) -> None:
        show(text)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    def expect_idle() -> None:
        deadline = time.monotonic() + 10
        while engines[0].stats()["num_running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engines[0].stats()["num_running"] == 0

    monkeypatch.setattr(chat, "_show", interrupt_at_third_piece)
    exit_code, out, err = talk(
        "go on", expect_idle, "again", options=("--max-tokens", "5000", "--max-model-len", "8192")
    )
    stopped, answered = out.splitlines()
    assert stopped == "".join(pieces[:3])
    assert SCRIPT.startswith(stopped)
    assert "stopped" in err.splitlines()
    assert len(answered) > len(stopped)
    assert asked[1] == said("go on", stopped, "again")
    assert exit_code == 0


def test_a_ctrl_c_before_the_first_token_forgets_the_question(talk, asked, monkeypatch):
    forward, steps = NullRunner.forward, []

    def interrupt_first_step(runner, batch):
        if batch.num_seqs and not steps:
            steps.append(batch.step_id)
            signal.pthread_kill(main_thread, signal.SIGINT)
            time.sleep(0.3)  # the answer must not overtake the signal
        return forward(runner, batch)

    import threading

    main_thread = threading.main_thread().ident
    monkeypatch.setattr(NullRunner, "forward", interrupt_first_step)
    exit_code, out, _ = talk("first", "second")
    assert (exit_code, out) == (0, "\n The\n")
    assert asked == [said("first"), said("second")]


class Terminal:
    """`cbrs chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cbrs", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._ours = ours
        self.text = ""

    def expect(self, text: str) -> None:
        """Reads until `text` has come after what was expected before."""
        while text not in self.text:
            try:
                data = os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"{text!r} did not come, but {self.text!r}"
            self.text += data.decode()
        self.text = self.text.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Sends what a Ctrl-C sends."""
        self.process.send_signal(signal.SIGINT)

    def wait_for_prompt(self) -> None:
        """Expects the prompt, and that the program then waits for a key.

        readline looks at signals only there: one that comes between two keys waits for the next.
        """
        self.expect("> ")
        self.settle()

    def settle(self) -> None:
        """Returns once the main thread has been asleep for a while."""
        num_asleep = 0
        while num_asleep < 10:
            time.sleep(0.02)
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
            num_asleep = num_asleep + 1 if state == "S" else 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_in_a_terminal_answers_stream_and_ctrl_c_stops_them(terminal):
    # At a quarter of a second a token, 200 tokens would take a minute.
    screen = terminal("null:0.25", "--max-tokens", "200")
    screen.expect("> ")
    screen.type("Hello\n")
    screen.expect(" The")
    screen.interrupt()
    screen.wait_for_prompt()
    screen.type("/reset\n")
    screen.wait_for_prompt()
    screen.type("\x04")
    assert screen.process.wait(60) == 0


def test_at_the_prompt_a_ctrl_c_clears_the_line_and_the_second_ends(terminal):
    screen = terminal("null", "--max-tokens", "4")
    screen.wait_for_prompt()
    screen.type("never sent")
    screen.expect("never sent")
    screen.settle()
    screen.interrupt()
    screen.wait_for_prompt()
    screen.type("Hello\n")
    screen.expect(" The\r\n")
    screen.wait_for_prompt()
    screen.interrupt()
    screen.wait_for_prompt()
    screen.interrupt()
    assert screen.process.wait(60) == 0
