"""transformers' continuous batching: its batch processor, without the model's forward pass."""

from __future__ import annotations

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

from .harness import Limits

TOKEN = 7


class Peer:
    version = transformers.__version__
    measured = (
        "prepare_next_batch() and update_batch(): scheduling and its tensors, on the CPU; declared "
        "as flash attention, so that no dense mask is built"
    )

    def __init__(self, limits: Limits) -> None:
        torch.set_num_threads(1)
        # As its own loop runs; this process does nothing else.
        torch.inference_mode().__enter__()
        config = LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=limits.vocab_size,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        # Never run, so it need not be installed.
        model.config._attn_implementation = "flash_attention_2"
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=limits.block_size,
                num_blocks=limits.num_blocks,
                max_batch_tokens=limits.max_num_batched_tokens,
                max_requests_per_batch=limits.max_num_seqs,
                use_async_batching=False,
                use_cuda_graph=False,
            ),
        )
        # Taken away for want of CUDA; it lets decodes fill block tables instead of token indices.
        blocks = limits.max_model_len // limits.block_size + 1
        manager.continuous_batching_config.max_blocks_per_request = blocks
        self.manager = manager
        self.processor = manager._create_batch_processor()
        self.is_running = False

    def prepare(self, prompt: list[int]) -> list[int]:
        return prompt

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self.manager.add_request(prompt, max_new_tokens=max_tokens)

    def schedule(self) -> None:
        self.is_running = self.processor.prepare_next_batch()

    def sample(self) -> None:
        tensors = self.processor.inputs_and_outputs
        self.batch = tensors.requests_in_batch if self.is_running else []
        tensors.output_ids[0, : len(self.batch)] = TOKEN
        self.num_tokens = sum(state.has_new_token for state in self.batch)

    def update(self) -> tuple[int, int]:
        num_active = len(self.processor.scheduler.active_requests)
        if self.is_running:
            self.processor.update_batch()
        return self.num_tokens, num_active - len(self.processor.scheduler.active_requests)
