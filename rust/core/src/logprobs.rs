//! Log-probabilities on their way through: matrices from the sampler, ragged rows to the readers of a step.

use crate::error::{Error, Result};

/// What a sampler says about `N` tokens: `columns` entries for each, the token itself first, then the most likely ids.
///
/// A row is read only as far as its request asked: one more than its number of most likely ids.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogprobMatrix<'a> {
    /// `[N, columns]` ids.
    pub token_ids: &'a [i32],
    /// `[N, columns]` natural logarithms of their probabilities, finite.
    pub values: &'a [f32],
    /// `[N]` place of the first column's token among all ids by likelihood; 1 = the most likely.
    pub ranks: &'a [i32],
    /// Entries per row.
    pub columns: usize,
}

impl LogprobMatrix<'_> {
    /// Checks that there are `num_rows` rows wide enough for a request that wants `num_logprobs`.
    pub(crate) fn check(&self, field: &'static str, step_id: u64, num_rows: usize, num_logprobs: usize) -> Result<()> {
        let check_len = |got, expected| {
            if got == expected { Ok(()) } else { Err(Error::ResultLength { field, step_id, expected, got }) }
        };
        check_len(self.ranks.len(), num_rows)?;
        check_len(self.columns, self.columns.max(1 + num_logprobs))?;
        check_len(self.token_ids.len(), num_rows * self.columns)?;
        check_len(self.values.len(), num_rows * self.columns)
    }
}

/// Ragged rows of log-probabilities: row `i` has the entries `start[i]..start[i + 1]`, the token itself first.
#[derive(Debug, PartialEq)]
pub struct LogprobRows {
    /// `[N+1]` offsets.
    pub start: Vec<i32>,
    /// Ids of all rows.
    pub token_ids: Vec<i32>,
    /// Natural logarithms of their probabilities.
    pub values: Vec<f32>,
    /// `[N]` rank of each row's token; 1 = the most likely.
    pub ranks: Vec<i32>,
}

impl Clone for LogprobRows {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// Keeps the memory that there is: nearly always both are empty.
    fn clone_from(&mut self, other: &Self) {
        self.start.clone_from(&other.start);
        self.token_ids.clone_from(&other.token_ids);
        self.values.clone_from(&other.values);
        self.ranks.clone_from(&other.ranks);
    }
}

impl Default for LogprobRows {
    fn default() -> Self {
        Self { start: vec![0], token_ids: Vec::new(), values: Vec::new(), ranks: Vec::new() }
    }
}

impl LogprobRows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Ids and values of row `index`, and the rank of its token.
    pub fn row(&self, index: usize) -> (&[i32], &[f32], i32) {
        let range = self.start[index] as usize..self.start[index + 1] as usize;
        (&self.token_ids[range.clone()], &self.values[range], self.ranks[index])
    }

    /// Appends row `row` of `matrix`, its first `1 + num_logprobs` entries.
    pub(crate) fn push_from(&mut self, matrix: &LogprobMatrix<'_>, row: usize, num_logprobs: usize) {
        let range = row * matrix.columns..row * matrix.columns + num_logprobs + 1;
        self.push(&matrix.token_ids[range.clone()], &matrix.values[range], matrix.ranks[row]);
    }

    /// Appends a row.
    pub fn push(&mut self, token_ids: &[i32], values: &[f32], rank: i32) {
        self.token_ids.extend_from_slice(token_ids);
        self.values.extend_from_slice(values);
        self.start.push(self.token_ids.len() as i32);
        self.ranks.push(rank);
    }

    /// Drops all rows and keeps their memory.
    pub fn clear(&mut self) {
        self.start.truncate(1);
        self.token_ids.clear();
        self.values.clear();
        self.ranks.clear();
    }
}
