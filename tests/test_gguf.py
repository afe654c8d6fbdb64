"""GGUF files: weights, row order, tokenizer and special tokens, against independent oracles."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from cbrs import _core

GOLDEN = Path(__file__).parent / "golden"
QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SCALE_OFFSETS = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
"""Where a block keeps its half-precision scales; (0, 2) for the others."""

Write = Callable[..., _core.GgufFile]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> _core.GgufFile:
    return _core.GgufFile(str(smollm2_gguf))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a GGUF file with the reference package and opens it."""

    def write_file(
        fill: Callable[[gguf.GGUFWriter], None], architecture: str = "llama"
    ) -> _core.GgufFile:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        fill(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return _core.GgufFile(str(path))

    return write_file


def golden_tensors() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "smollm2_tensors.json").read_text())["tensors"]


def half_split(values: np.ndarray, heads: int) -> np.ndarray:
    """Puts rows of rotary pairs into the order of Hugging Face models."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)


def test_every_tensor_of_smollm2_has_the_golden_fingerprint(smollm2: _core.GgufFile) -> None:
    golden = golden_tensors()
    assert [tensor["name"] for tensor in golden] == smollm2.tensor_names
    assert len(golden) == 272
    for tensor in golden:
        name = tensor["name"]
        assert smollm2.tensor_type(name) == tensor["type"]
        assert list(smollm2.tensor_shape(name)) == tensor["shape_out_in"]
        values = smollm2.tensor(name)
        assert values.dtype == np.float32
        assert list(values.shape) == tensor["shape_out_in"]
        # The first and the last row keep their place when rows are put in order.
        flat = values.ravel()
        np.testing.assert_allclose(flat[:4], tensor["first4"], rtol=1e-7, err_msg=name)
        np.testing.assert_allclose(flat[-4:], tensor["last4"], rtol=1e-7, err_msg=name)
        sums = [flat.sum(dtype=np.float64), np.abs(flat).sum(dtype=np.float64)]
        absolute = tensor["abs_sum"]
        np.testing.assert_allclose(
            sums, [tensor["sum"], absolute], rtol=1e-7, atol=1e-7 * absolute, err_msg=name
        )


def test_smollm2_equals_the_reference_package_with_query_and_key_rows_in_order(
    smollm2: _core.GgufFile, smollm2_gguf: Path
) -> None:
    heads = {"attn_q": 9, "attn_k": 3}
    for tensor in gguf.GGUFReader(smollm2_gguf).tensors:
        if not tensor.name.startswith(("blk.0.", "blk.29.", "output")):
            continue
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            expected = half_split(expected, heads[part])
        np.testing.assert_array_equal(smollm2.tensor(tensor.name), expected, err_msg=tensor.name)


def test_bfloat16_bits_are_rounded_as_torch_rounds(smollm2: _core.GgufFile) -> None:
    name = "blk.3.attn_q.weight"
    bits = smollm2.tensor(name, "bfloat16")
    assert bits.dtype == np.uint16
    expected = torch.from_numpy(smollm2.tensor(name)).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), expected)


def random_blocks(kind: str, count: int, seed: int) -> np.ndarray:
    """Blocks of random bytes with finite scales, `[count, block_bytes]`."""
    block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, (0, 2)):
        scales = rng.normal(size=(count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_decode_as_in_the_reference_package(
    write: Write, kind: str, seed: int
) -> None:
    blocks = random_blocks(kind, 64, seed).reshape(4, -1)
    raw_dtype = GGMLQuantizationType[kind]
    file = write(lambda writer: writer.add_tensor("w", blocks, raw_dtype=raw_dtype))
    assert file.tensor_type("w") == kind
    expected = gguf.dequantize(blocks, raw_dtype)
    np.testing.assert_array_equal(file.tensor("w"), expected)


@pytest.mark.parametrize("kind", [*QUANTISED, "F32", "BF16"])
def test_a_part_is_that_part_of_the_whole(write: Write, kind: str) -> None:
    raw_dtype = GGMLQuantizationType[kind]
    if kind in QUANTISED:
        blocks = random_blocks(kind, 64, 7).reshape(4, -1)
    else:
        blocks = random_blocks("Q8_0", 64, 7)[:, :32].reshape(4, -1)
    file = write(lambda writer: writer.add_tensor("w", blocks, raw_dtype=raw_dtype))
    for dtype in ("float32", "bfloat16"):
        whole = file.tensor("w", dtype)
        columns = whole.shape[1]
        for begin, end in ((0, 1), (1, 3), (2, 4), (4, 4)):
            np.testing.assert_array_equal(
                file.tensor("w", dtype, (0, begin, end)), whole[begin:end]
            )
        # At the borders of blocks, and across them.
        for begin, end in ((0, 32), (32, columns), (5, columns - 3), (7, 9), (columns, columns)):
            part = file.tensor("w", dtype, (1, begin, end))
            np.testing.assert_array_equal(part, whole[:, begin:end])


def test_conformance_vectors_decode_exactly(write: Write, cbrs_data: Path) -> None:
    vectors = json.loads((cbrs_data / "conformance/gguf_dequant_vectors.json").read_text())[
        "vectors"
    ]
    assert len(vectors) == 23
    for vector in vectors:
        kind = GGMLQuantizationType[vector["type"]]
        blocks = np.frombuffer(bytes.fromhex(vector["hex"]), dtype=np.uint8)
        file = write(lambda writer, b=blocks, k=kind: writer.add_tensor("w", b, raw_dtype=k))
        expected = np.array(vector["values"], dtype=np.float32)
        np.testing.assert_array_equal(file.tensor("w"), expected, err_msg=vector["source"])


def test_rows_of_other_architectures_stay_where_they_are(write: Write) -> None:
    weight = np.arange(32, dtype=np.float32).reshape(8, 4)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count(2)
        writer.add_tensor("blk.0.attn_q.weight", weight)

    expected = half_split(weight, 2)
    np.testing.assert_array_equal(write(fill).tensor("blk.0.attn_q.weight"), expected)
    other = write(fill, architecture="qwen2")
    np.testing.assert_array_equal(other.tensor("blk.0.attn_q.weight"), weight)


def test_metadata_has_python_types_and_leaves_the_token_lists_out(
    smollm2: _core.GgufFile,
) -> None:
    metadata = smollm2.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 30
    assert metadata["llama.rope.freq_base"] == 100_000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["general.languages"] == ["en"]
    assert "tokenizer.ggml.tokens" not in metadata


def test_special_tokens_and_template_of_smollm2(smollm2: _core.GgufFile) -> None:
    assert smollm2.special_token_ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 2}
    assert smollm2.add_bos_token is False
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "unk", "pad"])
def test_i01_a_special_token_id_beyond_the_vocabulary_is_refused_naming_the_key(
    write: Write, name: str
) -> None:
    def with_id(token_id: int) -> Callable[[gguf.GGUFWriter], None]:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_token_list(["<s>", "a", "b"])
            getattr(writer, f"add_{name}_token_id")(token_id)

        return fill

    with pytest.raises(_core.ModelLoadError) as caught:
        write(with_id(3))
    stored = {"unk": "unknown", "pad": "padding"}.get(name, name)
    assert caught.value.field == f"tokenizer.ggml.{stored}_token_id"
    assert caught.value.field in str(caught.value)
    assert write(with_id(2)).special_token_ids == {name: 2}
    assert write(with_id(0xFFFFFFFF)).special_token_ids == {}


def test_unknown_tensors_and_dtypes_are_refused(smollm2: _core.GgufFile) -> None:
    with pytest.raises(_core.ModelLoadError, match=r"blk\.99\.attn_q\.weight") as caught:
        smollm2.tensor("blk.99.attn_q.weight")
    assert caught.value.field == "tensor blk.99.attn_q.weight"
    with pytest.raises(ValueError, match="float16"):
        smollm2.tensor("output_norm.weight", "float16")


def vectors_of(cbrs_data: Path, name: str) -> Iterator[tuple[str, list[int]]]:
    with (cbrs_data / "conformance/tokenizer_vectors.jsonl").open(encoding="utf-8") as lines:
        for vector in map(json.loads, lines):
            if vector["tokenizer"] == name:
                yield vector["text"], vector["ids"]


def check_vectors(tokenizer_json: str, cbrs_data: Path, name: str, least: int) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    vectors = list(vectors_of(cbrs_data, name))
    assert len(vectors) >= least
    for text, ids in vectors:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def test_the_smollm2_tokenizer_gives_the_conformance_ids(
    smollm2: _core.GgufFile, cbrs_data: Path
) -> None:
    check_vectors(smollm2.tokenizer_json(), cbrs_data, "smollm2", least=50)


def test_the_smollm2_tokenizer_splits_digits_and_keeps_special_tokens_whole(
    smollm2: _core.GgufFile,
) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json())
    assert tokenizer.get_vocab_size() == 49_152
    assert len(tokenizer.encode("2024").ids) == 4
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("<|im_start|>Hi, 42!").ids) == "Hi, 42!"


def test_the_stories_tokenizer_gives_the_conformance_ids_and_starts_with_bos(
    cbrs_data: Path,
) -> None:
    file = _core.GgufFile(str(cbrs_data / "models/stories260K/stories260K.gguf"))
    assert file.special_token_ids == {"bos": 1, "eos": 2, "unk": 0}
    assert file.add_bos_token is True
    assert file.chat_template is None
    check_vectors(file.tokenizer_json(), cbrs_data, "stories260k", least=50)
    tokenizer = Tokenizer.from_str(file.tokenizer_json())
    ids = tokenizer.encode("Once upon a time").ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "Once upon a time"


def test_the_stories_weights_equal_their_hugging_face_form(cbrs_data: Path) -> None:
    folder = cbrs_data / "models/stories260K"
    file = _core.GgufFile(str(folder / "stories260K.gguf"))
    checkpoint = _core.SafetensorsCheckpoint(str(folder))
    for part, name in [("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")]:
        for layer in range(5):
            expected = checkpoint.tensor(f"model.layers.{layer}.self_attn.{name}.weight")
            np.testing.assert_array_equal(file.tensor(f"blk.{layer}.{part}.weight"), expected)


@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("qwen2", "qwen2")])
def test_a_vocabulary_written_to_a_file_gives_the_conformance_ids(
    write: Write, cbrs_data: Path, name: str, pre: str
) -> None:
    packed = (cbrs_data / f"tokenizers/{name}_tokenizer.json.gz").read_bytes()
    source = json.loads(gzip.decompress(packed))
    ids = source["model"]["vocab"] | {
        token["content"]: token["id"] for token in source["added_tokens"]
    }
    special = {token["id"] for token in source["added_tokens"] if token["special"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(ids, key=ids.__getitem__))
        writer.add_token_types([3 if i in special else 1 for i in range(len(ids))])
        writer.add_token_merges(merges)

    check_vectors(write(fill).tokenizer_json(), cbrs_data, pre, least=50)
