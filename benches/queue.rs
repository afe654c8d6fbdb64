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
use cbrs_core::{Error, RequestSpec, Scheduler, SchedulerConfig, StepResult, Submitter};
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
        // Before the producers can begin: what they push while this thread waits for a core counts, too.
        let started = Instant::now();
        start.wait();
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

/// `wrap` makes of an item what is queued: the item itself, or a box of it, whose memory one thread takes and another gives back.
fn push_through_queue<T: Send>(
    num_iterations: u64,
    wrap: impl Fn((u64, u64)) -> T + Sync,
    unwrap: impl Fn(T) -> (u64, u64),
) -> Duration {
    let queue = RequestQueue::new(CAPACITY);
    let produce = |producer, item| {
        let mut request = wrap((producer, item));
        while let Err(PushError::Full(refused)) = queue.push(request) {
            request = refused;
            thread::yield_now();
        }
    };
    let consume = || {
        let mut arrivals = Arrivals::new();
        for _ in 0..NUM_PRODUCERS * items_each(num_iterations) {
            let request = loop {
                match queue.pop() {
                    Some(request) => break request,
                    None => thread::yield_now(),
                }
            };
            let (producer, item) = unwrap(request);
            arrivals.note(producer, item);
        }
    };
    let elapsed = time(num_iterations, produce, consume);
    assert!(queue.is_empty());
    elapsed
}

/// Requests in flight when they are also run.
const MAX_NUM_SEQS: usize = 4_096;

/// For requests with a prompt of two tokens, which say who sent what; each ends with its first output.
fn scheduler(queue_capacity: usize) -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: 2 * MAX_NUM_SEQS,
        num_blocks: MAX_NUM_SEQS,
        max_model_len: 3,
        queue_capacity,
        ..SchedulerConfig::default()
    };
    Scheduler::new(config).unwrap()
}

fn submit(submitter: &Submitter, producer: u64, item: u64) {
    let spec = || RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![producer as i32, item as i32]) };
    while let Err(error) = submitter.submit(spec()) {
        assert!(matches!(error, Error::QueueFull { .. }), "{error}");
        thread::yield_now();
    }
}

/// Runs what has arrived, and notes the requests that the next step computes.
fn run(scheduler: &mut Scheduler, tokens: &[i32], arrivals: &mut Arrivals) {
    let num_samples = scheduler.batch().num_samples();
    let result = StepResult { token_ids: &tokens[..num_samples], ..StepResult::default() };
    scheduler.step(Some(&result), 0).unwrap();
    for request in scheduler.batch().token_ids.chunks_exact(2) {
        arrivals.note(request[0] as u64, request[1] as u64);
    }
}

/// The whole life of small requests: submitted by eight threads, run by one.
fn submit_and_run(num_iterations: u64) -> Duration {
    let mut scheduler = scheduler(CAPACITY);
    let submitter = scheduler.submitter();
    let tokens = vec![1; MAX_NUM_SEQS];
    let consume = || {
        let mut arrivals = Arrivals::new();
        while arrivals.len() < NUM_PRODUCERS * items_each(num_iterations) {
            run(&mut scheduler, &tokens, &mut arrivals);
            if scheduler.batch().num_seqs() == 0 {
                thread::yield_now();
            }
        }
    };
    time(num_iterations, |producer, item| submit(&submitter, producer, item), consume)
}

/// Requests that a paused scheduler takes in at most, in one round.
const MAX_WAITING: u64 = 1 << 18;

/// Only the way in: steps of a paused scheduler take requests from the queue, and nothing runs until all have come.
fn submit_and_drain(num_iterations: u64) -> Duration {
    let (mut elapsed, mut num_left) = (Duration::ZERO, num_iterations);
    let tokens = vec![1; MAX_NUM_SEQS];
    while num_left > 0 {
        let num_requests = num_left.min(MAX_WAITING);
        let num_items = NUM_PRODUCERS * items_each(num_requests);
        let mut scheduler = scheduler(num_items as usize);
        let submitter = scheduler.submitter();
        submitter.pause();
        let consume = || {
            while submitter.stats().num_accepted_requests < num_items {
                scheduler.step(None, 0).unwrap();
                thread::yield_now();
            }
            scheduler.step(None, 0).unwrap();
        };
        elapsed += time(num_requests, |producer, item| submit(&submitter, producer, item), consume);
        submitter.resume();
        let mut arrivals = Arrivals::new();
        while arrivals.len() < num_items {
            run(&mut scheduler, &tokens, &mut arrivals);
            assert!(scheduler.batch().num_seqs() > 0, "requests were lost");
        }
        num_left -= num_requests;
    }
    elapsed
}

fn throughput(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    group.throughput(Throughput::Elements(1)).sample_size(10).measurement_time(Duration::from_secs(3));
    group.bench_function("push_pop_by_8_producers", |bencher| {
        bencher.iter_custom(|num_iterations| push_through_queue(num_iterations, |item| item, |item| item));
    });
    group.bench_function("push_pop_boxes_by_8_producers", |bencher| {
        bencher.iter_custom(|num_iterations| push_through_queue(num_iterations, Box::new, |item| *item));
    });
    group.bench_function("submit_by_8_producers_and_drain", |bencher| bencher.iter_custom(submit_and_drain));
    group.bench_function("submit_by_8_producers_and_run", |bencher| bencher.iter_custom(submit_and_run));
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
