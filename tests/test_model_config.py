"""Malformed checkpoints: each gives one `ModelLoadError` that names file and field, and quickly."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from safetensors.numpy import save_file

from cbrs.errors import ModelLoadError
from cbrs.loading import load_model
from cbrs.models import config_from_gguf, config_from_hf
from cbrs.models.config import ModelConfig
from cbrs.models.rope import Rotary

Tensors = dict[str, np.ndarray]


def changed(**changes: Any) -> Callable[[Path], None]:
    """Write a config.json with these values; null stays null."""

    def damage(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**kit.tiny_config(), **changes}))

    return damage


def without(key: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = kit.tiny_config()
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def raw(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def tensors(edit: Callable[[Tensors], Any], **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = kit.tiny_config(**changes)
        (folder / "config.json").write_text(json.dumps(config))
        values = kit.tensors_of(config)
        edit(values)
        save_file(values, folder / "model.safetensors")

    return damage


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    # Opening this as a pickle would fail loudly; it must not be opened at all.
    (folder / "pytorch_model.bin").write_bytes(b"cbrs must not read this")


def added_token_beyond(folder: Path) -> None:
    tokenizer = kit.byte_tokenizer()
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][-1], "id": number, "content": f"<more_{number}>"}
        for number in range(kit.NUM_TOKENS, kit.VOCAB_SIZE + 1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def merge_of_missing_token(folder: Path) -> None:
    tokenizer = kit.byte_tokenizer()
    tokenizer["model"]["merges"].append("absent token")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def only_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def rope(**values: Any) -> Callable[[Path], None]:
    return changed(rope_scaling=values)


GATE = "model.layers.1.mlp.gate_proj.weight"

MALFORMED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # name: (damage, file that is named, field that is named)
    "config_is_absent": (lambda f: (f / "config.json").unlink(), "config.json", "file"),
    "config_is_empty": (raw("config.json", b""), "config.json", "file"),
    "config_is_not_json": (raw("config.json", b"{'a': 1}"), "config.json", "file"),
    "config_is_a_list": (raw("config.json", b"[]"), "config.json", "file"),
    "config_is_not_utf8": (raw("config.json", b'{"a": "\xff"}'), "config.json", "file"),
    "config_is_deep": (raw("config.json", b'{"a":' * 100 + b"1" + b"}" * 100), "", "file"),
    "config_is_very_deep": (raw("config.json", b"[" * 10**6), "config.json", "file"),
    "config_is_huge": (raw("config.json", b" " * (9 << 20)), "config.json", "file"),
    "number_is_nan": (changed(rms_norm_eps=float("nan")), "config.json", "file"),
    "number_is_infinite": (changed(rope_theta=float("inf")), "config.json", "file"),
    "number_overflows": (
        raw("config.json", b'{"architectures": ["LlamaForCausalLM"], "vocab_size": 1e999}'),
        "config.json",
        "vocab_size",
    ),
    "number_has_a_million_digits": (
        raw("config.json", b'{"vocab_size": ' + b"9" * 10**6 + b"}"),
        "config.json",
        "file",
    ),
    "theta_is_a_string": (changed(rope_theta="10000"), "config.json", "rope_theta"),
    "theta_is_negative": (changed(rope_theta=-1.0), "config.json", "rope_theta"),
    "epsilon_is_negative": (changed(rms_norm_eps=-1e-5), "config.json", "rms_norm_eps"),
    "width_is_missing": (without("hidden_size"), "config.json", "hidden_size"),
    "width_is_zero": (changed(hidden_size=0), "config.json", "hidden_size"),
    "width_is_fractional": (changed(hidden_size=64.5), "config.json", "hidden_size"),
    "width_is_true": (changed(hidden_size=True), "config.json", "hidden_size"),
    "heads_do_not_divide": (changed(num_attention_heads=5), "config.json", "num_attention_heads"),
    "kv_heads_are_zero": (changed(num_key_value_heads=0), "config.json", "num_key_value_heads"),
    "kv_heads_do_not_divide": (
        changed(num_key_value_heads=3),
        "config.json",
        "num_key_value_heads",
    ),
    "head_dim_is_odd": (changed(head_dim=15), "config.json", "head_dim"),
    "layers_are_a_billion": (changed(num_hidden_layers=10**9), "", "num_hidden_layers"),
    "layers_are_negative": (changed(num_hidden_layers=-1), "config.json", "num_hidden_layers"),
    "layer_is_missing": (changed(num_hidden_layers=3), "", "model.layers.2.input_layernorm.weight"),
    "layer_is_left_over": (changed(num_hidden_layers=1), "", "model.layers.1."),
    "vocabulary_is_too_small": (changed(vocab_size=319), "", "model.embed_tokens.weight"),
    "vocabulary_is_too_large": (changed(vocab_size=321), "", "model.embed_tokens.weight"),
    "vocabulary_is_absurd": (changed(vocab_size=2**63), "config.json", "vocab_size"),
    "architecture_is_unknown": (
        changed(architectures=["GPT2LMHeadModel"]),
        "config.json",
        "architectures",
    ),
    "architecture_is_a_number": (changed(architectures=7), "config.json", "architectures"),
    "architecture_is_absent": (
        changed(architectures=None, model_type="other"),
        "config.json",
        "architectures",
    ),
    "code_for_an_unknown_architecture": (
        changed(architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"}),
        "config.json",
        "architectures",
    ),
    "activation_is_unknown": (changed(hidden_act="relu6"), "config.json", "hidden_act"),
    "weights_are_quantized": (
        changed(quantization_config={"quant_method": "gptq"}),
        "config.json",
        "quantization_config",
    ),
    "rope_type_is_unknown": (rope(rope_type="spiral", factor=2.0), "config.json", "rope_type"),
    "rope_type_is_dynamic": (rope(type="dynamic", factor=2.0), "config.json", "type"),
    "rope_type_is_longrope": (rope(rope_type="longrope"), "config.json", "rope_type"),
    "rope_factor_is_missing": (rope(rope_type="linear"), "config.json", "factor"),
    "rope_factor_is_zero": (rope(rope_type="linear", factor=0), "config.json", "factor"),
    "rope_limits_are_swapped": (
        rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1),
        "config.json",
        "high_freq_factor",
    ),
    "rope_type_is_absent": (rope(factor=8.0), "config.json", "factor"),
    "rope_type_is_default_with_a_factor": (rope(rope_type="default", factor=8.0), "", "factor"),
    "rope_has_sections": (rope(type="default", mrope_section=[2, 3, 3]), "", "mrope_section"),
    "rope_is_by_kind_of_layer": (
        changed(rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0}}),
        "config.json",
        "full_attention",
    ),
    "rope_is_nested_in_a_scaling": (
        rope(rope_type="linear", factor=8.0, full_attention={"factor": 2.0}),
        "config.json",
        "full_attention",
    ),
    "rope_is_given_twice": (
        changed(rope_parameters={"rope_theta": 1e4}, rope_scaling=kit.ROPE_SCALINGS["linear"]),
        "config.json",
        "rope_scaling",
    ),
    "rope_is_partial_beside_it": (changed(partial_rotary_factor=0.5), "", "partial_rotary_factor"),
    "rope_is_partial": (rope(partial_rotary_factor=0.5), "", "partial_rotary_factor"),
    "rope_is_a_list": (changed(rope_scaling=[1]), "config.json", "rope_scaling"),
    "window_is_negative": (changed(sliding_window=-8), "config.json", "sliding_window"),
    "window_is_zero": (changed(sliding_window=0), "config.json", "sliding_window"),
    "window_differs_by_layer": (
        changed(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "config.json",
        "layer_types",
    ),
    "end_token_is_beyond": (changed(eos_token_id=320), "config.json", "eos_token_id"),
    "end_token_is_negative": (changed(eos_token_id=[1, -1]), "config.json", "eos_token_id"),
    "begin_token_is_a_string": (changed(bos_token_id="<s>"), "config.json", "bos_token_id"),
    "generation_end_token_is_beyond": (
        raw("generation_config.json", b'{"eos_token_id": [1, 4000]}'),
        "generation_config.json",
        "eos_token_id",
    ),
    "generation_config_is_not_json": (
        raw("generation_config.json", b"x"),
        "generation_config.json",
        "file",
    ),
    "tensor_is_missing": (tensors(lambda t: t.pop(GATE)), "", GATE),
    "tensor_is_unknown": (
        tensors(lambda t: t.update({"model.extra.weight": t["model.norm.weight"]})),
        "",
        "model.extra.weight",
    ),
    "tensor_is_transposed": (
        tensors(lambda t: t.update({GATE: np.ascontiguousarray(t[GATE].T)})),
        "",
        GATE,
    ),
    "bias_is_missing": (
        changed(attention_bias=True),
        "",
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "bias_has_no_place": (
        tensors(lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.zeros(96, np.float32)})),
        "",
        "model.layers.0.mlp.up_proj.bias",
    ),
    "head_is_missing": (changed(tie_word_embeddings=False), "", "lm_head.weight"),
    "tied_head_differs": (
        tensors(
            lambda t: t.update({"lm_head.weight": np.ones_like(t["model.embed_tokens.weight"])})
        ),
        "",
        "lm_head.weight",
    ),
    "only_a_pickle": (only_a_pickle, "", "model.safetensors"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "", "model.safetensors"),
    "tokenizer_is_not_json": (raw("tokenizer.json", b"{"), "tokenizer.json", "tokenizer"),
    "tokenizer_exceeds_the_embedding": (added_token_beyond, "tokenizer.json", "vocabulary"),
    "tokenizer_merges_a_missing_token": (merge_of_missing_token, "tokenizer.json", "tokenizer"),
    "tokenizer_is_sentencepiece_only": (only_sentencepiece, "", "tokenizer.json"),
    "tokenizer_settings_are_not_json": (
        raw("tokenizer_config.json", b"no"),
        "tokenizer_config.json",
        "file",
    ),
    "chat_template_is_a_number": (
        raw("tokenizer_config.json", b'{"chat_template": 5}'),
        "tokenizer_config.json",
        "chat_template",
    ),
    "begin_token_text_is_a_list": (
        raw("tokenizer_config.json", b'{"bos_token": [1]}'),
        "tokenizer_config.json",
        "bos_token",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_folder_is_one_error_naming_file_and_field(case: str, tmp_path: Path) -> None:
    damage, file, field = MALFORMED[case]
    folder = kit.tiny(tmp_path / "model")
    damage(folder)
    started = time.monotonic()
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert time.monotonic() - started < 2.0
    assert caught.value.file.startswith(str(folder / file))
    assert caught.value.field.startswith(field)
    assert caught.value.file in str(caught.value)
    assert caught.value.field in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_untouched_folder_loads(tmp_path: Path) -> None:
    """The kit's folder is fine without damage, so each case above fails for its own reason."""
    loaded = load_model(kit.tiny(tmp_path / "model"), dtype="float32", device="cpu")
    assert loaded.vocab_size == kit.NUM_TOKENS
    assert loaded.config.vocab_size == kit.VOCAB_SIZE
    assert loaded.eos_token_ids == (kit.EOS,)


def test_custom_code_is_named_and_never_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command line turns this off for the whole process; a test of it may have run before.
    monkeypatch.setattr(logging.getLogger("cbrs"), "propagate", True)
    folder = kit.tiny(tmp_path / "model", auto_map={"AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text("raise SystemExit('code from a checkpoint was run')")
    with caplog.at_level("WARNING", logger="cbrs"):
        load_model(folder, device="cpu")
    assert "auto_map" in caplog.text
    assert str(folder / "config.json") in caplog.text


def test_pickle_beside_safetensors_is_not_opened(tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    load_model(folder, device="cpu")


def test_generation_config_replaces_the_end_tokens(tmp_path: Path) -> None:
    config = kit.tiny_config()
    folder = kit.write_folder(
        tmp_path, config, kit.tensors_of(config), generation={"eos_token_id": [1, 2]}
    )
    assert load_model(folder, device="cpu").eos_token_ids == (1, 2)


def test_newer_names_of_rope_are_read() -> None:
    values = kit.tiny_config(rope_theta=None)
    values["rope_parameters"] = {"rope_theta": 500000.0, **kit.ROPE_SCALINGS["llama3"]}
    config = config_from_hf(values, "config.json")
    rotary = config.rotary[0]
    assert rotary is not None
    assert rotary.scaling is not None
    assert (rotary.theta, rotary.dim) == (500000.0, 16)
    assert (rotary.scaling.type, rotary.scaling.factor) == ("llama3", 8.0)


def test_plain_rotary_settings_are_no_scaling() -> None:
    plain = {"rope_type": "default", "type": "default", "rope_theta": 5e5, "factor": None}
    values = kit.tiny_config(rope_theta=None, rope_parameters={**plain, "partial_rotary_factor": 1})
    config = config_from_hf(values, "config.json")
    assert config.rotary == (Rotary(5e5, 16),) * 2


@dataclass
class Source:
    """A GGUF file of an embedding and nothing else."""

    metadata: dict[str, Any]
    tensor_names = ("token_embd.weight",)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        assert name == "token_embd.weight"
        return 300, 64


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_gguf_rope_factor_without_a_type_is_refused(key: str) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.context_length": 512,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }

    def read(**more: float) -> ModelConfig:
        return config_from_gguf(Source({**metadata, **more}), "model.gguf")

    assert read(**{f"llama.{key}": 1.0}).rotary == (Rotary(10000.0, 16),) * 2
    with pytest.raises(ModelLoadError, match=r"without rope\.scaling\.type") as caught:
        read(**{f"llama.{key}": 4.0})
    assert caught.value.field == f"llama.{key}"


def test_mistral_without_a_window_takes_its_default() -> None:
    values = kit.tiny_config(architectures=["MistralForCausalLM"], model_type="mistral")
    assert config_from_hf(values, "config.json").sliding_windows == (4096, 4096)
    values["sliding_window"] = None
    assert config_from_hf(values, "config.json").sliding_windows == (None, None)
