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

__all__ = [
    "FP8",
    "QUANTIZED",
    "SCALE_BYTES",
    "dequantize",
    "fill_quantized",
    "paged_attention",
    "quantize",
    "write_kv",
]
