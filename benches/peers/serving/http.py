"""Servers that speak OpenAI's protocol, under the load generator of cbrs."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable

from cbrs._core import run_load

from .harness import Figures, Load, MissingError, Peer

START_TIMEOUT_S = 300.0


class HttpPeer(Peer):
    """A server process of a port of its own."""

    process: subprocess.Popen[bytes]
    url: str

    def start(self, command: list[str], port: int, model: str) -> None:
        """Starts it and waits until it is ready; `model` is what requests name."""
        self._model = model
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise MissingError(f"{command[0]}: {error.strerror}") from None
        self._wait(self._is_healthy)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except OSError:
            return False

    def measure(self, load: Load) -> Figures:
        report = run_load(
            {
                "url": self.url,
                "model": self._model,
                "concurrency": load.concurrency,
                "num_requests": load.num_requests,
                "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens,
                "vocab_size": load.vocab_size,
                "seed": load.seed,
                "extra_body": {"temperature": 0.0, "ignore_eos": True},
            }
        )
        num_tokens = load.num_requests * load.output_tokens
        if report["num_failed"] or report["num_output_tokens"] != num_tokens:
            raise RuntimeError(
                f"{report['num_failed']} requests failed ({json.dumps(report['errors'])}); "
                f"{report['num_output_tokens']} of {num_tokens} output tokens came"
            )
        return {
            "tokens_per_s": report["output_tokens_per_s"],
            "ttft_p50_ms": report["ttft_ms"]["p50"],
            "ttft_p99_ms": report["ttft_ms"]["p99"],
            "itl_p50_ms": report["itl_ms"]["p50"],
            "itl_p99_ms": report["itl_ms"]["p99"],
            "itl_max_ms": report["itl_ms"]["max"],
            "duration_s": report["duration_s"],
        }

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def free_port() -> int:
    """A port that nobody has at this moment."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def version_of(binary: str, *arguments: str) -> str:
    """The first line that a program prints about itself."""
    try:
        result = subprocess.run(
            [binary, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise MissingError(f"{binary}: {error.strerror}") from None
    return next((line for line in result.stdout.splitlines() if "version" in line), "?").strip()
