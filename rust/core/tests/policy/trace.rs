//! What the scheduler writes down for those who want to know, and what it counts.
#![allow(clippy::unwrap_used)]

use cbrs_core::{RequestId, RequestSpec, Scheduler, SchedulerConfig, StepResult, TraceKind, TraceReader};

/// Kind, request, choice, time and tokens.
type Written = (TraceKind, RequestId, u8, u64, u32);

fn read(reader: &mut TraceReader) -> Vec<Written> {
    let mut records = Vec::new();
    reader.read(&mut records);
    records.iter().map(|it| (it.kind, it.request, it.choice, it.time_ns, it.num_tokens)).collect()
}

/// Two rows, seven blocks of four tokens, steps of eight tokens.
fn scheduler() -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        block_size: 4,
        num_blocks: 7,
        max_model_len: 20,
        ..SchedulerConfig::default()
    };
    Scheduler::new(config).unwrap()
}

fn spec(first: i32, len: i32, max_tokens: u64) -> RequestSpec {
    RequestSpec { max_tokens: Some(max_tokens), ..RequestSpec::new((first..first + len).collect()) }
}

/// Runs the batch in flight; every sample is another token.
fn step(scheduler: &mut Scheduler, now_ns: u64) {
    let tokens: Vec<i32> = (0..scheduler.batch().num_samples() as i32).map(|sample| 1_000 + sample).collect();
    scheduler.step(Some(&StepResult { token_ids: &tokens, ..StepResult::default() }), now_ns).unwrap();
}

#[test]
fn a_request_is_followed_from_its_start_through_a_preemption() {
    let mut scheduler = scheduler();
    let submitter = scheduler.submitter();
    let mut reader = submitter.trace();
    let first = submitter.submit(spec(0, 10, 10)).unwrap();
    let second = submitter.submit(spec(50, 5, 8)).unwrap();
    let mut written = Vec::new();
    scheduler.step(None, 0).unwrap();
    for time in 1..40 {
        written.extend(read(&mut reader));
        step(&mut scheduler, time);
    }
    let expected = [
        (TraceKind::Admitted, first, 0, 0, 0),
        (TraceKind::Chunk, first, 0, 1, 8),
        // The step has room for two more tokens of the first prompt and for the second one.
        (TraceKind::Admitted, second, 0, 1, 0),
        (TraceKind::Chunk, first, 0, 2, 2),
        (TraceKind::Chunk, second, 0, 2, 5),
        // The first one knows 17 tokens and needs a fifth block; the second one holds three with 11 computed tokens.
        (TraceKind::Preempted, second, 0, 8, 11),
        // The first one has ended; two full blocks are cached.
        (TraceKind::Resumed, second, 0, 11, 8),
        (TraceKind::Chunk, second, 0, 12, 4),
    ];
    assert_eq!(written, expected);
    assert_eq!(submitter.stats().num_preemptions, 1);
    assert_eq!(reader.num_missed(), 0);
}

#[test]
fn the_time_of_each_step_is_counted() {
    let mut scheduler = scheduler();
    let submitter = scheduler.submitter();
    submitter.submit(spec(0, 5, 3)).unwrap();
    scheduler.step(None, 1_000_000).unwrap();
    step(&mut scheduler, 1_500_000);
    let result = StepResult { token_ids: &[1], step_time_ns: Some(7_000_000), ..StepResult::default() };
    scheduler.step(Some(&result), 3_000_000).unwrap();
    step(&mut scheduler, 3_000_000);
    let times = submitter.step_times();
    assert_eq!(
        times.sum(),
        7_500_000,
        "from the plan to the result, or as the result says; nothing if the clock stands"
    );
    assert_eq!(times.counts().iter().sum::<u64>(), 2);
}
