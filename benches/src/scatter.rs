//! Puts the free blocks of a scheduler's pool in an order in which no two neighbours share a page of any table.
//!
//! Many sequences fill the whole pool, one block each in turn, and give everything back in a random order: a block and the next one to be
//! given out then are about as many blocks apart as there are sequences.

use cbrs_core::RequestSpec;
use cbrs_core::{Scheduler, SchedulerConfig};

use crate::{BLOCK_SIZE, prompt, shuffle};

/// Sequences that fill a large pool; no power of two, whose multiples would meet in the same few cache sets.
const MAX_FILLERS: usize = 3_001;

fn num_fillers(num_blocks: usize) -> usize {
    (num_blocks / BLOCK_SIZE).min(MAX_FILLERS)
}

/// Prompt tokens of each of them: all but the last block is full, and their tables cover the pool.
fn num_filler_tokens(num_blocks: usize) -> usize {
    num_blocks / num_fillers(num_blocks) * BLOCK_SIZE
}

/// Makes room in the limits for filling `num_blocks` blocks.
pub(crate) fn widen(config: &mut SchedulerConfig, num_blocks: usize) {
    let fillers = num_fillers(num_blocks);
    config.num_blocks = num_blocks;
    config.max_num_seqs = config.max_num_seqs.max(fillers);
    config.queue_capacity = config.queue_capacity.max(fillers);
    config.max_num_batched_tokens = config.max_num_batched_tokens.max(fillers * BLOCK_SIZE);
    config.max_model_len = config.max_model_len.max(num_filler_tokens(num_blocks) + 1);
}

/// Scatters the free list of an idle scheduler with `widen`ed limits; the pool is free again afterwards.
pub(crate) fn scatter_free_blocks(scheduler: &mut Scheduler) {
    let submitter = scheduler.submitter();
    let num_blocks = scheduler.pool().num_blocks();
    let (fillers, num_tokens) = (num_fillers(num_blocks), num_filler_tokens(num_blocks));
    // What runs when the cache is reset publishes nothing more, so that its blocks become free and not cached.
    let mut ids: Vec<_> = (0..fillers)
        .map(|filler| {
            let spec = RequestSpec { max_tokens: Some(1), ..RequestSpec::new(prompt(filler as u64, num_tokens)) };
            submitter.submit(spec).expect("there is room for every filler")
        })
        .collect();
    scheduler.step(None, 0).expect("nothing is in flight");
    scheduler.reset_prefix_cache();
    // The last chunk would be sampled and end the sequence: the cancels come before.
    while scheduler.pool().num_used() + fillers <= fillers * (num_tokens / BLOCK_SIZE) {
        assert_eq!(scheduler.batch().num_samples(), 0, "no filler ends by itself");
        scheduler.step(None, 0).expect("a chunk needs no token");
    }
    shuffle(&mut ids, 1);
    for id in ids {
        assert!(submitter.cancel(id));
        let result = vec![0; scheduler.batch().num_samples()];
        let result = cbrs_core::StepResult { token_ids: &result, ..Default::default() };
        scheduler.step(Some(&result), 0).expect("the result fits the batch in flight");
    }
    assert_eq!(scheduler.pool().num_free(), num_blocks, "every block is free again");
}
