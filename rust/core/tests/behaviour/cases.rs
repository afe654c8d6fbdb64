//! Faults that engines of this kind have really had, each with the behaviour that is right here. The oracle checks every step besides.
//!
//! A test is named after its case: `a..` blocks, `b..` prefix cache, `c..` chunked prefill, `d..` preemption and order.

use cbrs_core::{Error, RequestSpec, SchedulerConfig, Stats};

use crate::oracle::Oracle;
use crate::script::Script;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    let max_model_len = num_blocks * block_size;
    SchedulerConfig { max_num_seqs: 8, num_blocks, block_size, max_model_len, ..SchedulerConfig::default() }
}

fn stats(oracle: &Oracle) -> Stats {
    oracle.scheduler().submitter().stats()
}

/// Prompt tokens that a request found in the cache, if it was admitted by the last step.
fn cached_tokens(oracle: &Oracle, request: usize) -> Option<i32> {
    let output = oracle.scheduler().output();
    let id = oracle.model().choices[request].id.as_u64();
    let place = output.started_request_ids.iter().position(|&other| other == id)?;
    Some(output.started_num_cached_tokens[place])
}

/// Submits a prompt, runs it to its end alone, and says how much of it was cached.
fn run_alone(oracle: &mut Oracle, prompt: &[i32], max_tokens: u64) -> i32 {
    let request = oracle.accept(prompt, max_tokens, Script::constant(9));
    oracle.step();
    let cached = cached_tokens(oracle, request).expect("an empty engine admits at once");
    oracle.drain();
    cached
}

/// Query tokens of a request in the batch.
fn scheduled(oracle: &Oracle, request: usize) -> usize {
    oracle.model().flight.iter().filter(|flying| flying.choice == request).map(|flying| flying.end - flying.start).sum()
}

fn is_running(oracle: &Oracle, request: usize) -> bool {
    oracle.model().choices[request].row.is_some()
}

fn tokens(range: std::ops::Range<i32>) -> Vec<i32> {
    range.collect()
}

#[test]
fn a01_only_blocks_of_completed_steps_are_found_and_a_recycled_one_is_forgotten() {
    let outputs = [true, false].map(|enable_prefix_caching| {
        let limits = SchedulerConfig { max_prefill_chunk_tokens: Some(4), enable_prefix_caching, ..config(6, 4) };
        let mut oracle = Oracle::new(limits);
        let a = oracle.accept(&tokens(0..12), 2, Script::constant(9));
        oracle.step();
        let b = oracle.accept(&tokens(0..12), 2, Script::constant(9));
        let mut num_completed_blocks = 0;
        while !is_running(&oracle, b) && oracle.model().choices[b].num_output() == 0 {
            num_completed_blocks = oracle.model().choices[a].tokens.len().min(oracle.model().flight[0].end) as i32 / 4;
            oracle.step();
        }
        let cached = cached_tokens(&oracle, b).expect("b has just started");
        assert!(
            cached <= 4 * num_completed_blocks,
            "{cached} tokens were found, {num_completed_blocks} blocks complete"
        );
        assert_eq!(cached > 0, enable_prefix_caching);
        oracle.drain();
        // C needs every block of the pool; afterwards nothing of A can be found.
        assert_eq!(run_alone(&mut oracle, &tokens(100..123), 1), 0);
        assert_eq!(run_alone(&mut oracle, &tokens(0..12), 1), 0);
        oracle.model().choices[b].tokens.clone()
    });
    assert_eq!(outputs[0], outputs[1], "the cache shows in the output");
}

#[test]
fn a03_matched_blocks_are_not_evicted_while_they_are_in_use() {
    let mut oracle = Oracle::new(config(6, 4));
    assert_eq!(run_alone(&mut oracle, &tokens(0..8), 1), 0);
    let user = oracle.accept(&tokens(0..9), 8, Script::constant(9));
    oracle.step();
    assert_eq!(cached_tokens(&oracle, user), Some(8));
    let matched = oracle.model().table(user)[..2].to_vec();
    // This prompt would need all blocks that are left and one of the matched ones.
    let greedy = oracle.accept(&tokens(100..117), 1, Script::constant(9));
    for _ in 0..4 {
        oracle.step();
        assert_eq!(oracle.model().table(user)[..2], matched, "the matched blocks are still there");
        assert!(!is_running(&oracle, greedy), "it waits instead");
    }
    oracle.drain();
}

#[test]
fn a07_a_look_up_matches_exactly_as_far_as_contents_agree() {
    for collide_hashes in [false, true] {
        let mut oracle = Oracle::new(SchedulerConfig { collide_hashes, ..config(32, 1) });
        run_alone(&mut oracle, &[0, 1, 2], 1);
        run_alone(&mut oracle, &[0, 1, 2, 3, 4, 5], 1);
        // One token is always left to compute, so the whole of [0, 1, 2] shows with one token behind it.
        assert_eq!(run_alone(&mut oracle, &[0, 1, 2], 1), 2);
        assert_eq!(run_alone(&mut oracle, &[0, 1, 2, 8], 1), 3);
        assert_eq!(run_alone(&mut oracle, &[0, 1, 3, 4, 5], 1), 2);
        assert_eq!(run_alone(&mut oracle, &[0, 1, 2, 3, 4, 5, 8], 1), 6);
        assert_eq!(run_alone(&mut oracle, &[1, 2, 3], 1), 0);
    }
}

#[test]
fn a12_the_longest_accepted_request_is_what_the_pool_really_holds() {
    let mut oracle = Oracle::new(SchedulerConfig { max_model_len: 64, ..config(15, 4) });
    assert_eq!(oracle.scheduler().config().max_model_len, 60, "lowered, and readable back");
    let refused = oracle.submit(RequestSpec::new(tokens(0..60)), Script::constant(9));
    let too_long = Error::PromptTooLong { num_prompt_tokens: 60, max_tokens: 1, max_model_len: 60 };
    assert_eq!(refused, Err(too_long), "its output would be the 61st token");
    let longest = oracle.submit(RequestSpec::new(tokens(0..59)), Script::constant(9)).expect("59 + 1 fit");
    let wide =
        oracle.submit(RequestSpec::new(vec![5]), Script::constant(9)).expect("an absent max_tokens is what fits");
    oracle.drain();
    assert_eq!([longest, wide].map(|index| oracle.model().choices[index].tokens.len()), [60, 60]);
}

#[test]
fn a17_cached_blocks_count_as_room_for_the_next_step() {
    let mut oracle = Oracle::new(config(6, 2));
    run_alone(&mut oracle, &tokens(0..11), 1);
    let before = stats(&oracle);
    assert_eq!((before.num_free_blocks, before.num_cached_blocks, before.num_used_blocks), (1, 5, 0));
    let next = oracle.accept(&tokens(50..61), 1, Script::constant(9));
    oracle.step();
    assert_eq!(scheduled(&oracle, next), 11);
    assert_eq!(stats(&oracle).num_evicted_blocks, 5);
    oracle.drain();
}

#[test]
fn b03_a_prompt_of_whole_blocks_keeps_its_last_block_in_the_chain() {
    let mut oracle = Oracle::new(config(16, 16));
    let cached: Vec<i32> = (0..3).map(|_| run_alone(&mut oracle, &tokens(0..32), 1)).collect();
    assert_eq!(cached, [0, 16, 16]);
    assert_eq!(run_alone(&mut oracle, &tokens(0..48), 1), 32);
}

#[test]
fn b10_the_budget_is_charged_after_the_hit() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 6, ..config(16, 4) });
    run_alone(&mut oracle, &tokens(0..8), 1);
    let hit = oracle.accept(&tokens(0..10), 1, Script::constant(9));
    let other = oracle.accept(&tokens(100..110), 1, Script::constant(9));
    oracle.step();
    assert_eq!((cached_tokens(&oracle, hit), scheduled(&oracle, hit), scheduled(&oracle, other)), (Some(8), 2, 4));
    assert!(oracle.batch().positions.iter().all(|&position| position < 10));
    oracle.drain();
}

#[test]
fn b11_lengths_agree_when_cached_sequences_go_between_plan_and_run() {
    let mut oracle = Oracle::new(config(16, 2));
    run_alone(&mut oracle, &tokens(0..6), 1);
    let user = oracle.accept(&tokens(0..7), 4, Script::constant(9));
    oracle.step();
    assert_eq!(cached_tokens(&oracle, user), Some(6));
    // The plan is made, its batch runs: now the cache forgets everything.
    oracle.reset_prefix_cache();
    oracle.step();
    assert_eq!(oracle.batch().seq_lens, [8]);
    let late = oracle.accept(&tokens(0..7), 1, Script::constant(9));
    oracle.step();
    assert_eq!(cached_tokens(&oracle, late), Some(0));
    oracle.drain();
}

#[test]
fn c08_a_rest_of_the_budget_below_a_block_is_used() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 8, ..config(16, 16) });
    for token in 0..3 {
        oracle.accept(&[token], 30, Script::constant(9));
    }
    oracle.step();
    let waiting = oracle.accept(&tokens(0..20), 1, Script::constant(9));
    oracle.step();
    assert_eq!(scheduled(&oracle, waiting), 5, "the budget of 8 less three decodes");
    oracle.drain();
}

#[test]
fn c11_the_budget_holds_over_all_sequences_of_a_step() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_batched_tokens: 32, max_num_seqs: 16, ..config(64, 16) });
    for index in 0..10 {
        oracle.accept(&tokens(100 * index..100 * index + 20), 1, Script::constant(9));
    }
    let mut planned = Vec::new();
    while planned.iter().sum::<usize>() < 200 {
        oracle.step();
        planned.push(oracle.batch().num_tokens());
    }
    assert_eq!(planned, [32, 32, 32, 32, 32, 32, 8], "200 prompt tokens, 32 a step");
    oracle.drain();
}

/// Three requests of two blocks each that want a third when five blocks are all there is; steps until one is preempted.
fn preempted() -> Oracle {
    let mut oracle = Oracle::new(SchedulerConfig { enable_prefix_caching: false, max_model_len: 16, ..config(9, 2) });
    for index in 0..3 {
        oracle.accept(&[10 * index, 10 * index + 1], 8, Script::constant(9));
    }
    while stats(&oracle).num_preemptions == 0 {
        oracle.step();
    }
    oracle
}

#[test]
fn d01_nothing_is_both_planned_and_preempted() {
    let oracle = preempted();
    let planned = &oracle.batch().request_ids;
    let running: Vec<u64> =
        oracle.model().running().iter().map(|&index| oracle.model().choices[index].id.as_u64()).collect();
    assert!(planned.iter().all(|id| running.contains(id)), "planned {planned:?}, running {running:?}");
    let preempted = &oracle.model().choices[2];
    assert!(preempted.row.is_none() && !planned.contains(&preempted.id.as_u64()));
}

#[test]
fn d04_a_preempted_request_resumes_before_anything_starts() {
    let mut oracle = preempted();
    let newcomer = oracle.accept(&[77], 1, Script::constant(9));
    while !is_running(&oracle, 2) {
        assert!(!is_running(&oracle, newcomer), "the newcomer started first");
        oracle.step();
    }
    oracle.drain();
    let resumed = &oracle.model().choices[2];
    assert_eq!((resumed.num_prompt(), resumed.num_output()), (2, 8), "the prompt has not grown, nothing is lost");
}

#[test]
fn d05_the_newest_is_preempted() {
    let oracle = preempted();
    assert_eq!([0, 1, 2].map(|index| is_running(&oracle, index)), [true, true, false]);
}

#[test]
fn d06_a_pool_far_too_small_makes_progress_in_every_step() {
    let mut oracle = Oracle::new(SchedulerConfig { max_num_seqs: 32, ..config(4, 2) });
    for index in 0..30 {
        oracle.accept(&[index, index, index], 3, Script::constant(9));
    }
    let mut num_steps = 0;
    while !oracle.is_at_rest() {
        oracle.step();
        num_steps += 1;
        assert!(oracle.batch().num_seqs() > 0 || oracle.model().live.is_empty(), "a step without progress");
    }
    // Alone each needs three steps; nobody is worse off than one after the other, but for the chunk of a resumption.
    assert!(num_steps <= 30 * 4, "{num_steps} steps for 30 requests of 3 tokens");
    assert!(stats(&oracle).num_preemptions <= num_steps);
    oracle.drain();
}

#[test]
fn d09_no_more_is_preempted_than_is_needed() {
    let mut oracle = Oracle::new(SchedulerConfig { enable_prefix_caching: false, max_model_len: 24, ..config(12, 2) });
    for index in 0..4 {
        oracle.accept(&[10 * index, 10 * index + 1], 16, Script::constant(9));
    }
    let mut num_preemptions = 0;
    while !oracle.is_at_rest() {
        let num_running = oracle.model().running().len() as u64;
        oracle.step();
        let preempted_now = stats(&oracle).num_preemptions - num_preemptions;
        assert!(preempted_now <= num_running / 2, "{preempted_now} of {num_running} were preempted at once");
        num_preemptions += preempted_now;
    }
    assert!(num_preemptions > 0, "memory was short");
    oracle.drain();
}

#[test]
fn d09_a_victim_whose_blocks_others_hold_is_skipped() {
    // Of ten blocks nine are held: the two newest are twins and share all of theirs. The oldest takes the last one; the second needs one
    // too, and to displace a twin would gain nothing.
    let mut oracle = Oracle::new(config(10, 1));
    for (token, answer) in [(1, 9), (2, 8), (3, 7), (3, 7)] {
        oracle.accept(&[token], 6, Script::constant(answer));
    }
    while stats(&oracle).num_preemptions == 0 {
        oracle.step();
    }
    assert_eq!([0, 1, 2, 3].map(|index| is_running(&oracle, index)), [true, false, true, true]);
    assert_eq!(oracle.batch().num_seqs(), 3, "one preemption was enough for all others");
    oracle.drain();
}

/// What fcfs promises: nothing passes a request that lacks memory (K = 0), so a small one starts with the big one before it, which
/// starts in the step after enough was released.
#[test]
fn d12_a_small_request_waits_for_the_big_one_before_it_and_starts_with_it() {
    let mut oracle = Oracle::new(SchedulerConfig { enable_prefix_caching: false, ..config(12, 2) });
    let long = oracle.accept(&tokens(0..13), 2, Script::constant(9));
    oracle.step();
    let big = oracle.accept(&tokens(100..119), 1, Script::constant(9));
    let small = oracle.accept(&[50], 1, Script::constant(9));
    assert_eq!(oracle.scheduler().pool().num_available(), 5);
    oracle.step();
    assert!(!is_running(&oracle, big) && !is_running(&oracle, small));
    oracle.step();
    assert!(!is_running(&oracle, long) && is_running(&oracle, big) && is_running(&oracle, small));
    oracle.drain();
}

#[test]
fn a_tenant_or_salt_that_looks_like_another_shares_nothing() {
    let owners: Vec<_> = (0..crate::ops::NUM_OWNERS).map(crate::ops::owner).collect();
    let mut oracle = Oracle::new(SchedulerConfig { collide_hashes: true, ..config(64, 2) });
    for (tenant, cache_salt) in owners.iter().chain(&owners) {
        let (tenant, cache_salt) = (tenant.clone(), cache_salt.clone());
        let is_known = oracle.model().choices.len() >= owners.len();
        let spec = RequestSpec { tenant, cache_salt, max_tokens: Some(1), ..RequestSpec::new(tokens(0..9)) };
        let request = oracle.submit(spec, Script::constant(9)).expect("the request is acceptable");
        oracle.step();
        assert_eq!(cached_tokens(&oracle, request), Some(if is_known { 8 } else { 0 }));
        oracle.drain();
    }
}

/// Pairs of twins whose blocks fill in the same steps: more of them than are looked at together, each second block a duplicate.
#[test]
fn many_blocks_that_fill_at_once_are_published_and_exchanged() {
    let mut oracle = Oracle::new(SchedulerConfig {
        max_num_seqs: 150,
        max_num_batched_tokens: 600,
        num_blocks: 1_500,
        max_model_len: 24,
        ..config(1_500, 4)
    });
    for index in 0..150 {
        oracle.accept(&[index / 2, 1, 2, 3], 18, Script::constant(9));
    }
    let mut num_used = Vec::new();
    while !oracle.is_at_rest() {
        oracle.step();
        num_used.push(oracle.scheduler().pool().num_used());
    }
    // Twins share every full block; the block that is being filled is their own.
    assert_eq!(num_used[..6], [150, 75 + 150, 75 + 150, 75 + 150, 75 + 150, 2 * 75 + 150]);
    oracle.drain();
}
