"""The ranks of one model as they exchange tensors, over `torch.distributed`.

The process groups of torch are made here by themselves, without its global one: several engines may
live in one process.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE = "ranks"
"""Name of the file through which ranks find each other."""

_JOIN_TIMEOUT_S = 60.0
"""Time for all ranks, which are ready then, to find each other."""

_EXCHANGE_TIMEOUT_S = 600.0
"""A rank that takes longer for its part of a step counts as lost. Death is noticed otherwise."""


class Group:
    """One rank's end of the exchanges; every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        """Rank `rank` of `size`, which `connect` joins with the others."""
        self.rank = rank
        self.size = size
        self._group: Any = None

    def connect(self, folder: str | os.PathLike[str], device: torch.device) -> None:
        """Finds the other ranks through a file in `folder`; waits for all of them.

        Over the loopback interface only: gloo for the CPU, NCCL for CUDA, which moves tensors from
        GPU to GPU and needs the interface to find its peers.

        Raises:
            RuntimeError: not all came within a minute.
        """
        distributed: Any = _distributed()
        store = distributed.FileStore(str(Path(folder) / STORE), self.size)
        store.set_timeout(timedelta(seconds=_JOIN_TIMEOUT_S))
        timeout = timedelta(seconds=_EXCHANGE_TIMEOUT_S)
        if device.type == "cpu":
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = timeout
            self._group = distributed.ProcessGroupGloo(store, self.rank, self.size, options)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            torch.cuda.set_device(device)
            with _environment("NCCL_SOCKET_IFNAME", "lo"):
                self._group = distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
                # It connects with its first exchange.
                self.sum(torch.zeros(1, device=device))
                torch.cuda.synchronize(device)

    def sum(self, tensor: Tensor) -> None:
        """Replaces `tensor`, of one shape and type on all ranks, by the sum of all of them."""
        self._connected().allreduce([tensor]).wait()

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Returns all ranks' `tensor`, of one shape and type, in order; None but on rank 0."""
        group, tensor = self._connected(), tensor.contiguous()
        options: Any = _distributed().GatherOptions()
        options.rootRank = 0
        if self.rank > 0:
            group.gather([], [tensor], options).wait()
            return None
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        group.gather([gathered], [tensor], options).wait()
        return gathered

    def abort(self) -> None:
        """Ends exchanges that are under way with an error, from any thread; there are no more.

        The death of a peer ends those of gloo by itself, since its connections break.
        """
        group = self._group
        if group is not None and group.name() == "nccl":
            group.abort()

    def _connected(self) -> Any:
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        return self._group


def _distributed() -> Any:
    import torch.distributed as distributed

    return distributed


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable for the time of the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
