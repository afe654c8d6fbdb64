//! The examples with which continuous batching is explained, number by number.

use cbrs_core::{Policy, SchedulerConfig};

use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::script::Script;

fn config(max_num_seqs: usize, policy: Policy) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: 64,
        num_blocks: 64,
        max_model_len: 64,
        policy,
        ..SchedulerConfig::default()
    }
}

/// Requests with one-token prompts, named A, B, C, ... in the order of arrival, that give so many tokens.
fn one_token_requests(oracle: &mut Oracle, num_output_tokens: &[u64]) {
    for (index, &max_tokens) in num_output_tokens.iter().enumerate() {
        oracle.accept(&[index as i32], max_tokens, Script::constant(100));
    }
}

/// Who runs in each row: `A B - D`.
fn by_row(oracle: &Oracle) -> String {
    let mut rows = vec!['-'; oracle.model().config.max_num_seqs];
    for flying in &oracle.model().flight {
        rows[flying.row] = char::from(b'A' + flying.choice as u8);
    }
    let names: Vec<String> = rows.iter().map(char::to_string).collect();
    names.join(" ")
}

fn batches_by_row(oracle: &mut Oracle, num_steps: usize) -> Vec<String> {
    let step = |_| {
        oracle.step();
        by_row(oracle)
    };
    (0..num_steps).map(step).collect()
}

/// Row-steps that worked until nothing is left, and all there were.
fn occupancy(oracle: &mut Oracle) -> (usize, usize) {
    let (mut useful, mut num_steps) = (0, 0);
    loop {
        oracle.step();
        if oracle.batch().num_seqs() == 0 {
            return (useful, num_steps * oracle.model().config.max_num_seqs);
        }
        useful += oracle.batch().num_seqs();
        num_steps += 1;
    }
}

#[test]
fn a_finished_sequence_is_replaced_in_the_next_step() {
    let mut oracle = Oracle::new(config(4, Policy::Fcfs));
    one_token_requests(&mut oracle, &[3, 8, 2, 6, 5, 3, 4]);
    let batches = batches_by_row(&mut oracle, 10);
    let expected =
        ["A B C D", "A B C D", "A B E D", "F B E D", "F B E D", "F B E D", "G B E -", "G B - -", "G - - -", "G - - -"];
    assert_eq!(batches, expected);
    oracle.drain();
}

#[test]
fn a_static_group_runs_until_its_slowest_member_ends() {
    let mut oracle = Oracle::new(config(4, Policy::Static));
    one_token_requests(&mut oracle, &[3, 8, 2, 6, 5, 3, 4]);
    let batches = batches_by_row(&mut oracle, 9);
    let expected = ["A B C D", "A B C D", "A B - D", "- B - D", "- B - D", "- B - D", "- B - -", "- B - -", "E F G -"];
    assert_eq!(batches, expected);
    let useful = batches[..8].concat().chars().filter(char::is_ascii_uppercase).count();
    assert_eq!((useful, batches[..8].len() * 4), (19, 32));
    oracle.drain();
}

#[test]
fn eight_rows_of_lengths_one_to_eight_are_half_empty_under_static() {
    let mut oracle = Oracle::new(config(8, Policy::Static));
    one_token_requests(&mut oracle, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(occupancy(&mut oracle), (36, 64));
    oracle.drain();
}

#[test]
fn a_queue_that_never_empties_keeps_99_percent_of_rows_busy() {
    let mut oracle = Oracle::new(config(8, Policy::Fcfs));
    let mut rng = Rng::new(1);
    let mut num_busy = 0;
    for _ in 0..1000 {
        while oracle.model().waiting().len() < 16 {
            let prompt: Vec<i32> = (0..rng.within(1, 4)).map(|_| rng.below(1000) as i32).collect();
            oracle.accept(&prompt, rng.within(1, 32) as u64, Script::constant(100));
        }
        oracle.step();
        num_busy += oracle.batch().num_seqs();
    }
    assert!(num_busy >= 8 * 1000 * 99 / 100, "{num_busy} of 8,000 row-steps were busy");
    oracle.drain();
}

fn large(max_prefill_chunk_tokens: Option<usize>) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 1024,
        max_num_batched_tokens: 4096,
        num_blocks: 8192,
        max_model_len: 32_768,
        max_prefill_chunk_tokens,
        ..SchedulerConfig::default()
    }
}

fn prompt(seed: u64, len: usize) -> Vec<i32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.below(30_000) as i32).collect()
}

/// An oracle with this many requests that decode.
fn decoding(config: SchedulerConfig, num_decodes: usize) -> Oracle {
    let mut oracle = Oracle::new(config);
    for index in 0..num_decodes {
        oracle.accept(&[index as i32], 100, Script::constant(7));
    }
    oracle.step();
    oracle.step();
    assert_eq!((oracle.batch().num_decodes, oracle.batch().num_tokens()), (num_decodes, num_decodes));
    oracle
}

/// Query tokens of each sequence that has more than one.
fn chunks(oracle: &Oracle) -> Vec<usize> {
    oracle.model().flight.iter().map(|flying| flying.end - flying.start).filter(|&len| len > 1).collect()
}

#[test]
fn a_long_prompt_takes_what_100_decodes_leave_of_the_budget() {
    let mut oracle = decoding(large(None), 100);
    oracle.accept(&prompt(1, 20_000), 1, Script::constant(7));
    oracle.step();
    assert_eq!((oracle.batch().num_decodes, chunks(&oracle)), (100, vec![3996]));
    for _ in 0..4 {
        oracle.step();
        assert_eq!((oracle.batch().num_decodes, oracle.batch().num_tokens()), (100, 4096));
    }
    oracle.step();
    assert_eq!((oracle.batch().num_decodes, chunks(&oracle)), (100, vec![20_000 - 5 * 3996]));
}

#[test]
fn several_prompts_share_what_500_decodes_leave_of_the_budget() {
    let mut oracle = decoding(large(None), 500);
    for seed in 1..=4 {
        oracle.accept(&prompt(seed, 1000), 1, Script::constant(7));
    }
    oracle.step();
    assert_eq!((oracle.batch().num_decodes, oracle.batch().num_tokens()), (500, 500 + 3596));
    assert_eq!(chunks(&oracle), [1000, 1000, 1000, 596]);
}

#[test]
fn decodes_get_a_token_in_every_step_of_a_chunked_prefill() {
    let mut oracle = decoding(large(Some(2048)), 4);
    let long = oracle.accept(&prompt(1, 20_000), 1, Script::constant(7));
    let mut num_steps = 0;
    while oracle.model().choices[long].num_output() == 0 {
        let before: Vec<usize> = (0..4).map(|index| oracle.model().choices[index].num_output()).collect();
        oracle.step();
        let after: Vec<usize> = (0..4).map(|index| oracle.model().choices[index].num_output()).collect();
        assert!(before.iter().zip(&after).all(|(before, after)| before + 1 == *after), "{before:?} {after:?}");
        assert!(chunks(&oracle).iter().all(|&len| len <= 2048));
        num_steps += 1;
    }
    // Ten chunks, and the step that commits the last of them.
    assert_eq!(num_steps, 11);
}

#[test]
fn a_pool_for_300_runs_300_of_500_and_the_next_starts_after_a_release() {
    let mut oracle = Oracle::new(SchedulerConfig { num_blocks: 300, ..large(None) });
    for index in 0..500 {
        oracle.accept(&[index, index, index, index], 12, Script::constant(7));
    }
    oracle.step();
    let stats = oracle.scheduler().submitter().stats();
    assert_eq!((stats.num_running, stats.num_waiting), (300, 200));
    oracle.step();
    assert_eq!(oracle.batch().num_seqs(), 300, "nothing is released, so nothing starts");
    oracle.cancel(123);
    oracle.step();
    assert_eq!(oracle.scheduler().output().started_request_ids, [oracle.model().choices[300].id.as_u64()]);
    assert_eq!((oracle.batch().new_rows.clone(), oracle.batch().num_seqs()), (vec![123], 300));
    oracle.drain();
}

#[test]
fn a_group_larger_than_the_budget_takes_turns() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 2, ..config(5, Policy::Static) });
    one_token_requests(&mut oracle, &[20, 20, 20, 20, 20]);
    // ceil(5 / 2) = 3: each advances at least in every third step, and 15 steps of 2 tokens are shared evenly.
    let batches = batches_by_row(&mut oracle, 15);
    assert_eq!(batches[..5], ["A B - - -", "- - C D -", "A - - - E", "- B C - -", "- - - D E"]);
    for name in ["A", "B", "C", "D", "E"] {
        assert!(batches.windows(3).all(|window| window.concat().contains(name)), "{name} waits too long: {batches:?}");
        assert_eq!(batches.concat().matches(name).count(), 6, "{name} has had its share");
    }
    oracle.drain();
}

#[test]
fn a_budget_below_the_rows_starts_no_more_than_it_can_serve() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 2, ..config(5, Policy::Fcfs) });
    one_token_requests(&mut oracle, &[3, 5, 3, 3, 3]);
    let batches = batches_by_row(&mut oracle, 9);
    let expected = ["A B", "A B", "A B", "C B", "C B", "C D", "E D", "E D", "E -"].map(|rows| format!("{rows} - - -"));
    assert_eq!(batches, expected);
    oracle.drain();
}
