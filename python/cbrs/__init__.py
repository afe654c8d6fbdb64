"""Continuous batching for decoder language models.

Three ways in: `Scheduler`, the scheduler alone for an engine of your own (needs numpy only); `LLM`
and `AsyncLLM`, the Python engine (they need the extra `engine`); and the command `cbrs`.

Everything is loaded on first use: `import cbrs` loads neither numpy nor torch.
"""

from importlib import import_module

# As `typing.TYPE_CHECKING`, without `typing`, which would be most of the import time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cbrs import errors
    from cbrs._core import (
        Batch,
        Scheduler,
        SchedulerConfig,
        StepOutput,
        StepResult,
        __version__,
    )
    from cbrs.async_llm import AsyncLLM
    from cbrs.config import EngineConfig
    from cbrs.llm import LLM
    from cbrs.logprobs import Logprob
    from cbrs.output_stream import OutputStream
    from cbrs.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from cbrs.sampling_params import SamplingParams
    from cbrs.scoring import Score
    from cbrs.serving import serve

__all__ = [
    "LLM",
    "AsyncLLM",
    "Batch",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "OutputStream",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "Score",
    "StepOutput",
    "StepResult",
    "__version__",
    "errors",
    "serve",
]

_MODULE_OF = {
    "LLM": "cbrs.llm",
    "AsyncLLM": "cbrs.async_llm",
    "Batch": "cbrs._core",
    "CompletionOutput": "cbrs.outputs",
    "EngineConfig": "cbrs.config",
    "Logprob": "cbrs.logprobs",
    "OutputStream": "cbrs.output_stream",
    "RequestMetrics": "cbrs.outputs",
    "RequestOutput": "cbrs.outputs",
    "SamplingParams": "cbrs.sampling_params",
    "Scheduler": "cbrs._core",
    "SchedulerConfig": "cbrs._core",
    "Score": "cbrs.scoring",
    "serve": "cbrs.serving",
    "StepOutput": "cbrs._core",
    "StepResult": "cbrs._core",
    "__version__": "cbrs._core",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("cbrs.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cbrs' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
