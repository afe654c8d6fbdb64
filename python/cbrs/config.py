"""`EngineConfig`: every engine and model setting, its default, and its only check."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "int8"]
Quantization = Literal["int8"]

DEFAULT_MODEL = "smollm2-135m-instruct"

POLICY_FIELDS = (
    "admission",
    "victim",
    "target_itl_ms",
    "max_queue_s",
    "classes",
    "tenants",
    "default_tenant",
)
"""Settings of the engine that are keys of the policy."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")


def check_quantization(quantization: str | None) -> None:
    """Raises `ValueError` for anything but None and the known names."""
    if quantization not in (None, "int8"):
        raise ValueError(
            f"quantization is {quantization!r}; give 'int8', or leave it out to keep the weights"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; `LLM` takes them as keyword arguments.

    `None` means "decided when the model is known"; `LLM.config` tells what was decided. Limits of
    the scheduler are checked by the core.
    """

    model: str = DEFAULT_MODEL
    """A known name, `null`, a folder, a `.gguf` file, or (with the extra `hub`) a hub id."""
    tokenizer: str | os.PathLike[str] | None = None
    """Tokenizer and chat template to use instead of the model's: a known name, a folder with
    `tokenizer.json`, or a `.gguf` file. Its vocabulary must fit the model's."""
    dtype: Dtype = "auto"
    """Of the weights. `auto` on the CPU: float32 if the checkpoint is stored in float32,
    else bfloat16 (also for float16 and GGUF's quantized types); on a GPU: bfloat16 where that
    computes in it, else float32."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Of keys and values; `auto` is that of the weights. `int8` keeps whole numbers with a factor
    for each head of a token: about half of the memory of bfloat16, for a small loss."""
    quantization: Quantization | None = None
    """`int8`: matrices and embeddings in 8 bits with a scale per 32 inputs, whatever the
    checkpoint stores; products round their inputs likewise. CPU only. None = in `dtype`."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto` is the first CUDA device if there is one."""
    num_threads: int | None = None
    """CPU threads for the model; None = one per core that this process may use."""
    tensor_parallel_size: int = 1
    """GPUs that share the model, with a process for each; on the CPU, where it is for tests,
    processes. Must divide the attention heads and the intermediate size, and divide or be a
    multiple of the key and value heads."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks in the pool; None = as many as `kv_cache_bytes` holds."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool, with tensor parallelism of each process; None = a quarter of the free
    memory, at most 4 GiB, and no more than `max_num_seqs` can use."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None = 512 for a model on the CPU, where prompts are computed no
    faster in larger steps and each of them holds up everybody who decodes, else 2,048; never less
    than two tokens for each of `max_num_seqs`."""
    max_prefill_chunk_tokens: int | None = None
    """Prompt tokens of one sequence in one step; None = the token budget."""
    max_model_len: int | None = None
    """Prompt plus output at most; None = the model's context. Lowered to what the pool holds."""
    enable_prefix_caching: bool = True
    """Reuse computed KV blocks between prompts that begin alike."""
    policy: str | os.PathLike[str] | dict[str, Any] = "fcfs"
    """Who runs next: `fair` (classes, weighted tenants, deadlines), `fcfs` (order of arrival within
    each class), `static` (each batch runs until its slowest member ends), the path of a `.toml`
    file, or a dict with the same keys. The settings below go before what it says."""
    admission: str | None = None
    """Memory that must be free before a request starts: `prompt`, `estimated` or `guaranteed`;
    None, here and below = as the policy says."""
    victim: str | None = None
    """Who gives up its memory if others need it: `newest`, or `cost` (the least to compute
    again)."""
    target_itl_ms: float | None = None
    """Longest time between two tokens, in milliseconds, of requests for which nothing else says
    it."""
    max_queue_s: float | None = None
    """Bound on the predicted seconds of waiting; one more request is refused."""
    classes: Mapping[str, Mapping[str, Any]] | None = None
    """Defaults and limits of `interactive`, `standard` and `batch` requests."""
    tenants: Mapping[str, Mapping[str, Any]] | None = None
    """Weight, defaults and limits of tenants by name."""
    default_tenant: Mapping[str, Any] | None = None
    """The same for tenants without an entry."""
    queue_capacity: int = 65_536
    """Requests that may wait in the core."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait in the core; None = no bound but the requests'."""
    seed: int = 0
    """Source of the random numbers of requests without a seed."""

    def __post_init__(self) -> None:
        """Checks what the core does not check.

        Raises:
            ValueError: names the field and the fix.
        """
        if not self.model:
            raise ValueError(f"model is empty; give a name or a path, e.g. {DEFAULT_MODEL!r}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(_DTYPES)}")
        if self.kv_cache_dtype not in _KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r};"
                f" choose one of {', '.join(_KV_CACHE_DTYPES)}"
            )
        check_quantization(self.quantization)
        for name in (
            *("num_threads", "tensor_parallel_size", "block_size"),
            *("num_blocks", "kv_cache_bytes", "max_model_len"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a number >= 1")
        if self.tensor_parallel_size > 1 and self.quantization is not None:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but weights in"
                f" {self.quantization} are not divided; leave out one of the two"
            )
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("num_blocks and kv_cache_bytes both set the pool; give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfig(EngineConfig):
    """An `EngineConfig` in which every field is decided: what is in effect.

    `policy` is the name of the built-in that the policy started from.
    """

    num_threads: int
    num_blocks: int
    kv_cache_bytes: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int
    max_model_len: int
    policy: str
    policy_settings: dict[str, Any] = field(default_factory=dict)
    """The whole policy in effect, as `policy=` takes it; of `static` only its name."""

    def __post_init__(self) -> None:
        """Checks nothing: the fields were decided from a checked `EngineConfig`."""
