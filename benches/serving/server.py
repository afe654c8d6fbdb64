"""A server in a process of its own, on cores of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbrs._core import run_load

_END_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Served:
    """A server that answers at `url`."""

    url: str
    model: str
    pid: int

    def load(self, **config: Any) -> dict[str, Any]:
        """The report of a load on it."""
        return dict(run_load({"url": self.url, "model": self.model, **config}))

    def get(self, path: str) -> bytes:
        """The body of an answer."""
        with urllib.request.urlopen(self.url + path) as response:
            return bytes(response.read())

    def rss_mib(self) -> float:
        """Memory that the process holds."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found, "Linux tells the size of each process"
        return int(found[1]) / 1024

    def cpu_s(self) -> float:
        """Processor time so far of all its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(
            int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9 for task in tasks
        )

    def num_steps(self) -> int:
        """Steps of its engine so far."""
        return int(json.loads(self.get("/stats"))["num_steps"])

    def tokenize_s(self, text: str) -> float:
        """Seconds in which a text is tokenized."""
        body = json.dumps({"prompt": text}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + "/tokenize", body, headers)
        started = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            response.read()
        return time.perf_counter() - started


@contextmanager
def serving(model: str, cores: Sequence[int], *arguments: str) -> Iterator[Served]:
    """`cbrs serve MODEL` on `cores`, its log in a file, until the end of the block."""
    command = [sys.executable, "-m", "cbrs", "serve", model, "--port", "0", *arguments]
    with tempfile.NamedTemporaryFile() as log, on_cores(cores):
        process = subprocess.Popen(command, stderr=log)
        # It has the file open; the name is needed until it has told where it listens.
        url = _url(process, Path(log.name))
    with process:
        try:
            yield Served(url, model, process.pid)
            process.send_signal(signal.SIGTERM)
            status = process.wait(_END_TIMEOUT_S)
            if status != 0:
                raise RuntimeError(f"the server ended with {status}")
        finally:
            process.kill()


class Inside:
    """An engine in a process of its own, with a server; see `inside.py`."""

    def __init__(self, model: str, max_num_seqs: int, cores: Sequence[int]) -> None:
        """Starts it on `cores`."""
        program = Path(__file__).with_name("inside.py")
        command = [sys.executable, str(program), model, str(max_num_seqs)]
        with on_cores(cores):
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self.server = Served(self._read(), model, self._process.pid)

    def run(self, **load: Any) -> dict[str, float]:
        """The figures of a load without HTTP."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None, "it was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}")
        return line.strip()

    def __enter__(self) -> Inside:
        """Returns itself."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Ends it."""
        self._process.communicate(timeout=_END_TIMEOUT_S)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens, once its log says so."""
    while True:
        has_ended = process.poll() is not None
        text = log.read_text(encoding="utf-8")
        if found := re.search(r"serving \S+ at (http://\S+)", text):
            return found[1]
        if has_ended:
            raise RuntimeError(f"the server did not start: {text}")
        time.sleep(0.05)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Lets this thread, and what it starts, run on `cores` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
