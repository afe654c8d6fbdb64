"""safetensors files and folders, against the reference package."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cbrs import _core


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "single": normal(3, 5),
        "half": normal(4, 2, 3).to(torch.float16),
        "brain": normal(7).to(torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4),
    }


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def check_tensors(
    checkpoint: _core.SafetensorsCheckpoint, tensors: dict[str, torch.Tensor]
) -> None:
    assert checkpoint.tensor_names == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.tensor_shape(name) == tuple(tensor.shape)
        values = checkpoint.tensor(name)
        assert values.dtype == np.float32
        assert torch.equal(torch.from_numpy(values), tensor.float())
        bits = torch.from_numpy(checkpoint.tensor(name, "bfloat16"))
        assert torch.equal(bits.view(torch.bfloat16), tensor.to(torch.bfloat16))


def test_a_single_file_gives_every_tensor_in_both_types(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_tensors(_core.SafetensorsCheckpoint(str(tmp_path)), tensors)
    check_tensors(_core.SafetensorsCheckpoint(str(tmp_path / "model.safetensors")), tensors)


def test_stored_types_are_named(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    checkpoint = _core.SafetensorsCheckpoint(str(tmp_path))
    found = {name: checkpoint.tensor_dtype(name) for name in ("single", "half", "brain")}
    assert found == {"single": "F32", "half": "F16", "brain": "BF16"}


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    tensors = random_tensors()
    names = sorted(tensors)
    first, second = (
        {name: tensors[name] for name in names[:2]},
        {name: tensors[name] for name in names[2:]},
    )
    write_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    check_tensors(_core.SafetensorsCheckpoint(str(tmp_path)), tensors)


def test_types_that_are_no_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = _core.SafetensorsCheckpoint(str(tmp_path))
    with pytest.raises(_core.ModelLoadError, match="I64") as caught:
        checkpoint.tensor("ids")
    assert caught.value.field == "tensor ids"
    assert caught.value.file == str(tmp_path / "model.safetensors")


def test_a_missing_tensor_names_itself(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(_core.ModelLoadError, match="missing") as caught:
        _core.SafetensorsCheckpoint(str(tmp_path)).tensor("v")
    assert caught.value.field == "tensor v"


def test_values_do_not_depend_on_the_file_after_they_were_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, path)
    values = _core.SafetensorsCheckpoint(str(path)).tensor("w")
    path.unlink()
    values += 1
    assert values.tolist() == [2.0] * 4
