"""Drawing tokens and reporting log-probabilities, in plain PyTorch.

The meaning is that of the sampler of the CPU (`cbrs.runner.sampler_torch`), but for the random
numbers, which are one per id here: the token is the id whose logit over the temperature, plus a
Gumbel number of its own, is largest (Gumbel, 1954; Maddison, Tarlow and Minka, "A* sampling",
2014). Equal seeds therefore give equal tokens on one kind of device, and equal distributions on
all. Logits, weights and sums are float32 (sums of many are added up in float64), so a limit of
top_p, and a weight that is min_p of the largest, are exact but for about 1e-6 of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature a row is greedy."""

UNUSABLE_LOGITS = 1
"""Error: the largest logit is not a finite number, or a logit is NaN."""

EVERYTHING_EXCLUDED = 2
"""Error: bias, penalties and bans leave no id."""

LOGPROB_FLOOR = -9999.0
"""The least log-probability that is reported."""

MAX_LOGPROBS = 20
"""Most likely ids that a row may ask for."""


class SamplingParameters(NamedTuple):
    """How tokens are drawn, by row of the scheduler: all `[max_num_seqs]`, on the device.

    Temperature, top_p and min_p are float32, top_k is int32; top_k <= 0, top_p >= 1 and min_p <= 0
    exclude nothing. `seeds` is int64: the bits of an unsigned number.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


def sample(
    token_ids: Tensor,
    errors: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    choices: Tensor,
    parameters: SamplingParameters,
    vocab_size: int,
    unusable: Tensor | None = None,
    workspace: Tensor | None = None,
    draw: int = 0,
) -> None:
    """Fill `token_ids` and `errors`, int32 `[num_samples]`; with an error, and for padding, 0.

    `logits` is float32 `[num_logits, padded_vocab]`, of which the ids below `vocab_size` count,
    after penalties and bans (`change_logits`) if a row has any; then `unusable` is what that found.
    int32 `[num_samples]` are `logits_index` (row of the logits), `rows` (row of the parameters, -1
    for padding), `positions` (tokens generated so far) and `choices`. `workspace` is for the
    kernel alone (`sample_workspace_size` elements of int32).

    A temperature up to `GREEDY_TEMPERATURE` takes the largest logit, the lower id among equals.
    Otherwise weights are e^((logit - largest) / temperature), of which are kept, in this order: the
    `top_k` largest; of these the fewest largest whose sum reaches `top_p` of their sum; of these
    those of at least `min_p`. Among equals the lower ids are kept. The random number of an id comes
    from Philox4x32-10 with the seed as key and (position, choice, draw, id / 4) as counter: word
    id % 4 of four.
    """
    token_ids.zero_()
    errors.zero_()
    present = rows >= 0
    index = logits_index[present].long()
    row = rows[present].long()
    scores = logits[index, :vocab_size].float()
    largest, greedy = scores.max(-1)  # the lowest id among equals; NaN if there is one
    bad = ~largest.isfinite() if unusable is None else unusable[present] != 0
    excluded = ~bad & largest.isneginf()
    code = UNUSABLE_LOGITS * bad.int() + EVERYTHING_EXCLUDED * excluded.int()
    temperature = parameters.temperature[row]
    kept = allowed(scores, row, parameters)
    noise = gumbel(parameters.seeds[row], positions[present], choices[present], draw, vocab_size)
    exponent = (scores - largest[:, None]) / temperature[:, None]
    drawn = (exponent + noise).masked_fill(~kept, -torch.inf).argmax(-1)
    chosen = torch.where(temperature <= GREEDY_TEMPERATURE, greedy, drawn)
    token_ids[present] = chosen.masked_fill(code != 0, 0).int()
    errors[present] = code


def allowed(scores: Tensor, rows: Tensor, parameters: SamplingParameters) -> Tensor:
    """Return which ids may be drawn, bool `[num_samples, vocab_size]`; a row that fails has none.

    `scores` is float32 `[num_samples, vocab_size]`, `rows` int64 `[num_samples]`.
    """
    vocab_size = scores.shape[1]
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp((scores - largest) / parameters.temperature[rows, None]).nan_to_num(0.0)
    weights[scores.isneginf()] = 0.0
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, ranks)
    top_k = parameters.top_k[rows, None]
    kept = (rank < top_k) | (top_k <= 0)
    kept &= scores > -torch.inf
    # Before an id stands what the larger ones add up to: it stays while that is below the target.
    sums = (weights * kept).double().gather(-1, order).cumsum(-1)
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], -1).gather(-1, rank)
    top_p = parameters.top_p[rows, None]
    kept &= (before < top_p.double() * sums[:, -1:]) | (top_p >= 1.0) | (rank == 0)
    kept &= weights >= parameters.min_p[rows, None].clamp(max=1.0)
    return kept


def gumbel(seeds: Tensor, positions: Tensor, choices: Tensor, draw: int, vocab_size: int) -> Tensor:
    """Return a standard Gumbel number for each id, float32 `[num_samples, vocab_size]`.

    With `v = (word + 0.5) / 2^32` it is `-log(-log(1 - v))`.
    """
    group = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    zero = torch.zeros((len(seeds), group.shape[1]), dtype=torch.int64, device=seeds.device)
    counter = (
        zero + positions.long()[:, None],
        zero + choices.long()[:, None],
        zero + draw,
        zero + group,
    )
    words = philox4x32(counter, (seeds[:, None] & _LOW, (seeds[:, None] >> 32) & _LOW))
    word = torch.stack(words, -1).flatten(1)[:, :vocab_size]
    exact = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-exact)).float()


_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four 32-bit words per element, as int64 (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps around, and the bits of the product are those of the unsigned one.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _LOW) ^ c1 ^ k0,
            second & _LOW,
            ((first >> 32) & _LOW) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def logprobs(
    ids: Tensor,
    values: Tensor,
    ranks: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    token_ids: Tensor,
    vocab_size: int,
    workspace: Tensor | None = None,
) -> None:
    """Fill the log-probabilities of `token_ids` and of the most likely ids, of untouched logits.

    `ids` int32 and `values` float32 are `[num_rows, 1 + num_logprobs]`: the token itself, then the
    most likely ids, most likely first, the lower id among equals; with fewer ids than columns the
    last one is repeated. `ranks` int32 `[num_rows]` is one more than the number of ids with a
    greater logit. `logits` is float32 `[num_logits, padded_vocab]`; `logits_index` int32
    `[num_rows]` is -1 for padding, of which nothing is filled; `token_ids` int32 `[num_rows]`. A
    row whose largest logit is not finite, or that holds a NaN, says `LOGPROB_FLOOR` of every id,
    which are then the token, 0, 1, and so on. At most `MAX_LOGPROBS` likely ids.
    """
    num_logprobs = ids.shape[1] - 1
    present = logits_index >= 0
    scores = logits[logits_index[present].long(), :vocab_size].float()
    token = token_ids[present].long()[:, None]
    bad = ~scores.amax(-1, keepdim=True).isfinite()
    column = torch.arange(num_logprobs, device=scores.device).clamp(max=vocab_size - 1)
    best = scores.argsort(dim=-1, descending=True, stable=True)[:, column]
    chosen = torch.cat([token, torch.where(bad, column, best)], -1)
    likely = scores.log_softmax(-1).gather(-1, chosen).clamp(min=LOGPROB_FLOOR)
    ids[present] = chosen.int()
    values[present] = likely.masked_fill(bad, LOGPROB_FLOOR)
    ranks[present] = 1 + (scores > scores.gather(-1, token)).sum(-1).int()
