//! Memory, counted by the global allocator: none is asked for in a steady decode step, and what is held stays within its bounds.
//!
//! Counts are those of one thread, so that tests beside each other do not disturb each other. Sizes are what was asked for; what the
//! allocator adds is not seen.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;

use cbrs_core::block::BlockPool;
use cbrs_core::{Batch, RequestSpec, Scheduler, SchedulerConfig, StepOutput, StepResult, Submitter};

const BLOCK_SIZE: usize = 16;
/// Most bytes of a running sequence besides its tokens and its block table.
const MAX_SEQUENCE_BYTES: f64 = 400.0;
/// Most bytes of metadata of a block, its stored tokens included.
const MAX_BLOCK_BYTES: f64 = 100.0;
/// Bytes by which hash tables that keep their memory (hints of the plan, live tenants) may still reach a new largest size after 10,000
/// requests. A byte lost with every fortieth request would be more.
const MAX_SCRATCH_BYTES: i64 = 2_048;

/// The system's allocator, with a count of what this thread asked of it.
struct Counting;

/// What a thread asked of the allocator so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    num_calls: u64,
    live_bytes: i64,
}

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts { num_calls: 0, live_bytes: 0 }) };
}

fn counts() -> Counts {
    COUNTS.get()
}

/// Counts one call that changed the thread's live bytes by `change`.
fn count(change: i64) {
    let Counts { num_calls, live_bytes } = COUNTS.get();
    COUNTS.set(Counts { num_calls: num_calls + 1, live_bytes: live_bytes + change });
}

// SAFETY: every call goes to the system's allocator unchanged; the counters are plain cells without a destructor, so using them neither
// allocates nor fails at the end of a thread.
#[expect(unsafe_code, reason = "a global allocator is an unsafe trait")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are those of `System::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: as above; `memory` came from `System`, as all memory of this allocator does.
        unsafe { System.realloc(memory, layout, new_size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// `num_tokens` ids that differ between prompts from the first on.
fn prompt(number: usize, num_tokens: usize) -> Vec<i32> {
    (0..num_tokens).map(|position| ((number * 7_919 + position * 31) % 100_003) as i32).collect()
}

fn submit(submitter: &Submitter, prompt: Vec<i32>, max_tokens: usize) {
    submitter.submit(RequestSpec { max_tokens: Some(max_tokens as u64), ..RequestSpec::new(prompt) }).unwrap();
}

/// Runs the batch in flight: every sample is the same token.
fn step(scheduler: &mut Scheduler, tokens: &[i32]) {
    let num_samples = scheduler.batch().num_samples();
    scheduler.step(Some(&StepResult { token_ids: &tokens[..num_samples], ..StepResult::default() }), 0).unwrap();
}

/// A scheduler in which `num_seqs` sequences have run their prompts, of `num_prompt_tokens` and up to 15 fewer, in one step.
fn decoding(num_seqs: usize, num_prompt_tokens: usize, max_tokens: usize, config: SchedulerConfig) -> Scheduler {
    let mut scheduler = Scheduler::new(config).unwrap();
    let submitter = scheduler.submitter();
    for number in 0..num_seqs {
        submit(&submitter, prompt(number, num_prompt_tokens - number % BLOCK_SIZE), max_tokens);
    }
    scheduler.step(None, 0).unwrap();
    assert_eq!(scheduler.batch().num_samples(), num_seqs, "all prompts run in one step");
    scheduler
}

#[test]
fn every_call_of_the_allocator_is_counted() {
    let before = counts();
    let mut bytes = black_box(Vec::<u8>::with_capacity(100));
    assert_eq!(counts(), Counts { num_calls: before.num_calls + 1, live_bytes: before.live_bytes + 100 });
    bytes.reserve_exact(1_000);
    assert_eq!(counts(), Counts { num_calls: before.num_calls + 2, live_bytes: before.live_bytes + 1_000 });
    drop(black_box(bytes));
    assert_eq!(counts(), Counts { num_calls: before.num_calls + 3, live_bytes: before.live_bytes });
}

/// Steps of steady decode in which the allocator is called at all, and its calls in total.
///
/// Long enough for the contexts to double, so that lists which grow by doubling are noticed.
fn allocating_steps(num_seqs: usize, num_waiting: usize) -> (usize, u64) {
    const NUM_PROMPT_TOKENS: usize = 512;
    const NUM_STEPS: usize = 640;
    let max_model_len = NUM_PROMPT_TOKENS + NUM_STEPS + 8;
    let config = SchedulerConfig {
        max_num_seqs: num_seqs,
        max_num_batched_tokens: num_seqs * NUM_PROMPT_TOKENS,
        num_blocks: num_seqs * max_model_len.div_ceil(BLOCK_SIZE),
        max_model_len,
        block_size: BLOCK_SIZE,
        ..SchedulerConfig::default()
    };
    let mut scheduler = decoding(num_seqs, NUM_PROMPT_TOKENS, NUM_STEPS + 8, config);
    for number in 0..num_waiting {
        submit(&scheduler.submitter(), prompt(num_seqs + number, 32), 1);
    }
    let tokens = vec![1; num_seqs];
    // The first samples; then one step for each of the two sets of arrays.
    for _ in 0..3 {
        step(&mut scheduler, &tokens);
    }
    let (mut num_steps, mut num_calls, mut num_new_blocks) = (0, 0, 0);
    for _ in 0..NUM_STEPS {
        let before = counts().num_calls;
        step(&mut scheduler, &tokens);
        let calls = counts().num_calls - before;
        num_steps += usize::from(calls > 0);
        num_calls += calls;
        num_new_blocks += scheduler.batch().block_table_updates.ids.len();
        assert_eq!(scheduler.batch().num_decodes, num_seqs, "the load is steady");
        assert_eq!(scheduler.output().len(), num_seqs, "every sequence got a token");
    }
    assert_eq!(num_new_blocks, num_seqs * NUM_STEPS / BLOCK_SIZE, "block boundaries were crossed all the time");
    (num_steps, num_calls)
}

#[test]
fn a_steady_decode_step_asks_for_no_memory() {
    for (num_seqs, num_waiting) in [(256, 0), (1, 0), (64, 100)] {
        let (num_steps, num_calls) = allocating_steps(num_seqs, num_waiting);
        assert_eq!(
            num_calls, 0,
            "the allocator was called in {num_steps} steps of 640, with {num_seqs} sequences and {num_waiting} waiting"
        );
    }
}

/// Bytes of memory behind arrays.
macro_rules! bytes_of {
    ($owner:expr; $($array:ident)*) => { 0 $(+ memory_of(&$owner.$array))* };
}

fn memory_of<T>(array: &Vec<T>) -> usize {
    array.capacity() * size_of::<T>()
}

/// Bytes of one set of the arrays of a step: what is to run, and what is to tell.
fn set_bytes(batch: &Batch, output: &StepOutput) -> usize {
    let (tables, updates) = (&batch.new_row_tables, &batch.block_table_updates);
    bytes_of!(batch; token_ids positions slot_mapping query_start seq_lens row_ids request_ids choice_ids logits_index)
        + bytes_of!(batch; sample_index sample_rows sample_positions sample_choices new_rows freed_rows)
        + bytes_of!(batch; prompt_logits_index prompt_target_ids prompt_rows num_prompt_logprobs)
        + bytes_of!(tables; history_start history_ids history_num_prompt bias_start bias_ids bias_values banned_start)
        + bytes_of!(tables; banned_ids bad_words_start bad_word_start bad_word_ids)
        + bytes_of!(updates; rows first_columns start ids)
        + bytes_of!(output; request_ids choice_ids token_ids finish_reasons stop_ids logprob_events details)
        + bytes_of!(output; prompt_logprob_requests prompt_logprob_positions started_request_ids started_num_cached_tokens)
}

/// Bytes held by a scheduler, and the share of the arrays of its steps.
#[derive(Clone, Copy)]
struct Held {
    total: i64,
    step_arrays: i64,
}

impl Held {
    /// Runs two steps, since two sets of arrays take turns, and counts what is held besides what was held `before`.
    fn count(scheduler: &mut Scheduler, tokens: &[i32], before: i64) -> Self {
        let step_arrays = [(); 2].map(|()| {
            step(scheduler, tokens);
            set_bytes(scheduler.batch(), scheduler.output()) as i64
        });
        Self { total: counts().live_bytes - before, step_arrays: step_arrays.iter().sum() }
    }

    /// Bytes for each of `num` rows by which `self` is more than `other`.
    fn per_row(self, other: Self, num: usize) -> [f64; 2] {
        [self.total - other.total, self.step_arrays - other.step_arrays].map(|bytes| bytes as f64 / num as f64)
    }
}

/// What a scheduler with `num_seqs` rows holds when all of them compute their prompts, block by block, and when all decode.
///
/// The limits of a plan are the same for few rows and many: scratch for its tokens is no part of a sequence.
fn held_by_running(num_seqs: usize, num_prompt_tokens: usize, max_tokens: usize) -> [Held; 2] {
    const MOST_SEQS: usize = 1_024;
    let config = SchedulerConfig {
        max_num_seqs: num_seqs,
        max_num_batched_tokens: MOST_SEQS * BLOCK_SIZE,
        max_prefill_chunk_tokens: Some(BLOCK_SIZE),
        num_blocks: MOST_SEQS * (num_prompt_tokens + max_tokens).div_ceil(BLOCK_SIZE),
        max_model_len: num_prompt_tokens + max_tokens,
        block_size: BLOCK_SIZE,
        queue_capacity: MOST_SEQS,
        ..SchedulerConfig::default()
    };
    let tokens = vec![1; num_seqs];
    // The cell of the policy keeps a little for each thread that has ever looked into one, whatever the scheduler.
    drop(Scheduler::new(SchedulerConfig::default()).unwrap());
    let before = counts().live_bytes;
    drop(Scheduler::new(config.clone()).unwrap());
    assert_eq!(counts().live_bytes, before, "a dropped scheduler holds nothing");
    let mut scheduler = Scheduler::new(config).unwrap();
    for number in 0..num_seqs {
        submit(&scheduler.submitter(), prompt(number, num_prompt_tokens - number % BLOCK_SIZE), max_tokens);
    }
    scheduler.step(None, 0).unwrap();
    let prefilling = Held::count(&mut scheduler, &tokens, before);
    assert_eq!(
        (scheduler.batch().num_seqs(), scheduler.batch().num_samples()),
        (num_seqs, 0),
        "all prompts are under way"
    );
    while scheduler.batch().num_decodes < num_seqs {
        step(&mut scheduler, &tokens);
    }
    let decoding = Held::count(&mut scheduler, &tokens, before);
    assert_eq!(scheduler.batch().num_decodes, num_seqs, "nobody has ended yet");
    [prefilling, decoding]
}

/// Three things are stated apart from the state. The arrays of a step are what the runner and the readers of events see; they are there for
/// all rows, whether or not anything runs. Tokens: those of full blocks stand in the pool, which is as large for few rows as for many, and
/// those of the last block in the row's tail. While a prompt is computed there are a list of its tokens and one of its blocks' hashes.
#[test]
fn a_running_sequence_costs_little_besides_its_tokens_and_blocks() {
    const NUM_SEQS: usize = 512;
    const TAIL_BYTES: usize = BLOCK_SIZE * size_of::<i32>();
    let mut most = f64::NEG_INFINITY;
    for (num_prompt_tokens, max_tokens) in [(64, 16), (496, 16), (512, 512)] {
        let [few, many] = [NUM_SEQS, 2 * NUM_SEQS].map(|num| held_by_running(num, num_prompt_tokens, max_tokens));
        let table_bytes = (num_prompt_tokens + max_tokens).div_ceil(BLOCK_SIZE) * size_of::<i32>();
        // Of sixteen prompts, one has full blocks only.
        let hash_bytes = ((num_prompt_tokens / BLOCK_SIZE) as f64 - 15.0 / 16.0) * size_of::<u64>() as f64;
        let list_bytes = (num_prompt_tokens as f64 - 7.5) * size_of::<i32>() as f64;
        for (phase, extra_bytes) in [list_bytes + hash_bytes, 0.0].into_iter().enumerate() {
            let [total, step_arrays] = many[phase].per_row(few[phase], NUM_SEQS);
            let state = total - step_arrays - (TAIL_BYTES + table_bytes) as f64 - extra_bytes;
            eprintln!(
                "{num_prompt_tokens} + {max_tokens} tokens, {}: {state:.1} bytes of state per running sequence; apart from it, per row, {step_arrays:.1} in \
                 the arrays of the step, {TAIL_BYTES} for the tokens of the last block, {table_bytes} in the block table, {extra_bytes:.1} for the prompt",
                ["prefilling", "decoding"][phase]
            );
            most = most.max(state);
        }
    }
    assert!(most <= MAX_SEQUENCE_BYTES, "{most:.1} bytes of state per running sequence");
}

/// Bytes held by a scheduler of `num_blocks` blocks, each of which has had content.
fn filled_pool_bytes(num_blocks: usize) -> i64 {
    const NUM_PROMPT_TOKENS: usize = 1_024;
    let before = counts().live_bytes;
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 4 * NUM_PROMPT_TOKENS,
        num_blocks,
        max_model_len: NUM_PROMPT_TOKENS + 1,
        block_size: BLOCK_SIZE,
        queue_capacity: 16,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    let tokens = [1; 4];
    let mut number = 0;
    while scheduler.pool().num_free() > 0 {
        submit(&scheduler.submitter(), prompt(number, NUM_PROMPT_TOKENS), 1);
        number += 1;
        step(&mut scheduler, &tokens);
    }
    counts().live_bytes - before
}

#[test]
fn the_metadata_of_a_block_is_small() {
    let pool_bytes = |num_blocks| {
        let before = counts().live_bytes;
        let pool = black_box(BlockPool::new(num_blocks, BLOCK_SIZE));
        let bytes = counts().live_bytes - before;
        drop(pool);
        bytes
    };
    // Just above a power of two is where tables of such sizes waste most.
    for num_blocks in [1 << 14, (1 << 14) + 1, 20_000] {
        let per_block = (pool_bytes(num_blocks) - pool_bytes(0)) as f64 / num_blocks as f64;
        eprintln!("a pool of {num_blocks} blocks: {per_block:.1} bytes per block");
        assert!(per_block <= MAX_BLOCK_BYTES, "{per_block:.1} bytes per block in a pool of {num_blocks}");
    }
    let num_blocks = 1 << 13;
    let per_block = (filled_pool_bytes(2 * num_blocks) - filled_pool_bytes(num_blocks)) as f64 / num_blocks as f64;
    eprintln!("a scheduler with everything cached: {per_block:.1} bytes per block");
    assert!(per_block <= MAX_BLOCK_BYTES, "{per_block:.1} bytes per block of a scheduler");
}

/// A closed loop of short requests with shared heads, tenants, choices and cancels; the same again every 1,000 requests.
struct Churn {
    scheduler: Scheduler,
    submitter: Submitter,
    num_requests: usize,
    tokens: Vec<i32>,
}

impl Churn {
    fn new() -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            num_blocks: 96,
            max_model_len: 192,
            block_size: BLOCK_SIZE,
            queue_capacity: 64,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(config).unwrap();
        Self { submitter: scheduler.submitter(), scheduler, num_requests: 0, tokens: vec![1; 32] }
    }

    /// The next request: tokens to share, tokens of its own, and one choice or two.
    fn spec(&self) -> RequestSpec {
        let number = self.num_requests % 1_000;
        let mut tokens = prompt(number % 7, 32);
        tokens.extend(prompt(number, 1 + number % 40));
        let tenant = number.is_multiple_of(5).then(|| Arc::from(format!("tenant {}", number % 50)));
        let (n, max_tokens) = (1 + u32::from(number.is_multiple_of(11)), Some(1 + number as u64 % 112));
        RequestSpec { n, max_tokens, tenant, ..RequestSpec::new(tokens) }
    }

    /// Runs until `num_requests` have come in total and all have ended, and forgets what is cached. Gives the bytes that are held.
    fn run(&mut self, num_requests: usize) -> i64 {
        while self.num_requests < num_requests {
            for _ in 0..4 {
                let stats = self.submitter.stats();
                if stats.num_running + stats.num_waiting >= 48 {
                    break;
                }
                let id = self.submitter.submit(self.spec()).unwrap();
                if self.num_requests.is_multiple_of(13) {
                    assert!(self.submitter.cancel(id));
                }
                self.num_requests += 1;
            }
            step(&mut self.scheduler, &self.tokens);
        }
        while self.submitter.stats().num_running + self.submitter.stats().num_waiting > 0 {
            step(&mut self.scheduler, &self.tokens);
        }
        self.scheduler.reset_prefix_cache();
        self.scheduler.check_invariants();
        counts().live_bytes
    }
}

#[test]
fn memory_does_not_grow_with_the_number_of_requests() {
    let is_soak = std::env::var_os("CBRS_SOAK").is_some();
    let mut churn = Churn::new();
    let after_few = churn.run(10_000);
    let stats = churn.submitter.stats();
    let events =
        [stats.num_cached_prompt_tokens, stats.num_evicted_blocks, stats.num_preemptions, stats.num_cancelled_requests];
    assert!(events.iter().all(|&count| count > 100), "hits, evictions, preemptions and cancels: {events:?}");
    let later: &[usize] = if is_soak { &[100_000, 1_000_000, 10_000_000] } else { &[100_000] };
    for &num_requests in later {
        let change = churn.run(num_requests) - after_few;
        eprintln!("{change} bytes more after {num_requests} requests than after 10,000");
        assert!(change <= MAX_SCRATCH_BYTES, "{change} bytes more after {num_requests} requests than after 10,000");
    }
}
