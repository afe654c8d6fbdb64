"""From an `EngineConfig` to an engine: load the model, size the KV pool, join the parts."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cbrs._core import OutputProcessor, Scheduler, SchedulerConfig
from cbrs.config import POLICY_FIELDS, EffectiveConfig
from cbrs.engine import Engine
from cbrs.errors import CbrsError, is_failure
from cbrs.loading import LoadedModel, load_model
from cbrs.parallel.start import make_runners, start_ranks
from cbrs.runner.kv_cache import default_num_blocks, free_memory
from cbrs.runner.model_runner import make_runner

if TYPE_CHECKING:
    import torch

    from cbrs._core import Tokenizer
    from cbrs.config import EngineConfig
    from cbrs.parallel.ranks import Ranks
    from cbrs.runner.model_runner import Runner

logger = logging.getLogger("cbrs")

_DEFAULT_TOKEN_BUDGET = 2048
_CPU_TOKEN_BUDGET = 512
"""With the CPU's kernels a prompt takes the same time in steps of 128 to 2,048 tokens."""


def build_engine(config: EngineConfig) -> tuple[Engine, Tokenizer | None]:
    """Loads the model of `config` and returns an engine for it, and its tokenizer if it has one.

    Raises:
        ModelLoadError: names the file and what is wrong in it.
        ValueError: a setting that this model or machine cannot have.
    """
    if config.tensor_parallel_size == 1:
        return _build(config, None)
    config, ranks = start_ranks(config)
    try:
        return _build(config, ranks)
    except BaseException as error:
        ranks.close()
        death = ranks.fate.error
        if death is not None and is_failure(error) and not isinstance(error, CbrsError):
            raise death from error  # of which the other is a consequence
        raise


def _build(config: EngineConfig, ranks: Ranks | None) -> tuple[Engine, Tokenizer | None]:
    started = time.monotonic()
    logger.info("loading %s", config.model)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        num_threads=config.num_threads,
        tokenizer=config.tokenizer,
        group=None if ranks is None else ranks.group,
    )
    if ranks is not None:
        ranks.await_loaded()
        ranks.connect(loaded.device)
    decided = _decide(config, loaded)
    scheduler = Scheduler(_scheduler_config(decided, config, loaded))
    core = scheduler.config
    decided = replace(
        decided,
        max_model_len=core.max_model_len,
        policy=core.policy,
        **policy_in_force(core.policy_settings),
    )
    make_own = partial(
        make_runner,
        loaded,
        kv_dtype=loaded.kv_dtype(config.kv_cache_dtype),
        num_blocks=decided.num_blocks,
        block_size=decided.block_size,
        num_threads=decided.num_threads,
    )
    runner: Runner
    if ranks is None:
        runner, sampler = make_own()
    else:
        runner, sampler = make_runners(ranks, config, decided, make_own)
        ranks.on_death(scheduler.close)
    if decided.kv_cache_bytes > 0:
        logger.info(
            "KV pool of %d blocks x %d tokens in %s = %.1f MiB",
            decided.num_blocks,
            decided.block_size,
            decided.kv_cache_dtype,
            decided.kv_cache_bytes / 2**20,
        )
    processor = OutputProcessor(scheduler, loaded.tokenizer)
    logger.info(
        "%s is ready after %.1f s: %s on %s",
        decided.model,
        time.monotonic() - started,
        decided.dtype
        if decided.quantization is None
        else f"{decided.quantization} weights, else {decided.dtype},",
        decided.device,
    )
    return Engine(decided, scheduler, processor, runner, sampler, ranks), loaded.tokenizer


def _decide(config: EngineConfig, loaded: LoadedModel) -> EffectiveConfig:
    context = loaded.config.max_position_embeddings
    max_model_len = context if config.max_model_len is None else config.max_model_len
    if max_model_len > context:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the context of {config.model} has {context}"
        )
    kv_dtype = loaded.kv_dtype(config.kv_cache_dtype)
    block_bytes = loaded.kv_bytes_per_block(config.block_size, kv_dtype)
    # Processes on the CPU share its memory.
    sharing = config.tensor_parallel_size if loaded.device.type == "cpu" else 1
    num_blocks = _num_blocks(config, loaded, max_model_len, block_bytes, sharing)
    _check_fits(config, num_blocks * block_bytes * sharing, loaded.device)
    given = {item.name: getattr(config, item.name) for item in fields(config)}
    budget, chunk = _token_budget(config, loaded), config.max_prefill_chunk_tokens
    decided = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "num_threads": config.num_threads or len(os.sched_getaffinity(0)),
        "num_blocks": num_blocks,
        "kv_cache_bytes": num_blocks * block_bytes,
        "max_num_batched_tokens": budget,
        "max_prefill_chunk_tokens": budget if chunk is None else chunk,
        "max_model_len": max_model_len,
        "policy": "",
    }
    return EffectiveConfig(**(given | decided))


def _token_budget(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    usual = _DEFAULT_TOKEN_BUDGET if loaded.kernels is None else _CPU_TOKEN_BUDGET
    return max(usual, 2 * config.max_num_seqs)


def _num_blocks(
    config: EngineConfig, loaded: LoadedModel, max_model_len: int, block_bytes: int, sharing: int
) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is not None and block_bytes > 0:
        if config.kv_cache_bytes < block_bytes:
            raise ValueError(
                f"kv_cache_bytes is {config.kv_cache_bytes}, but one block takes {block_bytes}"
            )
        return config.kv_cache_bytes // block_bytes
    usable = config.max_num_seqs * math.ceil(max_model_len / config.block_size)
    if block_bytes == 0:
        return usable
    return min(usable, default_num_blocks(block_bytes * sharing, loaded.device))


def _check_fits(config: EngineConfig, num_bytes: int, device: torch.device) -> None:
    """Refuses a pool that the CPU's memory has no room for.

    Its pages are taken as they are written: the system would end the process in mid-service.
    """
    if device.type != "cpu" or num_bytes <= (free := free_memory(device)):
        return
    name = "kv_cache_bytes" if config.num_blocks is None else "num_blocks"
    raise ValueError(
        f"{name} is {getattr(config, name)}, a KV pool of {num_bytes} bytes, but {free} bytes of"
        " memory are free; lower it, or give kv_cache_dtype='int8'"
    )


def _scheduler_config(
    config: EffectiveConfig, given: EngineConfig, loaded: LoadedModel
) -> SchedulerConfig:
    rules = {name: getattr(given, name) for name in POLICY_FIELDS}
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        queue_capacity=config.queue_capacity,
        max_queued_tokens=config.max_queued_tokens,
        max_prefill_chunk_tokens=config.max_prefill_chunk_tokens,
        policy=given.policy,
        seed=config.seed,
        **rules,
    )


def policy_in_force(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an `EffectiveConfig` that are what the core made of the policy."""
    rules = {name: settings[name] for name in POLICY_FIELDS if name in settings}
    return {"policy_settings": settings, **rules}
