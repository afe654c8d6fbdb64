//! `Scheduler::step` and `Submitter` without Python: steady decode, what must not change its cost, the mixed load, submit and cancel.
//!
//! Loads have an end, so each is built again when it is used up; building is not timed.

#![allow(missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use cbrs_benches::{BLOCK_SIZE, Mixed, Steady, SteadyParams, VOCAB_SIZE, prompt};
use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Steps that are not timed: the first after a set-up find cold caches.
const NUM_WARM_UP_STEPS: usize = 16;
/// Steps of one load; a multiple of the block size, so that contexts are the same in every run.
const NUM_STEPS: usize = 256;

/// Times single steps of `params`' load.
fn bench_steady(group: &mut BenchmarkGroup<'_, WallTime>, id: BenchmarkId, params: SteadyParams) {
    let params = SteadyParams { num_steps: NUM_WARM_UP_STEPS + NUM_STEPS, ..params };
    let build = || {
        let mut load = Steady::new(params);
        for _ in 0..NUM_WARM_UP_STEPS {
            load.step(cbrs_benches::step);
        }
        load
    };
    let mut load: Option<Steady> = None;
    group.bench_function(id, |bencher| {
        bencher.iter_custom(|num_iterations| {
            let (mut elapsed, mut num_left) = (Duration::ZERO, num_iterations);
            while num_left > 0 {
                let current = match &mut load {
                    Some(current) if current.num_steps_left() > 0 => current,
                    used_up => {
                        // One load at a time: large pools do not fit twice.
                        *used_up = None;
                        used_up.insert(build())
                    }
                };
                let num_steps = num_left.min(current.num_steps_left() as u64);
                let started = Instant::now();
                for _ in 0..num_steps {
                    current.step(cbrs_benches::step);
                }
                elapsed += started.elapsed();
                current.check();
                num_left -= num_steps;
            }
            elapsed
        });
    });
}

fn quick<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group
}

fn steady(criterion: &mut Criterion) {
    let mut group = quick(criterion, "steady_decode");
    for num_seqs in [1, 64, 256, 1_024, 4_096, 16_384] {
        group.throughput(Throughput::Elements(num_seqs as u64));
        bench_steady(&mut group, BenchmarkId::new("num_seqs", num_seqs), SteadyParams::new(num_seqs, 0));
    }
}

/// Pairs that should cost the same.
fn independent(criterion: &mut Criterion) {
    let mut group = quick(criterion, "independent_of");
    for context in [512, 131_072] {
        let params = SteadyParams { context, ..SteadyParams::new(64, 0) };
        bench_steady(&mut group, BenchmarkId::new("context", context), params);
    }
    for num_waiting in [10, 100_000] {
        let params = SteadyParams { num_waiting, ..SteadyParams::new(64, 0) };
        bench_steady(&mut group, BenchmarkId::new("waiting", num_waiting), params);
    }
    for num_blocks in [1_000, 10_000_000] {
        // 24 sequences of 272 + 256 tokens are what a thousand blocks hold.
        let params = SteadyParams { context: 272, num_scattered_blocks: Some(num_blocks), ..SteadyParams::new(24, 0) };
        bench_steady(&mut group, BenchmarkId::new("scattered_blocks", num_blocks), params);
    }
}

/// Time per output token, submit and step together; the requests are prepared outside.
fn mixed(criterion: &mut Criterion) {
    let mut group = quick(criterion, "mixed");
    group.throughput(Throughput::Elements(1));
    let mut load = Mixed::new();
    load.warm_up();
    group.bench_function("per_output_token", |bencher| {
        bencher.iter_custom(|num_iterations| {
            let (mut elapsed, mut num_tokens) = (Duration::ZERO, 0);
            // A whole life of a request at least: crowded and quiet steps alternate.
            for num_steps in 1.. {
                let started = Instant::now();
                load.submit();
                load.step(cbrs_benches::step);
                elapsed += started.elapsed();
                num_tokens += load.settle();
                if num_steps >= 128 && num_tokens as u64 >= num_iterations {
                    break;
                }
            }
            elapsed.mul_f64(num_iterations as f64 / num_tokens as f64)
        });
    });
    load.check();
}

fn config(queue_capacity: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 16,
        num_blocks: 4_096,
        max_model_len: 2_048,
        block_size: BLOCK_SIZE,
        vocab_size: Some(VOCAB_SIZE),
        queue_capacity,
        ..SchedulerConfig::default()
    }
}

/// Range check and prompt hashes included; the list of tokens is handed over.
fn submit(criterion: &mut Criterion) {
    const NUM_PROMPTS: u64 = 1_000;
    let mut group = quick(criterion, "submit");
    let tokens = prompt(0, 512);
    group.bench_function("512_tokens", |bencher| {
        bencher.iter_custom(|num_iterations| {
            let (mut elapsed, mut num_left) = (Duration::ZERO, num_iterations);
            while num_left > 0 {
                let scheduler = Scheduler::new(config(NUM_PROMPTS as usize)).unwrap();
                let submitter = scheduler.submitter();
                let num_requests = num_left.min(NUM_PROMPTS);
                let specs: Vec<_> = (0..num_requests)
                    .map(|_| RequestSpec { max_tokens: Some(16), ..RequestSpec::new(tokens.clone()) })
                    .collect();
                let started = Instant::now();
                for spec in specs {
                    submitter.submit(spec).unwrap();
                }
                elapsed += started.elapsed();
                num_left -= num_requests;
            }
            elapsed
        });
    });
}

/// `Submitter::cancel` of one of many live requests, and the step that ends one of them, with nothing running.
fn cancel(criterion: &mut Criterion) {
    let mut group = quick(criterion, "cancel");
    for num_live in [10, 10_000] {
        let mut scheduler = Scheduler::new(config(num_live)).unwrap();
        let submitter = scheduler.submitter();
        // Nobody gets a row, so that the steps have nothing else to do.
        submitter.pause();
        let submit = |number| submitter.submit(RequestSpec::new(prompt(number, 32))).unwrap();
        let mut live: Vec<_> = (0..num_live as u64).map(submit).collect();
        scheduler.step(None, 0).unwrap();
        let mut next = 0;
        let mut cancel_one = |with_step: bool| {
            next = (next + 7) % num_live;
            let started = Instant::now();
            assert!(submitter.cancel(live[next]));
            let mut elapsed = started.elapsed();
            scheduler.step(None, 0).unwrap();
            if with_step {
                elapsed = started.elapsed();
            }
            assert_eq!(scheduler.output().len(), 1, "its end was told");
            // Its place is taken by another, which the next step finds.
            live[next] = submit(next as u64);
            scheduler.step(None, 0).unwrap();
            elapsed
        };
        for (name, with_step) in [("call", false), ("call_and_step", true)] {
            group.bench_function(BenchmarkId::new(name, num_live), |bencher| {
                bencher.iter_custom(|num_iterations| (0..num_iterations).map(|_| cancel_one(with_step)).sum());
            });
        }
    }
}

criterion_group!(benches, steady, independent, mixed, submit, cancel);
criterion_main!(benches);
