//! Bounds, at the limit and one above; and what must be refused without any effect.

use cbrs_core::admission::UNKNOWN_RETRY_S;
use cbrs_core::block::{BlockId, BlockPool};
use cbrs_core::{Error, RequestSpec, SamplingSpec, SchedulerConfig};

use crate::oracle::{Oracle, without_time};
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
        let refused = oracle.submit(RequestSpec::new(vec![7]), Script::constant(9)).map_err(without_time);
        assert_eq!(
            refused,
            Err(Error::QueueFull { queued: 3, limit: 3, retry_after_s: UNKNOWN_RETRY_S }),
            "round {round}"
        );
        // A started request no longer waits, so one more may.
        oracle.step();
        oracle.accept(&[3], 2, Script::constant(9));
        let refused = oracle.submit(RequestSpec::new(vec![7]), Script::constant(9)).map_err(without_time);
        assert_eq!(
            refused,
            Err(Error::QueueFull { queued: 3, limit: 3, retry_after_s: UNKNOWN_RETRY_S }),
            "round {round}"
        );
        oracle.drain();
    }
}

#[test]
fn the_queue_takes_its_prompt_tokens_and_not_more() {
    let mut oracle = Oracle::new(SchedulerConfig { max_queued_tokens: Some(10), ..config(16, 4) });
    let first = oracle.accept(&tokens(0..6), 2, Script::constant(9));
    let refused = oracle.submit(RequestSpec::new(tokens(0..5)), Script::constant(9));
    assert_eq!(
        refused,
        Err(Error::QueuedTokensFull { queued: 6, requested: 5, limit: 10, retry_after_s: UNKNOWN_RETRY_S })
    );
    oracle.accept(&tokens(0..4), 2, Script::constant(9));
    let refused = oracle.submit(RequestSpec::new(vec![1]), Script::constant(9));
    assert_eq!(
        refused,
        Err(Error::QueuedTokensFull { queued: 10, requested: 1, limit: 10, retry_after_s: UNKNOWN_RETRY_S })
    );
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

/// What `submit` answers to one parameter more than a prompt of one token and one output token.
fn answer(change: impl FnOnce(&mut RequestSpec)) -> Option<Error> {
    let limits = SchedulerConfig { vocab_size: Some(100), ..config(16, 4) };
    let oracle = Oracle::new(limits);
    let mut spec = RequestSpec { max_tokens: Some(8), ..RequestSpec::new(vec![1]) };
    change(&mut spec);
    let error = oracle.scheduler().submitter().submit(spec.clone()).err();
    if error.is_some() {
        oracle.scheduler().check_drained();
        assert_eq!(oracle.scheduler().submitter().stats().num_accepted_requests, 0, "nothing of it stays");
        return error;
    }
    // What is accepted runs to its end.
    let mut oracle = Oracle::new(SchedulerConfig { vocab_size: Some(100), ..config(16, 4) });
    oracle.submit(spec, Script::constant(9)).expect("it was accepted before");
    oracle.drain();
    None
}

fn invalid(name: &'static str, value: f64, expected: &'static str) -> Error {
    Error::InvalidParameter { name, value, expected }
}

fn is_refused_as(error: Option<&Error>, wanted: &str) -> bool {
    matches!(error, Some(Error::InvalidParameter { name, .. }) if *name == wanted)
}

#[test]
fn n_is_at_least_1_and_at_most_128() {
    for n in [1, 2, 128] {
        assert_eq!(answer(|spec| spec.n = n), None);
    }
    for n in [0, 129, u32::MAX] {
        assert_eq!(answer(|spec| spec.n = n), Some(invalid("n", f64::from(n), "in 1..=128")));
    }
}

#[test]
fn min_tokens_is_at_most_the_effective_max_tokens() {
    let with =
        |min_tokens, max_tokens| answer(|spec| (spec.sampling.min_tokens, spec.max_tokens) = (min_tokens, max_tokens));
    // Without max_tokens, what fits the context counts: 64 less the prompt's one token.
    for (most, max_tokens) in [(8, Some(8)), (63, None)] {
        assert_eq!(with(most, max_tokens), None);
        let too_many = invalid("min_tokens", f64::from(most + 1), "at most max_tokens");
        assert_eq!(with(most + 1, max_tokens), Some(too_many));
    }
}

#[test]
fn penalties_are_finite_and_within_their_ranges() {
    type Field = fn(&mut SamplingSpec) -> &mut f32;
    let additive: [(&str, Field); 2] = [
        ("presence_penalty", |sampling| &mut sampling.presence_penalty),
        ("frequency_penalty", |sampling| &mut sampling.frequency_penalty),
    ];
    for (name, field) in additive {
        for value in [-2.0, 0.0, 2.0] {
            assert_eq!(answer(|spec| *field(&mut spec.sampling) = value), None, "{name} = {value}");
        }
        for value in [-2.01, 2.01, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = answer(|spec| *field(&mut spec.sampling) = value);
            assert!(is_refused_as(error.as_ref(), name), "{name} = {value}: {error:?}");
        }
    }
    for value in [f32::MIN_POSITIVE, 1.0, f32::MAX] {
        assert_eq!(answer(|spec| spec.sampling.repetition_penalty = value), None, "{value}");
    }
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = answer(|spec| spec.sampling.repetition_penalty = value);
        assert!(is_refused_as(error.as_ref(), "repetition_penalty"), "{value}: {error:?}");
    }
}

#[test]
fn a_bias_has_1024_entries_at_most_with_ids_of_the_vocabulary() {
    let with = |bias: Vec<(i32, f32)>| answer(|spec| spec.logit_bias = bias);
    assert_eq!(with(vec![(99, 100.0); 1024]), None);
    let too_many = Error::TooManyEntries { name: "logit_bias", len: 1025, limit: 1024 };
    assert_eq!(with(vec![(99, 1.0); 1025]), Some(too_many));
    for token in [-1, 100] {
        let error = with(vec![(0, 1.0), (token, 1.0)]);
        let is_named = matches!(
            error,
            Some(Error::TokenOutOfVocabulary { field: "logit_bias", token: wrong, vocab_size: 100, .. })
                if wrong == i64::from(token)
        );
        assert!(is_named, "{error:?}");
    }
    assert_eq!(with(vec![(0, -100.0), (1, 100.0)]), None);
    for value in [-100.5, 100.5, f32::NAN, f32::INFINITY] {
        let error = with(vec![(0, value)]);
        assert!(is_refused_as(error.as_ref(), "logit_bias"), "{value}: {error:?}");
    }
}

#[test]
fn bad_words_are_1024_at_most_of_1_to_256_ids_of_the_vocabulary() {
    let with = |words: Vec<Vec<i32>>| answer(|spec| spec.bad_words_token_ids = words);
    assert_eq!(with(vec![vec![99]; 1024]), None);
    let too_many = Error::TooManyEntries { name: "bad_words", len: 1025, limit: 1024 };
    assert_eq!(with(vec![vec![99]; 1025]), Some(too_many));
    assert_eq!(with(vec![vec![1; 256]]), None);
    for len in [0, 257] {
        let wrong = Error::InvalidLength { name: "bad_words", len, unit: "tokens", expected: "1 to 256" };
        assert_eq!(with(vec![vec![1], vec![1; len]]), Some(wrong));
    }
    for token in [-1, 100] {
        let wrong =
            Error::TokenOutOfVocabulary { field: "bad_words", position: 1, token: i64::from(token), vocab_size: 100 };
        assert_eq!(with(vec![vec![0], vec![5, token]]), Some(wrong));
    }
}

#[test]
fn at_most_20_likely_ids_are_told_with_a_token() {
    for count in [0, 20] {
        assert_eq!(answer(|spec| spec.sampling.logprobs = Some(count)), None);
        assert_eq!(answer(|spec| (spec.prompt_logprobs, spec.prompt_token_ids) = (Some(count), vec![1, 2])), None);
    }
    for count in [21, u32::MAX] {
        let value = f64::from(count);
        let error = answer(|spec| spec.sampling.logprobs = Some(count));
        assert_eq!(error, Some(invalid("logprobs", value, "in 0..=20")));
        let error = answer(|spec| spec.prompt_logprobs = Some(count));
        assert_eq!(error, Some(invalid("prompt_logprobs", value, "in 0..=20")));
    }
}

#[test]
fn a_truncated_prompt_keeps_its_last_tokens() {
    // The context has 8 tokens.
    let kept = |truncate, max_tokens| {
        let mut scheduler = cbrs_core::Scheduler::new(SchedulerConfig { max_model_len: 8, ..config(16, 4) })
            .expect("the configuration is valid");
        let spec = RequestSpec { truncate_prompt_tokens: truncate, max_tokens, ..RequestSpec::new(tokens(0..20)) };
        let answer = scheduler.submitter().submit(spec);
        scheduler.step(None, 0).expect("there is no result");
        answer.map(|_| scheduler.batch().token_ids.clone())
    };
    assert_eq!(kept(Some(1), None), Ok(vec![19]));
    assert_eq!(kept(Some(7), None), Ok(tokens(13..20)), "one output token fits");
    assert_eq!(kept(Some(-1), None), Ok(tokens(13..20)));
    assert_eq!(kept(Some(-1), Some(3)), Ok(tokens(15..20)), "three output tokens fit");
    assert_eq!(kept(Some(5), Some(3)), Ok(tokens(15..20)));
    let too_long =
        |num_prompt_tokens, max_tokens| Err(Error::PromptTooLong { num_prompt_tokens, max_tokens, max_model_len: 8 });
    assert_eq!(kept(Some(8), None), too_long(8, 1));
    assert_eq!(kept(Some(6), Some(3)), too_long(6, 3));
    assert_eq!(kept(Some(i64::MAX), None), too_long(20, 1), "it is no longer than that");
    assert_eq!(kept(Some(-1), Some(8)), too_long(1, 8), "one prompt token is kept at least");
    for count in [0, -2, i64::MIN] {
        let value = count as f64;
        let (name, expected) = ("truncate_prompt_tokens", ">= 1, or -1 for what fits");
        assert_eq!(kept(Some(count), None), Err(Error::InvalidParameter { name, value, expected }));
    }
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
