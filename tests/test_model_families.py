"""Every architecture against Hugging Face transformers: logits, windows, special features."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from batches import Chunk, Tables
from references import TOKENS, load, logits_of, reference_logits

from cbrs.loading import LoadedModel
from cbrs.models import layers, llama
from cbrs.models.gemma3 import Gemma3ForCausalLM, Gemma3Layer
from cbrs.runner.model_runner import make_runner

WINDOWED = [name for name in kit.FAMILIES if name != "llama"]


@dataclass(frozen=True)
class Case:
    """A checkpoint, loaded, and the reference's logits of every position of `TOKENS`."""

    loaded: LoadedModel
    expected: torch.Tensor


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            folder = kit.family(tmp_path_factory.mktemp(name), name)
            loaded = load(folder)
            made[name] = Case(loaded, reference_logits(folder, TOKENS))
        return made[name]

    return make


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize("name", kit.FAMILIES)
@pytest.mark.parametrize("chunks", [(), (100, 1, 1, 30)], ids=["one_pass", "chunks"])
def test_logits_equal_the_reference(
    name: str, chunks: tuple[int, ...], case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    found = logits_of(case.loaded, TOKENS, chunks)
    assert found.shape == case.expected.shape
    assert largest(found - case.expected) < 1e-4
    assert float(case.expected.std()) > 0.5  # a reference that says something


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_torch_alone_equals_the_reference_too(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    assert case.loaded.path is not None
    plain = load(case.loaded.path, pack=False)
    assert plain.kernels is None
    found = logits_of(plain, TOKENS, chunks=(100, 1, 1, 30))
    assert largest(found - case.expected) < 1e-4


@pytest.mark.parametrize("name", WINDOWED)
def test_i18_a_small_window_sees_what_the_reference_sees(name: str, tmp_path: Path) -> None:
    folder = kit.family(tmp_path, name, sliding_window=8)
    loaded = load(folder)
    assert 8 in loaded.config.sliding_windows
    tokens = TOKENS[:20]
    assert largest(logits_of(loaded, tokens) - reference_logits(folder, tokens)) < 1e-4


@pytest.mark.parametrize("name", WINDOWED)
def test_i19_decode_across_the_window_equals_full_recompute(
    name: str, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    found = logits_of(case.loaded, TOKENS[:50], chunks=(28, *[1] * 21))
    # The reference is causal: one pass over all tokens holds every shorter one.
    assert largest(found - case.expected[:50]) < 1e-4


@pytest.mark.parametrize("name", WINDOWED)
def test_c06_chunks_at_every_length_around_the_window_equal_the_reference(
    name: str, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    lengths = list(range(30, 98))
    tables = Tables(len(lengths), 112)
    runner, _ = make_runner(case.loaded, num_blocks=tables.num_blocks, block_size=16, num_threads=1)
    checked = 0
    for start in range(0, 98, 16):
        parts = [
            Chunk(row, TOKENS[start : min(length, start + 16)], start)
            for row, length in enumerate(lengths)
            if length > start
        ]
        parts.sort(key=lambda part: len(part.tokens) > 1)
        logits = runner.forward(tables.batch(parts))
        wanted = [case.expected[start : start + len(part.tokens)] for part in parts]
        assert largest(logits - torch.cat(wanted)) < 1e-4
        checked += len(logits)
    assert checked == sum(lengths)


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (architecture, settings that turn the feature off)
    "mistral_window": ("mistral", {"sliding_window": None}),
    "qwen2_window": ("qwen2", {"use_sliding_window": False}),
    "qwen2_layers_with_a_window": ("qwen2", {"max_window_layers": 2}),
    "qwen3_window": ("qwen3", {"layer_types": ["full_attention"] * 2}),
    "qwen3_layers_with_a_window": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "smollm3_layers_without_rotation": ("smollm3", {"no_rope_layers": [1] * 4}),
    "smollm3_which_layers": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
    "smollm3_window": ("smollm3", {"use_sliding_window": False}),
    "gemma3_window": ("gemma3", {"sliding_window": 500}),
    "gemma3_layers_with_a_window": ("gemma3", {"sliding_window_pattern": 2}),
    "gemma3_local_theta": ("gemma3", {"rope_local_base_freq": 1e6}),
    "gemma3_theta": ("gemma3", {"rope_theta": 5000.0}),
    "gemma3_global_scaling": ("gemma3", {"rope_scaling": None}),
    "gemma3_attention_scale": ("gemma3", {"query_pre_attn_scalar": 24}),
    "gemma3_activation": ("gemma3", {"hidden_activation": "silu"}),
    "phi3_window": ("phi3", {"sliding_window": None}),
    "phi3_partial_rotation": ("phi3", {"partial_rotary_factor": None}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_setting_that_was_ignored_would_show(
    feature: str, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    name, off = FEATURES[feature]
    config = kit.tiny_config(**{**kit.FAMILIES[name], **off})
    folder = kit.write_folder(tmp_path, config, kit.tensors_of(config))
    if off == {"sliding_window": None}:  # an absent key is not the same
        config["sliding_window"] = None
        kit.write_folder(folder, config, kit.tensors_of(config))
    without = load(folder)
    assert largest(logits_of(without, TOKENS) - case_of(name).expected) > 0.01


class Unchanged(torch.nn.Module):
    """Stands for a norm that is left out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


def unbiased(cls: Any, weights: Any, prefixes: Any, bias: bool, **options: Any) -> Any:
    matrices = [weights.read(f"{prefix}.weight") for prefix in prefixes]
    return layers.Linear(torch.cat(matrices))


CODE: dict[str, tuple[str, Any, str, Any]] = {
    # name: (architecture, where, attribute, what is done instead)
    "qwen2_bias": ("qwen2", layers.Linear, "read", classmethod(unbiased)),
    "qwen3_head_norm": ("qwen3", layers.HeadNorm, "forward", lambda self, heads: heads),
    "gemma3_head_norm": ("gemma3", layers.HeadNorm, "forward", lambda self, heads: heads),
    "gemma3_embedding_scale": (
        "gemma3",
        Gemma3ForCausalLM,
        "embed",
        llama.LlamaForCausalLM.embed,
    ),
    "gemma3_norm_weights_about_1": (
        "gemma3",
        Gemma3ForCausalLM,
        "convert_hf",
        classmethod(lambda cls, config, name, values: values),
    ),
    "gemma3_norms_of_what_is_added": (
        "gemma3",
        Gemma3Layer,
        "forward",
        llama.LlamaLayer.forward,
    ),
}


@pytest.mark.parametrize("feature", CODE)
def test_a_feature_that_was_left_out_would_show(
    feature: str,
    case_of: Callable[[str], Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, place, attribute, instead = CODE[feature]
    expected = case_of(name).expected
    folder = kit.family(tmp_path, name)
    monkeypatch.setattr(place, attribute, instead)
    without = load(folder, pack=False)  # what was replaced is torch's
    assert largest(logits_of(without, TOKENS) - expected) > 0.01


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_bfloat16_is_near_float32(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    path = case.loaded.path
    assert path is not None
    half = load(path, "bfloat16")
    rounded = logits_of(half, TOKENS[:60], chunks=(20, 1, 1))
    assert rounded.dtype == torch.float32
    assert bool(rounded.isfinite().all())
    exact = case.expected[:60]
    assert float((exact - rounded).abs().mean()) < 0.04 * float(exact.std())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"use_sliding_window": None}),
        ("qwen2", {"max_window_layers": 9}),
        ("qwen2", {"rope_scaling": kit.ROPE_SCALINGS["yarn"]}),
        ("qwen3", {"attention_bias": True, "use_sliding_window": None, "layer_types": None}),
        ("smollm3", {"no_rope_layers": None, "use_sliding_window": None}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3, "mlp_bias": True}),
        ("smollm3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("smollm3", {"rope_theta": None, "attention_bias": True}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("gemma3", {"rope_theta": None, "rope_local_base_freq": None, "attention_bias": True}),
        ("gemma3", {"sliding_window_pattern": None, "num_hidden_layers": 7}),
        ("gemma3", {"hidden_size": 72}),
        ("mistral", {"num_key_value_heads": 4, "rope_scaling": kit.ROPE_SCALINGS["llama3"]}),
        ("phi3", {"partial_rotary_factor": None, "tie_word_embeddings": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value),
)
def test_other_settings_equal_the_reference(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = kit.family(tmp_path, name, **changes)
    loaded = load(folder)
    tokens = TOKENS[:120]
    assert largest(logits_of(loaded, tokens) - reference_logits(folder, tokens)) < 1e-4


def test_gemma3_embedding_scale_is_rounded_as_the_weights_are(tmp_path: Path) -> None:
    folder = kit.family(tmp_path, "gemma3", hidden_size=72)
    assert load(folder).module.embedding_scale == pytest.approx(72**0.5, rel=1e-7)
    assert load(folder, "bfloat16").module.embedding_scale == 8.5


def test_gemma3_newer_rotary_settings_equal_the_reference(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    }
    changes = {"rope_theta": None, "rope_local_base_freq": None, "rope_scaling": None}
    folder = kit.family(tmp_path, "gemma3", rope_parameters=parameters, **changes)
    loaded = load(folder)
    thetas = [rotary.theta for rotary in loaded.config.rotary if rotary is not None]
    assert thetas == [3000.0, 3000.0, 700000.0]
    tokens = TOKENS[:120]
    assert largest(logits_of(loaded, tokens) - reference_logits(folder, tokens)) < 1e-4


@pytest.mark.parametrize(
    "extra", [{}, {"attention_factor": 1.3}, {"factor": 2.0}], ids=lambda extra: "_".join(extra)
)
def test_i06_longrope_equals_the_reference_in_the_original_context(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"rope_scaling": kit.longrope() | extra, "original_max_position_embeddings": 128}
    folder = kit.family(tmp_path / "scaled", "phi3", **settings)
    loaded = load(folder)
    assert loaded.config.max_position_embeddings == 128
    tokens = TOKENS[:128]
    found = logits_of(loaded, tokens)
    assert largest(found - reference_logits(folder, tokens)) < 1e-4
    plain = load(kit.family(tmp_path / "plain", "phi3"))
    assert largest(found - logits_of(plain, tokens)) > 0.1
