"""Test kit: small checkpoints and tokenizers, made from nothing.

`tiny` is a random Llama-shaped checkpoint whose vocabulary is padded (320 rows, 300 tokens); with
the changes of `FAMILIES` it is one of another architecture.
`chain` is one that emits a scripted token sequence through the real code path: attention and MLP
add nothing, the embedding is one-hot, and the head maps every token to the one that follows it.
`byte_tokenizer` is a byte-level BPE with tokens that split characters; `spm_tokenizer` has byte
fallback and a leading-space marker.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 320
"""Rows of the embedding of `tiny` and `chain`."""

NUM_TOKENS = 300
"""Tokens of the byte tokenizer; ids from here on are padding."""

BOS, EOS = 0, 1

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
"""One setting of each supported rotary scaling; all matter below position 200."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "sliding_window": 32,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 24,
        "use_sliding_window": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 32,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 40,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 32,
        "partial_rotary_factor": 0.5,
    },
}
"""Changes to `tiny_config` that make a checkpoint of each architecture, special features on.

Where there are windows they are of 32 tokens. Position 200 is in the context of all.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of `tiny`; a change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "torch_dtype": "float32",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 tensors that fit `config`, large enough for telling logits."""
    random = np.random.default_rng(seed)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", width // heads)

    def matrix(rows: int, columns: int) -> np.ndarray:
        scale = 1.25 / columns**0.5
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def vector(size: int, middle: float) -> np.ndarray:
        return (middle + 0.1 * random.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], width)}
    family = config["model_type"]
    bias = config["attention_bias"]
    # Gemma stores the difference of a norm's weight from 1.
    middle = 0.0 if family == "gemma3_text" else 1.0
    queries, keys = heads * head_dim, kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (queries, width, bias or family == "qwen2"),
        "self_attn.k_proj": (keys, width, bias or family == "qwen2"),
        "self_attn.v_proj": (keys, width, bias or family == "qwen2"),
        "self_attn.o_proj": (width, queries, bias),
        "mlp.gate_proj": (hidden, width, config["mlp_bias"]),
        "mlp.up_proj": (hidden, width, config["mlp_bias"]),
        "mlp.down_proj": (width, hidden, config["mlp_bias"]),
    }
    if family == "phi3":
        shapes = {
            "self_attn.qkv_proj": (queries + 2 * keys, width, False),
            "self_attn.o_proj": (width, queries, False),
            "mlp.gate_up_proj": (2 * hidden, width, False),
            "mlp.down_proj": (width, hidden, False),
        }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if family == "gemma3_text":
        norms |= {"pre_feedforward_layernorm": width, "post_feedforward_layernorm": width}
    if family in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = vector(size, middle)
        for name, (rows, columns, has_bias) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = vector(rows, 0.0)
    tensors["model.norm.weight"] = vector(width, middle)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], width)
    return tensors


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tokenizer: Mapping[str, Any] | None = None,
    *,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint in the Hugging Face layout; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tiny(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint with the byte tokenizer; `changes` go to its config."""
    config = tiny_config(**changes)
    return write_folder(folder, config, tensors_of(config, seed), byte_tokenizer())


def family(folder: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of one of `FAMILIES`; `changes` go to its config."""
    return tiny(folder, seed=seed, **{**FAMILIES[name], **changes})


def longrope(dim: int = 8) -> dict[str, Any]:
    """Return rotary settings of Phi-3 whose short divisors matter; `dim` dimensions turn."""
    short = [1.0 + 0.25 * pair for pair in range(dim // 2)]
    long = [2.0 + pair for pair in range(dim // 2)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def chain(
    folder: Path,
    follows: Mapping[int, int],
    tokenizer: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a checkpoint that after token t emits `follows[t]`, and EOS after any other token."""
    config = tiny_config(
        hidden_size=VOCAB_SIZE,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **changes,
    )
    tensors = {
        name: np.ones_like(values) if values.ndim == 1 else np.zeros_like(values)
        for name, values in tensors_of(config).items()
    }
    tensors["model.embed_tokens.weight"] = np.eye(VOCAB_SIZE, dtype=np.float32)
    head = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.float32)
    for token in range(VOCAB_SIZE):
        head[follows.get(token, EOS), token] = 1.0
    tensors["lm_head.weight"] = head
    return write_folder(folder, config, tensors, tokenizer or byte_tokenizer())


def byte_letters() -> dict[int, str]:
    """Return the printable letter that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE tokenizer.json of 300 tokens.

    `<s>`, `</s>`, the 256 bytes, then merges: parts of multi-byte characters, a space with a
    partial character, words; the rest are added tokens, among them a newline outside the byte
    alphabet.
    """
    letters = byte_letters()
    tokens = ["<s>", "</s>", *(letters[byte] for byte in range(256))]
    merges = []
    for word in (" é", "日本", "😀", " the", " and", "ing", "hello", "\n\n", " 한"):
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            merged = parts[0] + parts[1]
            if merged not in tokens:
                merges.append(f"{parts[0]} {parts[1]}")
                tokens.append(merged)
            parts = [merged, *parts[2:]]
    added = ["<s>", "</s>", "<user>", "<assistant>", "‼", "\n"]
    added += [f"<extra_{number}>" for number in range(NUM_TOKENS - len(tokens) - 4)]
    ids = {token: index for index, token in enumerate(tokens)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(added, ids, special=("<s>", "</s>", "<user>", "<assistant>")),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }


def spm_tokenizer() -> dict[str, Any]:
    """Return a SentencePiece-style tokenizer.json: byte fallback and a leading-space marker."""
    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += list("abcdefghijklmnopqrstuvwxyz.,")[: NUM_TOKENS - len(tokens)]
    merges = []
    for left, right in (("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("in", "g")):
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    ids = {token: index for index, token in enumerate(tokens)}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(["<s>", "</s>", "<unk>"], ids, special=("<s>", "</s>")),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": merges,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _added_tokens(
    contents: list[str], ids: dict[str, int], special: tuple[str, ...]
) -> list[dict[str, Any]]:
    added, following = [], len(ids)
    for content in contents:
        token_id = ids.get(content, following)
        following += token_id == following
        added.append(
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content in special,
            }
        )
    return added
