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
pub(crate) fn run<'a>(batch: &Batch, mut script_of: impl FnMut(RequestId) -> &'a Script) -> Vec<i32> {
    let mut tokens = Vec::with_capacity(batch.num_samples());
    for (&row, &position) in batch.sample_rows.iter().zip(&batch.sample_positions) {
        let index = batch.row_ids.iter().position(|&other| other == row).expect("a sampled row is in the batch");
        tokens.push(script_of(RequestId::from_u64(batch.request_ids[index])).token(position as usize));
    }
    tokens
}
