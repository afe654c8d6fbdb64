"""A server in a process of its own, on cores of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far by name of the thread."""
        used: dict[str, float] = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            name = (task / "comm").read_text(encoding="utf-8").strip()
            ns = int((task / "schedstat").read_text(encoding="ascii").split()[0])
            used[name] = used.get(name, 0.0) + ns / 1e9
        return used


@contextmanager
def serving(model: str, cores: Sequence[int], *arguments: str) -> Iterator[Served]:
    """`cbrs serve MODEL` on `cores`, until the end of the block."""
    command = [sys.executable, "-m", "cbrs", "serve", model, "--port", "0", *arguments]
    with on_cores(cores):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield Served(_url(process), model, process.pid)
            process.send_signal(signal.SIGTERM)
            status = process.wait(_END_TIMEOUT_S)
            if status != 0:
                raise RuntimeError(f"the server ended with {status}")
        finally:
            process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None, "it was asked for"
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving \S+ at (http://\S+)", line):
            return found[1]
    raise RuntimeError("the server did not start: " + "".join(lines))


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Lets this thread, and what it starts, run on `cores` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
