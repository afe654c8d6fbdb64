"""The command `cbrs`: arguments in, exit code out.

0 = done, 1 = failed while running, 2 = bad input, 130 = Ctrl-C. Errors are one line on stderr.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cbrs
from cbrs.cli import bench, chat, demo, generate, info, pull, serve
from cbrs.cli.common import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    InputError,
    Parser,
)
from cbrs.errors import ModelLoadError

logger = logging.getLogger("cbrs")

_COMMANDS = (generate, chat, serve, bench, pull, info, demo)
_OFFLINE = "CBRS_OFFLINE"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse itself exits with 2 on bad arguments."""
    arguments = _make_parser().parse_args(argv)
    level = logging.DEBUG if arguments.verbose else logging.INFO
    with _logging_to_stderr(level), _offline(arguments.offline):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        exit_code = int(arguments.run(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("cbrs: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has gone; the interpreter must not try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (InputError, ModelLoadError, ValueError) as error:
        return _report(error, EXIT_BAD_INPUT)
    except ImportError as error:
        # Only a hub id needs this module, and what looks like one may be a mistyped path.
        is_hub_id = error.name == "huggingface_hub"
        return _report(error, EXIT_BAD_INPUT if is_hub_id else EXIT_FAILURE)
    except Exception as error:
        return _report(error, EXIT_FAILURE)
    return exit_code


def _make_parser() -> Parser:
    parser = Parser(
        prog="cbrs",
        description="Continuous-batching inference for decoder language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cbrs {cbrs.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    examples = [str(command.get_default("example")) for command in commands.choices.values()]
    parser.epilog = "\n".join(
        [
            "`cbrs COMMAND --help` tells the options of one command.",
            "exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted",
            "environment: CBRS_CACHE=FOLDER, CBRS_OFFLINE=1 or HF_HUB_OFFLINE=1 (see --offline)",
            "",
            "examples:",
            *(f"  {example}" for example in examples),
        ]
    )
    return parser


@contextmanager
def _offline(is_wanted: bool) -> Iterator[None]:
    """Sets `CBRS_OFFLINE` during one command; afterwards it is as it was."""
    before = os.environ.get(_OFFLINE)
    if is_wanted:
        os.environ[_OFFLINE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_OFFLINE, None)
        else:
            os.environ[_OFFLINE] = before


@contextmanager
def _logging_to_stderr(level: int) -> Iterator[None]:
    """Shows what the engine logs during one command; afterwards the set-up is as it was."""
    before = logger.handlers[:], logger.propagate, logger.level
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLineFormatter(level))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = before[0], before[1]
        logger.setLevel(before[2])


class _OneLineFormatter(logging.Formatter):
    """Leaves tracebacks out unless everything is logged."""

    def __init__(self, level: int) -> None:
        super().__init__("cbrs: %(message)s")
        self._with_traceback = level <= logging.DEBUG

    def format(self, record: logging.LogRecord) -> str:
        if not self._with_traceback:
            record.exc_info = record.exc_text = None
        return super().format(record)


def _report(error: Exception, exit_code: int) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    if logger.isEnabledFor(logging.DEBUG):
        # Not through the logger: a message may quote the input, and prompts are never logged.
        traceback.print_exception(error)
    print(f"cbrs: error: {message}", file=sys.stderr)
    return exit_code
