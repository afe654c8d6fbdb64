"""`cbrs chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cbrs.cli.common import EXIT_FAILURE, InputError, add_command
from cbrs.cli.conversation import Conversation, TurnError
from cbrs.cli.options import add_engine_options, add_model_argument, add_sampling_options, given
from cbrs.config import EngineConfig
from cbrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.common import Commands

logger = logging.getLogger("cbrs")

_DEFAULT_MAX_TOKENS = 512
_DETAILS = """\
At the prompt: /reset forgets the conversation, /system TEXT sets the system message (without TEXT,
none), /help, /quit. Ctrl-C stops an answer; what was said of it stays in the conversation. At the
prompt it clears the line; twice, or Ctrl-D, ends.

Without a terminal, every line of stdin is one turn, and stdout has the answers and nothing else."""
_HELP = """\
/reset        forget the conversation (not the system message)
/system TEXT  set the system message; without TEXT, none
/help         this list
/quit         end (as Ctrl-D)
Ctrl-C stops an answer. A line that begins with a space is never a command."""


def add_parser(commands: Commands) -> None:
    """Adds the command `chat`."""
    parser = add_command(
        commands,
        "chat",
        "talk to a model; answers appear as they are generated",
        "cbrs chat smollm2-135m-instruct --temperature 0 --max-tokens 64",
        _run,
        details=_DETAILS,
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_options(parser, _DEFAULT_MAX_TOKENS)
    # One conversation needs one row; fewer rows need a smaller pool.
    add_engine_options(parser, max_num_seqs="1")


def _run(arguments: argparse.Namespace) -> int:
    params = SamplingParams(**given(arguments, SamplingParams), output_kind="delta")
    from cbrs.async_llm import AsyncLLM

    options = {"max_num_seqs": 1, **given(arguments, EngineConfig, but="seed")}
    with asyncio.Runner() as runner:
        llm = AsyncLLM(**options)
        try:
            return _Chat(llm, params, arguments, runner).run()
        finally:
            runner.run(llm.aclose())


class _Chat:
    """Reads lines, answers them, and keeps going whatever goes wrong with one of them."""

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        arguments: argparse.Namespace,
        runner: asyncio.Runner,
    ) -> None:
        if params.max_tokens is None:
            params = replace(params, max_tokens=_DEFAULT_MAX_TOKENS)
        self._conversation = Conversation(llm, params, arguments.system)
        self._runner = runner
        self._is_verbose = arguments.verbose
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._num_failed = 0

    def run(self) -> int:
        """Returns the exit code: 1 if a turn of a pipe got no answer."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() edits lines once it is loaded)
            _tell("/help lists the commands, Ctrl-D ends")
        while (line := self._read()) is not None:
            try:
                if self._is_command(line):
                    if not self._obey(line):
                        break
                elif line.strip():
                    self._answer(line)
            except TurnError as error:
                self._num_failed += 1
                _tell(f"cbrs: {error}")
            except KeyboardInterrupt:
                _tell("")  # it came between the end of an answer and the prompt
        return EXIT_FAILURE if self._num_failed and not self._is_terminal else 0

    def _read(self) -> str | None:
        """Returns the next line; None at the end."""
        if self._is_terminal:
            return _ask()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8: {error.reason}") from None
        return line.rstrip("\r\n") if line else None

    @staticmethod
    def _is_command(line: str) -> bool:
        # A path such as /etc/hosts is something to talk about.
        return line.startswith("/") and line.split(maxsplit=1)[0][1:].isalpha()

    def _obey(self, line: str) -> bool:
        """Does what a command says; returns whether to go on."""
        name, _, rest = line.strip().partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self._conversation.reset()
        elif name == "/system":
            self._conversation.system = rest.strip() or None
        elif name == "/help":
            _tell(_HELP)
        else:
            raise TurnError(f"{name} is not a command; /help lists them")
        return True

    def _answer(self, line: str) -> None:
        """Prints the answer while it comes."""
        turn = self._conversation.turn(line)
        try:
            # While it runs, the runner turns a Ctrl-C into the cancellation of the turn.
            self._runner.run(turn.stream(_show))
        except KeyboardInterrupt:
            turn.stop()
        finally:
            if turn.text or turn.is_ended:
                print(flush=True)
        if turn.is_stopped:
            _tell("stopped")
        elif turn.finish_reason == "length":
            _tell(f"cut off after {turn.num_tokens} tokens (--max-tokens, or the context is full)")
        if self._is_verbose:
            _tell(turn.summary())


def _ask() -> str | None:
    """Reads a line from the terminal; a Ctrl-C clears it, a second one ends."""
    for _ in range(2):
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None
    return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(message: str) -> None:
    """Says something that is no answer."""
    print(message, file=sys.stderr, flush=True)
