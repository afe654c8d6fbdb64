//! The log-probabilities that the tests report: numbers that name the request, the choice, the place and the column they belong to.

use cbrs_core::{Batch, LogprobMatrix, SamplingRows};

use crate::rng::mix;

/// What stands in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Place {
    Prompt { position: usize },
    Output { choice: i32, position: usize },
}

/// The entries of one row, the token itself first, and its rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) token_ids: Vec<i32>,
    pub(crate) values: Vec<f32>,
    pub(crate) rank: i32,
}

/// What must be told about `token` at this place, if so many likely ids were asked for.
pub(crate) fn row(request: u64, place: Place, token: i32, num_logprobs: usize) -> Row {
    let name = match place {
        Place::Prompt { position } => mix(request ^ mix(position as u64)),
        Place::Output { choice, position } => mix(request ^ mix((position as u64) << 32 | (choice as u64 + 1) << 16)),
    };
    let column = |column: usize| mix(name ^ column as u64);
    let ids = (1..=num_logprobs).map(|index| (column(index) % 1000) as i32);
    let values = (0..=num_logprobs).map(|index| -((column(index) >> 32) as f32));
    Row {
        token_ids: std::iter::once(token).chain(ids).collect(),
        values: values.collect(),
        rank: (name % 7) as i32 + 1,
    }
}

/// A matrix that can be lent to `StepResult`.
#[derive(Debug, Default)]
pub(crate) struct Matrix {
    token_ids: Vec<i32>,
    values: Vec<f32>,
    ranks: Vec<i32>,
    columns: usize,
}

impl Matrix {
    fn new(columns: usize) -> Self {
        Self { columns, ..Self::default() }
    }

    fn push(&mut self, row: Row) {
        self.token_ids.extend(row.token_ids);
        self.values.extend(row.values);
        self.ranks.push(row.rank);
    }

    pub(crate) fn lend(&self) -> LogprobMatrix<'_> {
        let Self { token_ids, values, ranks, columns } = self;
        LogprobMatrix { token_ids, values, ranks, columns: *columns }
    }

    /// The same without its last row.
    pub(crate) fn shortened(mut self) -> Self {
        self.ranks.pop();
        self.token_ids.truncate(self.ranks.len() * self.columns);
        self.values.truncate(self.ranks.len() * self.columns);
        self
    }
}

/// Index in the batch of the sequence in this row.
fn place_of(batch: &Batch, row: i32) -> usize {
    batch.row_ids.iter().position(|&other| other == row).expect("the row is in the batch")
}

/// What a result has to say about the samples, if somebody wants to know; wider than needed in every other step.
pub(crate) fn logprobs(batch: &Batch, sampling: &SamplingRows, tokens: &[i32]) -> Option<Matrix> {
    let most = batch.sample_rows.iter().map(|&row| sampling.num_logprobs[row as usize]).max()?;
    let num_logprobs = usize::try_from(most).ok()? + (batch.step_id % 2) as usize;
    let mut matrix = Matrix::new(1 + num_logprobs);
    for (sample, &token) in tokens.iter().enumerate() {
        let request = batch.request_ids[place_of(batch, batch.sample_rows[sample])];
        let place =
            Place::Output { choice: batch.sample_choices[sample], position: batch.sample_positions[sample] as usize };
        matrix.push(row(request, place, token, num_logprobs));
    }
    Some(matrix)
}

/// What a result has to say about prompts.
pub(crate) fn prompt_logprobs(batch: &Batch) -> Option<Matrix> {
    let most = *batch.num_prompt_logprobs.iter().max()?;
    let num_logprobs = most as usize + (batch.step_id % 2) as usize;
    let mut matrix = Matrix::new(1 + num_logprobs);
    for (index, &logits) in batch.prompt_logits_index.iter().enumerate() {
        let token = batch.logits_index[logits as usize] as usize;
        let request = batch.request_ids[place_of(batch, batch.prompt_rows[index])];
        let place = Place::Prompt { position: batch.positions[token] as usize + 1 };
        matrix.push(row(request, place, batch.prompt_target_ids[index], num_logprobs));
    }
    Some(matrix)
}
