"""Samplers of both back ends, and what they should say: an oracle in plain Python, id by id."""

import math
from typing import Any

import numpy as np
import torch
from batches import Sampling

from cbrs._core import CpuKernels
from cbrs.runner.philox import uniforms
from cbrs.runner.sampler import Sampler
from cbrs.runner.sampler_cpu import CpuSampling
from cbrs.runner.sampler_torch import TorchSampling

BACKENDS = ("torch", "cpu")


def make_sampler(backend: str, vocab_size: int, num_threads: int = 2) -> Sampler:
    """Return a new sampler that knows no row yet."""
    if backend == "torch":
        return Sampler(vocab_size, TorchSampling(vocab_size))
    return Sampler(vocab_size, CpuSampling(vocab_size, CpuKernels(num_threads)))


@np.errstate(over="ignore")
def changed_logits(logits: torch.Tensor, params: Sampling) -> list[float]:
    """Apply bias, penalties and bans of one row, one token at a time, in float32.

    What overflows becomes infinite here.
    """
    row = [np.float32(value) for value in logits.tolist()]
    everything = params.prompt + params.output
    presence = np.float32(params.presence_penalty)
    frequency = np.float32(params.frequency_penalty)
    repetition = np.float32(params.repetition_penalty)
    for token, value in params.bias.items():
        row[token] = np.float32(row[token] + np.float32(value))
    for token in range(len(row)):
        if token in everything:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        count = params.output.count(token)
        row[token] = row[token] - frequency * np.float32(count)
        if count > 0:
            row[token] = row[token] - presence
    for word in params.bad_words:
        lead = word[:-1]
        if lead == params.output[len(params.output) - len(lead) :]:
            row[word[-1]] = np.float32(-math.inf)
    if len(params.output) < params.min_tokens:
        for token in params.banned:
            row[token] = np.float32(-math.inf)
    return [float(value) for value in row]


def probabilities(logits: list[float], params: Sampling) -> np.ndarray:
    """Return the probability of each token by a plain loop over the sorted tokens."""
    scores = np.array(logits, dtype=np.float64) / float(np.float32(params.temperature))
    weights = np.exp(scores - scores.max())
    order = sorted(range(len(scores)), key=lambda token: (-weights[token], token))
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    mass = 0.0
    top_p = float(np.float32(params.top_p))
    for token in order:
        if mass >= top_p:
            weights[token] = 0.0
        mass += weights[token]
    weights[weights < float(np.float32(params.min_p)) * weights.max()] = 0.0
    return weights / weights.sum()


def expected_token(logits: torch.Tensor, params: Sampling) -> int:
    """Return the token that one row gets; `logits` has no padding."""
    row = changed_logits(logits, params)
    if params.temperature <= 1e-4:
        return max(range(len(row)), key=lambda token: (row[token], -token))
    uniform = uniforms(
        np.array([params.seed], np.uint64),
        np.array([len(params.output)], np.int32),
        np.array([params.choice], np.int32),
    )
    cumulated = np.cumsum(probabilities(row, params))
    return int(np.flatnonzero(cumulated > uniform[0] * cumulated[-1])[0])


def expected_logprobs(
    logits: torch.Tensor, token: int, count: int
) -> tuple[list[int], list[float], int]:
    """Return ids, log-probabilities and rank; `logits` has no padding."""
    row = [float(value) for value in logits.tolist()]
    largest = max(row)
    log_sum = largest + math.log(math.fsum(math.exp(value - largest) for value in row))
    best = sorted(range(len(row)), key=lambda other: (-row[other], other))[:count]
    ids = [token, *best]
    values = [max(row[other] - log_sum, -9999.0) for other in ids]
    return ids, values, 1 + sum(value > row[token] for value in row)


def assert_logprobs(matrix: Any, row: int, expected: tuple[list[int], list[float], int]) -> None:
    """Compare one row of a matrix with what `expected_logprobs` says."""
    ids, values, rank = expected
    assert matrix is not None
    assert [array.dtype for array in matrix] == [np.int32, np.float32, np.int32]
    assert matrix[0][row, : len(ids)].tolist() == ids
    np.testing.assert_allclose(matrix[1][row, : len(ids)], values, rtol=1e-5, atol=1e-5)
    assert matrix[2][row] == rank
