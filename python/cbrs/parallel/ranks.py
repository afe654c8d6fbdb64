"""The other ranks as rank 0 sees them: starts their processes, sends to them, notices their end."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbrs.errors import CbrsError, EngineDeadError, ModelLoadError
from cbrs.fate import Fate
from cbrs.models.fields import load_error
from cbrs.parallel.group import Group
from cbrs.parallel.message import receive_json, send_json

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

logger = logging.getLogger("cbrs")

_CLOSE_WAIT_S = 5.0
"""Time for a rank to end by itself; then it is killed."""

_NOTICE_WAIT_S = 1.0
"""A broken exchange waits so long for the news of whose process has ended."""


class Ranks:
    """The processes of ranks 1 and up, from their start to their end.

    They end with this process, whatever ends it: each has the reading end of a pipe that nobody
    else writes to. (The kernel's own signal for this, PR_SET_PDEATHSIG, comes when the *thread*
    that started a process ends, and an engine may outlive that.) If one of them ends, so do the
    others, and `fate` says why.
    """

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        """Starts `size - 1` processes, each of which loads its part of the model.

        `settings` are the arguments of `load_model`, as JSON; `device` is "cpu" or "cuda".

        Raises:
            EngineDeadError: a process cannot be started.
        """
        self.group = Group(0, size)
        self.fate = Fate()
        self._members = _Members(tempfile.mkdtemp(prefix="cbrs-ranks-"))
        # If nobody closes it. At the end of this process they notice that by themselves, when the
        # threads of engines that still run have been stopped.
        self._end = weakref.finalize(self, self._members.end)
        self._end.atexit = False
        try:
            for rank in range(1, size):
                self._members.start(rank, size)
                self._send(rank, {**settings, "device": device_of(settings["device"], rank)})
        except OSError as error:
            self.close()
            raise EngineDeadError(f"the other ranks could not be started: {error}") from error

    @property
    def pids(self) -> list[int]:
        """The processes, from rank 1 on."""
        return [process.pid for process in self._members.processes]

    def await_loaded(self) -> None:
        """Returns when all have loaded their part.

        Raises:
            ModelLoadError, EngineDeadError: one of them has not, and why.
        """
        self._await("loaded")

    def connect(self, device: torch.device) -> None:
        """Joins all ranks, which have loaded, and watches over them from now on."""
        for rank in range(1, self.group.size):
            self._send(rank, {"do": "connect"})
        self.group.connect(self._members.folder, device)
        arguments = (self._members, self.group, self.fate)
        self._members.is_watched = True
        threading.Thread(target=_watch, args=arguments, name="cbrs-ranks", daemon=True).start()

    def make_runners(self, settings: dict[str, Any]) -> None:
        """Has the others make their runners, beside this one; `await_ready` waits for them.

        `settings` are the arguments of `make_runner`, as JSON.
        """
        for rank in range(1, self.group.size):
            self._send(rank, {"do": "make_runner", **settings})

    def await_ready(self) -> None:
        """Returns when all wait for their first step.

        Raises:
            ModelLoadError, EngineDeadError: one of them has failed, and why.
        """
        self._await("ready")

    def on_death(self, function: Callable[[], object]) -> None:
        """Has `function` called in a thread when a rank ends, after `fate` says so."""
        self._members.on_death = function
        if self.fate.error is not None:  # just now
            function()

    def send(self, message: memoryview) -> None:
        """Sends one step to all.

        Raises:
            EngineDeadError: a rank has ended.
        """
        if self.fate.error is not None:
            raise self.fate.error
        for connection in self._members.connections:
            connection.sendall(message)

    def lost(self, error: BaseException) -> EngineDeadError:
        """Returns why a step that was sent has failed here with `error`; nothing can go on.

        The ranks would never agree again on what they exchange next, so all of them end.
        """
        deadline = time.monotonic() + _NOTICE_WAIT_S
        while self.fate.error is None and time.monotonic() < deadline:
            if self._members.is_complete:
                time.sleep(0.005)
            else:
                self.fate.end(self._members.death())
        kind = type(error).__name__
        self.fate.end(f"rank 0 of {self.group.size} failed in a step: {kind}: {error}")
        self._members.kill()
        return self.fate.error or EngineDeadError(str(error))

    def close(self) -> None:
        """Ends the processes and removes the folder; calling it twice does no harm."""
        self._end()

    def _send(self, rank: int, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever waits for its answer learns why
            send_json(self._members.connections[rank - 1], value)

    def _await(self, answer: str) -> None:
        for rank in range(1, self.group.size):
            try:
                said = self._members.read(rank)
            except EOFError:
                # Whoever watches may have read it.
                said = {"detail": self.fate.error or self._members.how_it_ended(rank)}
            if said.get("says") != answer:
                raise _refusal(rank, self.group.size, said)


class _Members:
    """The processes and what leads to them; nothing in here refers to an engine."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[socket.socket] = []
        self.on_death: Callable[[], object] = bool
        self._reading: list[threading.Lock] = []
        self._lifelines: list[int] = []
        self._pid = os.getpid()
        self.is_ending = False
        self.is_watched = False
        self._telling = threading.Lock()
        self._told: str | None = None
        self.wake, self.woken = socket.socketpair()

    @property
    def is_complete(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def start(self, rank: int, size: int) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        self.connections.append(ours)
        self._reading.append(threading.Lock())
        self._lifelines.append(writing)
        numbers = (rank, size, theirs.fileno(), reading, os.getpid())
        command = [sys.executable, "-P", "-m", "cbrs.parallel.worker"]
        try:
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, numbers), self.folder],
                    env=_environment(),
                    pass_fds=(theirs.fileno(), reading),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # A Ctrl-C in a terminal is for rank 0, which ends the others if it ends.
                    process_group=0,
                )
            )
        finally:
            theirs.close()
            os.close(reading)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def read(self, rank: int, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for what a rank says; a whole message goes to one thread."""
        with self._reading[rank - 1]:
            connection = self.connections[rank - 1]
            if timeout_s is not None:
                connection.settimeout(timeout_s)
            return receive_json(connection)

    def how_it_ended(self, rank: int) -> str:
        """Waits for a process whose connection has ended, and returns what there is to say."""
        process = self.processes[rank - 1]
        try:
            code = process.wait(_NOTICE_WAIT_S)
        except subprocess.TimeoutExpired:
            return "its connection ended"
        if code < 0:
            return f"its process {process.pid} ended with {signal.Signals(-code).name}"
        return f"its process {process.pid} ended with code {code}"

    def death(self) -> str:
        """Returns what there is to say about the rank that ended first; one has."""
        with self._telling:
            if self._told is None:
                codes = [process.poll() for process in self.processes]
                # The others end by themselves when they lose one: that one was killed, if any was.
                ended = [i for i, code in enumerate(codes, 1) if code is not None]
                killed = [i for i in ended if (codes[i - 1] or 0) < 0]
                rank = (killed or ended or [1])[0]
                said: dict[str, Any] = {}
                with contextlib.suppress(EOFError, OSError, ValueError):
                    said = self.read(rank, _NOTICE_WAIT_S)
                detail = said.get("detail") or self.how_it_ended(rank)
                size = len(self.processes) + 1
                self._told = f"rank {rank} of {size} is lost: {detail}"
            return self._told

    def end(self) -> None:
        """Ends all; nothing in a forked child, whose parent goes on with them."""
        if os.getpid() != self._pid:
            return
        self.is_ending = True
        for end in (self.wake, *self.connections):
            end.close()
        if not self.is_watched:
            self.woken.close()
        for lifeline in self._lifelines:
            os.close(lifeline)
        self._lifelines.clear()
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def device_of(device: str, rank: int) -> str:
    """Returns the device of a rank: the CPU, or the GPU of its number."""
    return device if device == "cpu" else f"{device}:{rank}"


def _watch(members: _Members, group: Group, fate: Fate) -> None:
    """Waits for the first end of a process, or of the engine."""
    pidfds = []
    try:
        with selectors.DefaultSelector() as selector:
            for process in members.processes:
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(os.pidfd_open(process.pid))
                    selector.register(pidfds[-1], selectors.EVENT_READ)
            if len(pidfds) == len(members.processes):
                selector.register(members.woken, selectors.EVENT_READ)
                selector.select()
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
        members.woken.close()
    if members.is_ending:
        return
    fate.end(members.death())
    logger.critical("%s", fate.error)
    members.kill()
    group.abort()
    members.on_death()


def _refusal(rank: int, size: int, said: dict[str, Any]) -> CbrsError:
    detail = f"rank {rank} of {size} did not start: {said.get('detail')}"
    if said.get("kind") != ModelLoadError.__name__:
        return EngineDeadError(detail)
    error = load_error(str(said.get("file")), str(said.get("field")), "")
    error.args = (detail,)
    return error


def _environment() -> dict[str, str]:
    """Returns this process's, with which the others find the same package, and only loopback."""
    package = str(Path(__file__).resolve().parent.parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**os.environ, **loopback, "PYTHONPATH": os.pathsep.join(paths)}
