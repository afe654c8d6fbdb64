"""A model split among ranks, all of them threads of this process: every architecture, and GGUF."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf_kit
import kit
import numpy as np
import pytest
import torch
from references import TOKENS, load, logits_of
from torch import Tensor

from cbrs._core import SafetensorsCheckpoint
from cbrs.errors import ModelLoadError
from cbrs.loading import LoadedModel
from cbrs.models.layers import SummedLinear

PROMPT = TOKENS[:60]


class Exchange:
    """Where the threads of a `ThreadGroup` meet."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup:
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange

    def sum(self, tensor: Tensor) -> None:
        self._exchange.tensors[self.rank] = tensor
        self._exchange.barrier.wait()
        total = torch.stack(self._exchange.tensors).sum(0)
        self._exchange.barrier.wait()
        tensor.copy_(total)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        self._exchange.tensors[self.rank] = tensor
        self._exchange.barrier.wait()
        gathered = list(self._exchange.tensors)
        self._exchange.barrier.wait()
        return gathered if self.rank == 0 else None


def load_ranks(path: Path, size: int) -> list[LoadedModel]:
    exchange = Exchange(size)
    return [load(path, group=ThreadGroup(rank, size, exchange)) for rank in range(size)]


def split_logits(ranks: list[LoadedModel]) -> Tensor:
    """Run all ranks side by side; return what rank 0 has."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(lambda loaded: logits_of(loaded, PROMPT, (40, 1)), ranks))
    assert all(len(logits) == 0 for logits in found[1:])
    return found[0]


def check(path: Path, size: int) -> list[LoadedModel]:
    expected = logits_of(load(path, pack=False), PROMPT)
    ranks = load_ranks(path, size)
    found = split_logits(ranks)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4
    assert float(expected.std()) > 0.5
    return ranks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", kit.FAMILIES)
def test_split_logits_equal_those_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    ranks = check(kit.family(tmp_path, name), size)
    # Two key heads: of four ranks two have the same one.
    assert [loaded.config.num_heads for loaded in ranks] == [4 // size] * size
    assert [loaded.config.num_kv_heads for loaded in ranks] == [1] * size
    whole = load(tmp_path, pack=False)
    assert ranks[0].kv_bytes_per_block(16) * 2 == whole.kv_bytes_per_block(16)


def test_i12_biases_and_an_odd_vocabulary_are_divided_too(tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    ranks = check(kit.tiny(tmp_path, vocab_size=321, **changes), 4)
    layer = ranks[1].module.layers[0]
    assert isinstance(layer.out, SummedLinear)
    assert layer.out.bias is None  # it is added to the sum
    assert layer.out.in_features == layer.qkv.out_features // 3 == 16
    assert layer.down.in_features == 24
    assert ranks[3].module.head.out_features == 81  # three of them fill up


def test_more_ranks_than_rows_of_the_vocabulary_leave_some_without(tmp_path: Path) -> None:
    config = kit.tiny_config(vocab_size=5, tie_word_embeddings=False)
    tensors = kit.tensors_of(config)
    check_ids = [token % 5 for token in PROMPT]
    folder = kit.write_folder(tmp_path / "five", config, tensors)
    whole = logits_of(load(folder, pack=False), check_ids)
    ranks = load_ranks(folder, 4)
    with ThreadPoolExecutor(4) as pool:
        found = next(iter(list(pool.map(lambda loaded: logits_of(loaded, check_ids), ranks))))
    assert found.shape == (60, 5)
    assert float((found - whole).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["llama", "smollm3", "phi3"])
def test_gguf_files_are_divided_as_folders_are(name: str, tmp_path: Path) -> None:
    changes = kit.FAMILIES[name] | ({"attention_bias": True} if name == "llama" else {})
    changes |= {"sliding_window": None, "use_sliding_window": None, "partial_rotary_factor": None}
    config = kit.tiny_config(**changes)
    tensors = kit.tensors_of(config)
    # Query and key rows lie pair by pair in files of the first two.
    metadata = {"phi3.attention.sliding_window": 0} if name == "phi3" else None
    check(gguf_kit.write_gguf(tmp_path / "model.gguf", config, tensors, metadata), 2)


def test_a_tensor_is_read_in_part(tiny: Path) -> None:
    source = SafetensorsCheckpoint(str(tiny))
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = source.tensor(name)
    for dtype in ("float32", "bfloat16"):
        whole = source.tensor(name, dtype)
        assert np.array_equal(source.tensor(name, dtype, (0, 3, 9)), whole[3:9])
        assert np.array_equal(source.tensor(name, dtype, (1, 5, 64)), whole[:, 5:])
        assert source.tensor(name, dtype, (1, 7, 7)).shape == (64, 0)
    norm = "model.norm.weight"
    assert np.array_equal(source.tensor(norm, "float32", (0, 1, 5)), source.tensor(norm)[1:5])
    for part in ((0, 0, 65), (1, 9, 8), (2, 0, 1)):
        with pytest.raises(ValueError, match=r"part .* is outside \[64, 64\]"):
            source.tensor(name, "float32", part)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "is 3, which does not divide the model's 4 attention heads; give one of 1, 2, 4"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            "is 4, which neither divides the model's 6 key and value heads nor is a multiple;"
            " give one of 1, 2, 3, 6, 12",
        ),
        (4, {"intermediate_size": 98}, "does not divide the model's intermediate size of 98"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    size: int, changes: dict, message: str, tmp_path: Path
) -> None:
    folder = kit.tiny(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_ranks(folder, size)


def test_the_model_without_weights_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but null has no weights"):
        load_ranks(Path("null"), 2)


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path: Path) -> None:
    ranks = load_ranks(kit.tiny(tmp_path), 2)
    for number, loaded in enumerate(ranks):
        table = loaded.module.embedding.plain
        head = loaded.module.head._plain
        assert head.data_ptr() == table[number * 160 :].data_ptr()


def test_a_bad_checkpoint_is_refused_by_every_rank(tmp_path: Path) -> None:
    config = kit.tiny_config()
    tensors = kit.tensors_of(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = kit.write_folder(tmp_path / "holed", config, tensors)
    for rank in range(2):
        with pytest.raises(ModelLoadError, match=r"up_proj\.weight: missing tensor"):
            load(folder, group=ThreadGroup(rank, 2, Exchange(2)))
