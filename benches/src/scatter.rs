//! Puts the free blocks of a scheduler's pool in an order in which neighbours are far apart.
//!
//! Long and short requests, in turn, fill the whole pool in one step and give it back at once: the long ones first, then the short ones in a
//! random order. So the next blocks to be given out are pairs from anywhere in the pool.

use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};

use crate::{BLOCK_SIZE, shuffle};

/// Requests of each kind in a large pool.
const MAX_OF_A_KIND: usize = 1_000;
/// Blocks of a short one: one more than a chunk, so that it is not done in the step that fills the pool.
const NUM_SHORT_BLOCKS: usize = 2;

fn num_of_a_kind(num_blocks: usize) -> usize {
    (num_blocks / (2 * NUM_SHORT_BLOCKS)).min(MAX_OF_A_KIND)
}

fn num_long_blocks(num_blocks: usize) -> usize {
    num_blocks / num_of_a_kind(num_blocks) - NUM_SHORT_BLOCKS
}

/// Makes room in the limits for filling `num_blocks` blocks: each request computes one block of its prompt in a step.
pub(crate) fn widen(config: &mut SchedulerConfig, num_blocks: usize) {
    let num_requests = 2 * num_of_a_kind(num_blocks);
    config.num_blocks = num_blocks;
    config.max_num_seqs = config.max_num_seqs.max(num_requests);
    config.queue_capacity = config.queue_capacity.max(num_requests);
    config.max_num_batched_tokens = config.max_num_batched_tokens.max(num_requests * BLOCK_SIZE);
    config.max_prefill_chunk_tokens = Some(BLOCK_SIZE);
    config.max_model_len = config.max_model_len.max(num_long_blocks(num_blocks) * BLOCK_SIZE + 1);
}

/// Scatters the free list of an idle scheduler with `widen`ed limits; every block is free again afterwards.
pub(crate) fn scatter_free_blocks(scheduler: &mut Scheduler) {
    let submitter = scheduler.submitter();
    let num_blocks = scheduler.pool().num_blocks();
    let submit = |token: usize, num_blocks: usize| {
        let prompt = vec![token as i32; num_blocks * BLOCK_SIZE];
        let spec = RequestSpec { max_tokens: Some(1), ..RequestSpec::new(prompt) };
        submitter.submit(spec).expect("there is room for every request")
    };
    let (mut long, mut short) = (Vec::new(), Vec::new());
    for pair in 0..num_of_a_kind(num_blocks) {
        long.push(submit(2 * pair, num_long_blocks(num_blocks)));
        short.push(submit(2 * pair + 1, NUM_SHORT_BLOCKS));
    }
    scheduler.step(None, 0).expect("nothing is in flight");
    assert!(scheduler.pool().num_free() < num_of_a_kind(num_blocks), "the pool is full");
    assert_eq!(scheduler.batch().num_samples(), 0, "no request is done");
    shuffle(&mut short, 1);
    // Before the commit of that step, so that nothing is published and the blocks become free, not cached.
    for id in long.into_iter().chain(short) {
        assert!(submitter.cancel(id), "it lives");
    }
    scheduler.step(Some(&StepResult::default()), 0).expect("no sample is awaited");
    assert_eq!(scheduler.pool().num_free(), num_blocks, "every block is free again");
}
