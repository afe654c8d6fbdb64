"""From the settings of an engine to the ranks of its model, and to the runner of all of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cbrs.loading import choose_device, resolve
from cbrs.parallel.ranks import Ranks, device_of
from cbrs.parallel.runner import ParallelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbrs.config import EffectiveConfig, EngineConfig
    from cbrs.runner.model_runner import Runner, TokenSampler

    Own = tuple[Runner, TokenSampler]


def start_ranks(config: EngineConfig) -> tuple[EngineConfig, Ranks]:
    """Starts the other ranks, which begin to load, and returns the settings of this one.

    Raises:
        ValueError: a device that is not one for each rank.
        ModelLoadError: there is no such model.
        EngineDeadError: a process cannot be started.
    """
    size = config.tensor_parallel_size
    device = _device(config.device, size)
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // size)
    config = replace(config, device=device_of(device, 0), num_threads=threads)
    path = resolve(config.model)  # fetched once
    settings = {
        "name_or_path": str(path),
        "dtype": config.dtype,
        "device": device,
        "num_threads": threads,
    }
    return config, Ranks(size, settings)


def make_runners(
    ranks: Ranks, config: EngineConfig, decided: EffectiveConfig, make_own: Callable[[], Own]
) -> tuple[ParallelRunner, TokenSampler]:
    """Has all ranks make their runners at once, as `make_own` makes this one's and the sampler.

    Raises:
        ModelLoadError, EngineDeadError: another one cannot, and why.
    """
    settings = {
        "kv_cache_dtype": config.kv_cache_dtype,
        "num_blocks": decided.num_blocks,
        "block_size": decided.block_size,
        "num_threads": decided.num_threads,
    }
    ranks.make_runners(settings)
    runner, sampler = make_own()
    ranks.await_ready()
    return ParallelRunner(runner, ranks), sampler


def _device(device: str, size: int) -> str:
    """Returns "cpu" or "cuda"."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return "cpu"
    if chosen.index is not None:
        raise ValueError(
            f"device is {device!r}, but tensor_parallel_size is {size}: rank i takes GPU i;"
            " give device='cuda', and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but torch finds {torch.cuda.device_count()} CUDA"
            " devices; lower it, or let more be visible"
        )
    return "cuda"
