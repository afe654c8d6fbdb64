"""transformers' continuous batching, which runs on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

from .harness import Event, Settings, SteppedPeer

PAGE_SIZE = 256
MAX_BATCH_TOKENS = 1024
WAIT_S = 1.0


class Peer(SteppedPeer):
    version = transformers.__version__
    measured = (
        "its manager, streaming, in process; attention sdpa, pages of 256, 1,024 tokens a batch"
    )

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        ).eval()
        # One more than the pages that all sequences can fill.
        pages = settings.max_num_seqs * -(-settings.max_model_len // PAGE_SIZE) + 1
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=pages,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_requests_per_batch=settings.max_num_seqs,
                use_async_batching=False,
                use_cuda_graph=False,
            ),
        )
        with torch.inference_mode():
            self._manager.start()
        self._numbers: dict[str, int] = {}
        self._num_seen: dict[int, int] = {}

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        name = self._manager.add_request(prompt, max_new_tokens=num_output_tokens, streaming=True)
        if name is None:
            raise RuntimeError("the manager takes no more requests")
        self._numbers[name] = number
        self._num_seen[number] = 0

    def step(self) -> Iterator[Event]:
        result = self._manager.get_result(timeout=WAIT_S)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("its thread has ended")
            return
        if result.error is not None:
            raise RuntimeError(result.error)
        number = self._numbers[result.request_id]
        num_new = len(result.generated_tokens) - self._num_seen[number]
        self._num_seen[number] += num_new
        yield number, time.perf_counter(), num_new, result.is_finished()

    def close(self) -> None:
        self._manager.stop(hard_stop=True)
