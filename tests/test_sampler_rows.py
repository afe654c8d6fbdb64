"""What a sampler keeps of its rows: histories grow, rows change hands, nothing leaks."""

import numpy as np
import pytest
import torch
from batches import RowTables, Sampling, sampling_batch
from sampler_kit import BACKENDS, expected_token, make_sampler

from cbrs.runner.sampler_rows import Ragged, SamplerRows

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOKENS = 50


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ragged_rows_keep_their_values_through_growth_and_change() -> None:
    """Against a dictionary of lists, in random order, until much has been moved."""
    random = np.random.default_rng(0)
    ragged, model = Ragged(10, np.int32, np.float32), {row: [] for row in range(10)}
    for _ in range(3000):
        kind, row = random.integers(4), int(random.integers(10))
        if kind == 0:
            values = random.integers(0, 99, random.integers(0, 30)).tolist()
            ragged.set(row, np.array(values), np.array(values) * 0.5, room=int(random.integers(3)))
            model[row] = values
        elif kind == 1:
            ragged.clear(np.array([row]))
            model[row] = []
        else:
            rows = random.permutation(10)[: random.integers(1, 10)]
            values = random.integers(0, 99, len(rows))
            ragged.append(rows, values, values * 0.5)
            for one, value in zip(rows.tolist(), values.tolist(), strict=True):
                model[one].append(value)
        for one, expected in model.items():
            ids, halves = ragged.get(one)
            assert ids.tolist() == expected
            assert halves.tolist() == [value / 2 for value in expected]
    rows = np.array([7, 2, 2, 0])
    owner, number, index = ragged.take(rows)
    assert ragged.columns[0][index].tolist() == [v for row in (7, 2, 2, 0) for v in model[row]]
    assert owner.tolist() == [i for i, row in enumerate((7, 2, 2, 0)) for _ in model[row]]
    assert number.tolist() == [n for row in (7, 2, 2, 0) for n in range(len(model[row]))]


def test_memory_stays_within_a_factor_of_what_the_rows_hold() -> None:
    ragged = Ragged(8, np.int32)
    for round_ in range(200):
        ragged.set(round_ % 8, np.zeros(1000, np.int32))
    assert len(ragged.columns[0]) <= 2 * 9000
    ragged.clear(np.arange(8))
    for _ in range(20):
        ragged.set(3, np.zeros(1000, np.int32))
    assert len(ragged.columns[0]) <= 2 * 9000


def test_rows_without_such_parameters_take_no_memory(backend: str) -> None:
    sampler = make_sampler(backend, TOKENS)
    rows = [Sampling(temperature=1.0, seed=row, logprobs=2) for row in range(4)]
    sampler.sample(torch.zeros(4, TOKENS), sampling_batch(rows))
    assert sampler._rows is None


def test_own_samples_count_from_step_to_step(backend: str) -> None:
    """Rows that are handed over once and then only sampled, against one with the whole history."""
    random = np.random.default_rng(4)
    rows = [
        Sampling(
            temperature=1.0,
            seed=index,
            presence_penalty=0.5,
            frequency_penalty=0.75,
            repetition_penalty=1.2,
            prompt=random.integers(0, TOKENS, 5).tolist(),
            bad_words=[[3], [7, 8], [9, 9, 9]],
            min_tokens=10,
            banned=[1],
        )
        for index in range(6)
    ] + [Sampling(temperature=1.0, seed=99)]
    sampler = make_sampler(backend, TOKENS)
    for step in range(150):
        logits = torch.randn(7, TOKENS, generator=torch.Generator().manual_seed(step))
        tokens = sampler.sample(logits, sampling_batch(rows, new=step == 0)).token_ids.tolist()
        for row, params, token in zip(logits, rows, tokens, strict=True):
            assert token == expected_token(row, params), step
            params.output.append(token)


def test_a_resumed_row_goes_on_as_if_it_had_never_stopped(backend: str) -> None:
    """D15: the history that it brings says what was prompt; generated tokens count as such."""
    logits = torch.randn(40, 1, TOKENS, generator=torch.Generator().manual_seed(1))

    def run(preempt_at: int | None) -> list[int]:
        params = Sampling(
            temperature=1.0, seed=5, presence_penalty=1.0, frequency_penalty=0.5, prompt=[4, 4, 5]
        )
        sampler, row = make_sampler(backend, TOKENS), 2
        for step in range(40):
            is_resumed = step == preempt_at
            row = 0 if is_resumed else row
            batch = sampling_batch([params], rows=[row], new=step == 0 or is_resumed)
            set_max_rows(batch, 3)
            if is_resumed:
                batch.freed_rows = np.array([2], np.int32)
            params.output.append(int(sampler.sample(logits[step], batch).token_ids[0]))
        return params.output

    expected = run(None)
    assert [run(step) for step in (1, 2, 17, 39)] == [expected] * 4


def set_max_rows(batch, num_rows: int) -> None:
    """Lengthen the arrays by row: a sampler sees as many rows in every batch."""
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "min_tokens", "num_logprobs"):
        array = getattr(batch, name)
        setattr(batch, name, np.concatenate([array, np.zeros(num_rows - len(array), array.dtype)]))
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        array = getattr(batch, name)
        setattr(batch, name, np.concatenate([array, np.zeros(num_rows - len(array), array.dtype)]))


@pytest.mark.parametrize("is_freed_in_view", [True, False])
@pytest.mark.parametrize("heir", [Sampling(temperature=1.0, seed=3), Sampling(bias={4: 3.0})])
def test_whoever_gets_a_row_next_inherits_nothing(
    backend: str, is_freed_in_view: bool, heir: Sampling
) -> None:
    """Also if the batch in which the row was freed failed before it came to the sampler."""
    params = Sampling(
        presence_penalty=2.0,
        repetition_penalty=5.0,
        bias={5: 50.0},
        bad_words=[[6]],
        min_tokens=100,
        banned=[7],
        prompt=[1, 2, 3],
    )
    sampler = make_sampler(backend, TOKENS)
    logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(2))
    sampler.sample(logits, sampling_batch([params]))
    batch = sampling_batch([heir])
    if is_freed_in_view:
        batch.freed_rows = np.array([0], np.int32)
    # The parameters by row are new, but a stale table must not show even under old ones.
    batch.has_sampling_extras = True
    batch.min_tokens[:] = 100
    batch.presence_penalty[:], batch.repetition_penalty[:] = 2.0, 5.0
    assert sampler.sample(logits, batch).token_ids.tolist() == [expected_token(logits[0], heir)]


def test_a_chunk_without_samples_hands_over_what_later_samples_need(backend: str) -> None:
    params = Sampling(bias={9: 100.0}, bad_words=[[9]], prompt=[1])
    sampler = make_sampler(backend, TOKENS)
    batch = sampling_batch([params])
    for name in ("sample_index", "sample_rows", "sample_positions", "sample_choices"):
        setattr(batch, name, np.zeros(0, np.int32))
    batch.has_sampling_extras = False
    sampled = sampler.sample(torch.zeros(0, TOKENS), batch)
    assert (len(sampled.token_ids), sampled.row_error, sampled.logprobs) == (0, None, None)
    logits = torch.zeros(1, TOKENS)
    logits[0, 8] = 1.0
    assert sampler.sample(logits, sampling_batch([params], new=False)).token_ids.tolist() == [8]


def test_an_id_that_is_biased_twice_counts_with_its_last_value() -> None:
    tables = RowTables.of([Sampling(bias={4: 1.0, 5: 2.0, 6: 3.0})])
    assert tables is not None
    tables.bias_ids = np.array([4, 5, 4], np.int32)
    batch = sampling_batch([Sampling()])
    batch.new_row_tables = tables
    rows = SamplerRows(1)
    rows.update(batch)
    ids, values = rows.bias.get(0)
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {4: 3.0, 5: 2.0}
