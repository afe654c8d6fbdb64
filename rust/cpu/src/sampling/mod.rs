//! Sampling: from the logits of a batch to tokens and log-probabilities, one row at a time.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | what a call gets, and every check of it |
//! | `change` | bias, penalties and bans, on a copy of the row |
//! | `scan` | whole passes over a row: largest logits, weights, sums |
//! | `select` | finding the largest few without sorting the row |
//! | `mass` | a histogram, which narrows `top_p` down |
//! | `draw` | `top_k`, `top_p`, `min_p` and the draw |
//! | `logprobs` | log-probability, rank and the most likely ids |
//!
//! Invariants:
//! 1. A row's result depends on its own logits and parameters only, bit for bit: rows are computed by one thread each, and
//!    reductions add in an order that the length of the row alone decides.
//! 2. Weights are `e^((logit - largest) / temperature)` in f64; the largest is exactly 1. Equal logits have equal weights, and
//!    among equals the lower id comes first.
//! 3. The token drawn is the first whose weights, added up in the order of the ids, exceed the uniform number times their sum.
//!    Another implementation (the one in Python) adds in another order: its token may differ only where the two sides of that
//!    comparison are equal but for rounding, about 1e-12 of the sum.

mod args;
mod change;
mod draw;
mod logprobs;
mod mass;
mod scan;
mod select;

use std::sync::Mutex;

pub use args::{Bans, Bias, LogprobArgs, Penalties, Ragged, RowLogits, SampleArgs, SampleInput, SamplingParameters};
pub use logprobs::LOGPROB_FLOOR;

use crate::dispatch::{Isa, Kernels};
use crate::error::Result;
use crate::simd::Simd;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};

/// Row error: the largest logit is not a finite number, or a logit is NaN.
pub const UNUSABLE_LOGITS: u8 = 1;
/// Row error: bias, penalties and bans leave no id.
pub const EVERYTHING_EXCLUDED: u8 = 2;

/// At or below this temperature a row is greedy: only logits closer than 1e-3 could tell.
pub const GREEDY_TEMPERATURE: f32 = 1e-4;

/// Below this many logits waking threads costs more than it saves.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// Memory that one thread works in; kept from row to row.
#[derive(Debug, Default)]
struct Scratch {
    /// The row with bias, penalties and bans.
    changed: Vec<f32>,
    /// By id, what the history says of it; all 0 between rows.
    marks: Vec<u32>,
    /// Largest logit of each block of ids.
    block_largest: Vec<f32>,
    draw: draw::Scratch,
    logprobs: logprobs::Scratch,
}

impl Kernels {
    /// Draws a token for each sample; see [`SampleArgs`].
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Index`], [`crate::Error::Range`], [`crate::Error::Forked`];
    /// nothing is written then.
    pub fn sample(&self, args: SampleArgs<'_>) -> Result<()> {
        args.check()?;
        let SampleArgs { tokens, errors, input } = args;
        let parallel = tokens.len() * input.logits.vocab_size >= PARALLEL_ELEMENTS;
        // Each place is locked by the one thread that has its sample, so none ever waits.
        let places: Vec<_> = tokens.iter_mut().zip(errors).map(Mutex::new).collect();
        self.pool().for_each(places.len(), parallel, Scratch::default, |scratch, sample| {
            let (token, error) = match self.isa() {
                // SAFETY: `Kernels` holds only an instruction set that this CPU has.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { sample_avx512(&input, sample, scratch) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { sample_avx2(&input, sample, scratch) },
                // SAFETY: needs no instruction set.
                _ => unsafe { sample_row::<Portable<8>>(&input, sample, scratch) },
            };
            let mut place = places[sample].lock().expect("no thread panics with the lock held");
            (*place.0, *place.1) = (token as i32, error);
        })
    }

    /// Says how likely given tokens are, and which ids are the most likely; see [`LogprobArgs`].
    ///
    /// # Errors
    /// As for [`Self::sample`].
    pub fn logprobs(&self, args: LogprobArgs<'_>) -> Result<()> {
        args.check()?;
        let parallel = args.ranks.len() * args.logits.vocab_size >= PARALLEL_ELEMENTS;
        let (logits, targets, counts) = (args.logits, args.targets, args.num_logprobs);
        let rows = args.token_ids.chunks_exact_mut(args.columns).zip(args.values.chunks_exact_mut(args.columns));
        let places: Vec<_> = rows.zip(args.ranks).map(Mutex::new).collect();
        self.pool().for_each(places.len(), parallel, Scratch::default, |scratch, item| {
            let Ok(count) = usize::try_from(counts[item]) else { return };
            let mut place = places[item].lock().expect("no thread panics with the lock held");
            let ((ids, values), rank) = &mut *place;
            let row = logprobs::Row { scores: logits.row(item), target: targets[item] as usize };
            let out = logprobs::Out { ids: &mut ids[..=count], values: &mut values[..=count], rank };
            match self.isa() {
                // SAFETY: `Kernels` holds only an instruction set that this CPU has.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { logprobs_avx512(row, out, scratch) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { logprobs_avx2(row, out, scratch) },
                // SAFETY: needs no instruction set.
                _ => unsafe { logprobs_row::<Portable<8>>(row, out, scratch) },
            }
        })
    }
}

/// Returns the token of one sample and its error.
///
/// # Safety
/// The CPU has the instruction set of `S`. The input passed `SampleArgs::check`, or this panics.
#[inline(always)]
unsafe fn sample_row<S: Simd>(input: &SampleInput<'_>, sample: usize, scratch: &mut Scratch) -> (usize, u8) {
    let mut scores = input.logits.row(sample);
    let Some(mut largest) = scan::largest(scores, &mut scratch.block_largest) else {
        return (0, UNUSABLE_LOGITS);
    };
    if let Some(change) = input.change(sample) {
        scratch.changed.clear();
        scratch.changed.extend_from_slice(scores);
        change.apply(&mut scratch.changed, &mut scratch.marks);
        scores = &scratch.changed;
        match scan::largest(scores, &mut scratch.block_largest) {
            Some(changed) => largest = changed,
            None => return (0, EVERYTHING_EXCLUDED),
        }
    }
    let parameters = input.draw_parameters(sample);
    let token = if parameters.temperature <= f64::from(GREEDY_TEMPERATURE) {
        scan::first_equal(scores, &scratch.block_largest, largest)
    } else {
        // SAFETY: passed on.
        unsafe { draw::draw::<S>(scores, largest, &parameters, &mut scratch.draw) }
    };
    (token, 0)
}

/// Fills one row of a matrix of log-probabilities.
///
/// # Safety
/// The CPU has the instruction set of `S`.
#[inline(always)]
unsafe fn logprobs_row<S: Simd>(row: logprobs::Row<'_>, out: logprobs::Out<'_>, scratch: &mut Scratch) {
    let largest = scan::largest(row.scores, &mut scratch.block_largest);
    // SAFETY: passed on.
    unsafe { logprobs::fill::<S>(row, largest, out, &scratch.block_largest, &mut scratch.logprobs) };
}

/// # Safety
/// As for [`sample_row`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn sample_avx512(input: &SampleInput<'_>, sample: usize, scratch: &mut Scratch) -> (usize, u8) {
    // SAFETY: passed on; this function has the features.
    unsafe { sample_row::<Avx512>(input, sample, scratch) }
}

/// # Safety
/// As for [`sample_row`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn sample_avx2(input: &SampleInput<'_>, sample: usize, scratch: &mut Scratch) -> (usize, u8) {
    // SAFETY: passed on; this function has the features.
    unsafe { sample_row::<Avx2>(input, sample, scratch) }
}

/// # Safety
/// As for [`logprobs_row`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn logprobs_avx512(row: logprobs::Row<'_>, out: logprobs::Out<'_>, scratch: &mut Scratch) {
    // SAFETY: passed on; this function has the features.
    unsafe { logprobs_row::<Avx512>(row, out, scratch) }
}

/// # Safety
/// As for [`logprobs_row`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn logprobs_avx2(row: logprobs::Row<'_>, out: logprobs::Out<'_>, scratch: &mut Scratch) {
    // SAFETY: passed on; this function has the features.
    unsafe { logprobs_row::<Avx2>(row, out, scratch) }
}
