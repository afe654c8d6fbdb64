"""The process of a rank other than 0: loads its part of the model and computes it, step by step.

Started by `cbrs.parallel.ranks`; it ends when rank 0 does, or when anything fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from cbrs.errors import CbrsError
from cbrs.parallel.message import StepReader, receive_json, send_json

_LOOK_INTERVAL_S = 0.5
"""A forked child of rank 0's process may hold the pipe open, so its number is looked at, too."""


def main() -> None:
    """Runs the rank that the command line says; does not return."""
    rank, size, connection, lifeline, parent = map(int, sys.argv[1:6])
    folder = sys.argv[6]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline, parent, folder), daemon=True).start()
    # What the checkpoint is warned about, rank 0 says.
    logging.basicConfig(level=logging.ERROR, format=f"rank {rank}: %(message)s")
    code = 1
    with socket.socket(fileno=connection) as rank_0:
        try:
            _run(rank, size, rank_0, folder)
        except EOFError:
            code = 0  # the engine is closed
        except BaseException as error:
            if not isinstance(error, CbrsError | ValueError):  # which say all by themselves
                traceback.print_exc()
            _report(rank_0, error)
    # Without torch's own end: exchanges may be under way that nobody will answer.
    os._exit(code)


def _run(rank: int, size: int, rank_0: socket.socket, folder: str) -> None:
    # Only now, so that the pipe is watched meanwhile.
    from cbrs.loading import load_model
    from cbrs.parallel.group import Group
    from cbrs.runner.model_runner import make_runner

    group = Group(rank, size)
    loaded = load_model(**receive_json(rank_0), group=group)
    send_json(rank_0, {"says": "loaded"})
    _receive(rank_0, "connect")
    # Before the runner is made, which may try steps, as all ranks' do then.
    group.connect(folder, loaded.device)
    settings = _receive(rank_0, "make_runner")
    kv_dtype = loaded.kv_dtype(settings.pop("kv_cache_dtype"))
    runner, _ = make_runner(loaded, kv_dtype=kv_dtype, **settings)
    send_json(rank_0, {"says": "ready"})
    steps = StepReader(rank_0)
    while True:
        batch = steps.read()
        if batch.num_seqs > 0:
            runner.forward(batch)


def _receive(rank_0: socket.socket, wanted: str) -> dict[str, Any]:
    """Waits for an order of rank 0, and returns its settings."""
    settings = receive_json(rank_0)
    order = settings.pop("do", None)
    if order != wanted:
        raise ValueError(f"rank 0 says {order!r}, but {wanted!r} comes next")
    return settings


def _report(rank_0: socket.socket, error: BaseException) -> None:
    """Tells rank 0 why this one ends."""
    said: dict[str, Any] = {
        "says": "error",
        "kind": type(error).__name__,
        "detail": f"{type(error).__name__}: {error}",
        "file": getattr(error, "file", None),
        "field": getattr(error, "field", None),
    }
    with contextlib.suppress(OSError):  # it has gone
        send_json(rank_0, said)


def _end_with(lifeline: int, parent: int, folder: str) -> None:
    """Ends this process when rank 0's has ended, wherever it is at that moment."""
    while os.getppid() == parent:
        if select.select([lifeline], [], [], _LOOK_INTERVAL_S)[0]:
            break
    # Nobody else is left to do it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
