//! What the guard runs under callgrind: one load, each measured step inside a function that callgrind can name.
//!
//! usage: guard steady-256 | steady-1024 | mixed    (prints the number of measured steps)

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use cbrs_benches::{Mixed, Steady, SteadyParams};
use cbrs_core::{Scheduler, StepResult};

/// Four block boundaries of every sequence.
const NUM_STEADY_STEPS: usize = 64;
/// Two lives of a request, so that crowded and quiet steps are all there.
const NUM_MIXED_STEPS: usize = 256;

/// `run.py` tells callgrind to count inside this function only.
#[inline(never)]
fn measured_step(scheduler: &mut Scheduler, result: &StepResult<'_>) {
    cbrs_benches::step(scheduler, result);
}

fn steady(num_seqs: usize) -> usize {
    let mut load = Steady::new(SteadyParams::new(num_seqs, 1 + NUM_STEADY_STEPS));
    load.step(cbrs_benches::step);
    for _ in 0..NUM_STEADY_STEPS {
        load.step(measured_step);
        load.check();
    }
    NUM_STEADY_STEPS
}

fn mixed() -> usize {
    let mut load = Mixed::new();
    load.warm_up();
    for _ in 0..NUM_MIXED_STEPS {
        load.submit();
        load.step(measured_step);
        load.settle();
    }
    load.check();
    NUM_MIXED_STEPS
}

fn main() -> ExitCode {
    let num_steps = match std::env::args().nth(1).as_deref() {
        Some("steady-256") => steady(256),
        Some("steady-1024") => steady(1_024),
        Some("mixed") => mixed(),
        _ => {
            eprintln!("usage: guard steady-256 | steady-1024 | mixed");
            return ExitCode::FAILURE;
        }
    };
    println!("{num_steps}");
    ExitCode::SUCCESS
}
