"""What a step costs on the machines that the simulations stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_ROWS = 64
TOKEN_BUDGET = 2048
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 256
MEDIAN_OUTPUT_TOKENS = 128
MAX_OUTPUT_TOKENS = 2048


@dataclass(frozen=True)
class Profile:
    """A step takes `fixed + per_token * new tokens + per_kv_token * tokens of context read`."""

    name: str
    fixed_ms: float
    per_token_ms: float
    per_kv_token_ms: float

    def step_ns(self, num_tokens: int, num_kv_tokens: int) -> int:
        """Nanoseconds of a step."""
        return int(1e6 * self.step_ms(num_tokens, num_kv_tokens))

    def step_ms(self, num_tokens: float, num_kv_tokens: float) -> float:
        """Milliseconds of a step."""
        return self.fixed_ms + self.per_token_ms * num_tokens + self.per_kv_token_ms * num_kv_tokens

    def full_step_ms(self, num_prompts: int, context: int) -> float:
        """A step of full rows, `context` tokens each, that also computes some prompts; rounded up
        to 5 ms."""
        num_tokens = NUM_ROWS + num_prompts * NUM_PROMPT_TOKENS
        return 5.0 * math.ceil(self.step_ms(num_tokens, NUM_ROWS * context) / 5)


PROFILES = {
    "gpu": Profile("gpu", fixed_ms=5.0, per_token_ms=0.03, per_kv_token_ms=40e-6),
    "cpu": Profile("cpu", fixed_ms=6.0, per_token_ms=0.25, per_kv_token_ms=0.5e-3),
}
