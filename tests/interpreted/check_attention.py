"""The attention kernels against their twin. Run by `test_interpreted_attention.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cbrs.kernels import launch, reference
from cbrs.kernels.paged_attention import paged_attention, workspace_size

FLOAT, BRAIN, HALF, INT8, FP8 = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    reference.FP8,
)
TOLERANCE = {FLOAT: 2e-5, BRAIN: 2e-2, HALF: 4e-3}


def tolerance(query: torch.dtype, cache: torch.dtype) -> float:
    if query == HALF and cache in reference.QUANTIZED:
        return TOLERANCE[BRAIN]  # weights and factors are multiplied in bfloat16
    return TOLERANCE[query]


@dataclass
class Call:
    """A batch over poisoned caches: what no sequence owns is NaN, and so is every output."""

    lens: list[int]
    query_lens: list[int]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    query_dtype: torch.dtype = FLOAT
    cache_dtype: torch.dtype = FLOAT
    window: int | None = None
    soft_cap: float | None = None
    num_decodes: int = 0
    behind: int = 0
    max_query_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        num_heads, num_kv_heads = self.heads
        num_seqs, num_queries = len(self.lens), sum(self.query_lens)
        num_blocks = [-(-length // self.block_size) for length in self.lens]
        quantized = self.cache_dtype in reference.QUANTIZED
        row = self.head_dim + (reference.SCALE_BYTES if quantized else 0)
        shape = (sum(num_blocks) + 2, num_kv_heads, self.block_size, row)
        self.caches = [poisoned_cache(shape, self.cache_dtype) for _ in range(2)]
        free = torch.randperm(shape[0], generator=random, dtype=torch.int32)
        # entries that no sequence has filled would be read far outside
        self.tables = torch.full((num_seqs + 2, max(1, *num_blocks)), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(num_seqs + 2, generator=random)[:num_seqs].to(torch.int32)
        for index, length in enumerate(self.lens):
            blocks, free = free[: num_blocks[index]], free[num_blocks[index] :]
            self.tables[self.rows[index], : len(blocks)] = blocks
            tokens = torch.arange(length)
            slots = blocks.long()[tokens // self.block_size] * self.block_size
            slots += tokens % self.block_size
            new = (length, num_kv_heads, self.head_dim)
            key, value = (torch.randn(new, generator=random) for _ in range(2))
            reference.write_kv(key, value, *self.caches, slots)
        queries = torch.randn(num_queries, num_heads, self.head_dim, generator=random)
        nothing = torch.full((self.behind, num_heads, self.head_dim), float("nan"))
        self.query = torch.cat([queries, nothing]).to(self.query_dtype)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.starts = starts.to(torch.int32)
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32)

    def arguments(self) -> tuple[object, ...]:
        scale = self.head_dim**-0.5
        index = (self.tables, self.rows, self.starts, self.seq_lens)
        return (self.query, *self.caches, *index, scale, self.window, self.soft_cap)

    def run(self, workspace: Tensor | None = None) -> Tensor:
        out = torch.full_like(self.query, float("nan"))
        paged_attention(
            out,
            *self.arguments(),
            num_decodes=self.num_decodes,
            max_query_len=self.max_query_len,
            workspace=workspace,
        )
        return out

    def check(self, workspace: Tensor | None = None) -> None:
        expected = torch.full(self.query.shape, float("nan"))
        reference.paged_attention(expected, *self.arguments())
        assert not expected.isnan().any()
        limit = tolerance(self.query_dtype, self.cache_dtype)
        out = self.run(workspace).float()
        torch.testing.assert_close(out, expected, rtol=limit, atol=limit)


def poisoned_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype not in reference.QUANTIZED:
        return torch.full(shape, float("nan"), dtype=dtype)
    cache = torch.zeros(shape, dtype=torch.int8).view(dtype)
    reference.fill_quantized(cache, float("nan"))
    return cache


TYPES = [
    (FLOAT, FLOAT),
    (BRAIN, BRAIN),
    (HALF, HALF),
    (BRAIN, INT8),
    (BRAIN, FP8),
    (HALF, INT8),
    (HALF, FP8),
    (FLOAT, INT8),
    (FLOAT, BRAIN),
    (HALF, BRAIN),
]


@pytest.mark.parametrize(("query_dtype", "cache_dtype"), TYPES, ids=str)
def test_mixed_batch_of_every_type(query_dtype, cache_dtype):
    Call(
        lens=[33, 1, 0, 21, 17],
        query_lens=[1, 1, 1, 5, 17],
        heads=(3, 1),
        num_decodes=3,
        behind=2,
        query_dtype=query_dtype,
        cache_dtype=cache_dtype,
    ).check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache_dtype", [FLOAT, INT8], ids=str)
def test_head_dims_of_decodes_and_prompts(head_dim, cache_dtype):
    Call([19, 20], [1, 20], head_dim=head_dim, num_decodes=1, cache_dtype=cache_dtype).check()


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, pytest.param(71, marks=pytest.mark.soak)])
def test_groups_of_heads_share_a_tile(group):
    Call([18, 23, 40], [1, 3, 38], heads=(2 * group, 2), num_decodes=1, head_dim=16).check()


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_around_block_sizes(block_size):
    lens = [1, block_size - 1, block_size, block_size + 1, 63, 111]
    Call(lens * 2, [1] * 6 + lens, heads=(2, 1), block_size=block_size, num_decodes=6).check()


@pytest.mark.parametrize("window", [1, 7, 200])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_windows_and_caps(window, soft_cap):
    lens, query_lens = [90, 50, 40], [1, 4, 40]
    Call(lens, query_lens, heads=(3, 1), window=window, soft_cap=soft_cap).check()
    Call(lens[:2], [1, 1], heads=(3, 1), num_decodes=2, window=window, soft_cap=soft_cap).check()


@pytest.mark.parametrize("window", [None, 290])
@pytest.mark.parametrize("cache_dtype", [FLOAT, INT8], ids=str)
def test_long_contexts_are_split(window, cache_dtype, monkeypatch):
    many_processors(monkeypatch)
    call = Call([560, 3, 0, 258], [1] * 4, num_decodes=4, window=window, cache_dtype=cache_dtype)
    call.check()
    few_splits = torch.full([workspace_size(4, 4, 64, 2) + 1], float("nan"))
    call.check(few_splits)
    assert not few_splits[0].isnan()
    call.check(torch.empty(1))  # too small for any


def test_more_splits_than_are_summed_at_a_time(monkeypatch):
    many_processors(monkeypatch)
    Call([1200], [1], heads=(1, 1), num_decodes=1, head_dim=16).check()


def test_drafts_are_verified_over_split_contexts(monkeypatch):
    many_processors(monkeypatch)
    Call([300, 9, 0, 40], [5, 5, 5, 2], max_query_len=5, behind=1).check()


def test_decodes_with_long_contexts_take_a_launch_of_their_own():
    call = Call([60, 30], [1, 30], num_decodes=1)
    call.tables = torch.nn.functional.pad(call.tables, (0, 1100), value=2**30)  # may get long
    call.check()


def test_a_prompt_in_two_chunks_is_the_prompt():
    whole = Call([50], [50])
    again = Call([50], [20])
    again.caches, again.tables, again.rows = whole.caches, whole.tables, whole.rows
    again.query = whole.query[30:]
    torch.testing.assert_close(again.run(), whole.run()[30:], rtol=1e-5, atol=1e-5)


def test_batch_of_padding_only_is_zero():
    call = Call([0, 0], [1, 1], num_decodes=2, behind=1)
    assert (call.run() == 0).all()


def test_a_row_that_is_not_finite_shows_in_its_own_sequence_only():
    call = Call([20, 20], [1, 1], num_decodes=2)
    block = call.tables[call.rows[0], 0]
    call.caches[0][block, :, 3] = float("nan")
    out = call.run()
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_a16_offsets_pass_31_bits_in_large_pools():
    """Of a pool of more than 2^31 elements only the last blocks are touched: it takes no memory."""
    call = Call([40], [1], heads=(2, 1), num_decodes=1, cache_dtype=INT8)
    bytes_of_block = call.caches[0][0].numel()
    num_blocks = 2**31 // bytes_of_block + 5
    used = call.tables[call.rows[0]].clone()
    far = torch.arange(num_blocks - len(used), num_blocks, dtype=torch.int32)
    for index, cache in enumerate(call.caches):
        large = torch.empty((num_blocks, *cache.shape[1:]), dtype=torch.int8)
        large[far.long()] = cache[used.long()]
        call.caches[index] = large
    call.tables[call.rows[0]] = far
    call.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_dtype": torch.float64}, r"query is torch.float64"),
        ({"cache_dtype": torch.float64}, r"cache torch.float64"),
        ({"heads": (5, 2)}, r"5 heads and 2 KV heads"),
        ({"heads": (129, 1)}, r"at most 128"),
        ({"head_dim": 258}, r"head_dim is 258: it must be even and at most 256"),
        ({"window": 0}, r"sliding_window is 0: it must be at least 1"),
        ({"soft_cap": -1.0}, r"soft_cap is -1.0: it must be above 0"),
        ({"num_decodes": 2}, r"num_decodes is 2: it must lie between 0 and the 1 seq"),
    ],
    ids=str,
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        Call([4], [1], **change).run()


def test_refuses_tensors_that_do_not_fit():
    call = Call([4], [1])
    with pytest.raises(ValueError, match=r"scale is 0"):
        paged_attention(call.query, *call.arguments()[:7], 0.0)
    with pytest.raises(ValueError, match=r"must be alike"):
        paged_attention(call.query[:, :2], *call.arguments())
    call.caches[1] = call.caches[1].half()
    with pytest.raises(ValueError, match=r"must be alike"):
        call.run()
    call.caches = [torch.zeros(3, 16, 2, 64).transpose(1, 2)] * 2
    with pytest.raises(ValueError, match=r"must be contiguous"):
        call.run()


def test_refuses_fp8_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr(launch, "device_of", lambda _: launch.Device((8, 0), 4))
    with pytest.raises(ValueError, match=r"8\.0 has no float8_e4m3fn .* use an int8 cache"):
        Call([4], [1], cache_dtype=FP8).run()


def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_of", lambda _: launch.Device((9, 0), 1000))
