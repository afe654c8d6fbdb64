"""vLLM's V1 scheduler, synchronous, without workers."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from pathlib import Path

# Before vllm is imported: nothing but results on stdout, and nothing sent anywhere.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .harness import Limits

TOKENS = [7]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "torch_dtype": "bfloat16",
}


def model_folder(limits: Limits) -> str:
    """A folder that describes a model as small as possible; it has no weights and is never run."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    description = {**MODEL, "vocab_size": limits.vocab_size, "max_position_embeddings": 1 << 20}
    Path(folder.name, "config.json").write_text(json.dumps(description), encoding="utf-8")
    return folder.name


class Peer:
    version = vllm.__version__
    measured = (
        "schedule() and update_from_output(), synchronous: its output objects, but no arrays for "
        "the workers; prompts are hashed at submission (sha256, its default)"
    )

    def __init__(self, limits: Limits) -> None:
        scheduler_config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        model_config = ModelConfig(
            model=model_folder(limits),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=limits.max_model_len,
        )
        cache_config = CacheConfig(block_size=limits.block_size, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = limits.num_blocks
        config = VllmConfig(
            scheduler_config=scheduler_config,
            model_config=model_config,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(
            block_size=limits.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=limits.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=limits.block_size,
            log_stats=False,
        )
        hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(limits.block_size, hash_function)
        self.next_id = 0

    def prepare(self, prompt: list[int]) -> list[int]:
        return prompt

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        request = Request(
            request_id=str(self.next_id),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        self.next_id += 1

    def schedule(self) -> None:
        self.plan = self.scheduler.schedule()

    def sample(self) -> None:
        """A token for each request whose prompt is complete after this step."""
        requests = self.scheduler.requests
        names = list(self.plan.num_scheduled_tokens)
        sampled = [
            TOKENS if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in names
        ]
        self.output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def update(self) -> tuple[int, int]:
        outputs = self.scheduler.update_from_output(self.plan, self.output)
        events = [event for client in outputs.values() for event in client.outputs]
        num_tokens = sum(len(event.new_token_ids) for event in events)
        return num_tokens, sum(event.finish_reason is not None for event in events)
