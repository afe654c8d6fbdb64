"""How rows of `tables/ops.json` are compiled ahead of time: signature and constants by kernel.

The `example` of a row says what it is built for, where there is a choice: `width`, `head_dim`,
`cache` ("bfloat16", "int8", "fp8"), `bits`, `group_size`, `num_tokens`, `gelu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton.language as tl

from . import logprobs, pointwise, quantized_linear, rotary, row_state, sampling
from .launch import Example, Row
from .select import CAPACITY

Build = tuple[Any, dict[str, str], dict[str, Any]]
"""A Triton function, the types of those arguments that are not int32, and constants."""

_CACHES = {"bfloat16": ("*bf16", 0), "int8": ("*i8", 1), "fp8": ("*fp8e4nv", 2)}


def _norm(example: Mapping[str, Any]) -> Build:
    types = {"out_ptr": "*bf16", "hidden_ptr": "*fp32", "weight_ptr": "*fp32", "eps": "fp32"}
    return pointwise.rms_norm_kernel, types, {"BLOCK": example["width"]}


def _add_norm(example: Mapping[str, Any]) -> Build:
    types = {"out_ptr": "*bf16", "residual_ptr": "*fp32", "added_ptr": "*bf16", "eps": "fp32"}
    types |= {"weight_ptr": "*fp32", "added_weight_ptr": "*fp32"}
    constants = {"BLOCK": example["width"], "HAS_ADDED_WEIGHT": example["width"] <= 8192}
    return pointwise.fused_add_rms_norm_kernel, types, constants


def _gated(example: Mapping[str, Any]) -> Build:
    types = {"out_ptr": "*bf16", "gate_up_ptr": "*bf16"}
    return pointwise.gated_kernel, types, {"IS_GELU": bool(example["gelu"])}


def _rotary(example: Mapping[str, Any]) -> Build:
    cache, quantization = _CACHES[example["cache"]]
    types = dict.fromkeys(("query_out_ptr", "qkv_ptr", "key_scale_ptr", "value_scale_ptr"), "*bf16")
    types |= dict.fromkeys(("key_ptr", "value_ptr"), cache)
    types |= dict.fromkeys(("frequencies_ptr", "query_norm_ptr", "key_norm_ptr"), "*fp32")
    types |= {"slots_ptr": "*i64", "magnitude": "fp32", "eps": "fp32"}
    constants = {
        "HAS_ROTARY": True,
        "HAS_NORM": True,
        "QUANTIZATION": quantization,
        "BLOCK_DIM": example["head_dim"],
    }
    return rotary.rotary_kv_write_kernel, types, constants


def _quantized(example: Mapping[str, Any]) -> Build:
    types = {"out_ptr": "*fp32", "input_ptr": "*bf16", "scale_ptr": "*bf16", "bias_ptr": "*bf16"}
    types["number_ptr"] = "*i8" if example["bits"] == 8 else "*u8"
    constants = {
        "BITS": example["bits"],
        "GROUP": example["group_size"],
        "HAS_BIAS": True,
        "DOT_TYPE": tl.bfloat16,
        "BLOCK_TOKENS": example["num_tokens"],
    }
    return quantized_linear.quantized_linear_kernel, types, constants


def _add_splits(example: Mapping[str, Any]) -> Build:
    types = {"out_ptr": "*bf16", "partial_ptr": "*fp32", "bias_ptr": "*bf16"}
    return quantized_linear.add_splits_kernel, types, {"HAS_BIAS": True}


def _change(example: Mapping[str, Any]) -> Build:
    starts = ("bias_start", "seen_start", "banned_start", "words_start", "word_start")
    types = {f"{name}_ptr": "*i64" for name in (*starts, "output_start")}
    floats = ("scores", "logits", "presence", "frequency", "repetition", "bias_values")
    types |= {f"{name}_ptr": "*fp32" for name in floats}
    return row_state.change_logits_kernel, types, {}


def _record(example: Mapping[str, Any]) -> Build:
    types = {"seen_start_ptr": "*i64", "output_start_ptr": "*i64"}
    return row_state.record_tokens_kernel, types, {}


def _sample(example: Mapping[str, Any]) -> Build:
    types = {f"{name}_ptr": "*fp32" for name in ("logits", "temperature", "top_p", "min_p")}
    types["seeds_ptr"] = "*i64"
    return sampling.sample_kernel, types, {"HAS_UNUSABLE": True, "CAPACITY": CAPACITY}


def _logprobs(example: Mapping[str, Any]) -> Build:
    types = {"values_ptr": "*fp32", "logits_ptr": "*fp32"}
    return logprobs.logprobs_kernel, types, {"CAPACITY": CAPACITY}


_KERNELS: dict[str, Callable[[Mapping[str, Any]], Build]] = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _add_norm,
    "gated": _gated,
    "rotary_kv_write": _rotary,
    "quantized_linear": _quantized,
    "add_splits": _add_splits,
    "change_logits": _change,
    "record_tokens": _record,
    "sample": _sample,
    "logprobs": _logprobs,
}


def _example(row: Row) -> Example:
    function, types, constants = _KERNELS[row.kernel](row.example)
    constants |= row.launch.constants
    signature = {
        name: types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
        if name not in constants
    }
    divisible = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return Example(function, signature, constants, divisible)


EXAMPLES = dict.fromkeys(_KERNELS, _example)
"""What `cbrs.kernels.compile` builds rows of the launch table as."""
