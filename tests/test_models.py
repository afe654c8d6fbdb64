"""The Llama architecture against Hugging Face transformers, on random checkpoints."""

from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
import torch
from batches import Chunk, Tables
from references import TOKENS, assert_equals_reference, load, logits_of, reference_logits
from safetensors.torch import save_file

from cbrs._core import CpuKernels
from cbrs.errors import ModelLoadError
from cbrs.loading import load_model
from cbrs.models.layers import Linear
from cbrs.models.null import NullModel
from cbrs.runner.attention import CpuAttention
from cbrs.runner.kv_cache import KVCache
from cbrs.runner.model_runner import ModelRunner, make_runner


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_i04_rope_theta_is_applied(theta: float, tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, rope_theta=theta))


@pytest.mark.parametrize("kind", kit.ROPE_SCALINGS)
def test_i06_rope_scaling_is_applied(kind: str, tmp_path: Path) -> None:
    scaling = kit.ROPE_SCALINGS[kind]
    assert_equals_reference(kit.tiny(tmp_path / "scaled", rope_scaling=scaling))
    plain = load(kit.tiny(tmp_path / "plain"))
    scaled = load(tmp_path / "scaled")
    difference = logits_of(plain, TOKENS) - logits_of(scaled, TOKENS)
    assert float(difference[200].abs().max()) > 0.1  # ignoring the setting would show


@pytest.mark.parametrize(
    "changes",
    [
        {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"factor": 1.0},
    ],
    ids=lambda changes: "_".join(changes),
)
def test_i06_yarn_parameters_are_applied(changes: dict[str, Any], tmp_path: Path) -> None:
    scaling = {**kit.ROPE_SCALINGS["yarn"], **changes}
    assert_equals_reference(kit.tiny(tmp_path, rope_scaling=scaling))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard_of"])
def test_i06_rope_scaling_that_cannot_be_applied_is_refused(kind: str, tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path, rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(ModelLoadError, match=kind):
        load_model(folder)


def test_i08_tied_head_is_the_embedding(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, tie_word_embeddings=True))


def test_untied_head_is_read(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, tie_word_embeddings=False))


def test_tied_head_that_is_stored_again_is_accepted(tmp_path: Path) -> None:
    config = kit.tiny_config()
    tensors = kit.tensors_of(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert_equals_reference(kit.write_folder(tmp_path, config, tensors))


def test_i12_attention_bias_is_applied(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, attention_bias=True))


def test_i12_mlp_bias_is_applied(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, mlp_bias=True, attention_bias=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2)])
def test_grouped_heads_equal_the_reference(heads: int, kv_heads: int, tmp_path: Path) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    assert_equals_reference(kit.tiny(tmp_path, **changes))


def test_head_dim_apart_from_width_equals_the_reference(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, head_dim=24))


def test_plain_weights_equal_the_reference(tmp_path: Path) -> None:
    assert_equals_reference(kit.tiny(tmp_path, attention_bias=True), pack=False)


@pytest.mark.parametrize("window", [8, 32])
def test_i18_sliding_window_sees_the_keys_that_the_reference_sees(
    window: int, tmp_path: Path
) -> None:
    folder = kit.tiny(
        tmp_path,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=window,
    )
    assert_equals_reference(folder)


def test_i19_decode_at_the_window_equals_full_recompute(tmp_path: Path) -> None:
    folder = kit.tiny(
        tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8
    )
    loaded = load(folder)
    stepwise = logits_of(loaded, TOKENS[:16], chunks=(6, *[1] * 9))
    for length in range(6, 17):
        full = reference_logits(folder, TOKENS[:length])[-1]
        assert float((stepwise[length - 1] - full).abs().max()) < 1e-4


def test_c06_every_length_around_the_window_equals_one_pass(tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path, sliding_window=32)
    loaded = load(folder)
    for length in range(33, 98):
        tokens = TOKENS[:length]
        chunked = logits_of(loaded, tokens, chunks=[16] * ((length - 1) // 16))
        assert float((chunked - logits_of(loaded, tokens)).abs().max()) < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
def test_chunks_give_the_logits_of_one_pass(chunk: int, tiny_checkpoint: Path) -> None:
    loaded = load(tiny_checkpoint)
    whole = logits_of(loaded, TOKENS[:90])
    chunked = logits_of(loaded, TOKENS[:90], chunks=[chunk] * (89 // chunk))
    assert float((whole - chunked).abs().max()) < 1e-4
    assert torch.equal(whole.argmax(-1), chunked.argmax(-1))


def test_c01_slots_that_nothing_wrote_are_not_read(tiny_checkpoint: Path) -> None:
    loaded = load(tiny_checkpoint)
    tables = Tables(3, 64)
    runner, _ = make_runner(loaded, num_blocks=tables.num_blocks, block_size=16, num_threads=1)
    runner.kv_cache.fill(float("nan"))
    parts = [
        runner.forward(tables.batch([Chunk(2, TOKENS[start : start + 16][: 40 - start], start)]))
        for start in (0, 16, 32)
    ]
    assert float((torch.cat(parts) - logits_of(loaded, TOKENS[:40])).abs().max()) < 1e-4


def test_neighbours_do_not_change_a_sequence(tiny_checkpoint: Path) -> None:
    loaded = load(tiny_checkpoint)
    tables = Tables(4, 128)
    runner, _ = make_runner(loaded, num_blocks=tables.num_blocks, block_size=16, num_threads=1)
    others = [list(reversed(TOKENS[:50])), TOKENS[60:63]]
    runner.forward(tables.batch([Chunk(0, others[0]), Chunk(3, others[1]), Chunk(1, TOKENS[:20])]))
    batch = tables.batch(
        [
            Chunk(0, [5], 50, "last"),
            Chunk(1, TOKENS[20:40], 20, "last"),
            Chunk(3, [9, 8], 3, "none"),
        ]
    )
    logits = runner.forward(batch)
    assert batch.num_decodes == 1
    assert logits.shape == (2, kit.VOCAB_SIZE)
    alone = logits_of(loaded, TOKENS[:40])[-1]
    assert float((logits[1] - alone).abs().max()) < 1e-4


def test_chain_emits_its_script(tmp_path: Path) -> None:
    follows = {2: 70, 70: 71, 71: 290, 290: 2}
    loaded = load(kit.chain(tmp_path, follows))
    token, emitted = 2, []
    for _ in range(8):
        token = int(logits_of(loaded, [9, 8, token])[-1].argmax())
        emitted.append(token)
    assert emitted == [70, 71, 290, 2, 70, 71, 290, 2]
    assert int(logits_of(loaded, [77])[-1].argmax()) == kit.EOS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_steps_equal_torch_on_the_same_packed_weights(
    dtype: str, tiny_checkpoint: Path
) -> None:
    loaded = load(tiny_checkpoint, dtype)
    tables = Tables(3, 128)
    config = loaded.config
    cache = KVCache(
        config.num_layers,
        tables.num_blocks,
        16,
        config.num_kv_heads,
        config.head_dim,
        loaded.dtype,
        poison=True,
    )
    runner = ModelRunner(loaded, cache, CpuAttention(config, cache, 1))
    found = runner.forward(tables.batch([Chunk(1, TOKENS[:60], 0)]))
    native = logits_of(loaded, TOKENS[:60])
    # The torch modules round every activation to bfloat16, the native steps none.
    limit = 1e-4 if dtype == "float32" else 0.05 * float(native.std())
    assert float((found - native).abs().mean()) < limit


def test_the_logits_of_a_step_stay_while_they_are_held(tiny_checkpoint: Path) -> None:
    loaded = load(tiny_checkpoint)
    tables = Tables(3, 64)
    runner, _ = make_runner(loaded, num_blocks=tables.num_blocks, block_size=16, num_threads=1)
    first = runner.forward(tables.batch([Chunk(0, TOKENS[:8], 0)]))
    kept = first.clone()
    second = runner.forward(tables.batch([Chunk(0, TOKENS[8:16], 8)]))
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    place = second.data_ptr()
    del second
    third = runner.forward(tables.batch([Chunk(0, TOKENS[16:24], 16)]))
    assert third.data_ptr() == place  # nobody held it


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_product_equals_the_plain_one(num_tokens: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 40, generator=generator)
    bias = torch.randn(96, generator=generator) if has_bias else None
    inputs = torch.randn(num_tokens, 40, generator=generator)
    residual = torch.randn(num_tokens, 96, generator=generator)
    packed, plain = Linear(weight, bias, kernels=CpuKernels(2)), Linear(weight, bias)
    assert packed.packed is not None
    assert plain.packed is None
    with torch.inference_mode():
        for extra in (None, residual):
            difference = packed(inputs, extra) - plain(inputs, extra)
            assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 17])
def test_bfloat16_product_is_near_the_exact_one(num_tokens: int, pack: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 40, generator=generator).bfloat16()
    inputs = torch.randn(num_tokens, 40, generator=generator).bfloat16()
    exact = inputs.double() @ weight.double().T
    linear = Linear(weight, kernels=CpuKernels(1) if pack else None)
    with torch.inference_mode():
        out = linear(inputs)
        total = linear(inputs, torch.ones(num_tokens, 96))
    assert out.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert float((out.double() - exact).abs().max()) <= float(exact.abs().max()) / 128
    assert float((total.double() - 1 - exact).abs().max()) <= float(exact.abs().max()) / 128


@pytest.mark.parametrize("pack", [True, False])
def test_bfloat16_is_near_float32(pack: bool, tiny_checkpoint: Path) -> None:
    full = load(tiny_checkpoint)
    half = load_model(tiny_checkpoint, dtype="bfloat16", device="cpu", pack=pack)
    assert half.module.embedding.dtype == torch.bfloat16
    assert half.kv_bytes_per_block(16) * 2 == full.kv_bytes_per_block(16)
    exact = logits_of(full, TOKENS[:60])
    rounded = logits_of(half, TOKENS[:60], chunks=(20, 1, 1))
    assert rounded.dtype == torch.float32
    assert float((exact - rounded).abs().mean()) < 0.03 * float(exact.std())


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")],
)
def test_auto_dtype_follows_the_checkpoint(stored: str, expected: str, tmp_path: Path) -> None:
    config = kit.tiny_config(torch_dtype="float32")  # what is stored counts, not what is said
    folder = kit.write_folder(tmp_path / "model", config, {}, kit.byte_tokenizer())
    tensors = kit.tensors_of(config)
    kept = {
        name: torch.from_numpy(values).to(getattr(torch, stored))
        if values.ndim > 1
        else torch.from_numpy(values)  # norms are float32 in many a checkpoint of another type
        for name, values in tensors.items()
    }
    save_file(kept, folder / "model.safetensors")
    loaded = load_model(folder, device="cpu")
    assert loaded.dtype == getattr(torch, expected)
    assert loaded.kv_bytes_per_block(16) == 2 * 2 * 2 * 16 * 16 * loaded.dtype.itemsize
    assert load_model(folder, device="cpu", dtype="float32").dtype == torch.float32


def test_a_few_matrices_in_float32_do_not_decide_the_dtype(tmp_path: Path) -> None:
    config = kit.tiny_config()
    folder = kit.write_folder(tmp_path / "model", config, {}, kit.byte_tokenizer())
    tensors = {
        name: torch.from_numpy(values).to(
            torch.float32 if name.endswith("q_proj.weight") else torch.bfloat16
        )
        for name, values in kit.tensors_of(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float64", ""])
def test_unknown_dtype_is_refused_with_the_choices(dtype: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="auto, float32, bfloat16, float16"):
        load_model(tiny_checkpoint, dtype=dtype, device="cpu")


def test_float16_is_refused_on_the_cpu(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="float16 needs a GPU"):
        load_model(tiny_checkpoint, dtype="float16", device="cpu")


@pytest.mark.parametrize("device", ["tpu", "mps", "meta"])
def test_unusable_device_is_refused(device: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="device is"):
        load_model(tiny_checkpoint, device=device)


@pytest.mark.parametrize("name", ["null", "null:0", "null:0.001"])
def test_null_follows_its_script_whatever_the_batch(name: str) -> None:
    loaded = load_model(name, device="cpu")
    assert loaded.is_null
    assert loaded.kv_bytes_per_block(16) == 0
    assert loaded.tokenizer is not None
    runner, sampler = make_runner(loaded, num_blocks=4, block_size=16)
    assert isinstance(loaded.module, NullModel)
    script = loaded.module.script
    tables = Tables(3, 64)
    batch = tables.batch([Chunk(0, [5], 3, "last"), Chunk(2, [1, 2, 3], 0, "last")])
    batch.sample_positions = np.array([2, len(script) + 1], dtype=np.int32)
    sampled = sampler.sample(runner.forward(batch), batch)
    assert sampled.row_error is None
    assert sampled.token_ids.dtype == np.int32
    assert sampled.token_ids.tolist() == [script[2], script[1]]
    assert max(script) < loaded.vocab_size


@pytest.mark.parametrize("name", ["null:x", "null:-1", "null:nan", "null:1e9"])
def test_null_with_an_impossible_cost_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="step_cost_s"):
        load_model(name)


@pytest.mark.parametrize("name", ["no-such-model", "./absent", "absent.gguf", "/absent/folder"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"smollm2-135m-instruct, null") as caught:
        load_model(name)
    assert caught.value.file == name


def test_folder_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    config = kit.tiny_config()
    folder = kit.write_folder(tmp_path, config, kit.tensors_of(config))
    loaded = load_model(folder, device="cpu")
    assert loaded.tokenizer is None
    assert loaded.vocab_size == kit.VOCAB_SIZE


def test_chat_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    loaded = load_model(folder, device="cpu")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
