"""What a sampler says about one batch."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

LogprobMatrix: TypeAlias = tuple[
    npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]
]

UNUSABLE_LOGITS = 1
"""Row error: the largest logit of the row is not a finite number, or a logit is NaN."""

EVERYTHING_EXCLUDED = 2
"""Row error: the request's own parameters leave no token."""

LOGPROB_FLOOR = -9999.0
"""The least log-probability that is reported: minus infinity is no JSON number."""


class SampledTokens(NamedTuple):
    """Tokens of the `R` samples of a batch, and the log-probabilities that were asked for.

    `token_ids` is int32 `[R]`; `row_error` uint8 `[R]`, nonzero where no token could be drawn, or
    None if there is none. `logprobs` is `(token_ids int32 [R, 1 + K], values float32 [R, 1 + K],
    ranks int32 [R])`: the sampled token, then the `K` most likely ids, most likely first; `K` is
    what the most demanding row asked for, and others use their first columns only.
    `prompt_logprobs` is the same for the `P` prompt tokens of the batch.
    """

    token_ids: npt.NDArray[np.int32]
    row_error: npt.NDArray[np.uint8] | None = None
    logprobs: LogprobMatrix | None = None
    prompt_logprobs: LogprobMatrix | None = None
