//! Bounds, at the limit and one above; and what must be refused without any effect.

use cbrs_core::block::{BlockId, BlockPool};
use cbrs_core::{Error, RequestSpec, SchedulerConfig};

use crate::oracle::Oracle;
use crate::script::Script;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    let max_model_len = num_blocks * block_size;
    SchedulerConfig { max_num_seqs: 8, num_blocks, block_size, max_model_len, ..SchedulerConfig::default() }
}

fn tokens(range: std::ops::Range<i32>) -> Vec<i32> {
    range.collect()
}

#[test]
fn a_second_release_is_a_typed_error_and_changes_nothing() {
    let mut pool = BlockPool::new(4, 2);
    let block = pool.allocate().expect("the pool is free");
    pool.acquire(block);
    pool.release(block).expect("two hold it");
    pool.release(block).expect("one holds it");
    for block in [block, BlockId::new(3), BlockId::new(4), BlockId::new(u32::MAX)] {
        let error = pool.release(block).expect_err("nobody holds it");
        assert_eq!(error, Error::BlockNotHeld { block: block.index() as u32 });
        assert_eq!((pool.num_free(), pool.num_cached(), pool.num_used()), (4, 0, 0));
    }
    let blocks: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
    assert_eq!(blocks.len(), 4, "no block is handed out twice");
}

#[test]
fn prompt_and_output_may_fill_the_context_and_not_more() {
    let mut oracle = Oracle::new(SchedulerConfig { max_model_len: 10, ..config(16, 4) });
    let with =
        |num_prompt_tokens, max_tokens| RequestSpec { max_tokens, ..RequestSpec::new(tokens(0..num_prompt_tokens)) };
    for (num_prompt_tokens, max_tokens) in [(9, None), (9, Some(1)), (4, Some(6)), (1, Some(9))] {
        let spec = with(num_prompt_tokens, max_tokens);
        let accepted = oracle.submit(spec, Script::constant(9)).expect("the sum is 10");
        oracle.drain();
        assert_eq!(oracle.model().choices[accepted].tokens.len(), 10);
    }
    for (num_prompt_tokens, max_tokens) in [(10, None), (11, None), (9, Some(2)), (4, Some(7)), (1, Some(u64::MAX - 1))]
    {
        let max_asked = max_tokens.unwrap_or(1);
        let wanted = Error::PromptTooLong {
            num_prompt_tokens: num_prompt_tokens as usize,
            max_tokens: max_asked,
            max_model_len: 10,
        };
        assert_eq!(oracle.scheduler().submitter().submit(with(num_prompt_tokens, max_tokens)), Err(wanted));
    }
    oracle.drain();
}

#[test]
fn the_queue_takes_its_capacity_and_not_more() {
    let mut oracle = Oracle::new(SchedulerConfig { queue_capacity: 3, max_num_seqs: 1, ..config(16, 4) });
    for round in 0..4 {
        for token in 0..3 {
            oracle.accept(&[token], 2, Script::constant(9));
        }
        let refused = oracle.submit(RequestSpec::new(vec![7]), Script::constant(9));
        assert_eq!(refused, Err(Error::QueueFull { limit: 3 }), "round {round}");
        // A started request no longer waits, so one more may.
        oracle.step();
        oracle.accept(&[3], 2, Script::constant(9));
        let refused = oracle.submit(RequestSpec::new(vec![7]), Script::constant(9));
        assert_eq!(refused, Err(Error::QueueFull { limit: 3 }), "round {round}");
        oracle.drain();
    }
}

#[test]
fn the_queue_takes_its_prompt_tokens_and_not_more() {
    let mut oracle = Oracle::new(SchedulerConfig { max_queued_tokens: Some(10), ..config(16, 4) });
    let first = oracle.accept(&tokens(0..6), 2, Script::constant(9));
    let refused = oracle.submit(RequestSpec::new(tokens(0..5)), Script::constant(9));
    assert_eq!(refused, Err(Error::QueuedTokensFull { queued: 6, requested: 5, limit: 10 }));
    oracle.accept(&tokens(0..4), 2, Script::constant(9));
    let refused = oracle.submit(RequestSpec::new(vec![1]), Script::constant(9));
    assert_eq!(refused, Err(Error::QueuedTokensFull { queued: 10, requested: 1, limit: 10 }));
    // A cancelled request gives its room back when the next step takes the cancel.
    oracle.cancel(first);
    oracle.step();
    oracle.accept(&tokens(0..10), 2, Script::constant(9));
    oracle.drain();
}

#[test]
fn a_request_may_have_as_many_labels_and_stop_ids_as_documented() {
    let mut oracle = Oracle::new(config(16, 4));
    let spec = |num_stop_ids: usize, len: usize| RequestSpec {
        stop_token_ids: vec![1; num_stop_ids],
        tenant: Some("t".repeat(len).into()),
        max_tokens: Some(1),
        ..RequestSpec::new(vec![1])
    };
    oracle.submit(spec(128, 256), Script::constant(9)).expect("at the limits");
    let submitter = oracle.scheduler().submitter();
    let too_many = Error::TooManyEntries { name: "stop_token_ids", len: 129, limit: 128 };
    assert_eq!(submitter.submit(spec(129, 1)), Err(too_many));
    for len in [0, 257] {
        let wrong = Error::InvalidLength { name: "tenant", len, unit: "bytes", expected: "1 to 256" };
        assert_eq!(submitter.submit(spec(0, len)), Err(wrong));
    }
    oracle.drain();
}

#[test]
fn a_close_ends_every_request_once_whatever_it_does() {
    for num_steps in 0..8 {
        let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 2, max_num_batched_tokens: 4, ..config(4, 2) });
        for index in 0..4 {
            oracle.accept(&[index, index, index, index], 3, Script::constant(9));
        }
        for _ in 0..num_steps {
            oracle.step();
        }
        oracle.close();
    }
}

/// Whatever it does at that moment: queued, amid its prompt, between its tokens, or preempted.
#[test]
fn a_cancelled_request_ends_in_the_next_step_and_holds_nothing() {
    for num_steps in 0..12 {
        for request in 0..3 {
            let limits = SchedulerConfig {
                max_num_batched_tokens: 4,
                max_prefill_chunk_tokens: Some(3),
                enable_prefix_caching: false,
                ..config(9, 2)
            };
            let mut oracle = Oracle::new(limits);
            for token in 0..3 {
                oracle.accept(&[token; 7], 6, Script::constant(9));
            }
            for _ in 0..num_steps {
                oracle.step();
            }
            oracle.cancel(request);
            oracle.cancel(request);
            oracle.step();
            let cancelled = &oracle.model().choices[request];
            assert!(cancelled.end.is_some() && !oracle.batch().request_ids.contains(&cancelled.id.as_u64()));
            oracle.drain();
        }
    }
}

/// Its two cached blocks are unheld, so they are no room for its other two; nor is the one that the running request may need.
#[test]
fn the_blocks_that_a_request_found_do_not_count_as_room_for_the_rest_of_it() {
    let mut oracle = Oracle::new(config(6, 4));
    oracle.accept(&tokens(0..8), 1, Script::constant(9));
    oracle.drain();
    let holder = oracle.accept(&tokens(100..108), 5, Script::constant(9));
    oracle.step();
    let finder = oracle.accept(&tokens(0..13), 1, Script::constant(9));
    oracle.step();
    assert!(oracle.model().choices[holder].row.is_some() && oracle.model().choices[finder].row.is_none());
    oracle.drain();
}
