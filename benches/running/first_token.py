"""From `import torch` to the first token of `cbrs generate`, and the memory that it takes.

    python benches/running/first_token.py MODEL DTYPE [NUM_BLOCKS]

Prints one JSON line. A process of its own, so that nothing is there already.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

SAMPLE_S = 0.002


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("the kernel does not tell RssAnon")


class Peak:
    """The largest `anonymous_bytes` while it is on, looked up every two milliseconds.

    The kernel keeps the peak of all resident memory only, and most of that is the mapped file. What
    loads a model gives the GIL up for each tensor, so no long allocation goes unseen.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.is_set():
            self.num_bytes = max(self.num_bytes, anonymous_bytes())
            time.sleep(SAMPLE_S)


class Output(io.StringIO):
    """What is printed, and when it began."""

    first_s: float | None = None

    def write(self, text: str) -> int:
        if self.first_s is None:
            self.first_s = time.perf_counter()
        return super().write(text)


def generate(arguments: list[str]) -> dict[str, Any]:
    """Runs `cbrs generate` in this process; seconds to its first text and to its end.

    It writes when all of its tokens are there: it must be asked for one, if that is to be timed.
    """
    started_s = time.perf_counter()
    from cbrs.cli import main
    from cbrs.runner.cpu_runner import CpuRunner

    runners: list[CpuRunner] = []
    forward = CpuRunner.forward

    def noted(self: CpuRunner, batch: Any) -> Any:
        runners.append(self)
        return forward(self, batch)

    CpuRunner.forward = noted  # type: ignore[method-assign]
    with redirect_stdout(Output()) as out:
        status = main(["generate", *arguments])
    if status:
        raise RuntimeError(f"cbrs generate ended with {status}")
    if out.first_s is None:
        raise RuntimeError("cbrs generate wrote nothing")
    return {
        "first_token_s": out.first_s - started_s,
        "weight_bytes": runners[0].decoder.weight_bytes,
        "pool_bytes": runners[0].kv_cache.num_bytes,
        "end_s": time.perf_counter() - started_s,
        "text": out.getvalue().strip(),
    }


def main() -> None:
    model, dtype, *num_blocks = sys.argv[1:]
    import torch

    after_import = anonymous_bytes()
    options = ["--prompt", "The capital of France is", "--max-tokens", "1", "--temperature", "0"]
    options += ["--dtype", dtype, *(["--num-blocks", *num_blocks] if num_blocks else [])]
    with Peak() as peak:
        figures = generate([model, *options])
    figures |= {"peak_bytes": peak.num_bytes - after_import, "torch": torch.__version__}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
