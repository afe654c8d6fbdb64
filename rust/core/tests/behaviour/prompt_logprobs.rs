//! Log-probabilities of prompts, number by number: which logits a step computes for them, and when they are told.

use cbrs_core::{Error, RequestSpec, SchedulerConfig, StepResult};

use crate::oracle::Oracle;
use crate::script::Script;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    let max_model_len = num_blocks * block_size;
    SchedulerConfig { max_num_seqs: 4, num_blocks, block_size, max_model_len, ..SchedulerConfig::default() }
}

fn prompt(len: i32) -> Vec<i32> {
    (0..len).collect()
}

fn accept(oracle: &mut Oracle, prompt: Vec<i32>, n: u32, max_tokens: u64) -> usize {
    let max_tokens = Some(max_tokens);
    let spec = RequestSpec { n, max_tokens, prompt_logprobs: Some(2), ..RequestSpec::new(prompt) };
    oracle.submit(spec, Script::constant(9)).expect("the request is acceptable")
}

/// Choice and query tokens of each sequence in the batch, and the prompt tokens whose logits it needs.
fn batch(oracle: &Oracle) -> (Vec<(usize, usize)>, usize) {
    let flight = oracle.model().flight.iter();
    let mut batch: Vec<_> = flight.map(|flying| (flying.choice, flying.end - flying.start)).collect();
    batch.sort_unstable();
    (batch, oracle.batch().prompt_logits_index.len())
}

fn told(oracle: &Oracle) -> &[i32] {
    &oracle.scheduler().output().prompt_logprob_positions
}

#[test]
fn a_step_computes_512_logits_for_prompts_and_tells_them_in_the_next() {
    let mut oracle = Oracle::new(config(128, 16));
    accept(&mut oracle, prompt(600), 1, 2);
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 512)], 512));
    assert_eq!((oracle.batch().num_samples(), oracle.batch().logits_index.len()), (0, 512));
    oracle.step();
    // The last token of the prompt is followed by the first sample.
    assert_eq!((batch(&oracle), told(&oracle)), ((vec![(0, 88)], 87), &*(1..=512).collect::<Vec<i32>>()));
    assert_eq!((oracle.batch().num_samples(), oracle.batch().logits_index.len()), (1, 88));
    oracle.step();
    assert_eq!((batch(&oracle), told(&oracle)), ((vec![(0, 1)], 0), &*(513..=599).collect::<Vec<i32>>()));
    oracle.drain();
}

#[test]
fn prompts_share_the_logits_in_order_and_others_are_not_held_up() {
    let mut oracle = Oracle::new(SchedulerConfig { max_prefill_chunk_tokens: Some(400), ..config(256, 16) });
    accept(&mut oracle, prompt(300), 1, 2);
    accept(&mut oracle, prompt(310), 1, 2);
    oracle.step();
    // 299 logits for the first, which leaves 213 for the second.
    assert_eq!(batch(&oracle), (vec![(0, 300), (1, 213)], 512));
    oracle.accept(&[7; 500], 2, Script::constant(9));
    accept(&mut oracle, prompt(500), 1, 2);
    accept(&mut oracle, prompt(20), 1, 2);
    oracle.step();
    // 97 tokens and 96 logits are left of the second; the fourth has its chunk of 400 tokens and logits.
    assert_eq!(batch(&oracle), (vec![(0, 1), (1, 97), (2, 400), (3, 400)], 496));
    oracle.drain();
}

#[test]
fn who_finds_no_logits_left_is_not_admitted_yet() {
    let mut oracle = Oracle::new(SchedulerConfig { max_prompt_logits: 4, ..config(64, 4) });
    accept(&mut oracle, prompt(7), 1, 1);
    accept(&mut oracle, prompt(3), 1, 1);
    oracle.accept(&[50, 51], 1, Script::constant(9));
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 4)], 4));
    // Two logits for the first, two for the second, and nothing passes it.
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 3), (1, 3), (2, 2)], 4));
    oracle.drain();
}

#[test]
fn a_request_that_wants_them_finds_nothing_in_the_cache_but_fills_it() {
    let mut oracle = Oracle::new(config(16, 4));
    oracle.accept(&prompt(6), 1, Script::constant(9));
    oracle.drain();
    accept(&mut oracle, prompt(10), 1, 1);
    oracle.step();
    assert_eq!(oracle.scheduler().output().started_num_cached_tokens, [0]);
    assert_eq!(batch(&oracle), (vec![(1, 10)], 9));
    oracle.drain();
    oracle.accept(&prompt(10), 1, Script::constant(9));
    oracle.step();
    assert_eq!(oracle.scheduler().output().started_num_cached_tokens, [8]);
    oracle.drain();
}

#[test]
fn it_does_not_wait_for_a_block_in_flight_that_it_could_not_use() {
    let mut oracle = Oracle::new(SchedulerConfig { max_prefill_chunk_tokens: Some(2), ..config(16, 4) });
    oracle.accept(&prompt(10), 1, Script::constant(9));
    oracle.step();
    accept(&mut oracle, prompt(10), 1, 1);
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 2), (1, 2)], 2));
    oracle.drain();
}

#[test]
fn a_prompt_of_one_token_has_none() {
    let mut oracle = Oracle::new(config(16, 4));
    accept(&mut oracle, prompt(1), 2, 2);
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 1)], 0));
    oracle.drain();
    assert_eq!(oracle.model().seen.prompt_logprobs, 0);
}

#[test]
fn with_several_choices_they_are_told_once() {
    let mut oracle = Oracle::new(config(16, 4));
    accept(&mut oracle, prompt(10), 3, 2);
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 10)], 9));
    oracle.step();
    assert_eq!(batch(&oracle), (vec![(0, 1), (1, 2), (2, 2)], 0));
    oracle.drain();
    assert_eq!(oracle.model().seen.prompt_logprobs, 9);
}

/// The prompt of the second request is under way when the first one needs its blocks.
#[test]
fn after_a_preemption_only_those_that_were_not_told_are_asked_for() {
    let limits = SchedulerConfig { max_prompt_logits: 1, max_model_len: 16, ..config(10, 2) };
    let mut oracle = Oracle::new(limits);
    oracle.accept(&prompt(2), 8, Script::constant(9));
    oracle.step();
    let late = accept(&mut oracle, (50..61).collect(), 1, 3);
    let mut asked = Vec::new();
    while !oracle.is_at_rest() {
        oracle.step();
        let positions = &oracle.batch().positions;
        let logits = oracle.batch().prompt_logits_index.iter();
        asked.extend(logits.map(|&index| positions[oracle.batch().logits_index[index as usize] as usize]));
    }
    assert_eq!(asked, (0..10).collect::<Vec<i32>>(), "each once");
    assert!(oracle.scheduler().submitter().stats().num_preemptions > 0);
    assert_eq!(oracle.model().choices[late].num_output(), 3);
    assert!(oracle.model().seen.resumed_prompt_logprobs > 0, "some were told after the preemption");
    oracle.drain();
}

#[test]
fn a_result_without_them_is_refused_and_a_failed_step_tells_none() {
    let mut oracle = Oracle::new(SchedulerConfig { max_prompt_logits: 4, ..config(16, 4) });
    accept(&mut oracle, prompt(10), 1, 2);
    oracle.step();
    let (field, step_id, expected) = ("prompt_logprobs", 1, 4);
    let missing = Error::ResultLength { field, step_id, expected, got: 0 };
    oracle.refuse(None, &missing);
    oracle.refuse(Some(&StepResult::default()), &missing);
    oracle.fail("the device is gone");
    oracle.step();
    assert_eq!((oracle.model().seen.prompt_logprobs, told(&oracle)), (0, &[][..]));
    oracle.drain();
}
