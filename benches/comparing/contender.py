"""An engine in a process of its own that stands still while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cbrs

BENCHES = Path(__file__).resolve().parent.parent
START_LIMIT_S = 900.0
END_LIMIT_S = 30.0
Answer = dict[str, Any]


class Contender:
    """One peer: started, measured, and between measurements stopped by the system.

    What several engines do while they have no requests (spinning threads, polls) so costs none of
    the others. `problem` says why it cannot be measured (again): `absent` or `failed`, and why.
    """

    def __init__(self, module: str, python: str, settings: dict[str, Any], with_cbrs: bool) -> None:
        """Starts `peers/serving/MODULE.py` in an interpreter and waits until it is ready."""
        self.facts: Answer = {}
        self.problem: Answer | None = None
        paths = [str(BENCHES)]
        if with_cbrs:
            paths.append(str(Path(cbrs.__file__).resolve().parent.parent))
        command = [python, "-m", "peers.serving", module, json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # With its children it is stopped and ended as one; and should this process die,
                # the system wakes a stopped group and ends it.
                process_group=0,
            )
        except OSError as error:
            self.problem = {"absent": f"{python}: {error.strerror}"}
            return
        self.facts = self._answer(START_LIMIT_S)
        self._stop()

    def measure(self, load: dict[str, Any], limit_s: float) -> Answer | None:
        """The figures of a load; None if there are none, and then `problem` says why."""
        if self.problem is not None:
            return None
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "it was asked for"
        try:
            self._process.stdin.write(json.dumps(load).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail(f"it ended with {self._process.wait()}")
            return None
        answer = self._answer(limit_s)
        self._stop()
        return answer if self.problem is None else None

    def close(self) -> None:
        """Ends it, kindly if it can still hear."""
        if self.problem is not None:
            return
        self._signal(signal.SIGCONT)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=END_LIMIT_S)
        finally:
            self._end()

    def _answer(self, limit_s: float) -> Answer:
        """The next line; one with a problem, or none in time, is the end of it."""
        assert self._process.stdout is not None, "it was asked for"
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else b""
        if not ready:
            self._fail(f"no end within {limit_s:g} s")
        elif not line:
            self._fail(f"it ended with {self._process.wait()}; its error stands above")
        else:
            answer: Answer = json.loads(line)
            if answer.keys() & {"absent", "failed"}:
                self.problem = answer
                self._end()
            return answer
        return {}

    def _fail(self, reason: str) -> None:
        self.problem = {"failed": reason}
        self._end()

    def _stop(self) -> None:
        if self.problem is None:
            self._signal(signal.SIGSTOP)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both were asked for"
            with suppress(BrokenPipeError):  # a load that nobody has read
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # none of it may be left
            os.killpg(self._process.pid, number)


def rounds(names: Sequence[str], num_runs: int) -> list[list[str]]:
    """Who is measured after whom, run by run: every other one backwards."""
    return [list(names)[:: 1 if run % 2 == 0 else -1] for run in range(num_runs)]
