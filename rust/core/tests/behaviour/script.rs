//! The model that the tests run: it says what each request's script says at the position that the batch names.
//!
//! A token depends on the request and its output position only, as it must with a real model and a fixed seed; so whatever
//! the scheduler does to batches, the delivered tokens are known beforehand.

use cbrs_core::{Batch, RequestId};

use crate::rng::mix;

/// What a request will be answered.
#[derive(Debug, Clone)]
pub(crate) enum Script {
    /// These tokens, then the last one for ever.
    Fixed(Vec<i32>),
    /// Tokens in `0..vocab_size` drawn by the seed; `rare`, if any, comes once in eight.
    Random { seed: u64, vocab_size: i32, rare: Option<i32> },
}

impl Script {
    /// The same token for ever.
    pub(crate) fn constant(token: i32) -> Self {
        Self::Fixed(vec![token])
    }

    /// What another choice of the same request is answered: often something else, sometimes the same as with greedy sampling.
    fn for_choice(&self, number: usize) -> Self {
        match self {
            Self::Random { seed, vocab_size, rare } if number > 0 && !seed.is_multiple_of(4) => {
                Self::Random { seed: mix(seed ^ mix(number as u64)), vocab_size: *vocab_size, rare: *rare }
            }
            same => same.clone(),
        }
    }

    /// What each of `n` choices is answered.
    pub(crate) fn into_choices(self, n: u32) -> Vec<Self> {
        (0..n as usize).map(|number| self.for_choice(number)).collect()
    }

    /// Output token number `position`.
    pub(crate) fn token(&self, position: usize) -> i32 {
        match self {
            Self::Fixed(tokens) => tokens[position.min(tokens.len() - 1)],
            Self::Random { seed, vocab_size, rare } => {
                let draw = mix(seed ^ mix(position as u64));
                match rare {
                    Some(token) if draw.is_multiple_of(8) => *token,
                    _ => ((draw >> 3) % *vocab_size as u64) as i32,
                }
            }
        }
    }
}

/// Runs a batch: one token per sample, found by row, as a runner would.
pub(crate) fn run<'a>(batch: &Batch, mut script_of: impl FnMut(RequestId, i32) -> &'a Script) -> Vec<i32> {
    let mut tokens = Vec::with_capacity(batch.num_samples());
    for (&row, &position) in batch.sample_rows.iter().zip(&batch.sample_positions) {
        let index = batch.row_ids.iter().position(|&other| other == row).expect("a sampled row is in the batch");
        let script = script_of(RequestId::from_u64(batch.request_ids[index]), batch.choice_ids[index]);
        tokens.push(script.token(position as usize));
    }
    tokens
}
