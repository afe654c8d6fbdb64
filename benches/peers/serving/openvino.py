"""openvino-genai: its continuous batching pipeline, from a GGUF file or a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_genai import GenerationConfig, SchedulerConfig

from .harness import Event, Settings, SteppedPeer

CACHE_GIB = 2


class Peer(SteppedPeer):
    version = openvino_genai.__version__.partition("-")[0]

    def __init__(self, settings: Settings) -> None:
        limits = SchedulerConfig()
        limits.cache_size = CACHE_GIB
        limits.max_num_seqs = settings.max_num_seqs
        limits.max_num_batched_tokens = 2048
        limits.enable_prefix_caching = False
        # In bfloat16 it is left to choose, as by default: it knows where that is fast.
        precision = {"INFERENCE_PRECISION_HINT": "f32"} if settings.dtype == "float32" else {}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.model,
            limits,
            "CPU",
            {"INFERENCE_NUM_THREADS": settings.num_threads, **precision},
        )
        chosen = "float32" if precision else "its own choice"
        self.measured = (
            f"ContinuousBatchingPipeline.step() in process; precision: {chosen} (KV cache: its "
            f"default), cache {CACHE_GIB} GiB, at most 2,048 tokens a step, prefix cache off"
        )
        self._handles: dict[int, Any] = {}
        self._num_submitted = 0

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        config = GenerationConfig()
        config.max_new_tokens = num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_submitted += 1
        self._handles[number] = self._pipeline.add_request(
            self._num_submitted, openvino.Tensor(np.array([prompt], dtype=np.int64)), config
        )

    def step(self) -> Iterator[Event]:
        self._pipeline.step()
        now_s = time.perf_counter()
        for number, handle in list(self._handles.items()):
            if handle.can_read():
                (output,) = handle.read().values()
                has_ended = output.finish_reason.name != "NONE"
                if has_ended:
                    del self._handles[number]
                yield number, now_s, len(output.generated_ids), has_ended
