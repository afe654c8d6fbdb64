"""What a sampler keeps of each row from step to step: tokens so far, bias, bans, bad words.

A row's state begins when the scheduler gives the row to a sequence (`Batch.new_rows`, with its
`NewRowTables`) and ends when the row is freed or given out again. Afterwards the sampler adds its
own samples, so that nothing is handed over twice. Only rows that use such a parameter take memory.
Work in Python is per new row; a step costs a few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_LEAST_ROOM = 64
"""Values that a row which has outgrown its place gets room for, at least."""


class Ragged:
    """Values of varying number by row, in flat arrays that all rows share.

    The values of `row` are `column[start[row]:start[row] + length[row]]` of each of `columns`,
    which are replaced when they grow. They take at most twice what the rows needed then.
    """

    def __init__(self, num_rows: int, *dtypes: npt.DTypeLike) -> None:
        """Nothing in any of `num_rows` rows; one column of each of `dtypes`."""
        self.columns: list[npt.NDArray[Any]] = [np.zeros(0, dtype) for dtype in dtypes]
        self.start: Int64s = np.zeros(num_rows, np.int64)
        self.length: Int64s = np.zeros(num_rows, np.int64)
        self._capacity: Int64s = np.zeros(num_rows, np.int64)
        self._end = 0

    def clear(self, rows: npt.NDArray[np.integer[Any]]) -> None:
        """Empty `rows` and give up their place."""
        # The columns may shrink before the row is used again: no place may stay outside of them.
        self.start[rows] = 0
        self.length[rows] = 0
        self._capacity[rows] = 0

    def set(self, row: int, *values: npt.NDArray[Any], room: int = 0) -> None:
        """Make `values`, one array per column, those of `row`; with `room` to append so many."""
        count = len(values[0])
        self.length[row] = self._capacity[row] = 0
        if self._end + count + room > len(self.columns[0]):
            self._compact(count + room)
        start = self.start[row] = self._end
        self._capacity[row] = count + room
        self._end += count + room
        for column, new in zip(self.columns, values, strict=True):
            column[start : start + count] = new
        self.length[row] = count

    def append(self, rows: npt.NDArray[np.integer[Any]], *values: npt.NDArray[Any]) -> None:
        """Add one value to each of `rows`, which are distinct."""
        full = self.length[rows] == self._capacity[rows]
        for row in rows[full].tolist():  # rare: the room doubles each time
            self.set(row, *self.get(row), room=max(_LEAST_ROOM, int(self.length[row])))
        place = self.start[rows] + self.length[rows]
        for column, new in zip(self.columns, values, strict=True):
            column[place] = new
        self.length[rows] += 1

    def get(self, row: int) -> list[npt.NDArray[Any]]:
        """Return the values of `row`, one array per column."""
        place = slice(int(self.start[row]), int(self.start[row] + self.length[row]))
        return [column[place] for column in self.columns]

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> tuple[Int64s, Int64s, Int64s]:
        """Return where all values of `rows` are, one row after the other.

        For each value: the index of its row in `rows`, its number within the row, and its index
        into `columns`.
        """
        length = self.length[rows]
        owner = np.repeat(np.arange(len(rows)), length)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
        return owner, number, number + self.start[rows][owner]

    def _compact(self, extra: int) -> None:
        """Move the rows together, to arrays twice as large as what they and `extra` need.

        Everything is replaced at the end, without a call in between: an interrupt leaves either all
        rows where they were, or all where they are now.
        """
        size = 2 * (int(self._capacity.sum()) + extra)
        columns = [np.zeros(size, column.dtype) for column in self.columns]
        start, end = self.start.copy(), 0
        for row in np.flatnonzero(self._capacity).tolist():
            for column, values in zip(columns, self.get(row), strict=True):
                column[end : end + len(values)] = values
            start[row] = end
            end += int(self._capacity[row])
        self.columns, self.start, self._end = columns, start, end


@dataclass(frozen=True, slots=True)
class Bans:
    """Ids that must not be sampled: of sample `i` they are `ids[start[i]:start[i + 1]]`."""

    start: Int64s
    ids: Int32s


class SamplerRows:
    """The state of all rows: `history` with `num_prompt`, `bias`, bans and bad words.

    `history` has one int32 column: prompt, then output; empty for a row without penalties and bad
    words. `bias` has an int32 and a float32 column, no id twice within a row.
    """

    def __init__(self, num_rows: int) -> None:
        """No row has anything yet."""
        self.history = Ragged(num_rows, np.int32)
        self.num_prompt: Int64s = np.zeros(num_rows, np.int64)
        self.bias = Ragged(num_rows, np.int32, np.float32)
        self._banned = Ragged(num_rows, np.int32)
        # Of a bad word of k tokens: the last one, k - 1, and where the others begin in `_leads`.
        self._words = Ragged(num_rows, np.int32, np.int64, np.int64)
        self._leads = Ragged(num_rows, np.int32)

    def update(self, batch: Any) -> None:
        """Forget the rows that the batch freed or gave out, then learn what is new.

        A row is forgotten even if the batch in which it was freed never got here: whoever has it
        next is in `new_rows`.
        """
        new_rows, tables = batch.new_rows, batch.new_row_tables
        for rows in (batch.freed_rows, new_rows):
            if len(rows) > 0:
                for ragged in (self.history, self.bias, self._banned, self._words, self._leads):
                    ragged.clear(rows)
        if tables is not None:
            self._learn(new_rows.tolist(), tables)

    def append(self, rows: Int32s, tokens: Int32s) -> None:
        """Add the tokens just sampled to the histories of those rows that have one."""
        kept = self.history.length[rows] > 0
        if kept.any():
            self.history.append(rows[kept], tokens[kept])

    def bans(self, rows: Int32s, positions: Int32s, min_tokens: Int32s) -> Bans | None:
        """Return what the samples of `rows` must not be; None if nothing is excluded.

        `positions` are the output tokens that each of them has, `min_tokens` the numbers before
        which its end tokens are banned.
        """
        parts = []
        held = np.flatnonzero((positions < min_tokens) & (self._banned.length[rows] > 0))
        if len(held) > 0:
            owner, _, index = self._banned.take(rows[held])
            parts.append((held[owner], self._banned.columns[0][index]))
        worded = np.flatnonzero(self._words.length[rows])
        if len(worded) > 0:
            owner, ids = self._completed(rows[worded])
            parts.append((worded[owner], ids))
        if not parts:
            return None
        owner, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
        start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.bincount(owner, minlength=len(rows)), out=start[1:])
        return Bans(start, ids[np.argsort(owner, kind="stable")])

    def _learn(self, rows: list[int], tables: Any) -> None:
        history_start, history = tables.history_start, tables.history_ids
        num_prompt = tables.history_num_prompt
        bias_start, bias_ids, bias_values = tables.bias_start, tables.bias_ids, tables.bias_values
        banned_start, banned = tables.banned_start, tables.banned_ids
        words_start = tables.bad_words_start
        word_start, word_ids = tables.bad_word_start, tables.bad_word_ids
        for index, row in enumerate(rows):
            part = slice(history_start[index], history_start[index + 1])
            if part.start < part.stop:
                self.history.set(row, history[part], room=_LEAST_ROOM)
                self.num_prompt[row] = num_prompt[index]
            part = slice(bias_start[index], bias_start[index + 1])
            if part.start < part.stop:
                self.bias.set(row, *_last_of_each(bias_ids[part], bias_values[part]))
            part = slice(banned_start[index], banned_start[index + 1])
            if part.start < part.stop:
                self._banned.set(row, banned[part])
            part = slice(words_start[index], words_start[index + 1])
            if part.start < part.stop:
                self._set_words(row, word_start[part.start : part.stop + 1], word_ids)

    def _set_words(self, row: int, start: Int32s, ids: Int32s) -> None:
        """Store the words `ids[start[i]:start[i + 1]]`, each as its last id and those before."""
        last = start[1:] - 1
        is_lead = np.ones(int(start[-1] - start[0]), bool)
        is_lead[last - start[0]] = False
        num_leads = last - start[:-1]
        self._words.set(row, ids[last], num_leads, np.cumsum(num_leads) - num_leads)
        self._leads.set(row, ids[start[0] : start[-1]][is_lead])

    def _completed(self, rows: Int32s) -> tuple[Int64s, Int32s]:
        """Return the ids that would complete a bad word: index into `rows` and id of each.

        As in vLLM a word is completed if the output, without the prompt, ends in all its tokens
        but the last. Words that still match are compared token by token, from the end.
        """
        owner, _, index = self._words.take(rows)
        last, num_leads, lead_at = (column[index] for column in self._words.columns)
        history, leads = self.history.columns[0], self._leads.columns[0]
        num_outputs = self.history.length[rows] - self.num_prompt[rows]
        history_end = (self.history.start + self.history.length)[rows][owner]
        lead_end = lead_at + num_leads + self._leads.start[rows][owner]
        alive = np.flatnonzero(num_leads <= num_outputs[owner])
        done = [alive[num_leads[alive] == 0]]
        alive, depth = alive[num_leads[alive] > 0], 1
        while len(alive) > 0:
            same = history[history_end[alive] - depth] == leads[lead_end[alive] - depth]
            alive = alive[same]
            done.append(alive[num_leads[alive] == depth])
            alive, depth = alive[num_leads[alive] > depth], depth + 1
        found = np.concatenate(done)
        return owner[found], last[found]


def _last_of_each(
    ids: Int32s, values: npt.NDArray[np.float32]
) -> tuple[Int32s, npt.NDArray[np.float32]]:
    """Drop all but the last entry of each id."""
    unique, first_from_the_end = np.unique(ids[::-1], return_index=True)
    return unique, values[::-1][first_from_the_end]
