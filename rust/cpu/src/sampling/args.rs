//! What a call gets: rows of logits, and parameters by the batch's persistent rows.

use crate::error::{Error, Result};
use crate::layout::check_len;
use crate::sampling::change::Change;
use crate::sampling::draw::DrawParameters;

/// Rows of a matrix of logits.
#[derive(Debug, Clone, Copy)]
pub struct RowLogits<'a> {
    /// `[num_rows, row_len]`.
    pub data: &'a [f32],
    /// Logits in a row of the matrix, padding included.
    pub row_len: usize,
    /// Leading logits of a row that belong to an id.
    pub vocab_size: usize,
    /// `[N]` rows of the matrix that are meant.
    pub index: &'a [i32],
}

impl<'a> RowLogits<'a> {
    fn check(&self) -> Result<()> {
        if self.vocab_size == 0 {
            return Err(Error::ZeroDimension { dimension: "vocab_size" });
        }
        if self.row_len < self.vocab_size {
            return Err(Error::Length { argument: "a row of logits", len: self.row_len, expected: self.vocab_size });
        }
        let num_rows = self.data.len() / self.row_len;
        check_len("logits", self.data.len(), num_rows * self.row_len)?;
        check_index("logits_index", self.index, num_rows)
    }

    /// The logits of item `item`, without padding.
    pub(super) fn row(&self, item: usize) -> &'a [f32] {
        &self.data[self.index[item] as usize * self.row_len..][..self.vocab_size]
    }
}

/// Values of varying number by row: those of row `r` are `values[start[r]..start[r] + len[r]]`.
#[derive(Debug, Clone, Copy)]
pub struct Ragged<'a, T> {
    /// Values of all rows.
    pub values: &'a [T],
    /// `[max_num_seqs]`.
    pub start: &'a [i64],
    /// `[max_num_seqs]`.
    pub len: &'a [i64],
}

impl<'a, T> Ragged<'a, T> {
    fn check(&self, argument: &'static str, rows: &[i32], num_rows: usize) -> Result<()> {
        check_len(argument, self.start.len(), num_rows)?;
        check_len(argument, self.len.len(), num_rows)?;
        rows.iter().try_for_each(|&row| {
            let range = self.range(row as usize).filter(|range| range.1 <= self.values.len());
            range.map(|_| ()).ok_or(Error::Range { argument, index: row as usize, len: self.values.len() })
        })
    }

    fn range(&self, row: usize) -> Option<(usize, usize)> {
        let start = usize::try_from(self.start[row]).ok()?;
        Some((start, start.checked_add(usize::try_from(self.len[row]).ok()?)?))
    }

    fn get(&self, row: usize) -> &'a [T] {
        let (start, end) = self.range(row).expect("checked");
        &self.values[start..end]
    }
}

/// How tokens are drawn, each `[max_num_seqs]`, by row.
#[derive(Debug, Clone, Copy)]
pub struct SamplingParameters<'a> {
    /// At or below [`crate::sampling::GREEDY_TEMPERATURE`] the largest logit wins.
    pub temperature: &'a [f32],
    /// Number of most likely ids kept; below 1 = all.
    pub top_k: &'a [i32],
    /// Mass of what is kept of them; 1 or more = all.
    pub top_p: &'a [f32],
    /// Least weight relative to the largest; 0 or less = any.
    pub min_p: &'a [f32],
}

/// Penalties, each `[max_num_seqs]`, by row, and the tokens that they are about.
#[derive(Debug, Clone, Copy)]
pub struct Penalties<'a> {
    /// Subtracted from what was generated; 0 = none.
    pub presence: &'a [f32],
    /// Subtracted for each time that it was generated; 0 = none.
    pub frequency: &'a [f32],
    /// Divides positive and multiplies other logits of what is in prompt or output; 1 = none.
    pub repetition: &'a [f32],
    /// Prompt, then output; an id outside the vocabulary is ignored.
    pub history: Ragged<'a, i32>,
    /// How many tokens of the history are the prompt's.
    pub num_prompt: &'a [i64],
}

/// What is added to logits; an id comes at most once in a row, and outside the vocabulary it is ignored.
#[derive(Debug, Clone, Copy)]
pub struct Bias<'a> {
    /// Ids by row.
    pub ids: Ragged<'a, i32>,
    /// What belongs to each of `ids.values`.
    pub values: &'a [f32],
}

/// Ids that must not be drawn: those of sample `i` are `ids[start[i]..start[i + 1]]`.
#[derive(Debug, Clone, Copy)]
pub struct Bans<'a> {
    /// `[R + 1]`, ascending from 0.
    pub start: &'a [i64],
    /// Outside the vocabulary they are ignored.
    pub ids: &'a [i32],
}

/// What [`SampleArgs`] reads.
#[derive(Debug, Clone, Copy)]
pub struct SampleInput<'a> {
    /// Logits of `R` samples.
    pub logits: RowLogits<'a>,
    /// `[R]` row of each sample.
    pub rows: &'a [i32],
    /// `[R]` random numbers in [0, 1).
    pub uniform: &'a [f64],
    /// By row.
    pub parameters: SamplingParameters<'a>,
    /// Applied after the bias.
    pub penalties: Option<Penalties<'a>>,
    /// Applied first.
    pub bias: Option<Bias<'a>>,
    /// By sample; nothing brings a banned id back.
    pub bans: Option<Bans<'a>>,
}

/// Arguments of [`crate::Kernels::sample`], for `R` samples.
#[derive(Debug)]
pub struct SampleArgs<'a> {
    /// `[R]`; written.
    pub tokens: &'a mut [i32],
    /// `[R]`, 0, [`crate::sampling::UNUSABLE_LOGITS`] or [`crate::sampling::EVERYTHING_EXCLUDED`]; written.
    pub errors: &'a mut [u8],
    /// What is read.
    pub input: SampleInput<'a>,
}

impl SampleArgs<'_> {
    /// Draws rely on these; what is not a number fails every comparison.
    fn check_values(&self) -> Result<()> {
        let input = &self.input;
        let wrong = input.uniform.iter().position(|uniform| !(0.0..1.0).contains(uniform));
        if let Some(index) = wrong {
            let (argument, value) = ("uniform", input.uniform[index]);
            return Err(Error::Value { argument, index, value, expected: "in [0, 1)" });
        }
        let parameters = &input.parameters;
        let check = |argument, values: &[f32], is_valid: fn(f32) -> bool, expected| match input
            .rows
            .iter()
            .map(|&row| row as usize)
            .find(|&row| !is_valid(values[row]))
        {
            None => Ok(()),
            Some(index) => Err(Error::Value { argument, index, value: f64::from(values[index]), expected }),
        };
        check("temperature", parameters.temperature, |value| value >= 0.0, "a number, 0 or more")?;
        check("top_p", parameters.top_p, |value| value >= 0.0, "a number, 0 or more")?;
        check("min_p", parameters.min_p, |value| !value.is_nan(), "a number")
    }

    pub(super) fn check(&self) -> Result<()> {
        let input = &self.input;
        input.logits.check()?;
        let num_samples = input.logits.index.len();
        check_len("tokens", self.tokens.len(), num_samples)?;
        check_len("errors", self.errors.len(), num_samples)?;
        check_len("rows", input.rows.len(), num_samples)?;
        check_len("uniform", input.uniform.len(), num_samples)?;
        let parameters = &input.parameters;
        let num_rows = parameters.temperature.len();
        check_len("top_k", parameters.top_k.len(), num_rows)?;
        check_len("top_p", parameters.top_p.len(), num_rows)?;
        check_len("min_p", parameters.min_p.len(), num_rows)?;
        check_index("rows", input.rows, num_rows)?;
        self.check_values()?;
        if let Some(penalties) = &input.penalties {
            check_len("presence_penalty", penalties.presence.len(), num_rows)?;
            check_len("frequency_penalty", penalties.frequency.len(), num_rows)?;
            check_len("repetition_penalty", penalties.repetition.len(), num_rows)?;
            check_len("num_prompt", penalties.num_prompt.len(), num_rows)?;
            penalties.history.check("history", input.rows, num_rows)?;
        }
        if let Some(bias) = &input.bias {
            check_len("bias values", bias.values.len(), bias.ids.values.len())?;
            bias.ids.check("bias", input.rows, num_rows)?;
        }
        if let Some(bans) = &input.bans {
            check_len("bans start", bans.start.len(), num_samples + 1)?;
            let len = bans.ids.len();
            let wrong = bans.start.windows(2).position(|pair| pair[0] < 0 || pair[0] > pair[1] || pair[1] > len as i64);
            wrong.map_or(Ok(()), |index| Err(Error::Range { argument: "bans", index, len }))?;
        }
        Ok(())
    }
}

impl<'a> SampleInput<'a> {
    fn row_of(&self, sample: usize) -> usize {
        self.rows[sample] as usize
    }

    /// What is done to the logits of a sample; `None` if nothing is.
    pub(super) fn change(&self, sample: usize) -> Option<Change<'a>> {
        let row = self.row_of(sample);
        let mut change = Change { repetition: 1.0, ..Change::default() };
        if let Some(bias) = &self.bias {
            let (start, end) = bias.ids.range(row).expect("checked");
            (change.bias_ids, change.bias_values) = (&bias.ids.values[start..end], &bias.values[start..end]);
        }
        if let Some(penalties) = &self.penalties {
            change.presence = penalties.presence[row];
            change.frequency = penalties.frequency[row];
            change.repetition = penalties.repetition[row];
            change.history = penalties.history.get(row);
            change.num_prompt = usize::try_from(penalties.num_prompt[row]).unwrap_or(0);
        }
        if let Some(bans) = &self.bans {
            change.banned = &bans.ids[bans.start[sample] as usize..bans.start[sample + 1] as usize];
        }
        change.has_effect().then_some(change)
    }

    pub(super) fn draw_parameters(&self, sample: usize) -> DrawParameters {
        let (row, parameters) = (self.row_of(sample), &self.parameters);
        DrawParameters {
            temperature: f64::from(parameters.temperature[row]),
            top_k: usize::try_from(parameters.top_k[row]).unwrap_or(0),
            top_p: f64::from(parameters.top_p[row]),
            min_p: f64::from(parameters.min_p[row]),
            uniform: self.uniform[sample],
        }
    }
}

/// Arguments of [`crate::Kernels::logprobs`], for `N` tokens.
#[derive(Debug)]
pub struct LogprobArgs<'a> {
    /// `[N, columns]` the token itself, then the most likely ids; written as far as the row asks.
    pub token_ids: &'a mut [i32],
    /// `[N, columns]` natural logarithms of their probabilities, at least [`crate::sampling::LOGPROB_FLOOR`]; written likewise.
    pub values: &'a mut [f32],
    /// `[N]` one more than the number of ids with a greater logit than the token; written where the row asks.
    pub ranks: &'a mut [i32],
    /// At least 1.
    pub columns: usize,
    /// Logits of the `N` tokens.
    pub logits: RowLogits<'a>,
    /// `[N]` the tokens.
    pub targets: &'a [i32],
    /// `[N]` most likely ids wanted, less than `columns`; negative = nothing at all.
    pub num_logprobs: &'a [i32],
}

impl LogprobArgs<'_> {
    pub(super) fn check(&self) -> Result<()> {
        self.logits.check()?;
        if self.columns == 0 {
            return Err(Error::ZeroDimension { dimension: "columns" });
        }
        let num_tokens = self.logits.index.len();
        check_len("token_ids", self.token_ids.len(), num_tokens.saturating_mul(self.columns))?;
        check_len("values", self.values.len(), num_tokens.saturating_mul(self.columns))?;
        check_len("ranks", self.ranks.len(), num_tokens)?;
        check_len("targets", self.targets.len(), num_tokens)?;
        check_len("num_logprobs", self.num_logprobs.len(), num_tokens)?;
        check_index("targets", self.targets, self.logits.vocab_size)?;
        let wrong = self.num_logprobs.iter().position(|&count| count >= self.columns as i32);
        wrong.map_or(Ok(()), |index| {
            let value = i64::from(self.num_logprobs[index]);
            Err(Error::Index { argument: "num_logprobs", index, value, limit: self.columns })
        })
    }
}

fn check_index(argument: &'static str, values: &[i32], limit: usize) -> Result<()> {
    match values.iter().position(|&value| value < 0 || value as usize >= limit) {
        None => Ok(()),
        Some(index) => Err(Error::Index { argument, index, value: i64::from(values[index]), limit }),
    }
}
