"""What rank 0 sends the other ranks: a step as one flat message, and before the first step JSON.

A step is `HEADER_WORDS` int64 numbers and then the batch's arrays, one behind the other. It goes
through a Unix socket to each rank: one copy a rank of a few KiB, whatever the device is, and the
system tells each side when the other is gone. Block tables go as what changed in them; each rank
keeps a copy. Nothing that is received is code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import socket

    from numpy.typing import NDArray

    Int32s = NDArray[np.int32]

HEADER_WORDS = 12
_MAGIC = 0x6362727374657031
_HEADER_BYTES = 8 * HEADER_WORDS
_ENDED = "the other side is gone"
_MAX_JSON_BYTES = 1 << 20
_QUERY_START_OF_NONE = np.zeros(1, np.int32)


@dataclass(slots=True)
class ReceivedBatch:
    """A `Batch` as the other ranks have it: what a forward pass needs, valid until the next one."""

    num_seqs: int
    num_decodes: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: NDArray[np.int64]
    token_ids: Int32s
    positions: Int32s
    query_start: Int32s
    seq_lens: Int32s
    row_ids: Int32s
    logits_index: Int32s
    block_table_updates: tuple[Int32s, Int32s, Int32s, Int32s]
    block_tables: Int32s


class StepWriter:
    """Puts batches into one buffer, which is used again."""

    def __init__(self) -> None:
        """Begins with room for a small batch."""
        self._buffer = np.empty(1 << 16, np.uint8)

    def write(self, batch: Any) -> memoryview:
        """Returns the message of `batch`, valid until the next call."""
        numbers = (
            batch.num_seqs,
            batch.num_decodes,
            batch.num_tokens,
            batch.max_query_len,
            batch.max_seq_len,
            len(batch.logits_index),
        )
        arrays = (
            batch.slot_mapping,  # int64, the others int32
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.row_ids,
            batch.logits_index,
        )
        return self._write(batch, numbers, arrays)

    def write_changes(self, batch: Any) -> memoryview:
        """Returns the message of what `batch` changes in the block tables, with nothing to run."""
        return self._write(batch, (0,) * 6, (_QUERY_START_OF_NONE,))

    def _write(
        self, batch: Any, numbers: tuple[int, ...], arrays: tuple[NDArray[Any], ...]
    ) -> memoryview:
        updates = batch.block_table_updates
        arrays = (*arrays, *updates)
        length = _HEADER_BYTES + sum(array.nbytes for array in arrays)
        if length > len(self._buffer):
            self._buffer = np.empty(2 * length, np.uint8)
        counts = (len(updates[0]), len(updates[3]), *batch.block_tables.shape)
        self._buffer[:_HEADER_BYTES].view(np.int64)[:] = (_MAGIC, length, *numbers, *counts)
        start = _HEADER_BYTES
        for array in arrays:
            end = start + array.nbytes
            self._buffer[start:end].view(array.dtype)[:] = array
            start = end
        return self._buffer[:length].data


class StepReader:
    """Takes batches from a socket, and follows the block tables."""

    def __init__(self, connection: socket.socket) -> None:
        """Reads from `connection`, all of whose further messages are steps."""
        self._connection = connection
        self._buffer = np.empty(1 << 16, np.uint8)
        self._block_tables: Int32s = np.zeros((0, 0), np.int32)

    def read(self) -> ReceivedBatch:
        """Waits for the next batch; its arrays are valid until the next call.

        Raises:
            EOFError: rank 0 is gone or has closed the engine.
        """
        header = np.empty(HEADER_WORDS, np.int64)
        _receive(self._connection, header.data.cast("B"))
        magic, length, num_seqs, num_decodes, num_tokens, *rest = header.tolist()
        max_query_len, max_seq_len, num_logits, num_updates, num_ids, *shape = rest
        counts = (
            *(num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs, num_logits),
            *(num_updates, num_updates, num_updates + 1, num_ids),
        )
        payload = 8 * num_tokens + 4 * sum(counts)
        if magic != _MAGIC or min(counts) < 0 or length != _HEADER_BYTES + payload:
            raise ValueError(f"no step begins with {header.tolist()}")
        if payload > len(self._buffer):
            self._buffer = np.empty(2 * payload, np.uint8)
        _receive(self._connection, self._buffer[:payload].data)
        split = 8 * num_tokens
        numbers = self._buffer[split:payload].view(np.int32)
        parts = np.split(numbers, np.cumsum(counts[:-1]))
        token_ids, positions, query_start, seq_lens, row_ids, logits_index = parts[:6]
        rows, first_columns, start, ids = parts[6:]
        batch = ReceivedBatch(
            num_seqs=num_seqs,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            slot_mapping=self._buffer[:split].view(np.int64),
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            row_ids=row_ids,
            logits_index=logits_index,
            block_table_updates=(rows, first_columns, start, ids),
            block_tables=self._tables((shape[0], shape[1])),
        )
        apply_updates(batch.block_tables, batch.block_table_updates)
        return batch

    def _tables(self, shape: tuple[int, int]) -> Int32s:
        if self._block_tables.shape != shape:
            self._block_tables = np.zeros(shape, np.int32)
        return self._block_tables


def apply_updates(block_tables: Int32s, updates: tuple[Int32s, Int32s, Int32s, Int32s]) -> None:
    """Writes `Batch.block_table_updates` into `block_tables` `[max_num_seqs, max_blocks]`."""
    rows, first_columns, start, ids = updates
    lengths = np.diff(start)
    within = np.arange(len(ids)) - np.repeat(start[:-1], lengths)
    block_tables[np.repeat(rows, lengths), np.repeat(first_columns, lengths) + within] = ids


def send_json(connection: socket.socket, value: dict[str, Any]) -> None:
    """Sends `value` with its length before it."""
    text = json.dumps(value).encode()
    connection.sendall(len(text).to_bytes(8, "little") + text)


def receive_json(connection: socket.socket) -> dict[str, Any]:
    """Waits for what `send_json` sent.

    Raises:
        EOFError: the other side is gone.
    """
    length = bytearray(8)
    _receive(connection, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > _MAX_JSON_BYTES:
        raise ValueError(f"a message of {size} bytes, above the limit of {_MAX_JSON_BYTES}")
    text = bytearray(size)
    _receive(connection, memoryview(text))
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"a message that is no object: {value!r}")
    return value


def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`."""
    received = 0
    while received < len(target):
        try:
            count = connection.recv_into(target[received:])
        except ConnectionError as error:
            raise EOFError(_ENDED) from error
        if count == 0:
            raise EOFError(_ENDED)
        received += count
