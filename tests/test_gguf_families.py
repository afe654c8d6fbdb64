"""GGUF files of every architecture: the logits of the same checkpoint as a folder."""

from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from gguf_kit import assert_same, write_gguf

from cbrs.errors import ModelLoadError
from cbrs.loading import load_model

WITHOUT_WINDOW = {"use_sliding_window": None, "sliding_window": None}

# As these files can say it: their models have windows and layers without rotation by rule.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (changes to the kit's config, metadata)
    "qwen2": (WITHOUT_WINDOW, {}),
    "qwen3": (WITHOUT_WINDOW | {"layer_types": None}, {}),
    "smollm3": (WITHOUT_WINDOW | {"no_rope_layers": None}, {}),
    "gemma3": (
        {"query_pre_attn_scalar": 24},
        {
            "gemma3.attention.sliding_window": 32,
            "gemma3.attention.sliding_window_pattern": 3,
            "gemma3.rope.freq_base_swa": 5000.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ({}, {"phi3.attention.sliding_window": 32}),
}


def assert_family_same(
    tmp_path: Path,
    name: str,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> None:
    """Compare folder and GGUF file of an architecture with its `SETTINGS` and the given ones."""
    common, keys = SETTINGS[name]
    merged = {**kit.FAMILIES[name], **common, **changes}
    assert_same(tmp_path, {**keys, **(metadata or {})}, extra, **merged)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_the_logits_of_the_folder(name: str, tied: bool, tmp_path: Path) -> None:
    assert_family_same(tmp_path, name, tie_word_embeddings=tied)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"attention_bias": True}),
        ("smollm3", {"num_hidden_layers": 9, "attention_bias": True}),
        ("phi3", {"partial_rotary_factor": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value),
)
def test_other_shapes_in_gguf_files_equal_the_folder(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert_family_same(tmp_path, name, **changes)


def test_gemma3_keys_that_older_files_lack_have_their_defaults(tmp_path: Path) -> None:
    absent = dict.fromkeys(SETTINGS["gemma3"][1]) | {"gemma3.attention.sliding_window": 32}
    changes = {"sliding_window_pattern": 6, "num_hidden_layers": 7, "rope_scaling": None}
    assert_family_same(tmp_path, "gemma3", absent, rope_local_base_freq=10000.0, **changes)


def test_gemma3_of_62_layers_scales_attention_by_its_width(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 62, "hidden_size": 32, "intermediate_size": 16, "head_dim": 6}
    shape |= {"rope_theta": 10000.0, "rope_local_base_freq": 5000.0}
    assert_family_same(tmp_path, "gemma3", query_pre_attn_scalar=8, **shape)


def test_phi3_without_a_window(tmp_path: Path) -> None:
    assert_family_same(tmp_path, "phi3", {"phi3.attention.sliding_window": 0}, sliding_window=None)


LONGROPE = {"phi3.rope.scaling.original_context_length": 210, "phi3.rope.scaling.attn_factor": 1.25}


def divisors(scaling: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        "rope_factors_short.weight": np.array(scaling["short_factor"], dtype=np.float32),
        "rope_factors_long.weight": np.array(scaling["long_factor"], dtype=np.float32),
    }


def test_i06_phi3_longrope_of_a_gguf_file_is_applied(tmp_path: Path) -> None:
    scaling = kit.longrope() | {"attention_factor": 1.25}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 210}
    assert_family_same(tmp_path, "phi3", LONGROPE, divisors(scaling), **changes)


@pytest.mark.parametrize(
    ("name", "metadata", "field"),
    [
        ("qwen2", {"qwen2.attention.sliding_window": 32}, "qwen2.attention.sliding_window"),
        ("qwen3", {"qwen3.attention.sliding_window": 32}, "qwen3.attention.sliding_window"),
        ("qwen3", {"qwen3.expert_count": 8}, "qwen3.expert_count"),
        ("smollm3", {"smollm3.attention.sliding_window": 9}, "smollm3.attention.sliding_window"),
        ("smollm3", {"smollm3.block_count": None}, "smollm3.block_count"),
        (
            "gemma3",
            {"gemma3.attention.sliding_window": None},
            "gemma3.attention.sliding_window",
        ),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": 0},
            "gemma3.attention.sliding_window_pattern",
        ),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping"),
        ("gemma3", {"gemma3.rope.freq_base_swa": 0.5}, "gemma3.rope.freq_base_swa"),
        ("phi3", {"phi3.attention.sliding_window": None}, "phi3.attention.sliding_window"),
        ("phi3", {"phi3.rope.dimension_count": 7}, "phi3.rope.dimension_count"),
        ("phi3", {"phi3.rope.dimension_count": 18}, "phi3.rope.dimension_count"),
        ("phi3", {"phi3.rope.scaling.type": "linear"}, "phi3.rope.scaling.type"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, "phi3.rope.scaling.attn_factor"),
    ],
)
def test_metadata_that_cannot_be_applied_is_one_error_naming_the_key(
    name: str, metadata: dict[str, Any], field: str, tmp_path: Path
) -> None:
    changes, keys = SETTINGS[name]
    config = kit.tiny_config(**{**kit.FAMILIES[name], **changes})
    file = tmp_path / "model.gguf"
    write_gguf(file, config, kit.tensors_of(config), {**keys, **metadata})
    with pytest.raises(ModelLoadError) as caught:
        load_model(file)
    assert (caught.value.file, caught.value.field) == (str(file), field)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"rope_factors_short.weight": None}, "rope_factors_short.weight"),
        ({"rope_factors_long.weight": np.ones(3, np.float32)}, "rope_factors_long.weight"),
        ({"rope_factors_short.weight": np.zeros(4, np.float32)}, "rope_factors_short.weight"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs.weight"),
    ],
    ids=["no_short", "too_few_long", "zero", "of_another_kind"],
)
def test_phi3_divisors_that_cannot_be_applied_are_named(
    edit: dict[str, Any], field: str, tmp_path: Path
) -> None:
    changes, keys = SETTINGS["phi3"]
    config = kit.tiny_config(**{**kit.FAMILIES["phi3"], **changes})
    given = {**divisors(kit.longrope()), **edit}
    extra = {name: values for name, values in given.items() if values is not None}
    file = tmp_path / "model.gguf"
    write_gguf(file, config, kit.tensors_of(config), {**keys, **LONGROPE}, extra)
    with pytest.raises(ModelLoadError) as caught:
        load_model(file)
    assert caught.value.field == field
