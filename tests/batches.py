"""Hand-made batches: what the scheduler would hand to a runner, as plain arrays.

Each row owns its own blocks, handed out in a scrambled order so that a table is never the identity.
"""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Chunk:
    """Tokens of one sequence in one step; `logits` is "all", "last" or "none"."""

    row: int
    tokens: list[int]
    start: int = 0
    logits: str = "all"


@dataclass
class Sampling:
    """Sampling parameters of one row; the defaults are greedy.

    From `prompt` on they are what a new row brings: the tokens are handed over if they are needed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int = -1
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def has_history(self) -> bool:
        """Whether the sampler has to know the tokens."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or bool(self.bad_words)

    @property
    def has_extras(self) -> bool:
        """Whether the row has more than the first five parameters."""
        tables = self.has_history or bool(self.bias) or self.min_tokens > 0
        return tables or self.logprobs >= 0


@dataclass
class RowTables:
    """The ragged parameters of new rows, as `NewRowTables` has them."""

    history_start: np.ndarray
    history_ids: np.ndarray
    history_num_prompt: np.ndarray
    bias_start: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    banned_start: np.ndarray
    banned_ids: np.ndarray
    bad_words_start: np.ndarray
    bad_word_start: np.ndarray
    bad_word_ids: np.ndarray

    @classmethod
    def of(cls, rows: list[Sampling]) -> "RowTables | None":
        """Return the tables of `rows`; None if they are all empty."""
        history = [row.prompt + row.output if row.has_history else [] for row in rows]
        words = [row.bad_words for row in rows]
        every_word = [word for of_row in words for word in of_row]
        banned = [row.banned if row.min_tokens > 0 else [] for row in rows]
        bias = [row.bias for row in rows]
        if not any(map(any, (history, bias, banned, words))):
            return None
        return cls(
            offsets(history),
            joined(history),
            np.array([len(row.prompt) if row.has_history else 0 for row in rows], dtype=np.int32),
            offsets(bias),
            joined(bias),
            joined([row.values() for row in bias], np.float32),
            offsets(banned),
            joined(banned),
            offsets(words),
            offsets(every_word),
            joined(every_word),
        )


def offsets(lists: Sequence[Sized]) -> np.ndarray:
    """Return the prefix sums of the lengths, from 0."""
    return np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int32)


def joined(lists: Iterable[Iterable[float]], dtype: type = np.int32) -> np.ndarray:
    """Return all items one after the other."""
    return np.array([item for items in lists for item in items], dtype=dtype)


@dataclass
class Batch:
    """The arrays of one step that a runner and a sampler read."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    row_ids: np.ndarray
    block_tables: np.ndarray
    logits_index: np.ndarray
    num_decodes: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    choice_ids: np.ndarray
    sample_index: np.ndarray
    sample_rows: np.ndarray
    sample_positions: np.ndarray
    temperature: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    top_k: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    top_p: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    min_p: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    seeds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    sample_choices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    presence_penalty: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    frequency_penalty: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    repetition_penalty: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    min_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    has_sampling_extras: bool = False
    prompt_logits_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prompt_target_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_prompt_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    new_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    freed_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    new_row_tables: RowTables | None = None


class Tables:
    """Block tables of `max_num_seqs` rows over a pool that holds all of them at full length."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int = 16) -> None:
        self.block_size = block_size
        per_row = -(-max_model_len // block_size)
        self.num_blocks = max_num_seqs * per_row
        order = np.random.default_rng(3).permutation(self.num_blocks).astype(np.int32)
        self.block_tables = order.reshape(max_num_seqs, per_row)

    def batch(self, chunks: list[Chunk], sampling: dict[int, Sampling] | None = None) -> Batch:
        """Return the batch that runs `chunks`, decodes first as the scheduler orders them."""
        chunks = sorted(chunks, key=lambda chunk: len(chunk.tokens) > 1)
        lengths = [len(chunk.tokens) for chunk in chunks]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        ).astype(np.int32)
        rows = np.concatenate([np.full(len(c.tokens), c.row) for c in chunks])
        blocks = self.block_tables[rows, positions // self.block_size].astype(np.int64)
        wanted: list[int] = []
        for chunk, start, length in zip(chunks, starts, lengths, strict=False):
            first = {"all": 0, "last": length - 1, "none": length}[chunk.logits]
            wanted.extend(range(start + first, start + length))
        sampled = [index for index, chunk in enumerate(chunks) if chunk.logits != "none"]
        last = np.searchsorted(wanted, [starts[index + 1] - 1 for index in sampled])
        batch = Batch(
            token_ids=np.array([t for c in chunks for t in c.tokens], dtype=np.int32),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start=starts,
            seq_lens=np.array([c.start + len(c.tokens) for c in chunks], dtype=np.int32),
            row_ids=np.array([c.row for c in chunks], dtype=np.int32),
            block_tables=self.block_tables,
            logits_index=np.array(wanted, dtype=np.int32),
            num_decodes=sum(length == 1 for length in lengths),
            num_seqs=len(chunks),
            max_query_len=max(lengths),
            max_seq_len=max(c.start + len(c.tokens) for c in chunks),
            choice_ids=np.zeros(len(chunks), dtype=np.int32),
            sample_index=last.astype(np.int32),
            sample_rows=np.array([chunks[index].row for index in sampled], dtype=np.int32),
            sample_positions=np.zeros(len(sampled), dtype=np.int32),
        )
        set_sampling(batch, sampling or {}, len(self.block_tables))
        return batch


def set_sampling(batch: Batch, sampling: dict[int, Sampling], max_num_seqs: int) -> None:
    """Fill the parameter arrays, which are indexed by row."""
    rows = [sampling.get(row, Sampling()) for row in range(max_num_seqs)]
    batch.temperature = np.array([row.temperature for row in rows], dtype=np.float32)
    batch.top_k = np.array([row.top_k for row in rows], dtype=np.int32)
    batch.top_p = np.array([row.top_p for row in rows], dtype=np.float32)
    batch.min_p = np.array([row.min_p for row in rows], dtype=np.float32)
    batch.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        setattr(batch, name, np.array([getattr(row, name) for row in rows], dtype=np.float32))
    batch.min_tokens = np.array([row.min_tokens for row in rows], dtype=np.int32)
    batch.num_logprobs = np.array([row.logprobs for row in rows], dtype=np.int32)
    sampled = [rows[row] for row in batch.sample_rows.tolist()]
    batch.sample_choices = np.array([row.choice for row in sampled], dtype=np.int32)
    batch.has_sampling_extras = any(row.has_extras for row in sampled)


def sampling_batch(
    sampling: list[Sampling],
    positions: list[int] | None = None,
    rows: list[int] | None = None,
    *,
    new: bool = True,
) -> Batch:
    """Return a batch that only samples: row i of the logits belongs to `rows[i]`, by default i.

    With `new` the rows are handed over with this batch. `positions` is by default the number of
    output tokens.
    """
    rows = list(range(len(sampling))) if rows is None else rows
    tables = Tables(max(rows) + 1, 16)
    batch = tables.batch([Chunk(row, [0]) for row in rows])
    set_sampling(batch, dict(zip(rows, sampling, strict=True)), max(rows) + 1)
    positions = [len(row.output) for row in sampling] if positions is None else positions
    batch.sample_positions = np.array(positions, dtype=np.int32)
    if new:
        batch.new_rows = np.array(rows, dtype=np.int32)
        batch.new_row_tables = RowTables.of(sampling)
    return batch
