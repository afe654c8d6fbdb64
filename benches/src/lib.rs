//! The loads that are measured: built once here, timed by the benchmarks and counted by the guard.
//!
//! 1. A load is a function of its parameters: no clock, no random seed but fixed ones, hash seeds included.
//! 2. What is not part of a measurement (prompts, set-up, checks) happens outside `step`.

mod mixed;
mod scatter;
mod steady;
mod tokens;

pub use mixed::Mixed;
pub use steady::{Steady, SteadyParams};
pub use tokens::{VOCAB_SIZE, prompt, shuffle};

use cbrs_core::{Scheduler, StepResult};

/// Tokens per block in every load.
pub const BLOCK_SIZE: usize = 16;

/// One call of `Scheduler::step`; the guard passes its own, which callgrind can name.
///
/// # Panics
/// If the step is refused: the load is wrong then.
#[inline]
pub fn step(scheduler: &mut Scheduler, result: &StepResult<'_>) {
    scheduler.step(Some(result), 0).expect("the result fits the batch in flight");
}
