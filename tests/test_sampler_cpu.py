"""The native kernels against `TorchSampling`, at the edges where they take other ways."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from batches import Sampling, sampling_batch
from sampler_kit import make_sampler

from cbrs._core import CpuKernels
from cbrs.sampled import SampledTokens

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def assert_same(logits: torch.Tensor, rows: list[Sampling], vocab_size: int) -> None:
    """Both back ends say the same of every row."""
    ours, reference = (
        make_sampler(backend, vocab_size).sample(logits, sampling_batch(rows))
        for backend in ("cpu", "torch")
    )
    errors = reference.row_error
    if errors is None:
        assert ours.row_error is None
        errors = np.zeros(len(rows), np.uint8)
    else:
        assert ours.row_error is not None
        assert ours.row_error.tolist() == errors.tolist()
    wrong = np.flatnonzero(ours.token_ids != reference.token_ids)
    assert len(wrong) == 0, rows[wrong[0]]
    for row, params in enumerate(rows):
        if params.logprobs >= 0 and errors[row] == 0:
            assert_same_logprobs(ours, reference, row, 1 + params.logprobs)


def assert_same_logprobs(
    ours: SampledTokens, reference: SampledTokens, row: int, columns: int
) -> None:
    assert ours.logprobs is not None
    assert reference.logprobs is not None
    assert ours.logprobs[0][row, :columns].tolist() == reference.logprobs[0][row, :columns].tolist()
    values = [matrix[1][row, :columns] for matrix in (ours.logprobs, reference.logprobs)]
    np.testing.assert_allclose(*values, rtol=1e-5, atol=2e-5)
    assert ours.logprobs[2][row] == reference.logprobs[2][row]


RESTRICTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 64},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.99999994},
    {"min_p": 1e-6},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 63, 64, 65, 129, 1000, 4099])
def test_vocabularies_of_every_width_give_the_reference_tokens(vocab_size: int) -> None:
    temperatures = [0.0, 2e-4, 0.1, 1.0, 1e6]
    rows = [
        Sampling(temperature=t, seed=7 * i, logprobs=min(vocab_size, 20) if i % 3 else 0, **given)
        for i, (t, given) in enumerate((t, g) for t in temperatures for g in RESTRICTIONS)
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(rows), vocab_size + 5, generator=generator) * 3
    assert_same(logits, rows, vocab_size)
    assert_same(logits.round(), rows, vocab_size)  # whole groups of equal ones


@pytest.mark.parametrize("scale", [0.0, 1e-6, 30.0, 1000.0, 1e38])
def test_logits_of_every_scale_give_the_reference_tokens(scale: float) -> None:
    rows = [Sampling(temperature=1.0, seed=i, logprobs=5, **g) for i, g in enumerate(RESTRICTIONS)]
    generator = torch.Generator().manual_seed(3)
    logits = torch.rand(len(rows), 700, generator=generator) * scale * 3
    assert_same(logits, rows, 700)
    logits[torch.rand(len(rows), 700, generator=generator) < 0.9] = -math.inf
    logits[:, 350] = 0.0
    assert_same(logits, rows, 700)


def test_unusable_rows_are_the_same_wherever_the_number_is() -> None:
    rows = [Sampling(temperature=1.0, seed=i, logprobs=2) for i in range(130)]
    for number in (math.nan, math.inf):
        logits = torch.zeros(130, 130)
        logits.fill_diagonal_(number)
        logits[7, 7] = 0.0
        assert_same(logits, rows, 129)


def test_a_flat_row_of_a_large_vocabulary_shares_evenly() -> None:
    """The case in which partial selection has most to do: everything is equal."""
    rows = [Sampling(temperature=1.0, seed=i, top_p=p) for i, p in enumerate([0.5, 0.9, 1.0, 1e-3])]
    assert_same(torch.full((4, 40_000), 2.5), rows, 40_000)


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_g26_extreme_uniforms_give_an_id_of_positive_weight(uniform: float) -> None:
    logits = torch.full((len(RESTRICTIONS), 200), -math.inf)
    logits[:, 20:150] = torch.randn(130, generator=torch.Generator().manual_seed(1))
    count = len(RESTRICTIONS)
    batch = sampling_batch([Sampling(temperature=1.0, **given) for given in RESTRICTIONS])
    tokens, errors = CpuKernels(1).sample(
        logits.numpy(),
        200,
        batch.sample_index,
        batch.sample_rows,
        np.full(count, uniform),
        (batch.temperature, batch.top_k, batch.top_p, batch.min_p),
    )
    assert not errors.any()
    assert ((tokens >= 20) & (tokens < 150)).all()
    if uniform == 0.0:
        assert tokens[0] == 20
    if uniform > 0.9:
        assert tokens[0] == 149


def arguments(**changes: Any) -> list[Any]:
    """Return valid arguments of `CpuKernels.sample` for two samples, with `changes`."""
    given: dict[str, Any] = {
        "logits": np.zeros((3, 8), np.float32),
        "vocab_size": 6,
        "logits_index": np.array([2, 0], np.int32),
        "rows": np.array([1, 0], np.int32),
        "uniform": np.zeros(2),
        "parameters": tuple(
            np.zeros(2, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)
        ),
        "penalties": None,
        "bias": None,
        "bans": None,
    }
    return list((given | changes).values())


def penalties(start: list[int], length: list[int]) -> tuple[np.ndarray, ...]:
    zeros = np.zeros(2, np.float32)
    history = np.zeros(4, np.int32)
    places = (np.array(start), np.array(length), np.zeros(2, np.int64))
    return (zeros, zeros, zeros + 1, history, *places)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros((3, 8))}, "logits must be a 2-dimensional"),
        ({"logits": np.zeros((8, 3), np.float32).T}, "logits must be C-contiguous"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"vocab_size": 9}, "a row of logits has 8 elements, expected 9"),
        ({"logits_index": np.array([3, 0], np.int32)}, r"logits_index\[0\] is 3"),
        ({"logits_index": np.array([-1, 0], np.int32)}, r"logits_index\[0\] is -1"),
        ({"rows": np.array([0, 2], np.int32)}, r"rows\[1\] is 2, expected 0..2"),
        ({"rows": np.array([0], np.int32)}, "rows has 1 elements, expected 2"),
        ({"uniform": np.zeros(3)}, "uniform has 3"),
        ({"penalties": penalties([0, 2], [2, 3])}, "history: the place of entry 1"),
        ({"penalties": penalties([0, -1], [2, 1])}, "history: the place of entry 1"),
        ({"penalties": penalties([0, 2**63 - 1], [2, 2])}, "history: the place of entry 1"),
        ({"bans": (np.array([0, 2, 1]), np.zeros(2, np.int32))}, "bans: the place of entry 1"),
        ({"bans": (np.array([0, 1, 3]), np.zeros(2, np.int32))}, "bans: the place of entry 1"),
        ({"bans": (np.array([0, 1]), np.zeros(2, np.int32))}, "bans start has 2"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    kernels = CpuKernels(1)
    with pytest.raises(ValueError, match=message):
        kernels.sample(*arguments(**changes))
    tokens, errors = kernels.sample(*arguments())
    assert (tokens.tolist(), errors.tolist()) == ([0, 0], [0, 0])


@pytest.mark.parametrize(
    ("targets", "counts", "message"),
    [
        ([6, 0], [1, 1], r"targets\[0\] is 6, expected 0..6"),
        ([0, -1], [1, 1], r"targets\[1\] is -1"),
        ([0], [1, 1], "targets has 1"),
        ([0, 0], [1, 2**31 - 1], r"num_logprobs\[1\] is 2147483647"),
    ],
)
def test_bad_questions_about_logprobs_are_refused(
    targets: list[int], counts: list[int], message: str
) -> None:
    logits = np.zeros((2, 8), np.float32)
    index = np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match=message):
        CpuKernels(1).logprobs(
            logits, 6, index, np.array(targets, np.int32), np.array(counts, np.int32)
        )


def test_an_empty_batch_is_no_error() -> None:
    nothing = np.zeros(0, np.int32)
    kernels = CpuKernels(2)
    ids, values, ranks = kernels.logprobs(
        np.zeros((0, 8), np.float32), 6, nothing, nothing, nothing
    )
    assert (ids.shape, values.shape, ranks.shape) == ((0, 1), (0, 1), (0,))
    tokens, _ = kernels.sample(*arguments(logits_index=nothing, rows=nothing, uniform=np.zeros(0)))
    assert len(tokens) == 0
