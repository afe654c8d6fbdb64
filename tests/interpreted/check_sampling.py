"""Sampling, log-probabilities and the state of rows against their twins."""

import math

import pytest
import torch
import triton
import triton.language as tl
from batches import Sampling
from interpreted.ops_kit import poisoned
from row_kit import row_state

from cbrs.kernels import logprobs, reference, sampling, select
from cbrs.kernels import row_state as rows_kernels
from cbrs.kernels.twins import sampling as twins

VOCAB = 2611  # two tiles, one of them not full


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(8)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def odd_logits():
    """Return rows of padded logits: usual ones, ties, unusable and nearly empty ones."""
    logits = 2 * torch.randn(9, VOCAB + 5)
    logits[1] = logits[1].round()
    logits[2, 7] = math.nan
    logits[3] = -math.inf
    logits[4, 9] = math.inf
    logits[5, ::3] = -math.inf
    logits[6, :] = 1.5
    logits[7, 1:] = -math.inf
    logits[8] *= 1e-3  # so flat that the whole row has to be searched
    logits[:, VOCAB:] = 100.0
    return logits


CASES = [  # row of the logits, temperature, top_k, top_p, min_p
    (0, 1.0, 0, 1.0, 0.0),
    (0, 0.7, 50, 0.9, 0.0),
    (0, 0.0, 5, 0.5, 0.5),
    (0, 1.5, 0, 0.99, 0.1),
    (0, 1.0, 1000, 1.0, 0.2),
    (1, 1.0, 20, 0.7, 0.0),
    (1, 0.0, 0, 1.0, 0.0),
    (2, 1.0, 0, 1.0, 0.0),
    (3, 1.0, 5, 1.0, 0.0),
    (4, 0.0, 0, 1.0, 0.0),
    (5, 1.0, VOCAB + 9, 0.95, 0.0),
    (6, 1.0, 7, 1.0, 0.0),
    (6, 1.0, 0, 0.5, 0.0),
    (7, 1.0, 3, 0.9, 0.1),
    (8, 0.5, 900, 0.6, 0.0),
    (8, 2.0, 0, 0.3, 1.0),
]


def parameters(cases, seeds=None):
    columns = list(zip(*cases, strict=True))
    if seeds is None:
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(cases),))
    return reference.SamplingParameters(
        torch.tensor(columns[1]),
        int32(columns[2]),
        torch.tensor(columns[3]),
        torch.tensor(columns[4]),
        seeds,
    )


def sampled(function, logits, cases, given, positions, vocab_size=VOCAB, **rest):
    """Return tokens and errors; the first sample is padding."""
    count = len(cases)
    tokens, errors = (poisoned(count + 1, dtype=torch.int32) for _ in range(2))
    function(
        tokens,
        errors,
        logits,
        int32([99, *(case[0] for case in cases)]),
        int32([-1, *range(count)]),
        int32([0, *positions]),
        int32([place % 3 for place in range(count + 1)]),
        given,
        vocab_size,
        **rest,
    )
    return tokens, errors


def test_tokens_and_errors_are_those_of_the_twin():
    logits, given = odd_logits(), parameters(CASES)
    positions = [7 * place for place in range(len(CASES))]
    workspace = torch.empty(sampling.sample_workspace_size(len(CASES) + 1), dtype=torch.int32)
    found = sampled(sampling.sample, logits, CASES, given, positions, workspace=workspace, draw=1)
    expected = sampled(reference.sample, logits, CASES, given, positions, draw=1)
    assert torch.equal(found[1], expected[1])
    assert found[1].tolist() == [0] * 8 + [1, 1, 1] + [0] * 6
    assert torch.equal(found[0], expected[0])
    # A row draws the same alone.
    tokens, errors = poisoned(1, dtype=torch.int32), poisoned(1, dtype=torch.int32)
    place = 3
    sampling.sample(
        tokens,
        errors,
        logits,
        int32([0]),
        int32([place]),
        int32(positions[place : place + 1]),
        int32([(place + 1) % 3]),
        given,
        VOCAB,
        draw=1,
    )
    assert tokens[0] == found[0][place + 1]


@triton.jit
def _kept_kernel(
    threshold_ptr, room_ptr, logits_ptr, size, temperature, top_k, top_p, BLOCK: tl.constexpr
):
    """Store what top_k and top_p leave of a row: the threshold and the room for its equals."""
    largest, _first = select.largest_of(logits_ptr, size, BLOCK)
    threshold = select.LOWEST
    room = select.ALL
    if top_k > 0:
        threshold, room = select.threshold_of_count(logits_ptr, size, top_k, largest, BLOCK)
    if top_p < 1.0:
        _count, mass = select.mass_from(
            logits_ptr, size, select.LOWEST, largest, temperature, BLOCK
        )
        threshold, room = select.threshold_of_mass(
            logits_ptr, size, top_p * mass, threshold, room, largest, temperature, BLOCK
        )
    tl.store(threshold_ptr, threshold)
    tl.store(room_ptr, room)


@pytest.mark.parametrize("kind", ["usual", "ties", "zeros"])
@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (0, 0.3), (0, 0.9)])
def test_exactly_those_ids_are_kept_that_the_twin_keeps(kind, top_k, top_p):
    logits = torch.randn(257)
    if kind != "usual":
        logits = logits.round()
    if kind == "zeros":
        logits = torch.where(logits > 0, 0.0, logits)
        logits[logits == 0] *= torch.randn(int((logits == 0).sum())).sign()  # -0 is 0
    threshold, room = int32([0]), int32([0])
    _kept_kernel[(1,)](threshold, room, logits, 257, 0.8, top_k, top_p, BLOCK=128)
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    equal = keys == threshold
    kept = (keys > threshold) | (equal & (equal.cumsum(0) <= room))
    given = parameters([(0, 0.8, top_k, top_p, 0.0)])
    expected = twins.allowed(logits[None], torch.zeros(1, dtype=torch.int64), given)[0]
    assert torch.equal(kept, expected)


def test_a_large_vocabulary_is_sampled_from():
    logits = 2 * torch.randn(1, 49_155)
    cases = [(0, 0.8, 0, 0.9, 0.0)]
    given = parameters(cases)
    found = sampled(sampling.sample, logits, cases, given, [3], 49_155)
    assert torch.equal(found[0], sampled(reference.sample, logits, cases, given, [3], 49_155)[0])


@pytest.mark.soak
def test_tokens_are_drawn_as_often_as_they_should():
    logits, count = torch.randn(1, 11), 5000
    given = parameters([(0, 0.8, 8, 0.95, 0.0)], torch.tensor([3]))
    tokens, errors = poisoned(count, dtype=torch.int32), poisoned(count, dtype=torch.int32)
    zero = torch.zeros(count, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    sampling.sample(tokens, errors, logits, zero, zero, positions, zero, given, 11)
    kept = twins.allowed(logits, zero[:1].long(), given)[0]
    expected = count * (logits[0].double() / 0.8).masked_fill(~kept, -torch.inf).softmax(0)
    counts = tokens.long().bincount(minlength=11).double()
    assert (counts[~kept] == 0).all()
    # Seven degrees of freedom exceed this once in a hundred thousand times.
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 35.3


@pytest.mark.parametrize(("columns", "vocab_size"), [(0, VOCAB), (20, VOCAB), (5, 3)])
def test_logprobs_are_those_of_the_twin(columns, vocab_size):
    logits = odd_logits()
    index = int32([0, 1, -1, 2, 3, 4, 5, 6, 7, 8])
    tokens = int32([2, 1, 0, 1, 2, 0, 1, 2, 1, 0])
    results = []
    for function in (logprobs.logprobs, reference.logprobs):
        out = (
            poisoned(10, 1 + columns, dtype=torch.int32),
            poisoned(10, 1 + columns),
            poisoned(10, dtype=torch.int32),
        )
        function(*out, logits, index, tokens, vocab_size)
        results.append(out)
    (ids, values, ranks), (twin_ids, twin_values, twin_ranks) = results
    assert torch.equal(ids, twin_ids)
    assert torch.equal(ranks, twin_ranks)
    torch.testing.assert_close(values, twin_values, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert values[2].isnan().all()  # padding is left as it is


def test_sampling_refuses_what_does_not_fit():
    logits, given = torch.randn(1, 8), parameters([(0, 1.0, 0, 1.0, 0.0)])
    one = int32([0])

    def sample(logits=logits, vocab_size=8, **rest):
        sampling.sample(
            one.clone(), one.clone(), logits, one, one, one, one, given, vocab_size, **rest
        )

    with pytest.raises(ValueError, match=r"torch.float16 \[1, 8\]: float32 rows of at least 8"):
        sample(logits.half())
    with pytest.raises(ValueError, match="float32 rows of at least 9 numbers"):
        sample(vocab_size=9)
    with pytest.raises(
        ValueError, match=r"has 5 elements of torch\.int32: 8192 of int32 are needed"
    ):
        sample(workspace=torch.empty(5, dtype=torch.int32))
    wide = torch.empty(1, 22)
    with pytest.raises(ValueError, match="21 most likely ids are asked for: at most 20"):
        logprobs.logprobs(wide.int(), wide, one.clone(), logits, one, one, 8)


ROWS = [
    Sampling(),
    Sampling(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.3,
        prompt=[5, 6, 7, 7, 2610],
        output=[7, 9, 9, 9, 2611, 5],
        bias={3: 4.0, 9: -1.5, 2000: 1.0},
    ),
    Sampling(bias={0: 3e38, 4: -3e38, 8: 1.0}, repetition_penalty=1e-3, prompt=[0, 4, 8]),
    Sampling(banned=[1, 5, 1029, 4000], min_tokens=3, output=[4, 4], bias={1: 100.0}),
    Sampling(banned=[1, 5], min_tokens=2, output=[4, 4]),
    Sampling(
        bad_words=[[11], [8, 12], [4, 8, 13], [5, 8, 14], [9, 9, 9, 15], [1, 2, 4, 8, 16]],
        prompt=[1, 2],
        output=[4, 8],
    ),
    Sampling(
        bad_words=[[*range(100, 170), 17], [*range(101, 170), 18], [99, *range(101, 170), 19]],
        output=list(range(100, 170)),
    ),
]


def changed(function, logits, state, dtype=torch.float32):
    scores, unusable = poisoned(len(ROWS) + 1, VOCAB), poisoned(len(ROWS) + 1, dtype=torch.int32)
    function(
        scores,
        unusable,
        logits.to(dtype),
        int32([77, *range(len(ROWS))]),
        int32([-1, *range(len(ROWS))]),
        int32([0, *(len(row.output) for row in ROWS)]),
        state,
    )
    return scores, unusable


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changed_logits_are_those_of_the_twin(dtype):
    logits, state = odd_logits()[: len(ROWS)], row_state(ROWS)
    logits[2, [0, 4, 8]] = torch.tensor([3e38, -3e38, -math.inf])
    found = changed(rows_kernels.change_logits, logits, state, dtype)
    expected = changed(reference.change_logits, logits, state, dtype)
    assert torch.equal(found[1], expected[1])
    usable = expected[1][1:] == 0
    assert usable.tolist() == [True, True, False, False, False, True, True]
    for mine, twin in zip(found[0][1:][usable], expected[0][1:][usable], strict=True):
        assert torch.equal(mine, twin)
    assert found[0][0].isnan().all()


def test_a_row_of_which_nothing_is_left_says_so():
    logits, errors = torch.randn(2, 4), {}
    state = row_state([Sampling(banned=[0, 1, 2, 3], min_tokens=1), Sampling()])
    logits[1, 2] = math.nan
    cases = [(0, 1.0, 0, 1.0, 0.0), (1, 0.0, 0, 1.0, 0.0)]
    for name, change, sample in (
        ("kernel", rows_kernels.change_logits, sampling.sample),
        ("twin", reference.change_logits, reference.sample),
    ):
        scores, unusable = poisoned(3, 4), poisoned(3, dtype=torch.int32)
        change(scores, unusable, logits, int32([0, 0, 1]), int32([-1, 0, 1]), int32([0] * 3), state)
        cases = [(1, 1.0, 0, 1.0, 0.0), (2, 0.0, 0, 1.0, 0.0)]
        given = parameters(cases)
        errors[name] = sampled(sample, scores, cases, given, [0, 0], 4, unusable=unusable)[1]
    assert errors["kernel"].tolist() == errors["twin"].tolist() == [0, 2, 1]


def test_drawn_tokens_are_recorded_as_the_twin_does():
    states = row_state(ROWS, room=2), row_state(ROWS, room=2)
    before = row_state(ROWS, room=2)
    rows = int32([-1, *range(len(ROWS))])
    positions = [0, *(len(row.output) for row in ROWS)]
    for step, token in enumerate((9, 500, 500, 501, 502, 503)):
        tokens = int32([token + place % 2 for place in range(len(rows))])
        for state, function in zip(
            states, (rows_kernels.record_tokens, reference.record_tokens), strict=True
        ):
            function(tokens, rows, int32([position + step for position in positions]), state)
        for name, mine, twin in zip(before._fields, *states, strict=True):
            assert torch.equal(mine, twin), name
    assert not torch.equal(states[0].seen_ids, before.seen_ids)
    assert not torch.equal(states[0].output_ids, before.output_ids)


def test_changing_logits_refuses_what_does_not_fit():
    state = row_state([Sampling()])
    one = int32([0])
    with pytest.raises(ValueError, match="scores must be float32 and contiguous"):
        rows_kernels.change_logits(
            torch.empty(1, 8).half(), one.clone(), torch.randn(1, 8), one, one, one, state
        )
    with pytest.raises(ValueError, match=r"logits are \[1, 7\]: 8 columns are needed"):
        rows_kernels.change_logits(
            torch.empty(1, 8), one.clone(), torch.randn(1, 7), one, one, one, state
        )
