//! Several choices of one prompt, number by number: who computes what, which blocks are shared and pinned, and how choices end.

use cbrs_core::{FinishReason, Policy, RequestSpec, SchedulerConfig, Stats};

use crate::oracle::Oracle;
use crate::script::Script;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    let max_model_len = num_blocks * block_size;
    SchedulerConfig { max_num_seqs: 4, num_blocks, block_size, max_model_len, ..SchedulerConfig::default() }
}

fn without_cache(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    SchedulerConfig { enable_prefix_caching: false, ..config(num_blocks, block_size) }
}

fn prompt(len: i32) -> Vec<i32> {
    (0..len).collect()
}

/// Submits a prompt for `n` choices; returns the first one. Each choice is answered with its own tokens.
fn accept(oracle: &mut Oracle, prompt: &[i32], n: u32, max_tokens: u64) -> usize {
    let spec = RequestSpec { n, max_tokens: Some(max_tokens), ..RequestSpec::new(prompt.to_vec()) };
    oracle.submit(spec, Script::Random { seed: 1, vocab_size: 1000, rare: None }).expect("the request is acceptable")
}

/// Choice and query tokens of each sequence in the batch, by choice.
fn batch(oracle: &Oracle) -> Vec<(usize, usize)> {
    let mut batch: Vec<_> =
        oracle.model().flight.iter().map(|flying| (flying.choice, flying.end - flying.start)).collect();
    batch.sort_unstable();
    batch
}

fn stats(oracle: &Oracle) -> Stats {
    oracle.scheduler().submitter().stats()
}

fn num_used(oracle: &Oracle) -> u64 {
    stats(oracle).num_used_blocks
}

fn ends(oracle: &Oracle) -> Vec<Option<FinishReason>> {
    oracle.model().choices.iter().map(|choice| choice.end).collect()
}

#[test]
fn the_first_choice_computes_the_prompt_and_the_others_its_last_block() {
    for config in [config(32, 4), without_cache(32, 4)] {
        let mut oracle = Oracle::new(config);
        accept(&mut oracle, &prompt(10), 3, 4);
        oracle.step();
        assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(0, 10)], 3));
        assert_eq!((stats(&oracle).num_running, stats(&oracle).num_waiting), (1, 2));
        // Two full blocks are shared; each choice has the last two prompt tokens in a block of its own.
        oracle.step();
        assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(0, 1), (1, 2), (2, 2)], 2 + 3));
        assert_eq!(oracle.batch().choice_ids, [0, 1, 2]);
        assert_eq!(
            (&oracle.batch().sample_choices, &oracle.batch().sample_positions),
            (&vec![0, 1, 2], &vec![1, 0, 0])
        );
        let seeds = &oracle.scheduler().sampling().seeds;
        assert!(seeds[0] == seeds[1] && seeds[1] == seeds[2] && seeds[0] != 0, "one seed for all choices");
        oracle.step();
        assert_eq!(batch(&oracle), [(0, 1), (1, 1), (2, 1)]);
        oracle.drain();
        let outputs: Vec<&[i32]> = oracle.model().choices.iter().map(|choice| &choice.tokens[10..]).collect();
        assert!(outputs[0] != outputs[1] && outputs[1] != outputs[2], "{outputs:?}");
        let stats = stats(&oracle);
        assert_eq!((stats.num_prompt_tokens, stats.num_output_tokens), (10, 12), "the prompt counts once");
        assert_eq!((stats.num_length_requests, stats.num_accepted_requests), (3, 1), "each choice ends once");
        assert_eq!(stats.num_scheduled_tokens, 10 + 2 * 2 + 3 * 3);
    }
}

#[test]
fn of_a_prompt_of_whole_blocks_the_last_block_is_computed_again() {
    let mut oracle = Oracle::new(without_cache(32, 4));
    accept(&mut oracle, &prompt(8), 2, 3);
    oracle.step();
    oracle.step();
    assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(0, 1), (1, 4)], 1 + 2 + 1));
    oracle.drain();
    // With a cache the second choice's copy is exchanged for the published one when it is computed.
    let mut oracle = Oracle::new(config(32, 4));
    accept(&mut oracle, &prompt(8), 2, 3);
    for (wanted, used) in [(vec![(0, 8)], 2), (vec![(0, 1), (1, 4)], 4), (vec![(0, 1), (1, 1)], 4)] {
        oracle.step();
        assert_eq!((batch(&oracle), num_used(&oracle)), (wanted, used));
    }
    oracle.drain();
}

#[test]
fn choices_start_as_rows_become_free_and_find_the_prompt_pinned() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 1, ..without_cache(8, 4) });
    accept(&mut oracle, &prompt(10), 3, 1);
    oracle.step();
    assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(0, 10)], 3));
    // Choice 0 ends with its first token; its two full blocks stay for the others.
    oracle.step();
    assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(1, 2)], 3));
    assert_eq!((stats(&oracle).num_running, stats(&oracle).num_waiting), (1, 1));
    oracle.step();
    assert_eq!((batch(&oracle), num_used(&oracle)), (vec![(2, 2)], 3));
    assert_eq!(oracle.scheduler().pinned_blocks(oracle.model().requests[0].id), [], "the last choice has started");
    oracle.step();
    assert_eq!((batch(&oracle), num_used(&oracle)), (vec![], 0));
    oracle.drain();
}

#[test]
fn choices_that_have_not_started_come_before_requests_that_have_not() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 2, max_num_batched_tokens: 6, ..config(32, 4) });
    accept(&mut oracle, &prompt(10), 3, 2);
    accept(&mut oracle, &[77], 1, 2);
    accept(&mut oracle, &[78], 1, 2);
    // The first chunk leaves no budget. With the second the prompt is still under way, so that nobody of it is in line: 77 starts.
    oracle.step();
    assert_eq!(batch(&oracle), [(0, 6)]);
    oracle.step();
    assert_eq!(batch(&oracle), [(0, 4), (3, 1)]);
    oracle.step();
    assert_eq!(batch(&oracle), [(0, 1), (3, 1)]);
    // Both rows are free again: the two choices come before 78.
    oracle.step();
    assert_eq!(batch(&oracle), [(1, 2), (2, 2)]);
    oracle.step();
    assert_eq!(batch(&oracle), [(1, 1), (2, 1)]);
    oracle.step();
    assert_eq!(batch(&oracle), [(4, 1)]);
    oracle.drain();
}

#[test]
fn a_newer_choice_gives_way_to_an_older_one() {
    // Each choice will need 5 blocks, of which one is shared: 9 for both, and 6 are there.
    let mut oracle = Oracle::new(without_cache(6, 4));
    accept(&mut oracle, &prompt(6), 2, 14);
    while stats(&oracle).num_preemptions == 0 {
        oracle.step();
    }
    assert_eq!([0, 1].map(|choice| oracle.model().choices[choice].row.is_some()), [true, false]);
    oracle.drain();
    assert_eq!(stats(&oracle).num_output_tokens, 28);
}

#[test]
fn pins_are_given_up_for_a_running_sequence_and_the_prompt_is_computed_again() {
    // While the third prompt is computed in three chunks the two before it grow. Then choice 0 ends, and its two full blocks are pinned
    // for choice 1, which has no room: it needs a block, and one for each of the two that may grow.
    let limits = SchedulerConfig { max_prefill_chunk_tokens: Some(2), ..without_cache(9, 2) };
    let mut oracle = Oracle::new(limits);
    let growing = [50, 60].map(|token| oracle.accept(&[token, token, token], 9, Script::constant(7)));
    accept(&mut oracle, &prompt(5), 2, 1);
    let request = oracle.model().requests[2].id;
    for num_pins in [0, 0, 0, 2, 2] {
        oracle.step();
        assert_eq!(oracle.scheduler().pinned_blocks(request).len(), num_pins);
    }
    assert_eq!((stats(&oracle).num_running, stats(&oracle).num_waiting, num_used(&oracle)), (2, 1, 3 + 3 + 2));
    // Both need a fourth block, and one is left.
    oracle.step();
    assert_eq!((oracle.scheduler().pinned_blocks(request).len(), num_used(&oracle)), (0, 4 + 4));
    assert_eq!((stats(&oracle).num_preemptions, batch(&oracle)), (0, growing.map(|index| (index, 1)).to_vec()));
    while oracle.model().choices[3].row.is_none() {
        oracle.step();
    }
    assert_eq!(batch(&oracle).last(), Some(&(3, 2)), "it computes the whole prompt, from its first chunk on");
    assert_eq!(oracle.batch().positions.last(), Some(&1));
    oracle.drain();
}

#[test]
fn pins_are_given_up_when_nothing_runs_and_the_first_in_line_does_not_fit() {
    // Two requests find four blocks of their prompt in the cache. The newer one is displaced, and the cache forgets the blocks: when
    // choice 0 has ended, these four of eight are pinned for choice 1, and the displaced request, which comes first, needs seven.
    let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 2, ..config(8, 2) });
    oracle.accept(&prompt(9), 1, Script::constant(7));
    oracle.drain();
    let first = accept(&mut oracle, &prompt(9), 2, 6);
    let twin = oracle.accept(&prompt(9), 7, Script::constant(7));
    while stats(&oracle).num_preemptions == 0 {
        oracle.step();
    }
    oracle.reset_prefix_cache();
    while oracle.model().choices[first].end.is_none() {
        assert_eq!(oracle.model().seen.stuck_drops, 0);
        oracle.step();
    }
    assert_eq!((oracle.model().seen.stuck_drops, num_used(&oracle)), (1, 7));
    assert_eq!(batch(&oracle), [(twin, 13)]);
    oracle.drain();
    assert_eq!(stats(&oracle).num_output_tokens, 1 + 6 + 6 + 7);
}

#[test]
fn after_a_reset_of_the_cache_the_other_choices_still_share_and_publish_nothing() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 1, ..config(16, 4) });
    accept(&mut oracle, &prompt(10), 2, 1);
    oracle.step();
    oracle.step();
    oracle.reset_prefix_cache();
    oracle.step();
    assert_eq!((stats(&oracle).num_cached_blocks, oracle.model().seen.forks), (0, 1));
    oracle.drain();
}

#[test]
fn if_the_choice_that_computes_the_prompt_is_finished_the_next_one_computes_it() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 6, ..without_cache(16, 4) });
    accept(&mut oracle, &prompt(10), 3, 2);
    oracle.step();
    oracle.finish(0, 0, None);
    oracle.step();
    assert_eq!((batch(&oracle), ends(&oracle)), (vec![(1, 6)], vec![Some(FinishReason::Stop), None, None]));
    oracle.step();
    oracle.step();
    assert_eq!(batch(&oracle), [(1, 1), (2, 2)]);
    oracle.drain();
}

#[test]
fn a_choice_that_has_not_started_is_not_finished() {
    let mut oracle = Oracle::new(config(16, 4));
    accept(&mut oracle, &prompt(10), 2, 2);
    oracle.finish(0, 0, None);
    oracle.finish(1, 0, None);
    oracle.step();
    assert_eq!((batch(&oracle), ends(&oracle)), (vec![(0, 10)], vec![None, None]));
    oracle.finish(1, 0, None);
    oracle.drain();
    assert_eq!(ends(&oracle), [Some(FinishReason::Length); 2]);
}

#[test]
fn a_failed_prompt_ends_all_choices_and_a_failed_decode_the_one_it_touched() {
    for is_unusable in [false, true] {
        for num_steps_before in 1..=3 {
            let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 2, ..config(16, 4) });
            accept(&mut oracle, &prompt(10), 3, 8);
            for _ in 0..num_steps_before {
                oracle.step();
            }
            if is_unusable {
                oracle.step_with_errors(0b11);
            } else {
                oracle.fail("the device is gone");
                oracle.step();
            }
            let failed = Some(FinishReason::Error);
            let wanted = if num_steps_before == 1 { [failed; 3] } else { [failed, failed, None] };
            assert_eq!(ends(&oracle), wanted, "{is_unusable} {num_steps_before}");
            oracle.drain();
        }
    }
}

#[test]
fn a_cancel_ends_every_choice_whatever_it_does() {
    for policy in [Policy::Fcfs, Policy::Static] {
        for num_steps in 0..10 {
            let limits = SchedulerConfig { max_num_seqs: 2, max_num_batched_tokens: 6, policy, ..config(7, 2) };
            let mut oracle = Oracle::new(limits);
            accept(&mut oracle, &prompt(5), 4, 6);
            for _ in 0..num_steps {
                oracle.step();
            }
            oracle.cancel(0);
            oracle.step();
            assert!(ends(&oracle).iter().all(Option::is_some));
            assert_eq!((num_used(&oracle), stats(&oracle).num_waiting), (0, 0));
            oracle.drain();
        }
    }
}

#[test]
fn a_step_tells_any_number_of_ends() {
    let mut oracle = Oracle::new(SchedulerConfig { queue_capacity: 2, max_num_seqs: 1, ..config(16, 4) });
    for round in 0..3 {
        let first = accept(&mut oracle, &prompt(3), 128, 2);
        let second = accept(&mut oracle, &prompt(3), 128, 2);
        oracle.cancel(first);
        oracle.cancel(second);
        oracle.step();
        assert_eq!(oracle.scheduler().output().len(), 256, "round {round}");
    }
    oracle.drain();
}

#[test]
fn a_close_ends_every_choice() {
    for num_steps in 0..6 {
        let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 2, ..config(16, 4) });
        accept(&mut oracle, &prompt(10), 4, 2);
        accept(&mut oracle, &prompt(3), 2, 2);
        for _ in 0..num_steps {
            oracle.step();
        }
        oracle.close();
        assert!(ends(&oracle).iter().all(Option::is_some));
    }
}
