"""The `null` model: no weights, a scripted cycle of tokens, an optional cost per step.

It plugs in where a real model does, for benchmarks of everything around the model and for tests.
Output token i of every request is entry i of the script, modulo its length, so a result can be
checked without running it. The model is certain of every token, so sampling parameters have no
effect and every log-probability is 0 or `LOGPROB_FLOOR`. `null:0.002` sleeps 2 ms per step.
"""

import json
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cbrs._core import Tokenizer
from cbrs.models.config import ModelConfig
from cbrs.models.fields import load_error
from cbrs.sampled import LOGPROB_FLOOR, LogprobMatrix, SampledTokens

SCRIPT = " The quick brown fox jumps over the lazy dog, and the small grey cat watches it all day."
MAX_STEP_COST_S = 60.0
MAX_POSITIONS = 8192
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def is_null(name: str) -> bool:
    """Say whether `name` asks for the null model."""
    return name == "null" or name.startswith("null:")


def parse_step_cost(name: str) -> float:
    """Return the seconds per step that a name such as `null:0.002` asks for; 0 for `null`."""
    _, _, text = name.partition(":")
    try:
        cost = float(text) if text else 0.0
    except ValueError:
        cost = math.nan
    if not 0.0 <= cost <= MAX_STEP_COST_S:
        detail = f"{text!r} is not a number of seconds from 0 to {MAX_STEP_COST_S:g}"
        raise load_error(name, "step_cost_s", detail)
    return cost


def null_config(vocab_size: int) -> ModelConfig:
    """Return the shape of a model without layers, and so without a KV cache."""
    return ModelConfig(
        architecture="null",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        attention_scale=1.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
    )


class NullModel(nn.Module):
    """Holds the script and stands for the weights."""

    def __init__(self, tokenizer: Tokenizer | None, step_cost_s: float = 0.0) -> None:
        """Script the tokens of `SCRIPT`; without a tokenizer, one of bytes is built."""
        super().__init__()
        self.tokenizer = tokenizer or Tokenizer(
            _byte_tokenizer_json(), chat_template=_CHAT_TEMPLATE
        )
        self.vocab_size = self.tokenizer.vocab_size
        self.step_cost_s = step_cost_s
        script = self.tokenizer.encode(SCRIPT, add_special_tokens=False)
        self.script: npt.NDArray[np.int32] = np.asarray(script, dtype=np.int32)


class NullRunner:
    """Runner and sampler of the null model in one: the token depends on its position alone."""

    def __init__(self, model: NullModel) -> None:
        """Run `model`."""
        # The token of each position that there can be.
        self._script = np.resize(model.script, MAX_POSITIONS)
        self._vocab_size = model.vocab_size
        self._step_cost_s = model.step_cost_s
        self._no_logits = torch.empty((0, model.vocab_size), dtype=torch.float32)

    def forward(self, batch: Any) -> Tensor:
        """Take the time of one step if the batch has work; there are no logits."""
        if self._step_cost_s > 0.0 and batch.num_seqs > 0:
            time.sleep(self._step_cost_s)
        return self._no_logits

    def sample(self, logits: Tensor, batch: Any) -> SampledTokens:
        """Return the scripted token of each sample, int32 `[num_samples]`."""
        token_ids = self._script[batch.sample_positions]
        logprobs = prompt_logprobs = None
        if batch.has_sampling_extras:
            columns = int(batch.num_logprobs[batch.sample_rows].max(initial=-1))
            logprobs = self._certain(token_ids, columns) if columns >= 0 else None
        targets = batch.prompt_target_ids
        if len(targets) > 0:
            prompt_logprobs = self._certain(targets, int(batch.num_prompt_logprobs.max()))
        return SampledTokens(token_ids, None, logprobs, prompt_logprobs)

    def _certain(self, token_ids: npt.NDArray[np.int32], columns: int) -> LogprobMatrix:
        """Say that each token is certain, and the others impossible: the lower ids come first."""
        others = np.arange(max(columns - 1, 0), dtype=np.int32)[None, :]
        others = np.minimum(others + (others >= token_ids[:, None]), self._vocab_size - 1)
        chosen = np.repeat(token_ids[:, None], 1 + min(columns, 1), axis=1)
        ids = np.concatenate([chosen, others], axis=1).astype(np.int32)
        values = np.full(ids.shape, LOGPROB_FLOOR, dtype=np.float32)
        values[:, : 1 + min(columns, 1)] = 0.0
        return ids, values, np.ones(len(token_ids), dtype=np.int32)


def _byte_tokenizer_json() -> str:
    """Make a byte-level tokenizer with the 256 bytes and nothing else."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
    )
