"""The meaning of every kernel in plain PyTorch, by the same names and arguments; any device.

These are what the fast kernels are tested against, so nothing here is clever. Each part has a
module in `twins/`; this one gathers their names.
"""

from .twins.attention import paged_attention
from .twins.kv_cache import (
    FP8,
    QUANTIZED,
    SCALE_BYTES,
    dequantize,
    fill_quantized,
    quantize,
    write_kv,
)
from .twins.pointwise import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    rms_norm,
    silu_and_mul,
)
from .twins.quantized_linear import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
    quantized_linear,
)
from .twins.rotary import rotary_kv_write
from .twins.row_state import RowState, change_logits, record_tokens
from .twins.sampling import SamplingParameters, logprobs, sample

__all__ = [
    "FP8",
    "QUANTIZED",
    "SCALE_BYTES",
    "QuantizedWeight",
    "RowState",
    "SamplingParameters",
    "change_logits",
    "dequantize",
    "dequantize_weight",
    "fill_quantized",
    "fused_add_rms_norm",
    "gelu_tanh_and_mul",
    "logprobs",
    "paged_attention",
    "quantize",
    "quantize_weight",
    "quantized_linear",
    "record_tokens",
    "rms_norm",
    "rotary_kv_write",
    "sample",
    "silu_and_mul",
    "write_kv",
]
