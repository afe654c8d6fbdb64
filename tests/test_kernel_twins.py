"""The twins of the kernels against what the CPU does: they say what kernels mean."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batches import Sampling
from row_kit import row_state
from sampler_kit import changed_logits

from cbrs.kernels import reference
from cbrs.kernels.twins import sampling as twins
from cbrs.models.layers import RotaryEmbedding, rotate
from cbrs.models.rope import RopeScaling, Rotary, inverse_frequencies
from cbrs.runner import philox, sampler_torch

VOCAB = 1031


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(8)


def test_norms_are_those_of_torch():
    hidden, weight, out = torch.randn(3, 111), torch.rand(111), torch.empty(3, 111)
    reference.rms_norm(out, hidden, weight, 1e-3)
    torch.testing.assert_close(out, F.rms_norm(hidden, (111,), weight, 1e-3))
    residual, added = torch.randn(3, 111), torch.randn(3, 111)
    sums = residual.clone()
    reference.fused_add_rms_norm(out, sums, added, weight, 1e-3, weight + 1)
    expected = residual + F.rms_norm(added, (111,), weight + 1, 1e-3)
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(out, F.rms_norm(expected, (111,), weight, 1e-3))


def test_rotary_is_that_of_the_models():
    rope = Rotary(10_000.0, 16, RopeScaling("yarn", 4.0, 64, attention_factor=1.2))
    positions, slots = torch.tensor([5, 0, 900], dtype=torch.int32), torch.tensor([2, 1, 0])
    qkv = torch.randn(3, 6 * 24)
    heads = rotate(qkv.view(3, 6, 24)[:, :5], RotaryEmbedding(rope, qkv.device)(positions))
    keys, values = torch.zeros(1, 1, 16, 24), torch.zeros(1, 1, 16, 24)
    out = torch.empty(3, 4, 24)
    frequencies = torch.from_numpy(inverse_frequencies(rope))
    reference.rotary_kv_write(out, qkv, keys, values, positions, slots, frequencies, 1.2)
    torch.testing.assert_close(out, heads[:, :4])
    torch.testing.assert_close(keys[0, 0, :3].flip(0), heads[:, 4])
    assert torch.equal(values[0, 0, :3].flip(0), qkv.view(3, 6, 24)[:, 5])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_quantized_weights_are_within_half_a_step(bits, group):
    weight = torch.randn(5, 256) * torch.logspace(-30, 30, 5)[:, None]
    weight[1, :group] = 0.0
    packed = reference.quantize_weight(weight, bits, group)
    assert (packed.out_features, packed.in_features) == (5, 256)
    assert packed.numbers.shape == (5, 256 * bits // 8)
    back = reference.dequantize_weight(packed)
    step = packed.scales.float().repeat_interleave(group, 1)
    assert ((back - weight).abs() <= 0.5001 * step).all()
    assert (back[1, :group] == 0).all()


def test_weights_below_every_scale_become_zero():
    packed = reference.quantize_weight(torch.full((1, 32), 1e-44), 8, 32)
    assert (reference.dequantize_weight(packed) == 0).all()


@pytest.mark.parametrize(
    ("inputs", "bits", "group", "message"),
    [
        (64, 5, 32, "bits=5: weights are stored in 8 or 4 bits"),
        (64, 8, 48, "group_size=48: choose one of"),
        (96, 8, 64, "96 inputs do not fill groups of 64"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(inputs, bits, group, message):
    with pytest.raises(ValueError, match=message):
        reference.quantize_weight(torch.ones(2, inputs), bits, group)


def test_random_words_are_those_of_the_cpu():
    rng = np.random.default_rng(8)
    words = rng.integers(0, 2**32, (6, 50), np.uint64)
    expected = philox.philox4x32(tuple(words[:4]), tuple(words[4:]))
    tensors = [torch.from_numpy(word.astype(np.int64)) for word in words]
    found = twins.philox4x32(tuple(tensors[:4]), tuple(tensors[4:]))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.numpy() == theirs.astype(np.int64)).all()


def parameters(temperature, top_k=0, top_p=1.0, min_p=0.0, seeds=0, rows=1):
    """Return parameters of `rows` rows; each a number or a list by row."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return reference.SamplingParameters(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
    )


def test_what_may_be_drawn_is_what_the_cpu_keeps():
    logits = torch.randn(60, VOCAB)
    logits[20:30] = logits[20:30].round()  # ties
    logits[30:35, ::2] = -torch.inf
    grid = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.3, 1.0, 5.0)
        for top_k in (0, 1, 40, 1030, 5000)
        for top_p in (0.05, 0.9, 1.0)
        for min_p in (0.0, 0.2)
    ]
    rows = torch.arange(60) * 7 % len(grid)
    given = parameters(*([case[i] for case in grid] for i in range(4)), rows=len(grid))
    kept = twins.allowed(logits, rows, given)
    distance = (logits - logits.amax(-1, keepdim=True)).double()
    weights = torch.exp(distance / given.temperature[rows, None].double())
    sampler_torch.restrict(
        weights, given.top_k[rows].long(), given.top_p[rows].double(), given.min_p[rows].double()
    )
    assert torch.equal(kept, weights > 0)


def test_logits_are_changed_as_on_the_cpu():
    rng = np.random.default_rng(8)

    def some(count):
        return rng.integers(0, 40, count).tolist()

    rows = [Sampling(bad_words=[[3], [1, 2, 4], [9, 2, 5]], output=[1, 2])]
    for number in range(30):
        rows.append(
            Sampling(
                presence_penalty=rng.choice([0.0, 0.5, -2.0]),
                frequency_penalty=rng.choice([0.0, 0.7]),
                repetition_penalty=rng.choice([1.0, 1.4, 0.5]),
                prompt=some(20),
                output=some(number % 4 * 10),
                bias=dict(zip(some(5), rng.normal(size=5).tolist(), strict=True)),
                banned=some(3),
                min_tokens=10,
                bad_words=[some(1), some(2)] if number % 2 else [],
            )
        )
    logits = torch.randn(len(rows), 40)
    logits[3, 7] = -torch.inf
    scores, unusable = torch.empty(len(rows), 40), torch.empty(len(rows), dtype=torch.int32)
    index = torch.arange(len(rows), dtype=torch.int32)
    positions = torch.tensor([len(row.output) for row in rows], dtype=torch.int32)
    reference.change_logits(scores, unusable, logits, index, index, positions, row_state(rows))
    assert not unusable.any()
    for own, row, untouched in zip(scores, rows, logits, strict=True):
        assert own.tolist() == changed_logits(untouched, row)


def test_tokens_recorded_one_by_one_are_a_history():
    first = Sampling(presence_penalty=1.0, bad_words=[[5]], prompt=[4, 4, 7])
    whole = Sampling(presence_penalty=1.0, bad_words=[[5]], prompt=[4, 4, 7], output=[9, 7, 9])
    state, row = row_state([first], room=5), torch.zeros(1, dtype=torch.int32)
    for position, token in enumerate(whole.output):
        tokens, positions = torch.tensor([token]).int(), torch.tensor([position]).int()
        reference.record_tokens(tokens, row, positions, state)
    expected = row_state([whole])
    length = expected.seen_length[0]
    assert torch.equal(state.seen_length, expected.seen_length)
    assert torch.equal(state.seen_ids[:length], expected.seen_ids[:length])
    assert torch.equal(state.seen_counts[:length], expected.seen_counts[:length])
    assert state.output_ids[:3].tolist() == whole.output


def draw(logits, given, count):
    """Return `count` tokens of one row of logits, by position."""
    tokens, errors = (torch.empty(count, dtype=torch.int32) for _ in range(2))
    zero = torch.zeros(count, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    reference.sample(tokens, errors, logits[None], zero, zero, positions, zero, given, len(logits))
    assert not errors.any()
    return tokens


@pytest.mark.parametrize("restriction", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_tokens_are_drawn_as_often_as_they_should(restriction):
    logits, count = torch.randn(11), 40_000
    given = parameters(0.8, seeds=-7, **restriction)
    counts = draw(logits, given, count).long().bincount(minlength=11).double()
    kept = twins.allowed(logits[None], torch.zeros(1, dtype=torch.int64), given)[0]
    expected = count * (logits.double() / 0.8).masked_fill(~kept, -torch.inf).softmax(0)
    assert (counts[~kept] == 0).all()
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    # Ten degrees of freedom exceed this once in a hundred thousand times.
    assert statistic < 41.3


def test_seed_position_choice_and_draw_each_give_other_numbers():
    def numbers(seed=1, position=2, choice=3, number=0):
        return twins.gumbel(
            torch.tensor([seed]), torch.tensor([position]), torch.tensor([choice]), number, 50
        )

    first = numbers()
    assert torch.equal(first, numbers())
    for other in ({"seed": 1 + 2**40}, {"position": 3}, {"choice": 4}, {"number": 1}):
        assert not torch.isclose(first, numbers(**other)).any()
