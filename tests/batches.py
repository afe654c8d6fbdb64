"""Hand-made batches: what the scheduler would hand to a runner, as plain arrays.

Each row owns its own blocks, handed out in a scrambled order so that a table is never the identity.
"""

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
    """Sampling parameters of one row; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


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


def sampling_batch(
    sampling: list[Sampling], positions: list[int] | None = None, rows: list[int] | None = None
) -> Batch:
    """Return a batch that only samples: row i of the logits belongs to `rows[i]`, by default i."""
    rows = list(range(len(sampling))) if rows is None else rows
    tables = Tables(max(rows) + 1, 16)
    batch = tables.batch([Chunk(row, [0]) for row in rows])
    set_sampling(batch, dict(zip(rows, sampling, strict=True)), max(rows) + 1)
    if positions is not None:
        batch.sample_positions = np.array(positions, dtype=np.int32)
    return batch
