"""`cbrs serve` as a process, with all that it prints."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from server_kit import wait_until

# A process loads torch first, which a busy machine takes long for.
START_TIMEOUT_S = 120.0


class ServerProcess:
    """A server process: its lines as they come, and where it listens."""

    def __init__(self, arguments: tuple[str, ...], environ: Mapping[str, str]) -> None:
        environ = {**os.environ, **environ}
        command = [sys.executable, "-m", "cbrs", "serve", *arguments]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._found is None and self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        found = self._found
        assert found is not None, self.output
        return found[1]

    @property
    def _found(self) -> re.Match[str] | None:
        return re.search(r"serving \S+ at (http://\S+)", self.output)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def reload(self, told: str) -> None:
        """Has it read its files again, until it tells so."""
        before = self.output.count("SIGHUP")
        self.signal(signal.SIGHUP)
        wait_until(lambda: self.output.count("SIGHUP") > before)
        assert told in self.output.rsplit("SIGHUP", 1)[1]

    def end(self) -> int:
        """Waits for its end; returns the exit code."""
        code = self.process.wait(30)
        self._reader.join()
        return code


@contextmanager
def server_process(*arguments: str, **environ: str) -> Iterator[ServerProcess]:
    """A server process, once it listens; killed at the end if it has not ended."""
    server = ServerProcess(arguments, environ)
    try:
        assert server.url
        yield server
    finally:
        server.process.kill()
        server.end()
