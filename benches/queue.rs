//! Eight producer threads and one consumer: the queue alone, and the whole way in through `Submitter::submit`.
//!
//! Every run checks that nothing is lost and that each producer's items come in order. One iteration is one item, from its producer to
//! the consumer; a full queue makes a producer try again.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use cbrs_core::queue::{PushError, RequestQueue};
use cbrs_core::{Error, RequestSpec, Scheduler, SchedulerConfig, StepResult};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const NUM_PRODUCERS: u64 = 8;
const CAPACITY: usize = 65_536;

/// The share of one producer, at least one item.
fn items_each(num_iterations: u64) -> u64 {
    num_iterations.div_ceil(NUM_PRODUCERS)
}

/// Runs the producers and the consumer together, and gives the time that they took for `num_iterations` items.
fn time(num_iterations: u64, produce: impl Fn(u64, u64) + Sync, consume: impl FnOnce()) -> Duration {
    let num_items = items_each(num_iterations);
    let start = Barrier::new(NUM_PRODUCERS as usize + 1);
    let elapsed = thread::scope(|scope| {
        for producer in 0..NUM_PRODUCERS {
            let (start, produce) = (&start, &produce);
            scope.spawn(move || {
                start.wait();
                for item in 0..num_items {
                    produce(producer, item);
                }
            });
        }
        start.wait();
        let started = Instant::now();
        consume();
        started.elapsed()
    });
    elapsed.mul_f64(num_iterations as f64 / (num_items * NUM_PRODUCERS) as f64)
}

/// Checks the order of each producer's items as they arrive.
struct Arrivals {
    next: [u64; NUM_PRODUCERS as usize],
}

impl Arrivals {
    fn new() -> Self {
        Self { next: [0; NUM_PRODUCERS as usize] }
    }

    fn note(&mut self, producer: u64, item: u64) {
        assert_eq!(item, self.next[producer as usize], "an item of producer {producer} was lost or passed");
        self.next[producer as usize] += 1;
    }

    fn len(&self) -> u64 {
        self.next.iter().sum()
    }
}

fn push_through_queue(num_iterations: u64) -> Duration {
    let queue = RequestQueue::new(CAPACITY);
    let produce = |producer, item| {
        while let Err(PushError::Full(_)) = queue.push(Box::new((producer, item))) {
            thread::yield_now();
        }
    };
    let consume = || {
        let mut arrivals = Arrivals::new();
        while arrivals.len() < NUM_PRODUCERS * items_each(num_iterations) {
            match queue.pop() {
                Some(request) => arrivals.note(request.0, request.1),
                None => thread::yield_now(),
            }
        }
    };
    let elapsed = time(num_iterations, produce, consume);
    assert!(queue.is_empty());
    elapsed
}

/// Prompts of two tokens, which say who sent what; each ends with its first output.
fn push_through_submitter(num_iterations: u64) -> Duration {
    const MAX_NUM_SEQS: usize = 4_096;
    let config = SchedulerConfig {
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: 2 * MAX_NUM_SEQS,
        num_blocks: MAX_NUM_SEQS,
        max_model_len: 3,
        queue_capacity: CAPACITY,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    let submitter = scheduler.submitter();
    let produce = |producer, item| {
        let spec = || RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![producer as i32, item as i32]) };
        while let Err(error) = submitter.submit(spec()) {
            assert!(matches!(error, Error::QueueFull { .. }), "{error}");
            thread::yield_now();
        }
    };
    let tokens = vec![1; MAX_NUM_SEQS];
    let consume = || {
        let mut arrivals = Arrivals::new();
        while arrivals.len() < NUM_PRODUCERS * items_each(num_iterations) {
            let num_samples = scheduler.batch().num_samples();
            let result = StepResult { token_ids: &tokens[..num_samples], ..StepResult::default() };
            scheduler.step(Some(&result), 0).unwrap();
            for request in scheduler.batch().token_ids.chunks_exact(2) {
                arrivals.note(request[0] as u64, request[1] as u64);
            }
            if scheduler.batch().token_ids.is_empty() {
                thread::yield_now();
            }
        }
    };
    time(num_iterations, produce, consume)
}

fn throughput(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    group.throughput(Throughput::Elements(1)).sample_size(10).measurement_time(Duration::from_secs(3));
    group.bench_function("push_pop_by_8_producers", |bencher| bencher.iter_custom(push_through_queue));
    group.bench_function("submit_by_8_producers_and_step", |bencher| bencher.iter_custom(push_through_submitter));
}

/// The answer of a full queue, alone and at the public method.
fn full(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    let queue = RequestQueue::new(16);
    while queue.push(0_u64).is_ok() {}
    group.bench_function("push_to_full", |bencher| {
        bencher.iter(|| assert!(matches!(queue.push(black_box(1)), Err(PushError::Full(_)))));
    });
    let scheduler = Scheduler::new(SchedulerConfig { queue_capacity: 1, ..SchedulerConfig::default() }).unwrap();
    let submitter = scheduler.submitter();
    submitter.submit(RequestSpec::new(vec![1])).unwrap();
    group.bench_function("submit_to_full", |bencher| {
        bencher.iter(|| {
            let refused = submitter.submit(black_box(RequestSpec::new(vec![1])));
            assert!(matches!(refused, Err(Error::QueueFull { .. })));
        });
    });
}

criterion_group!(benches, throughput, full);
criterion_main!(benches);
