"""vLLM on the CPU: its engine, stepped in process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

# Read when it is imported: the engine is to run in this process, and to tell nobody of it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from .harness import Event, Settings, SteppedPeer


def dtype_of(settings: Settings) -> str:
    """The type to run in: without bfloat16 instructions its products in bfloat16 have no kernel."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    has_bfloat16 = "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags
    return settings.dtype if has_bfloat16 else "float32"


class Peer(SteppedPeer):
    version = vllm.__version__

    def __init__(self, settings: Settings) -> None:
        dtype = dtype_of(settings)
        self.measured = (
            f"LLMEngine.step() in process, {dtype}, without detokenizing; prefix cache off"
        )
        cores = sorted(os.sched_getaffinity(0))[: settings.num_threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings.model,
                dtype=dtype,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        self._numbers: dict[str, int] = {}

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        name = f"{len(self._numbers)}"
        self._numbers[name] = number
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> Iterator[Event]:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            # What was given as a name may come back with something appended.
            number = self._numbers[output.request_id.partition("-")[0]]
            yield number, now_s, len(output.outputs[0].token_ids), output.finished
