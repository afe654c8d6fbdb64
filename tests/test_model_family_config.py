"""Settings of the single architectures: what is read, and what is refused by file and field."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest

from cbrs import SamplingParams
from cbrs.errors import InvalidRequestError, ModelLoadError
from cbrs.loading import load_model
from cbrs.models import ARCHITECTURES, GGUF_ARCHITECTURES, config_from_hf
from cbrs.models.config import ModelConfig

ABSENT = object()
"""A change that takes a key away; None stays null."""


def config_of(name: str, **changes: Any) -> ModelConfig:
    values = {**kit.tiny_config(**kit.FAMILIES[name]), **changes}
    values = {key: value for key, value in values.items() if value is not ABSENT}
    return config_from_hf(values, "config.json")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: (architecture, changes, field that is named)
    "mistral_bias": ("mistral", {"attention_bias": True}, "attention_bias"),
    "mistral_window_is_zero": ("mistral", {"sliding_window": 0}, "sliding_window"),
    "mistral_layers_without_a_window": (
        "mistral",
        {"layer_types": ["full_attention"] * 2},
        "layer_types",
    ),
    "qwen2_mlp_bias": ("qwen2", {"mlp_bias": True}, "mlp_bias"),
    "qwen2_window_use_is_a_number": ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
    "qwen2_window_is_a_string": ("qwen2", {"sliding_window": "32"}, "sliding_window"),
    "qwen2_first_layer_is_negative": ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    "qwen2_kinds_are_too_few": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    "qwen2_kind_is_unknown": ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    "qwen2_kind_is_a_list": ("qwen2", {"layer_types": [["full_attention"]] * 3}, "layer_types"),
    "qwen2_windows_that_are_off": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
        "layer_types",
    ),
    "qwen3_head_dim_is_odd": ("qwen3", {"head_dim": 23}, "head_dim"),
    "qwen3_windows_without_a_size": ("qwen3", {"sliding_window": None}, "layer_types"),
    "qwen3_rope_is_dynamic": ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "type"),
    "smollm3_marks_are_too_few": ("smollm3", {"no_rope_layers": [1, 1, 1]}, "no_rope_layers"),
    "smollm3_marks_are_a_number": ("smollm3", {"no_rope_layers": 4}, "no_rope_layers"),
    "smollm3_mark_is_2": ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers"),
    "smollm3_mark_is_true": ("smollm3", {"no_rope_layers": [True, 0, 1, 0]}, "no_rope_layers"),
    "smollm3_interval_is_zero": (
        "smollm3",
        {"no_rope_layer_interval": 0},
        "no_rope_layer_interval",
    ),
    "smollm3_windows_that_are_off": (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
        "layer_types",
    ),
    "gemma3_multimodal": (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        "architectures",
    ),
    "gemma3_softcap_of_attention": (
        "gemma3",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping",
    ),
    "gemma3_softcap_of_logits": (
        "gemma3",
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping",
    ),
    "gemma3_both_directions": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "gemma3_activation_is_unknown": ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
    "gemma3_scale_is_zero": ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "gemma3_window_is_null": ("gemma3", {"sliding_window": None}, "layer_types"),
    "gemma3_pattern_is_zero": ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    "gemma3_local_theta_is_zero": ("gemma3", {"rope_local_base_freq": 0}, "rope_local_base_freq"),
    "gemma3_rope_is_partial": ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "gemma3_rope_is_given_twice": ("gemma3", {"rope_parameters": {}}, "rope_scaling"),
    "gemma3_rope_of_another_kind": (
        "gemma3",
        {"rope_scaling": None, "rope_parameters": {"chunked_attention": {}}},
        "rope_parameters",
    ),
    "gemma3_rope_without_kinds": (
        "gemma3",
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
        "rope_parameters",
    ),
    "gemma3_rope_of_a_kind_is_dynamic": (
        "gemma3",
        {
            "rope_scaling": None,
            "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
        },
        "rope_type",
    ),
    "gemma3_rope_is_a_list": (
        "gemma3",
        {"rope_scaling": None, "rope_parameters": [1]},
        "rope_parameters",
    ),
    "phi3_bias": ("phi3", {"attention_bias": True}, "attention_bias"),
    "phi3_no_dimension_turns": (
        "phi3",
        {"partial_rotary_factor": 0.0},
        "partial_rotary_factor",
    ),
    "phi3_an_odd_number_turns": (
        "phi3",
        {"partial_rotary_factor": 0.45},
        "partial_rotary_factor",
    ),
    "phi3_rope_is_linear": (
        "phi3",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_type",
    ),
    "phi3_longrope_without_divisors": ("phi3", {"rope_scaling": {"type": "su"}}, "short_factor"),
    "phi3_too_few_divisors": ("phi3", {"rope_scaling": kit.longrope(6)}, "short_factor"),
    "phi3_no_long_divisors": (
        "phi3",
        {"rope_scaling": kit.longrope() | {"long_factor": None}},
        "long_factor",
    ),
    "phi3_divisor_is_zero": (
        "phi3",
        {"rope_scaling": kit.longrope() | {"short_factor": [1.0, 0.0, 1.0, 1.0]}},
        "short_factor",
    ),
    "phi3_divisor_is_a_string": (
        "phi3",
        {"rope_scaling": kit.longrope() | {"long_factor": [1.0, "1", 1.0, 1.0]}},
        "long_factor",
    ),
    "phi3_longrope_with_more": (
        "phi3",
        {"rope_scaling": kit.longrope() | {"short_mscale": 1.2}},
        "short_mscale",
    ),
    "phi3_two_original_contexts": (
        "phi3",
        {
            "rope_scaling": kit.longrope() | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 128,
        },
        "original_max_position_embeddings",
    ),
    "phi3_divisors_without_longrope": (
        "phi3",
        {"rope_scaling": kit.longrope() | {"rope_type": "default"}},
        "short_factor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_setting_that_cannot_be_applied_is_one_error_naming_the_field(case: str) -> None:
    name, changes, field = REFUSED[case]
    with pytest.raises(ModelLoadError) as caught:
        config_of(name, **changes)
    assert (caught.value.file, caught.value.field) == ("config.json", field)
    assert field in str(caught.value)


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_the_kit_is_read_without_complaint(name: str) -> None:
    assert config_of(name).architecture in ARCHITECTURES


def test_every_architecture_is_in_the_kit() -> None:
    assert {config_of(name).architecture for name in kit.FAMILIES} == set(ARCHITECTURES)


def test_the_documentation_names_every_architecture() -> None:
    document = Path(__file__).parent.parent / "docs" / "models.md"
    text = document.read_text(encoding="utf-8")
    missing = [name for name in (*ARCHITECTURES, *GGUF_ARCHITECTURES) if f"`{name}`" not in text]
    assert missing == []


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_model_type_alone_names_the_architecture(name: str) -> None:
    assert config_of(name, architectures=None) == config_of(name)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
        ("gemma3", "model.layers.0.post_feedforward_layernorm.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
    ],
)
def test_missing_tensor_of_an_architecture_is_named(
    name: str, missing: str, tmp_path: Path
) -> None:
    config = kit.tiny_config(**kit.FAMILIES[name])
    tensors = kit.tensors_of(config)
    del tensors[missing]
    with pytest.raises(ModelLoadError, match="missing tensor") as caught:
        load_model(kit.write_folder(tmp_path, config, tensors))
    assert caught.value.field == missing


def test_window_of_qwen_is_off_unless_it_is_used() -> None:
    assert config_of("qwen2").sliding_windows == (None, 32, 32)
    assert config_of("qwen2", use_sliding_window=ABSENT).sliding_windows == (None,) * 3
    assert config_of("qwen2", sliding_window=ABSENT).sliding_windows == (None, 4096, 4096)
    assert config_of("qwen2", max_window_layers=ABSENT).sliding_windows == (None,) * 3


def test_smollm3_rotates_all_but_every_fourth_layer() -> None:
    config = config_of("smollm3", no_rope_layers=ABSENT, num_hidden_layers=9)
    without = [layer for layer, rotary in enumerate(config.rotary) if rotary is None]
    assert without == [3, 7]
    assert config.rotary[0] is not None
    assert config.rotary[0].theta == 10000.0
    plain = config_of("smollm3", rope_theta=ABSENT).rotary[0]
    assert plain is not None
    assert plain.theta == 2e6


def test_gemma3_sees_the_whole_context_in_every_sixth_layer() -> None:
    changes = {"sliding_window_pattern": ABSENT, "num_hidden_layers": 13}
    config = config_of("gemma3", **changes)
    whole = [layer for layer, window in enumerate(config.sliding_windows) if window is None]
    assert whole == [5, 11]
    thetas = [rotary.theta for rotary in config.rotary if rotary is not None]
    assert [layer for layer, theta in enumerate(thetas) if theta == 1e6] == whole
    assert config.attention_scale == pytest.approx(40**-0.5)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_names_of_longrope_are_read(kind: str) -> None:
    settings = {"original_max_position_embeddings": 128}
    named = kit.longrope() | {"rope_type": kind}
    expected = config_of("phi3", rope_scaling=kit.longrope(), **settings)
    assert config_of("phi3", rope_scaling=named, **settings) == expected
    assert expected.max_position_embeddings == 128


def test_longrope_says_that_the_context_is_shorter(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cbrs"), "propagate", True)
    with caplog.at_level("WARNING", logger="cbrs"):
        config_of("phi3", rope_scaling=kit.longrope(), original_max_position_embeddings=128)
    assert "the context is 128 of 512 positions" in caplog.text


def tokenizer_with(extra: int) -> dict[str, Any]:
    """Return the byte tokenizer with `extra` tokens more than the kit's models have embeddings."""
    tokenizer = kit.byte_tokenizer()
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][-1], "id": number, "content": f"<more_{number}>"}
        for number in range(kit.NUM_TOKENS, kit.VOCAB_SIZE + extra)
    ]
    return tokenizer


def test_image_token_of_gemma3_has_no_embedding_and_cannot_be_used(
    tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    config = kit.tiny_config(**kit.FAMILIES["gemma3"])
    tensors = kit.tensors_of(config)
    folder = kit.write_folder(tmp_path / "one", config, tensors, tokenizer_with(1))
    llm = make_llm(folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    assert len(llm.generate(f"a<more_{kit.VOCAB_SIZE - 1}>", greedy)) == 1
    with pytest.raises(InvalidRequestError, match=f"{kit.VOCAB_SIZE}"):
        llm.generate(f"a<more_{kit.VOCAB_SIZE}>", greedy)
    folder = kit.write_folder(tmp_path / "two", config, tensors, tokenizer_with(2))
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert caught.value.field == "vocabulary"
