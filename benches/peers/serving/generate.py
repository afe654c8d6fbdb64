"""Static batches: transformers' `generate` on as many prompts as there are clients.

All prompts have one length, so nothing is padded: the best case of a static batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from .harness import Event, Settings, SteppedPeer


class Clock(BaseStreamer):
    """Notes when each step's tokens came; the first call is the prompts."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left."""


class Peer(SteppedPeer):
    version = transformers.__version__
    measured = "generate() on whole batches in process, attention sdpa, dynamic cache"

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        ).eval()
        self._waiting: list[tuple[int, list[int], int]] = []

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        self._waiting.append((number, prompt, num_output_tokens))

    def step(self) -> Iterator[Event]:
        batch, self._waiting = self._waiting, []
        num_output_tokens = batch[0][2]
        ids = torch.tensor([prompt for _, prompt, _ in batch])
        clock = Clock()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_output_tokens,
                max_new_tokens=num_output_tokens,
                pad_token_id=0,
                streamer=clock,
            )
        num_new = output.shape[1] - ids.shape[1]
        for step, time_s in enumerate(clock.times_s[1:]):
            for number, _, _ in batch:
                yield number, time_s, 1, step == num_new - 1
