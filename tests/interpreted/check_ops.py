"""Norms, activations, rotary with KV write and quantized products against their twins."""

import math

import pytest
import torch
from interpreted.ops_kit import assert_close, poisoned

from cbrs.kernels import pointwise, quantized_linear, reference, rotary
from cbrs.kernels.launch import Device
from cbrs.models.rope import RopeScaling, Rotary, inverse_frequencies

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*FLOATS, torch.int8, reference.FP8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 111, 1536])
def test_norms_are_their_twins(dtype, width):
    hidden, weight = 3 * torch.randn(3, width), torch.rand(width) + 0.5
    out, expected = poisoned(3, width, dtype=dtype), poisoned(3, width, dtype=dtype)
    pointwise.rms_norm(out, hidden, weight, 1e-5)
    reference.rms_norm(expected, hidden, weight, 1e-5)
    assert_close(out, expected)
    for added_weight in (None, torch.rand(width) + 0.5):
        added = torch.randn(3, width).to(dtype)
        sums = hidden.clone(), hidden.clone()
        out.fill_(math.nan)
        pointwise.fused_add_rms_norm(out, sums[0], added, weight, 1e-5, added_weight)
        reference.fused_add_rms_norm(expected, sums[1], added, weight, 1e-5, added_weight)
        assert_close(sums[0], sums[1])
        assert_close(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gated_activations_are_their_twins(dtype):
    # More than a tile wide, and numbers at which exponentials overflow.
    gate_up = (30 * torch.randn(2, 2 * 2100)).to(dtype)
    gate_up[0, :2] = torch.tensor([1000.0, -1000.0])
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        out, expected = poisoned(2, 2100, dtype=dtype), poisoned(2, 2100, dtype=dtype)
        getattr(pointwise, name)(out, gate_up)
        getattr(reference, name)(expected, gate_up)
        # tanh by way of the exponential loses what is 1e-7 of the gate, where the result is small
        torch.testing.assert_close(
            out, expected, rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=2e-5
        )


def test_empty_batches_are_fine():
    pointwise.rms_norm(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), 1e-5)
    pointwise.fused_add_rms_norm(*(torch.empty(0, 8) for _ in range(3)), torch.ones(8), 1e-5)
    pointwise.silu_and_mul(torch.empty(0, 8), torch.empty(0, 16))
    weight = reference.quantize_weight(torch.randn(4, 32), 8, 32)
    quantized_linear.quantized_linear(torch.empty(0, 4), torch.empty(0, 32), weight)
    cache = torch.zeros(1, 1, 16, 8)
    rotary.rotary_kv_write(
        torch.empty(0, 1, 8),
        torch.empty(0, 24),
        cache,
        cache.clone(),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
        None,
    )


def test_norms_refuse_what_does_not_fit():
    rows, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight \[7\] do not fit rows \[2, 8\]"):
        pointwise.rms_norm(rows.clone(), rows, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"torch.float16: norms are scaled in float32"):
        pointwise.rms_norm(rows.clone(), rows, weight.half(), 1e-5)
    with pytest.raises(ValueError, match="hidden is not contiguous"):
        pointwise.rms_norm(torch.ones(8, 8), torch.ones(8, 8).T, weight, 1e-5)
    wide = torch.empty(1, pointwise.MAX_WIDTH + 1)
    with pytest.raises(ValueError, match="16385 numbers: norms take at most 16384"):
        pointwise.rms_norm(wide.clone(), wide, wide[0], 1e-5)
    with pytest.raises(ValueError, match=r"residual is torch\.bfloat16"):
        pointwise.fused_add_rms_norm(rows.clone(), rows.bfloat16(), rows, weight, 1e-5)
    with pytest.raises(ValueError, match=r"gate_up is \[2, 8\].*must be \[2, 16\]"):
        pointwise.silu_and_mul(rows.clone(), rows)


YARN = RopeScaling("yarn", 4.0, 64, attention_factor=1.138)
LLAMA3 = RopeScaling("llama3", 8.0, 64)
LONGROPE = RopeScaling(
    "longrope", attention_factor=1.2, freq_factors=tuple(1.0 + i for i in range(24))
)


@pytest.mark.parametrize("dtype", CACHES, ids=str)
def test_rotary_kv_write_is_its_twin_for_every_cache(dtype):
    check_rotary(dtype, 48, None, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(("turned", "scaling"), [(24, YARN), (0, None)], ids=["part", "none"])
def test_rotary_kv_write_may_turn_a_part_or_nothing(dtype, turned, scaling):
    check_rotary(dtype, turned, scaling, False)


@pytest.mark.parametrize(
    "scaling", [RopeScaling("linear", 4.0), LLAMA3, LONGROPE], ids=lambda scaling: scaling.type
)
def test_rotary_kv_write_takes_every_scaling(scaling):
    check_rotary(torch.float32, 48, scaling, True)


def check_rotary(dtype, turned, scaling, normed):
    num_heads, num_kv_heads, head_dim, block_size = 9, 3, 48, 16
    quantized = dtype in reference.QUANTIZED
    row = head_dim + 2 if quantized else head_dim
    shape = (4, num_kv_heads, block_size, row)
    # Whatever was in the caches stays where nothing is written.
    start = torch.randint(0, 100, shape, dtype=torch.int8)
    caches = [start.view(dtype).clone() if quantized else start.to(dtype) for _ in range(4)]
    # The last position is the last of the longest context; padding has slot -1.
    positions = torch.tensor([0, 1, 5, 77, 100_000, 131_071, 3], dtype=torch.int32)
    slots = torch.tensor([3, 17, -1, 63, 0, 31, 40])
    qkv = 3 * torch.randn(7, (num_heads + 2 * num_kv_heads) * head_dim)
    qkv[3, num_heads * head_dim + 5] = math.nan  # a key
    qkv[4, -1] = math.inf  # a value
    qkv[5, num_heads * head_dim :] = 0.0
    rope = Rotary(10_000.0, turned, scaling)
    frequencies = torch.from_numpy(inverse_frequencies(rope)) if turned else None
    magnitude = 1.0 if scaling is None else scaling.attention_factor
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if normed else (None, None)
    out, expected = poisoned(7, num_heads, head_dim), poisoned(7, num_heads, head_dim)
    rest = (positions, slots, frequencies, magnitude, *norms, 1e-6)
    rotary.rotary_kv_write(out, qkv, caches[0], caches[1], *rest)
    reference.rotary_kv_write(expected, qkv, caches[2], caches[3], *rest)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    for cache, twin in zip(caches[:2], caches[2:], strict=True):
        if quantized:
            # Numbers on the border between two may fall to either side; factors are the same but
            # for a last bit: not more than a few in a hundred thousand here.
            assert (stored_bits(cache) != stored_bits(twin)).sum() <= 2
        else:
            relative = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
            torch.testing.assert_close(cache, twin, rtol=relative, atol=2e-6, equal_nan=True)


def stored_bits(cache):
    """Return the bytes of a quantized cache; both zeros of fp8 are one."""
    raw = cache.view(torch.int8)
    return raw.masked_fill(raw == -128, 0) if cache.dtype == reference.FP8 else raw


def test_rotary_kv_write_stores_queries_in_their_type():
    for dtype in (torch.bfloat16, torch.float16):
        qkv = torch.randn(3, 3 * 64).to(dtype)
        caches = [torch.zeros(1, 1, 16, 64, dtype=dtype) for _ in range(4)]
        rest = (torch.arange(3, dtype=torch.int32), torch.arange(3), 0.01 * torch.ones(32))
        out, expected = poisoned(3, 1, 64, dtype=dtype), poisoned(3, 1, 64, dtype=dtype)
        rotary.rotary_kv_write(out, qkv, caches[0], caches[1], *rest)
        reference.rotary_kv_write(expected, qkv, caches[2], caches[3], *rest)
        assert_close(out, expected)


def test_rotary_kv_write_refuses_what_does_not_fit():
    out, cache = torch.empty(2, 2, 8), torch.zeros(1, 1, 16, 8)
    positions, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def write(qkv=None, key=cache, value=None, frequencies=None, **norms):
        qkv = torch.zeros(2, 32) if qkv is None else qkv
        value = key.clone() if value is None else value
        rotary.rotary_kv_write(out, qkv, key, value, positions, slots, frequencies, **norms)

    with pytest.raises(ValueError, match=r"qkv is \[2, 24\].*must be \[2, 32\]"):
        write(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="int8 cache is 8: for heads of 8 it must be 10"):
        write(key=cache.to(torch.int8))
    with pytest.raises(ValueError, match="differ in shape or dtype"):
        write(value=cache.half())
    with pytest.raises(ValueError, match="5 frequencies turn 10 dimensions, but heads have 8"):
        write(frequencies=torch.ones(5))
    with pytest.raises(ValueError, match="come together"):
        write(query_norm=torch.ones(8))
    with pytest.raises(ValueError, match="key_cache is not contiguous"):
        write(key=torch.zeros(1, 16, 1, 8).transpose(1, 2).expand(2, 1, 16, 8))
    odd = torch.zeros(1, 1, 16, 9, dtype=torch.int8)
    with pytest.raises(ValueError, match="head_dim=7"):
        rotary.rotary_kv_write(
            torch.empty(2, 2, 7), torch.zeros(2, 28), odd, odd.clone(), positions, slots, None
        )


def test_an_fp8_cache_is_refused_where_the_device_has_no_such_numbers(monkeypatch):
    monkeypatch.setattr(rotary, "device_of", lambda _: Device((8, 0), 108))
    cache = torch.zeros(1, 1, 16, 10).to(reference.FP8)
    some = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9.*has 8\.0: use int8"):
        rotary.rotary_kv_write(
            torch.empty(1, 1, 8), torch.zeros(1, 24), cache, cache.clone(), some, some.long(), None
        )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("dtype", "group", "inputs"),
    [(torch.float32, 32, 96), (torch.bfloat16, 64, 512), (torch.float16, 128, 384)],
    ids=str,
)
def test_quantized_linear_is_its_twin(dtype, bits, group, inputs):
    weight = reference.quantize_weight(torch.randn(70, inputs), bits, group)
    values = torch.randn(17 if bits == 8 and group == 32 else 2, inputs).to(dtype)
    size = quantized_linear.workspace_size(len(values), weight)
    for bias in (None, torch.randn(70)):
        out, expected = poisoned(len(values), 70), poisoned(len(values), 70)
        quantized_linear.quantized_linear(out, values, weight, bias, torch.empty(size))
        reference.quantized_linear(expected, values, weight, bias)
        # Sums of float32 in another order.
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-4)
    stored = poisoned(len(values), 70, dtype=dtype)
    quantized_linear.quantized_linear(stored, values, weight, bias)
    assert_close(stored, expected.to(dtype), 200 if dtype == torch.float32 else 2)


def test_inputs_are_split_where_outputs_are_few():
    few = reference.quantize_weight(torch.randn(8, 4096), 8, 128)
    many = reference.quantize_weight(torch.zeros(20_000, 32), 8, 32)
    assert quantized_linear.workspace_size(3, few) == 3 * 8 * 16
    assert quantized_linear.workspace_size(3, many) == 3 * 20_000
    for tokens in (1, 16, 100, 200):
        needed = tokens * 8 * quantized_linear._num_splits(tokens, few)
        assert quantized_linear.workspace_size(200, few) >= needed


def test_quantized_linear_refuses_what_does_not_fit():
    weight = reference.quantize_weight(torch.randn(8, 1024), 8, 64)
    values, out = torch.randn(2, 1024), torch.empty(2, 8)
    with pytest.raises(ValueError, match="inputs have 512 features, the weights 1024"):
        quantized_linear.quantized_linear(out, values[:, :512], weight)
    with pytest.raises(ValueError, match=r"out is \[2, 9\].*must be \[2, 8\]"):
        quantized_linear.quantized_linear(torch.empty(2, 9), values, weight)
    with pytest.raises(ValueError, match=r"bias is \[9\]: it must be \[8\]"):
        quantized_linear.quantized_linear(out, values, weight, torch.ones(9))
    with pytest.raises(
        ValueError, match=r"has 3 elements of torch\.float32: this product needs 64"
    ):
        quantized_linear.quantized_linear(out, values, weight, None, torch.empty(3))
    with pytest.raises(ValueError, match="inputs is not contiguous"):
        quantized_linear.quantized_linear(out, torch.randn(1024, 2).T, weight)
