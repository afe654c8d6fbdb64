"""The sampler: greedy, the four restrictions, Philox, independence of rows."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from batches import Sampling, sampling_batch
from sampler_kit import BACKENDS, make_sampler, probabilities

from cbrs.runner.philox import philox4x32, uniforms
from cbrs.runner.sampler import Sampler
from cbrs.runner.sampler_torch import pick, restrict

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Sample = Callable[..., list[int]]
NewSampler = Callable[[int], Sampler]

VOCAB = 320
TOKENS = 300


def random_logits(rows: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


@pytest.fixture(params=BACKENDS)
def new_sampler(request: pytest.FixtureRequest) -> NewSampler:
    """Return a function that makes a sampler for a vocabulary."""
    return partial(make_sampler, request.param)


@pytest.fixture
def sample(new_sampler: NewSampler) -> Sample:
    """Return a function that samples from logits and parameters, with a new sampler each time."""

    def run(
        logits: torch.Tensor, sampling: list[Sampling], positions: list[int] | None = None
    ) -> list[int]:
        sampled = new_sampler(TOKENS).sample(logits, sampling_batch(sampling, positions))
        assert sampled.row_error is None
        assert sampled.token_ids.dtype == np.int32
        return sampled.token_ids.tolist()

    return run


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known answers of the generator's authors for philox4x32-10.
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox4x32(words(*counter), words(*key)) == words(*expected)


def test_uniforms_use_seed_position_choice_and_draw() -> None:
    seeds = np.array([7, 7, 7, 8, 2**63 + 7], dtype=np.uint64)
    positions = np.array([0, 1, 0, 0, 0], dtype=np.int32)
    choices = np.array([0, 0, 1, 0, 0], dtype=np.int32)
    values = uniforms(seeds, positions, choices)
    assert len({*values.tolist(), *uniforms(seeds[:1], positions[:1], choices[:1], 1)}) == 6
    assert np.all((values >= 0.0) & (values < 1.0))
    high, low, _, _ = philox4x32(words(1, 0, 0, 0), words(7, 0))
    assert values[1] == (int(high[0]) >> 5) / 2**27 + (int(low[0]) >> 6) / 2**53


def test_greedy_takes_the_lowest_id_among_equals(sample: Sample) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [9, 5, 200]] = 3.0
    assert sample(logits, [Sampling(), Sampling()]) == [5, 0]


def test_greedy_ignores_the_other_parameters(sample: Sample) -> None:
    logits = random_logits(8)
    odd = [Sampling(top_k=3, top_p=0.1, min_p=0.9, seed=row) for row in range(8)]
    assert sample(logits, odd) == logits[:, :TOKENS].argmax(-1).tolist()


def test_sample_index_and_rows_select_logits_and_parameters(
    sample: Sample, new_sampler: NewSampler
) -> None:
    logits = random_logits(6)
    batch = sampling_batch([Sampling(temperature=1.0, seed=9), Sampling()], rows=[3, 1])
    batch.sample_index = np.array([4, 2], dtype=np.int32)
    tokens = new_sampler(TOKENS).sample(logits, batch).token_ids
    alone = sample(logits[4:5], [Sampling(temperature=1.0, seed=9)])
    assert tokens.tolist() == [*alone, int(logits[2, :TOKENS].argmax())]


def test_g02_seed_zero_is_a_seed(sample: Sample) -> None:
    logits = random_logits(1).repeat(200, 1)
    positions = list(range(200))
    zero = [Sampling(temperature=1.0, seed=0)] * 200
    one = [Sampling(temperature=1.0, seed=1)] * 200
    first = sample(logits, zero, positions)
    assert first == sample(logits, zero, positions)
    assert first != sample(logits, one, positions)
    assert len(set(first)) > 5


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12, 1e-38, 1e-45])
def test_g04_tiny_temperature_equals_greedy(temperature: float, sample: Sample) -> None:
    generator = torch.Generator().manual_seed(4)
    # Rounded to bfloat16 there are equal largest logits, where only greedy's rule decides.
    logits = (torch.rand(64, VOCAB, generator=generator) * 2000 - 1000).bfloat16().float()
    logits[0, 17:20] = 1000.0
    rows = [Sampling(temperature=temperature, seed=row) for row in range(64)]
    assert sample(logits, rows) == sample(logits, [Sampling()] * 64)


@pytest.mark.parametrize("temperature", [2e-4, 1e-3, 1e-2])
def test_g04_low_temperature_is_finite_and_takes_the_best(
    temperature: float, sample: Sample
) -> None:
    logits = torch.full((4, VOCAB), -1000.0)
    logits[:, 42] = 1000.0
    rows = [Sampling(temperature=temperature, seed=row) for row in range(4)]
    assert sample(logits, rows) == [42] * 4


def test_g12_padded_ids_are_never_sampled(sample: Sample) -> None:
    logits = random_logits(1, scale=1.0)
    logits[0, TOKENS:] += 50.0
    rows = [Sampling(temperature=5.0, seed=seed) for seed in range(1000)]
    for position in range(10):
        tokens = sample(logits.expand(1000, -1), rows, [position] * 1000)
        assert max(tokens) < TOKENS
    assert max(sample(logits, [Sampling()])) < TOKENS


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 2.0**-53, 1.0 - 2.0**-53])
def test_g26_extreme_uniforms_give_a_valid_id(uniform: float) -> None:
    weights = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(1)).double()
    weights[0, :10] = 0.0
    weights[1, -10:] = 0.0
    weights[2] = 0.0
    weights[2, 123] = 1e-300
    tokens = pick(weights, torch.full((3,), uniform, dtype=torch.float64))
    assert bool((weights.gather(1, tokens.unsqueeze(1)) > 0.0).all())
    assert tokens[2] == 123


def test_nan_row_is_its_own_error_and_spares_the_others(
    sample: Sample, new_sampler: NewSampler
) -> None:
    logits = random_logits(5)
    clean = logits.clone()
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 299] = math.inf
    for rows in ([Sampling()] * 5, [Sampling(temperature=1.0, seed=row) for row in range(5)]):
        sampled = new_sampler(TOKENS).sample(logits, sampling_batch(rows))
        assert sampled.row_error is not None
        assert sampled.row_error.tolist() == [0, 1, 1, 1, 0]
        expected = sample(clean, rows)
        assert [sampled.token_ids[0], sampled.token_ids[4]] == [expected[0], expected[4]]


def test_nan_in_the_padding_is_no_error(sample: Sample) -> None:
    logits = random_logits(1)
    logits[0, TOKENS:] = math.nan
    assert sample(logits, [Sampling()]) == [int(logits[0, :TOKENS].argmax())]


def kept(weights: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    row = torch.tensor([weights], dtype=torch.float64)
    restrict(row, torch.tensor([top_k]), torch.tensor([top_p]).double(), torch.tensor([min_p]))
    return torch.nonzero(row[0]).squeeze(1).tolist()


def test_top_k_keeps_the_lower_ids_among_equals() -> None:
    assert kept([0.5, 1.0, 0.5, 0.5], top_k=2) == [0, 1]
    assert kept([0.5, 1.0, 0.5, 0.5], top_k=3) == [0, 1, 2]
    assert kept([0.5, 1.0, 0.2], top_k=-1) == [0, 1, 2]
    assert kept([0.5, 1.0, 0.2], top_k=100) == [0, 1, 2]


def test_top_p_keeps_the_fewest_that_reach_the_mass() -> None:
    # Shares 0.2, 0.5, 0.25, 0.05.
    weights = [0.4, 1.0, 0.5, 0.1]
    assert kept(weights, top_p=0.5) == [1]
    assert kept(weights, top_p=0.51) == [1, 2]
    assert kept(weights, top_p=0.9) == [0, 1, 2]
    assert kept(weights, top_p=1e-9) == [1]


def test_top_p_counts_what_top_k_left() -> None:
    # Of the two largest (1.0 and 0.5) the first alone has two thirds.
    assert kept([0.4, 1.0, 0.5, 0.1], top_k=2, top_p=0.6) == [1]
    assert kept([0.4, 1.0, 0.5, 0.1], top_p=0.6) == [1, 2]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept([0.4, 1.0, 0.5, 0.1], min_p=0.5) == [1, 2]
    assert kept([0.4, 1.0, 0.5, 0.1], min_p=1.0) == [1]


def test_top_p_reaches_beyond_the_first_sort() -> None:
    """A flat row needs more candidates than the first sort looks at."""
    weights = torch.ones(2, 5000, dtype=torch.float64)
    weights[1] = torch.linspace(1.0, 0.5, 5000).double()
    limit = torch.tensor([0.9, 0.9], dtype=torch.float64)
    expected = [4500, int((weights[1].cumsum(0) < 0.9 * weights[1].sum()).sum()) + 1]
    restrict(weights, torch.zeros(2, dtype=torch.int64), limit, torch.zeros(2))
    assert (weights > 0).sum(-1).tolist() == expected


@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.7),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.2, top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=lambda params: f"t{params.temperature}_k{params.top_k}_p{params.top_p}_m{params.min_p}",
)
def test_samples_follow_the_exact_distribution(params: Sampling, new_sampler: NewSampler) -> None:
    """A chi-square test; the seeds are fixed, so it gives the same answer every time."""
    draws, chunk = 20_000, 2_000
    logits = random_logits(1, seed=3, scale=1.5)[:, :40]
    rows = [Sampling(**{**vars(params), "seed": seed}) for seed in range(chunk)]
    counts = np.zeros(40)
    for position in range(draws // chunk):
        batch = sampling_batch(rows, [position] * chunk)
        tokens = new_sampler(40).sample(logits.expand(chunk, -1), batch).token_ids
        counts += np.bincount(tokens, minlength=40)
    expected = probabilities(logits[0].tolist(), params) * draws
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    statistic = float((((counts - expected) ** 2)[often] / expected[often]).sum())
    freedom = int(often.sum()) - 1
    # Mean plus five standard deviations of the chi-square distribution.
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def neighbours_differ(rows: int) -> list[Sampling]:
    return [
        Sampling(
            temperature=[0.0, 0.7, 1.0, 1.9][row % 4],
            top_k=[0, 7, 0, 300][row % 3],
            top_p=[1.0, 0.6, 0.95][row % 3],
            min_p=[0.0, 0.02][row % 2],
            seed=row,
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("arrange", [lambda n: range(n), lambda n: reversed(range(n))])
def test_rows_do_not_depend_on_their_neighbours(
    arrange: Callable[[int], range], sample: Sample
) -> None:
    count = 70
    logits = random_logits(count, seed=8)
    params = neighbours_differ(count)
    order = list(arrange(count))
    positions = [3 * row for row in range(count)]
    together = sample(logits[order], [params[row] for row in order], [positions[r] for r in order])
    alone = [sample(logits[row : row + 1], [params[row]], [positions[row]])[0] for row in order]
    assert together == alone


def test_weights_are_equal_bit_for_bit_wherever_the_row_stands() -> None:
    """The probabilities themselves, which the token alone might not show."""
    logits = random_logits(33, seed=5)[:, :299].double()
    together = torch.exp(logits / 0.7).cumsum(-1)
    for row in range(33):
        assert torch.equal(together[row], torch.exp(logits[row : row + 1] / 0.7).cumsum(-1)[0])
