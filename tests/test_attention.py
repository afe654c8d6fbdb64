"""Attention back ends: native kernels, PyTorch twin and a dense recompute must agree."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="attention needs torch")

from cbrs._core import CpuKernels, cpu_features  # noqa: E402
from cbrs.kernels import reference  # noqa: E402
from cbrs.runner.attention import (  # noqa: E402
    AttentionMetadata,
    CpuAttention,
    TorchAttention,
    make_backend,
)
from cbrs.runner.kv_cache import KVCache  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """Two layers, of which the second may have a window; tests run the second."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    scale: float | None = None

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        return None, self.window


@dataclass
class Part:
    """Positions `start` to `end` of one sequence, computed in one step."""

    sequence: int
    start: int
    end: int


class Bench:
    """Sequences of random q, k, v with blocks dealt at random out of one poisoned cache."""

    def __init__(
        self,
        shape: Shape,
        lens: list[int],
        block_size: int,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.window = replace(shape, window=window), window
        self.lens, self.block_size, self.dtype = lens, block_size, dtype
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)

        def numbers(length: int, heads: int) -> torch.Tensor:
            size = (length, heads, shape.head_dim)
            return torch.randn(size, generator=generator).to(dtype)

        self.query = [numbers(n, shape.num_heads) for n in lens]
        self.key = [numbers(n, shape.num_kv_heads) for n in lens]
        self.value = [numbers(n, shape.num_kv_heads) for n in lens]
        needed = [-(-n // block_size) for n in lens]
        num_blocks = sum(needed) + 2
        self.cache = KVCache(
            2,
            num_blocks,
            block_size,
            shape.num_kv_heads,
            shape.head_dim,
            kv_dtype or dtype,
            poison=True,
        )
        free = list(range(num_blocks - 1))
        rng.shuffle(free)
        free.append(num_blocks - 1)  # the highest id goes first
        self.rows = rng.sample(range(len(lens) + 3), len(lens))
        self.tables = np.full((len(lens) + 3, max(needed, default=0) + 2), -1, dtype=np.int32)
        for row, count in zip(self.rows, needed, strict=True):
            self.tables[row, :count] = [free.pop() for _ in range(count)]

    def metadata(self, parts: list[Part], padding: int = 0) -> AttentionMetadata:
        """Return the arrays a scheduler would make; sequences with one query token come first."""
        slots = [
            int(self.tables[self.rows[part.sequence], position // self.block_size])
            * self.block_size
            + position % self.block_size
            for part in parts
            for position in range(part.start, part.end)
        ]
        lens = [part.end - part.start for part in parts]
        return AttentionMetadata(
            slot_mapping=np.array(slots + [-1] * padding, dtype=np.int64),
            query_start=np.cumsum([0, *lens], dtype=np.int32),
            seq_lens=np.array([part.end for part in parts], dtype=np.int32),
            row_ids=np.array([self.rows[part.sequence] for part in parts], dtype=np.int32),
            block_tables=self.tables,
            num_decodes=sum(length == 1 for length in lens),
            max_query_len=max(lens, default=0),
            max_seq_len=max((part.end for part in parts), default=0),
        )

    def inputs(self, parts: list[Part], padding: int = 0) -> list[torch.Tensor]:
        """Return q, k, v of the step; padding rows are NaN."""
        heads = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        result = []
        for source, count in zip((self.query, self.key, self.value), heads, strict=True):
            rows = [source[part.sequence][part.start : part.end] for part in parts]
            pad = torch.full((padding, count, self.shape.head_dim), float("nan"))
            result.append(torch.cat([*rows, pad.to(self.dtype)]))
        return result

    def run(self, backend, parts: list[Part], padding: int = 0, layer: int = 1) -> torch.Tensor:
        backend.begin_step(self.metadata(parts, padding))
        return backend.forward(layer, *self.inputs(parts, padding))

    def cpu(self, num_threads: int = 2) -> CpuAttention:
        return CpuAttention(self.shape, self.cache, num_threads)

    def torch(self) -> TorchAttention:
        return TorchAttention(self.shape, self.cache)

    def dense(self, part: Part) -> torch.Tensor:
        """Recompute from q, k, v alone, in float64, row by row."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        query = self.query[part.sequence].double()
        key = self.key[part.sequence].double().repeat_interleave(group, 1)
        value = self.value[part.sequence].double().repeat_interleave(group, 1)
        rows = []
        for position in range(part.start, part.end):
            first = 0 if self.window is None else max(0, position - self.window + 1)
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,khd->hk", query[position], key[seen])
            weights = (scores * self.shape.attention_scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, value[seen]))
        return torch.stack(rows).to(self.dtype)


def steps(lens: Iterable[int], chunk: int) -> list[list[Part]]:
    """Chunk every sequence; decodes come first in each step, as in the scheduler's batches."""
    result: list[list[Part]] = []
    for sequence, length in enumerate(lens):
        for index, start in enumerate(range(0, length, chunk)):
            while len(result) <= index:
                result.append([])
            result[index].append(Part(sequence, start, min(length, start + chunk)))
    return [sorted(step, key=lambda part: part.end - part.start > 1) for step in result]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 8])
def test_odd_lengths_in_mixed_batches_equal_twin_and_dense_recompute(dtype, block_size, window):
    lens = [1, block_size, block_size + 1, max(1, block_size - 1), 63, 111]
    bench = Bench(Shape(), lens, block_size, dtype, window)
    cpu, twin = bench.cpu(), bench.torch()
    for parts in steps(lens, 37):
        got = bench.run(cpu, parts)
        close(got, torch.cat([bench.dense(part) for part in parts]))
        close(got, bench.run(twin, parts))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_every_head_size_and_gqa_ratio_equals_twin_and_dense_recompute(head_dim, group):
    lens = [33, 70]
    bench = Bench(Shape(2 * group, 2, head_dim), lens, 16)
    for parts in ([Part(0, 0, 32), Part(1, 0, 69)], [Part(0, 32, 33), Part(1, 69, 70)]):
        got = bench.run(bench.cpu(), parts)
        close(got, torch.cat([bench.dense(part) for part in parts]))
        close(got, bench.run(bench.torch(), parts))


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_neighbours_and_threads_change_no_bit(window):
    lens = [150, 90, 1]
    whole = Bench(Shape(), lens, 16, window=window)
    expected = [whole.run(whole.cpu(1), [Part(s, 0, n)]) for s, n in enumerate(lens)]
    for chunk in (1, 16, 50):
        bench = Bench(Shape(), lens, 16, window=window)
        backend = bench.cpu(3)
        for parts in steps(lens, chunk):
            got = bench.run(backend, parts)
            want = [expected[part.sequence][part.start : part.end] for part in parts]
            assert torch.equal(got, torch.cat(want))


def test_c01_chunks_over_a_poisoned_pool_equal_one_pass():
    bench = Bench(Shape(), [40], 16)
    backend = bench.cpu()
    chunks = [bench.run(backend, parts) for parts in steps([40], 16)]
    assert len(chunks) == 3
    close(torch.cat(chunks), bench.dense(Part(0, 0, 40)))


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_i18_the_window_counts_the_query_itself(make):
    bench = Bench(Shape(1, 1, 32), [20], 4, window=8)
    bench.query[0].zero_()
    bench.value[0] = torch.eye(20, 32)[:, None]
    seen = bench.run(make(bench), [Part(0, 0, 20)])[:, 0, :20] > 0
    expected = torch.ones(20, 20, dtype=torch.bool).tril().triu(-7)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_i19_decoding_across_the_window_edge_equals_full_recompute(make):
    bench = Bench(Shape(), [16], 4, window=8)
    backend = make(bench)
    parts = [Part(0, 0, 6), *(Part(0, n, n + 1) for n in range(6, 16))]
    for part in parts:
        close(bench.run(backend, [part]), bench.dense(part))


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_each_layer_has_a_window_of_its_own(make):
    bench = Bench(Shape(), [20], 4, window=8)
    backend = make(bench)
    close(bench.run(backend, [Part(0, 0, 20)], layer=1), bench.dense(Part(0, 0, 20)))
    bench.window = None
    close(bench.run(backend, [Part(0, 0, 20)], layer=0), bench.dense(Part(0, 0, 20)))


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_the_scale_is_that_of_the_model(make):
    bench = Bench(Shape(scale=0.7), [20], 4)
    close(bench.run(make(bench), [Part(0, 0, 20)]), bench.dense(Part(0, 0, 20)))


def test_c06_chunks_around_the_window_edge_equal_one_pass():
    for length in range(33, 98):
        bench = Bench(Shape(), [length], 16, window=32)
        expected = bench.run(bench.cpu(), [Part(0, 0, length)])
        chunked = Bench(Shape(), [length], 16, window=32)
        backend = chunked.cpu()
        got = torch.cat([chunked.run(backend, parts) for parts in steps([length], 16)])
        assert torch.equal(got, expected)


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_padding_is_not_written_and_comes_back_as_zero(make):
    bench = Bench(Shape(), [5], 4)
    got = bench.run(make(bench), [Part(0, 0, 5)], padding=3)
    close(got[:5], bench.dense(Part(0, 0, 5)))
    assert torch.equal(got[5:], torch.zeros_like(got[5:]))
    written = bench.cache.keys[1].isfinite().all(-1).all(1)
    assert int(written.sum()) == 5
    assert not bench.cache.keys[0].isfinite().any()


@pytest.mark.parametrize("make", [Bench.cpu, Bench.torch])
def test_an_empty_batch_gives_an_empty_result(make):
    bench = Bench(Shape(), [5], 4)
    assert bench.run(make(bench), []).shape == (0, 6, 16)


def test_a_read_only_metadata_array_is_fine():
    bench = Bench(Shape(), [5], 4)
    bench.tables.setflags(write=False)
    parts = [Part(0, 0, 5)]
    close(bench.run(bench.cpu(), parts), bench.run(bench.torch(), parts))


def test_strided_inputs_are_read_as_they_look():
    bench = Bench(Shape(), [5], 4)
    parts = [Part(0, 0, 5)]
    fused = torch.cat(bench.inputs(parts), dim=1)
    backend = bench.cpu()
    backend.begin_step(bench.metadata(parts))
    query, key, value = fused.split([6, 2, 2], dim=1)
    assert not query.is_contiguous()
    close(backend.forward(1, query, key, value), bench.dense(parts[0]))


def test_forward_before_begin_step_is_refused():
    bench = Bench(Shape(), [5], 4)
    for backend in (bench.cpu(), bench.torch()):
        with pytest.raises(RuntimeError, match="begin_step"):
            backend.forward(0, *bench.inputs([Part(0, 0, 5)]))


def test_make_backend_chooses_by_device_and_refuses_other_dtypes():
    bench = Bench(Shape(), [5], 4)
    assert isinstance(make_backend(bench.shape, bench.cache, "cpu", 1), CpuAttention)
    assert isinstance(make_backend(bench.shape, bench.cache, "meta", 1), TorchAttention)
    half = KVCache(1, 2, 4, 2, 16, torch.float16)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or int8 KV cache, got torch\.float16"):
        make_backend(bench.shape, half, "cpu", 1)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 1), (64, 16), (3, 4), (80, 32)])
def test_a_cache_of_int8_equals_its_twin_byte_by_byte(head_dim, block_size, window):
    lens = [1, block_size + 1, 63, 300]
    bench = Bench(Shape(6, 2, head_dim), lens, block_size, window=window, kv_dtype=torch.int8)
    twin = Bench(Shape(6, 2, head_dim), lens, block_size, window=window, kv_dtype=torch.int8)
    cpu, torch_twin = bench.cpu(), twin.torch()
    for parts in steps(lens, 37):
        got, expected = bench.run(cpu, parts), twin.run(torch_twin, parts)
        close(got, expected)
        # Keys and values in 8 bits are near those of 32.
        dense = torch.cat([bench.dense(part) for part in parts])
        torch.testing.assert_close(got, dense, rtol=0, atol=0.06)
    for ours, theirs in zip(bench.cache.keys, twin.cache.keys, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(bench.cache.values, twin.cache.values, strict=True):
        assert torch.equal(ours, theirs)


def arguments() -> dict[str, object]:
    """Return valid arguments of `paged_attention`: one sequence of 5 tokens in blocks 3 and 1."""
    return {
        "out": np.full((5, 2, 8), np.nan, dtype=np.float32),
        "query": np.ones((5, 2, 8), dtype=np.float32),
        "key_cache": np.ones((4, 1, 4, 8), dtype=np.float32),
        "value_cache": np.ones((4, 1, 4, 8), dtype=np.float32),
        "block_tables": np.array([[3, 1, -1]], dtype=np.int32),
        "row_ids": np.zeros(1, dtype=np.int32),
        "query_start": np.array([0, 5], dtype=np.int32),
        "seq_lens": np.array([5], dtype=np.int32),
        "scale": 1.0,
    }


BAD_ARGUMENTS = {
    "a block id beyond the pool": (
        {"block_tables": np.array([[3, 4, -1]], dtype=np.int32)},
        r"block_tables\[0, 1\] is 4, the cache has blocks 0\.\.4",
    ),
    "a context beyond the table": (
        {"seq_lens": np.array([13], dtype=np.int32)},
        "needs 4 blocks, block_tables has 3 columns",
    ),
    "int64 lengths": (
        {"seq_lens": np.array([5])},
        "seq_lens must be a 1-dimensional numpy array of int32",
    ),
    "a list": ({"row_ids": [0]}, "row_ids must be a 1-dimensional numpy array of int32"),
    "a half precision cache": (
        {"key_cache": np.ones((4, 1, 4, 8), dtype=np.float16)},
        "key_cache must be a 4-dimensional numpy array of float32",
    ),
    "caches of two dtypes": (
        {"key_cache": np.ones((4, 1, 4, 8), dtype=np.uint16)},
        "different element types",
    ),
    "caches of two shapes": (
        {"value_cache": np.ones((4, 1, 4, 16), dtype=np.float32)},
        "value_cache has shape",
    ),
    "a strided query": (
        {"query": np.ones((5, 4, 8), dtype=np.float32)[:, ::2]},
        "query must be C-contiguous",
    ),
    "a short output": (
        {"out": np.ones((4, 2, 8), dtype=np.float32)},
        r"out has shape \[4, 2, 8\], expected \[5, 2, 8\]",
    ),
    "a wrong head size": ({"query": np.ones((5, 2, 7), dtype=np.float32)}, "query has shape"),
    "a window of 0": ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    "a negative window": ({"sliding_window": -8}, "sliding_window must be at least 1, got -8"),
    "a NaN scale": ({"scale": float("nan")}, "scale must be finite"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_a_value_error_and_nothing_is_written(case):
    damage, message = BAD_ARGUMENTS[case]
    kwargs = arguments()
    CpuKernels(1).paged_attention(**kwargs)
    assert np.isfinite(kwargs["out"]).all()
    kwargs = arguments() | damage
    before = kwargs["out"].copy()
    with pytest.raises(ValueError, match=message):
        CpuKernels(1).paged_attention(**kwargs)
    np.testing.assert_array_equal(kwargs["out"], before)


def test_a_read_only_or_shared_output_is_refused():
    kwargs = arguments()
    kwargs["out"].setflags(write=False)
    with pytest.raises(ValueError, match="out: "):
        CpuKernels(1).paged_attention(**kwargs)
    shared = torch.ones(5, 2, 8)
    kwargs = arguments() | {"out": shared.numpy(), "query": shared.numpy()}
    with pytest.raises(ValueError, match="out and query share memory"):
        CpuKernels(1).paged_attention(**kwargs)


@pytest.mark.parametrize("slot", [16, -2, 2**40])
def test_a_slot_outside_the_cache_is_a_value_error_and_nothing_is_written(slot):
    cache = np.zeros((4, 1, 4, 8), dtype=np.float32)
    new = np.ones((2, 1, 8), dtype=np.float32)
    slots = np.array([0, slot], dtype=np.int64)
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}"):
        CpuKernels(1).write_kv(new, new, cache, cache.copy(), slots)
    assert not cache.any()


def test_bf16_caches_are_written_as_torch_rounds():
    key = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(1))
    native, twin = (torch.zeros(10, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    view = native.view(torch.uint16).numpy()
    CpuKernels(1).write_kv(key.numpy(), key.numpy(), view, np.zeros_like(view), slots.numpy())
    reference.write_kv(key, key, twin, torch.zeros_like(twin), slots)
    assert torch.equal(native, twin)


def test_cpu_features_name_the_chosen_kernel():
    features = cpu_features()
    assert features[features["isa"]] is True
    assert features["kernel"].startswith(features["isa"])


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_refused(num_threads):
    with pytest.raises(ValueError, match=f"num_threads must be .*, got {num_threads}"):
        CpuKernels(num_threads)


def test_one_kernels_object_serves_several_threads():
    rng = np.random.default_rng(0)
    kernels = CpuKernels(3)
    batch = arguments() | {
        "query": rng.standard_normal((5, 2, 8), dtype=np.float32),
        "key_cache": rng.standard_normal((400, 1, 4, 8), dtype=np.float32),
        "value_cache": rng.standard_normal((400, 1, 4, 8), dtype=np.float32),
        "block_tables": rng.permutation(400).astype(np.int32).reshape(1, 400),
        "seq_lens": np.array([1600], dtype=np.int32),
    }

    def attend(_: int) -> bytes:
        out = np.full((5, 2, 8), np.nan, dtype=np.float32)
        kernels.paged_attention(**(batch | {"out": out}))
        return out.tobytes()

    with ThreadPoolExecutor(8) as pool:
        results = set(pool.map(attend, range(200)))
    assert len(results) == 1
    assert np.isfinite(np.frombuffer(results.pop(), dtype=np.float32)).all()


def test_threads_end_with_the_kernels():
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("needs /proc to count threads")
    # By id: threads of other tests may end in the meantime.
    before = set(tasks.iterdir())
    kernels = CpuKernels(4)
    assert kernels.num_threads == 4
    started = set(tasks.iterdir()) - before
    assert len(started) == 3
    del kernels
    deadline = time.monotonic() + 10  # the system takes a joined thread off its list a moment later
    while started & set(tasks.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not started & set(tasks.iterdir())
