"""The KV cache and its default size."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the KV cache needs torch")

from cbrs.cli import main  # noqa: E402
from cbrs.kernels import reference  # noqa: E402
from cbrs.runner import kv_cache  # noqa: E402
from cbrs.runner.kv_cache import KVCache, default_num_blocks  # noqa: E402


def test_the_tensors_take_the_bytes_of_every_block_of_every_layer():
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(3, 7, 4, 2, 16, dtype)
        assert cache.num_bytes == 7 * 2 * 3 * 4 * 2 * 16 * dtype.itemsize
        assert [tuple(t.shape) for t in (*cache.keys, *cache.values)] == [(7, 2, 4, 16)] * 6
        assert all(t.is_contiguous() and t.dtype == dtype for t in (*cache.keys, *cache.values))


@pytest.mark.parametrize("num_layers", [4, 64])
def test_a_pool_takes_no_memory_until_it_is_written_and_begins_on_a_cache_line(num_layers):
    # 16 MiB for a tensor, which is mapped by itself, and 1 MiB.
    def resident_bytes():
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    cache = KVCache(num_layers, 16384 // num_layers, 16, 2, 64, torch.bfloat16)
    assert cache.num_bytes == 128 << 20
    assert resident_bytes() - before < 16 << 20
    assert all(t.data_ptr() % 64 == 0 for t in (*cache.keys, *cache.values))
    assert (cache.keys[-1][-1] == 0).all()


def test_poison_fills_everything_and_fill_only_the_blocks_named():
    cache = KVCache(2, 4, 4, 2, 8, torch.bfloat16, poison=True)
    assert all(t.isnan().all() for t in (*cache.keys, *cache.values))
    cache.fill(1.0, slice(1, 3))
    for tensor in (*cache.keys, *cache.values):
        assert (tensor[1:3] == 1).all()
        assert tensor[0].isnan().all()
        assert tensor[3].isnan().all()


def test_a_cache_of_int8_has_room_for_a_factor_of_each_head_and_poison_that_shows():
    cache = KVCache(2, 4, 4, 2, 8, torch.int8, poison=True)
    assert cache.num_bytes == 4 * 2 * 2 * 4 * 2 * (8 + 2)
    assert all(tuple(t.shape) == (4, 2, 4, 10) for t in (*cache.keys, *cache.values))
    assert all(reference.dequantize(t).isnan().all() for t in (*cache.keys, *cache.values))
    cache.fill(1.0, slice(1, 3))
    for tensor in (*cache.keys, *cache.values):
        numbers = reference.dequantize(tensor)
        torch.testing.assert_close(numbers[1:3], torch.ones(2, 2, 4, 8), rtol=0.005, atol=0)
        assert numbers[0].isnan().all()
        assert numbers[3].isnan().all()


def test_a_large_cache_is_zero_writable_and_outlives_what_it_was_made_from():
    cache = KVCache(1, 4097, 16, 2, 64, torch.bfloat16)
    tensor = cache.keys[0]
    assert tensor.nbytes > 16 * 1024**2
    del cache
    assert not tensor.any()
    tensor[-1] = 2
    assert tensor.float().sum() == 2 * 2 * 16 * 64


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "head_dim"])
def test_a_size_below_1_is_refused_by_name(name):
    sizes = {"num_layers": 1, "num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        KVCache(**(sizes | {name: 0}), dtype=torch.float32)


def test_the_default_pool_is_a_quarter_of_free_memory_and_at_most_4_gib(monkeypatch):
    free = 2 * 1024**3
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: free)
    assert default_num_blocks(1024**2) == 512
    free = 100 * 1024**3
    assert default_num_blocks(1024**2) == 4096
    free = 0
    assert default_num_blocks(1024**2) == 1


def test_free_memory_is_what_the_system_calls_available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert 0 < kv_cache.free_memory() <= total * 1024


@pytest.mark.parametrize(
    ("limit_file", "usage_file"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_control_group_limit_lowers_free_memory(tmp_path, monkeypatch, limit_file, usage_file):
    headroom = kv_cache._control_group_headroom
    assert headroom(tmp_path) == 2**63 - 1
    (tmp_path / "memory").mkdir()
    (tmp_path / limit_file).write_text("1000\n")
    (tmp_path / usage_file).write_text("400\n")
    monkeypatch.setattr(kv_cache, "_control_group_headroom", lambda root: headroom(tmp_path))
    assert kv_cache.free_memory() == 600
    (tmp_path / limit_file).write_text("max\n")
    assert kv_cache.free_memory() > 600


def test_the_pool_is_logged_once_and_nothing_is_printed(make_llm, tiny, capsys, caplog):
    caplog.set_level(logging.INFO, logger="cbrs")
    llm = make_llm(tiny, num_blocks=20)
    assert capsys.readouterr() == ("", "")
    # 20 blocks of 16 tokens: 2 layers, keys and values, 2 heads of 16 float32.
    assert caplog.messages.count("KV pool of 20 blocks x 16 tokens in float32 = 0.2 MiB") == 1
    assert llm.config().kv_cache_bytes == llm.engine._runner.kv_cache.num_bytes


def test_the_command_line_prints_the_pool_once_and_null_has_none(tiny, capsys):
    for model, expected in ((str(tiny), 1), ("null", 0)):
        assert main(["generate", model, "--prompt", "a", "--max-tokens", "1"]) == 0
        assert capsys.readouterr().err.count("KV pool") == expected
