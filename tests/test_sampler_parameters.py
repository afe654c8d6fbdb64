"""Penalties, bias, bans, bad words and log-probabilities, against plain loops and transformers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from batches import Sampling, sampling_batch
from sampler_kit import (
    BACKENDS,
    assert_logprobs,
    changed_logits,
    expected_logprobs,
    expected_token,
    make_sampler,
)

from cbrs.runner.sampler import Sampler
from cbrs.sampled import EVERYTHING_EXCLUDED, LOGPROB_FLOOR

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB, TOKENS = 160, 131


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_sampler(backend: str) -> Callable[[], Sampler]:
    return lambda: make_sampler(backend, TOKENS)


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


def greedy(sampler: Sampler, logits: torch.Tensor, *sampling: Sampling) -> list[int]:
    return sampler.sample(logits, sampling_batch(list(sampling))).token_ids.tolist()


def random_sampling(random: np.random.Generator) -> Sampling:
    """Draw any combination of all parameters."""

    def choice(*values: float) -> float:
        return float(random.choice(values))

    prompt = random.integers(0, TOKENS, random.integers(1, 40)).tolist()
    output = random.integers(0, 12, random.integers(0, 9)).tolist()
    biased = random.choice(TOKENS, 5, replace=False).tolist()
    return Sampling(
        temperature=choice(0.0, 0.0, 0.3, 1.0, 2.5),
        top_k=int(choice(0, -1, 1, 7, 130, 1000)),
        top_p=choice(1.0, 1.0, 1e-6, 0.5, 0.9, 0.99),
        min_p=choice(0.0, 0.0, 0.1, 1.0),
        seed=int(random.integers(2**62)),
        choice=int(random.integers(3)),
        presence_penalty=choice(0.0, 1.5, -2.0),
        frequency_penalty=choice(0.0, 0.25, -2.0, 2.0),
        repetition_penalty=choice(1.0, 1.3, 0.5, 10.0),
        min_tokens=int(choice(0, 4)),
        logprobs=int(choice(-1, 0, 1, 5, 20)),
        prompt=prompt,
        output=output,
        bias={token: choice(-100.0, -1.5, 2.5, 30.0) for token in biased} if choice(0, 1) else {},
        banned=[3, 5, 8],
        bad_words=[[7], [3, 9], [*output[-2:], 11], [0, 1, 2, 3]] if choice(0, 1) else [],
    )


@pytest.mark.parametrize("seed", range(6))
def test_every_combination_equals_the_oracle_row_by_row(
    new_sampler: Callable[[], Sampler], seed: int
) -> None:
    """Tokens, log-probabilities and ranks of rows that all differ in everything."""
    random = np.random.default_rng(seed)
    rows = [random_sampling(random) for _ in range(40)]
    logits = logits_of(len(rows), seed)
    logits[: len(rows) // 2] = (2 * logits[: len(rows) // 2]).round() / 2  # many equal ones
    logits[5, 20:90] = -math.inf
    before = logits.clone()
    sampled = new_sampler().sample(logits, sampling_batch(rows))
    assert torch.equal(logits, before), "the model's logits are left as they are"
    assert sampled.row_error is None
    for index, params in enumerate(rows):
        row = logits[index, :TOKENS]
        assert sampled.token_ids[index] == expected_token(row, params), params
        if params.logprobs >= 0:
            token = int(sampled.token_ids[index])
            wanted = expected_logprobs(row, token, params.logprobs)
            assert_logprobs(sampled.logprobs, index, wanted)


def test_g14_a_neighbour_changes_nothing(new_sampler: Callable[[], Sampler]) -> None:
    """Each row alone, at another place, equals the row among others; also the plain ones."""
    random = np.random.default_rng(11)
    rows = [random_sampling(random) if index % 2 else Sampling(seed=index) for index in range(20)]
    logits = logits_of(len(rows), 3)
    together = new_sampler().sample(logits, sampling_batch(rows))
    for index, params in enumerate(rows):
        batch = sampling_batch([params], rows=[(index + 5) % 20])
        alone = new_sampler().sample(logits[index : index + 1], batch)
        assert alone.token_ids[0] == together.token_ids[index]
        if params.logprobs >= 0:
            assert alone.logprobs is not None
            assert together.logprobs is not None
            used = slice(0, 1 + params.logprobs)
            for one, all_ in zip(alone.logprobs[:2], together.logprobs[:2], strict=True):
                assert one[0, used].tobytes() == all_[index, used].tobytes()


def test_g15_presence_and_frequency_ignore_the_prompt_and_repetition_does_not(
    new_sampler: Callable[[], Sampler],
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 4] = 2.0, 1.5
    prompt = [9] * 5
    for params, expected in (
        (Sampling(presence_penalty=2.0, prompt=prompt), 9),
        (Sampling(frequency_penalty=2.0, prompt=prompt), 9),
        (Sampling(repetition_penalty=1.5, prompt=prompt), 4),
        (Sampling(presence_penalty=1.0, prompt=prompt, output=[9]), 4),
        (Sampling(frequency_penalty=0.2, prompt=prompt, output=[9] * 2), 9),
        (Sampling(frequency_penalty=0.2, prompt=prompt, output=[9] * 3), 4),
        (Sampling(repetition_penalty=1.5, prompt=[1], output=[9]), 4),
    ):
        assert greedy(new_sampler(), logits, params) == [expected], params


def test_g15_at_step_one_the_logits_themselves_are_touched_as_they_should_be() -> None:
    logits = torch.linspace(-1, 1, TOKENS)
    for params in (Sampling(presence_penalty=2.0), Sampling(frequency_penalty=2.0)):
        params.prompt = [100] * 5
        assert changed_logits(logits, params) == logits.tolist()


def test_repetition_penalty_equals_transformers(backend: str) -> None:
    """The log-probabilities after the penalty, which greedy choices show one at a time."""
    logits = logits_of(8, 2)[:, :TOKENS]
    tokens = np.random.default_rng(2).integers(0, TOKENS, (8, 30))
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.4)
    theirs = processor(torch.from_numpy(tokens), logits.clone())
    rows = [Sampling(repetition_penalty=1.4, prompt=row.tolist()) for row in tokens]
    for params, row, expected in zip(rows, logits, theirs, strict=True):
        np.testing.assert_allclose(changed_logits(row, params), expected.tolist(), rtol=1e-6)
    ours = greedy(make_sampler(backend, TOKENS), logits, *rows)
    assert ours == theirs.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "make"),
    [
        (Sampling(top_k=9), lambda: transformers.TopKLogitsWarper(9)),
        (Sampling(top_p=0.8), lambda: transformers.TopPLogitsWarper(0.8)),
        (Sampling(min_p=0.05), lambda: transformers.MinPLogitsWarper(0.05)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_what_may_be_drawn_equals_transformers(
    backend: str, params: Sampling, make: Callable[[], transformers.LogitsProcessor]
) -> None:
    logits = logits_of(1, 4, scale=1.5)[:, :TOKENS]
    kept = torch.isfinite(make()(torch.zeros(1, 1, dtype=torch.long), logits.clone()))[0]
    rows = [Sampling(**{**vars(params), "temperature": 1.0, "seed": seed}) for seed in range(800)]
    batch = sampling_batch(rows)
    drawn = make_sampler(backend, TOKENS).sample(logits.expand(800, -1), batch).token_ids
    assert set(drawn.tolist()) <= set(torch.nonzero(kept).squeeze(1).tolist())
    # Whatever would be drawn some 16 times is drawn.
    likely = torch.nonzero(torch.where(kept, logits[0], -torch.inf).softmax(0) > 0.02).squeeze(1)
    assert set(likely.tolist()) <= set(drawn.tolist())


def test_bad_words_ban_the_last_token_of_a_word_that_the_output_has_begun(
    new_sampler: Callable[[], Sampler],
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 31, 32]] = torch.tensor([3.0, 2.0, 1.0])
    for words, prompt, output, expected in (
        ([[30]], [0], [], 31),
        ([[30], [31]], [0], [5], 32),
        ([[5, 30]], [0], [5], 31),
        ([[5, 30]], [5], [], 30),  # the prompt does not count
        ([[5, 30]], [0], [5, 6], 30),
        ([[6, 5, 30]], [6], [5], 30),  # nor does a beginning in the prompt
        ([[6, 5, 30]], [0], [6, 5], 31),
        ([[6, 5, 30], [5, 31], [4, 32]], [0], [6, 5], 32),
        ([[1, 2, 3, 4, 30]], [0], [1, 2, 3], 30),
        ([[30, 30, 30]], [0], [30, 30], 31),
    ):
        params = Sampling(bad_words=words, prompt=prompt, output=output)
        assert greedy(new_sampler(), logits, params) == [expected], (words, prompt, output)


def test_g07_min_tokens_bans_every_end_token_even_with_a_bias(
    new_sampler: Callable[[], Sampler],
) -> None:
    logits = logits_of(1, 6)
    for output in ([], [9], [9] * 4):
        params = Sampling(
            min_tokens=5, banned=[1, 2], bias={2: 100.0, 1: 80.0, 40: 50.0}, output=output
        )
        assert greedy(new_sampler(), logits, params) == [40]
    params.output = [9] * 5
    assert greedy(new_sampler(), logits, params) == [2]


def test_a_row_whose_parameters_exclude_everything_is_its_own_error(
    new_sampler: Callable[[], Sampler],
) -> None:
    everything = [[token] for token in range(TOKENS)]
    logits = logits_of(5, 7)
    rows = [
        Sampling(seed=1),
        Sampling(bad_words=everything, temperature=1.0, logprobs=3),
        Sampling(bad_words=everything, logprobs=2),
        Sampling(bad_words=everything[1:], temperature=1.0),
        Sampling(min_tokens=1, banned=list(range(TOKENS))),
    ]
    sampled = new_sampler().sample(logits, sampling_batch(rows))
    assert sampled.row_error is not None
    excluded = EVERYTHING_EXCLUDED
    assert sampled.row_error.tolist() == [0, excluded, excluded, 0, excluded]
    assert sampled.token_ids[[0, 3]].tolist() == [int(logits[0, :TOKENS].argmax()), 0]


def test_an_unusable_row_with_every_parameter_is_error_one_and_spares_the_others(
    new_sampler: Callable[[], Sampler],
) -> None:
    random = np.random.default_rng(21)
    rows = [random_sampling(random) for _ in range(9)]
    logits = logits_of(9, 9)
    clean = logits.clone()
    logits[0, 3], logits[4, 130], logits[8] = math.nan, math.inf, -math.inf
    expected = new_sampler().sample(clean, sampling_batch(rows))
    sampled = new_sampler().sample(logits, sampling_batch(rows))
    assert sampled.row_error is not None
    assert sampled.row_error.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    good = [1, 2, 3, 5, 6, 7]
    assert sampled.token_ids[good].tolist() == expected.token_ids[good].tolist()
    if sampled.logprobs is not None:
        assert np.isfinite(sampled.logprobs[1]).all()


def test_extreme_penalties_never_make_an_unusable_row(new_sampler: Callable[[], Sampler]) -> None:
    logits = logits_of(2, 1, scale=1000.0)
    logits[1] = -logits[1].abs()
    for penalty in (1e-38, 3e38):
        rows = [
            Sampling(temperature=t, repetition_penalty=penalty, prompt=[5, 6, 7]) for t in (0, 1.0)
        ]
        for order in (rows, rows[::-1]):
            sampled = new_sampler().sample(logits, sampling_batch(order))
            assert sampled.row_error is None
            for row, params, token in zip(logits, order, sampled.token_ids, strict=True):
                bounded = np.clip(changed_logits(row[:TOKENS], params), -3.4028235e38, 3.4028235e38)
                assert bounded[token] == bounded.max()


def test_logprobs_are_of_the_untouched_logits(new_sampler: Callable[[], Sampler]) -> None:
    """Neither bias, penalties, bans nor temperature show; the padding does not count."""
    logits = logits_of(1, 5)
    logits[0, TOKENS:] = 50.0
    params = Sampling(
        temperature=3.0,
        top_k=1,
        bias={8: 100.0},
        repetition_penalty=2.0,
        bad_words=[[1], [2]],
        logprobs=4,
    )
    sampled = new_sampler().sample(logits, sampling_batch([params]))
    assert sampled.token_ids.tolist() == [8]
    assert_logprobs(sampled.logprobs, 0, expected_logprobs(logits[0, :TOKENS], 8, 4))


def test_an_impossible_token_has_the_floor_as_its_logprob(
    new_sampler: Callable[[], Sampler],
) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4:7] = 0.0
    sampled = new_sampler().sample(logits, sampling_batch([Sampling(logprobs=5)]))
    assert sampled.logprobs is not None
    ids, values, ranks = (array[0].tolist() for array in sampled.logprobs)
    assert (ids, ranks) == ([4, 4, 5, 6, 0, 1], 1)
    assert values[4:] == [LOGPROB_FLOOR] * 2
    assert values[:4] == pytest.approx([-math.log(3)] * 4)


def test_more_logprobs_than_ids_repeat_the_least_likely(backend: str) -> None:
    sampler = make_sampler(backend, 3)
    sampled = sampler.sample(
        torch.tensor([[1.0, 3.0, 2.0]]), sampling_batch([Sampling(logprobs=5)])
    )
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].tolist() == [[1, 1, 2, 0, 0, 0]]


def test_prompt_logprobs_are_of_the_given_tokens(new_sampler: Callable[[], Sampler]) -> None:
    logits = logits_of(6, 12)
    batch = sampling_batch([Sampling()])
    batch.sample_index = np.array([5], np.int32)
    batch.prompt_logits_index = np.array([0, 1, 4, 3], np.int32)
    batch.prompt_target_ids = np.array([7, 130, 0, 7], np.int32)
    batch.num_prompt_logprobs = np.array([0, 20, 2, 1], np.int32)
    sampled = new_sampler().sample(logits, batch)
    assert sampled.logprobs is None
    assert sampled.token_ids.tolist() == [int(logits[5, :TOKENS].argmax())]
    counts = batch.num_prompt_logprobs.tolist()
    for row, (index, target) in enumerate(zip([0, 1, 4, 3], [7, 130, 0, 7], strict=True)):
        wanted = expected_logprobs(logits[index, :TOKENS], target, counts[row])
        assert_logprobs(sampled.prompt_logprobs, row, wanted)


def test_a_prompt_row_of_nan_says_the_floor(new_sampler: Callable[[], Sampler]) -> None:
    logits = logits_of(2, 1)
    logits[0, 9] = math.nan
    batch = sampling_batch([Sampling()])
    batch.sample_index = np.array([1], np.int32)
    batch.prompt_logits_index = np.array([0], np.int32)
    batch.prompt_target_ids = np.array([5], np.int32)
    batch.num_prompt_logprobs = np.array([2], np.int32)
    prompt = new_sampler().sample(logits, batch).prompt_logprobs
    assert prompt is not None
    assert prompt[1].tolist() == [[LOGPROB_FLOOR] * 3]
    assert prompt[0][0, 0] == 5


def test_choices_draw_their_own_numbers(new_sampler: Callable[[], Sampler]) -> None:
    """n > 1: rows that share logits and seed differ by the choice alone, which is reproducible."""
    logits = logits_of(1, 8, scale=0.5).expand(50, -1)
    rows = [Sampling(temperature=1.0, seed=3, choice=choice) for choice in range(50)]
    tokens = greedy(new_sampler(), logits, *rows)
    assert len(set(tokens)) > 20
    assert tokens == [expected_token(logits[0, :TOKENS], params) for params in rows]
