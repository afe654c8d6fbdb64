"""tokenspeed-scheduler: a C++ scheduler with one event for each token."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tokenspeed_scheduler import (
    AttnKind,
    CacheGroupConfig,
    ExecutionEvent,
    ForwardEvent,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
)

from .harness import Limits

GROUP_ID = "full"
TOKENS = [7]


class Peer:
    version = version("tokenspeed-scheduler")
    measured = (
        "next_execution_plan() with its lists and block table arrays read, and advance() with one "
        "event a token"
    )

    def __init__(self, limits: Limits) -> None:
        config = SchedulerConfig()
        config.max_batch_size = limits.max_num_seqs
        config.max_scheduled_tokens = limits.max_num_batched_tokens
        config.num_device_pages = limits.num_blocks
        config.prefix_granularity = limits.block_size
        config.disable_l2_cache = True
        config.num_snapshot_pages = 1  # never retracts
        config.enable_mixed_prefill_decode = True
        config.cache_groups = [
            CacheGroupConfig(GROUP_ID, limits.block_size, limits.num_blocks, AttnKind.Full)
        ]
        self.scheduler = Scheduler(config)
        self.batches: list[dict[str, Any]] = []
        self.left: dict[str, int] = {}
        self.sampled: list[tuple[str, list[int]]] = []
        self.next_id = 0

    def prepare(self, prompt: list[int]) -> list[int]:
        return prompt

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        spec = RequestSpec()
        spec.request_id = str(self.next_id)
        spec.tokens = prompt
        spec.max_new_tokens = max_tokens
        self.scheduler.submit_requests([spec])
        self.left[spec.request_id] = max_tokens
        self.next_id += 1

    def schedule(self) -> None:
        plan = self.scheduler.next_execution_plan()
        self.batches = [
            {
                "request_ids": batch.request_ids,
                "request_pool_indices": batch.request_pool_indices,
                "input_ids": batch.input_ids,
                "input_lengths": batch.input_lengths,
                "extend_prefix_lens": batch.extend_prefix_lens,
                "prefill_lengths": batch.prefill_lengths,
                "decode_input_ids": batch.decode_input_ids,
                "block_tables": batch.block_tables_arrays(),
                "num_extends": batch.num_extends(),
            }
            for batch in plan.forward
        ]

    def sample(self) -> None:
        """A token for each sequence, but for prompts of which a part is left."""
        self.sampled = []
        for batch in self.batches:
            for index, request in enumerate(batch["request_ids"]):
                is_partial = False
                if index < batch["num_extends"]:
                    computed = batch["extend_prefix_lens"][index] + batch["input_lengths"][index]
                    is_partial = computed < batch["prefill_lengths"][index]
                self.sampled.append((request, [] if is_partial else TOKENS))

    def update(self) -> tuple[int, int]:
        event = ExecutionEvent()
        num_tokens = num_ended = 0
        for request, tokens in self.sampled:
            result = ForwardEvent.ExtendResult()
            result.request_id = request
            result.tokens = tokens
            event.add_event(result)
            num_tokens += len(tokens)
            self.left[request] -= len(tokens)
            if self.left[request] == 0:
                end = ForwardEvent.Finish()
                end.request_id = request
                event.add_event(end)
                del self.left[request]
                num_ended += 1
        self.scheduler.advance(event)
        return num_tokens, num_ended
