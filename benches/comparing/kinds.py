"""Who can be compared: the engines, and the forms of the weights that each of them runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """The file in `peers/serving/`, what it is called in table and plot, and how it runs."""

    module: str
    label: str
    needs_cbrs: bool = False
    is_over_http: bool = False
    gguf: str | None = None
    """The GGUF file of a peer that does not read folders."""
    is_quantized: bool = False
    """Whether its weights have fewer than 16 bits."""
    quantization: str | None = None
    """The setting of cbrs."""


OURS, OURS_HTTP = "cbrs", "cbrs_http"
INT8, INT8_HTTP = "cbrs_int8", "cbrs_int8_http"
KINDS = {
    OURS: Kind("ours", "cbrs", needs_cbrs=True),
    OURS_HTTP: Kind("ours_http", "cbrs over HTTP", needs_cbrs=True, is_over_http=True),
    INT8: Kind("ours", "cbrs int8", True, is_quantized=True, quantization="int8"),
    INT8_HTTP: Kind(
        "ours_http", "cbrs int8 over HTTP", True, True, is_quantized=True, quantization="int8"
    ),
    "llama": Kind("llama_cpp", "llama.cpp", True, True, "model-bf16.gguf"),
    "llama_q8": Kind("llama_cpp", "llama.cpp Q8_0", True, True, "model-q8_0.gguf", True),
    "llama_q4": Kind("llama_cpp", "llama.cpp Q4_1", True, True, "model-q4_1.gguf", True),
    "openvino": Kind("openvino", "OpenVINO GenAI", gguf="model-f16.gguf"),
    "openvino_q4": Kind(
        "openvino", "OpenVINO GenAI Q4_1", gguf="model-q4_1.gguf", is_quantized=True
    ),
    "vllm": Kind("vllm", "vLLM"),
    "transformers": Kind("transformers_cb", "transformers CB"),
    "generate": Kind("generate", "generate(), static"),
    "scripted": Kind("scripted", "sleep"),
}
OVER_HTTP = frozenset(name for name, kind in KINDS.items() if kind.is_over_http)
QUANTIZED = frozenset(name for name, kind in KINDS.items() if kind.is_quantized)
LABELS = {name: kind.label for name, kind in KINDS.items()}
HTTP_TWINS = {OURS: OURS_HTTP, INT8: INT8_HTTP}
OF_CBRS = frozenset({*HTTP_TWINS, *HTTP_TWINS.values()})
DEFAULT = [
    *(OURS, INT8, "llama", "llama_q8", "llama_q4", "openvino", "openvino_q4", "vllm"),
    *("transformers", "generate"),
]


def twin_for(mode: str, peer: str) -> str:
    """The contender of cbrs in a mode (`cbrs`, `cbrs_int8`) that is measured as a peer is."""
    return HTTP_TWINS[mode] if peer in OVER_HTTP else mode
