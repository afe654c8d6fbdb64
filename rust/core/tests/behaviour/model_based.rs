//! The random test: operations drawn from a seed on tiny pools, each followed by the whole check of the oracle.
//!
//! `CBRS_RANDOM_OPS` sets how many operations there are in total, `CBRS_RANDOM_SEED` the first seed. A failure names its seed and
//! the shortest list of operations that was found to fail as well.

use std::env;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use cbrs_core::SchedulerConfig;

use crate::episode::{Episode, random, replay};
use crate::ops::Op;
use crate::shrink::shrink;

const DEFAULT_NUM_OPS: u64 = 1_000_000;
/// Operations of one episode before it is drained.
const EPISODE_LEN: usize = 300;

fn number_from_env(name: &str, default: u64) -> u64 {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is not a number")),
        Err(_) => default,
    }
}

fn report(seed: u64, episode: &Episode, message: &str) -> String {
    let fails = |ops: &[Op]| replay(&episode.config, ops).is_err();
    let (ops, last) = if fails(&episode.ops) {
        let ops = shrink(&episode.ops, fails);
        let last = replay(&episode.config, &ops).expect_err("the shrunk list fails");
        (ops, last)
    } else {
        (episode.ops.clone(), "the list does not fail when it is replayed".to_owned())
    };
    let list: Vec<String> = ops.iter().map(|op| format!("    {op:?},")).collect();
    format!(
        "seed {seed} fails: {message}\nrepeat: CBRS_RANDOM_SEED={seed} CBRS_RANDOM_OPS=1\nconfig: {:?}\n{} operations suffice:\n{}\n{last}",
        episode.config,
        ops.len(),
        list.join("\n"),
    )
}

/// Runs episodes from `next_seed` on until `num_ops` operations are done; the first failure is told.
fn run_episodes(
    next_seed: &AtomicU64,
    num_done: &AtomicU64,
    num_ops: u64,
    has_failed: &AtomicBool,
) -> Result<(), String> {
    while num_done.load(Ordering::Relaxed) < num_ops && !has_failed.load(Ordering::Relaxed) {
        let seed = next_seed.fetch_add(1, Ordering::Relaxed);
        let episode = random(seed, EPISODE_LEN);
        num_done.fetch_add(episode.ops.len() as u64, Ordering::Relaxed);
        if let Err(message) = &episode.outcome {
            has_failed.store(true, Ordering::Relaxed);
            return Err(report(seed, &episode, message));
        }
    }
    Ok(())
}

#[test]
fn random_operations_never_contradict_the_oracle() {
    let num_ops = number_from_env("CBRS_RANDOM_OPS", DEFAULT_NUM_OPS);
    let next_seed = AtomicU64::new(number_from_env("CBRS_RANDOM_SEED", 1));
    let (num_done, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let num_threads = thread::available_parallelism().map_or(1, usize::from);
    let failures: Vec<String> = thread::scope(|scope| {
        let run = || run_episodes(&next_seed, &num_done, num_ops, &has_failed);
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(run)).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("panics are caught").err()).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(num_done.into_inner() >= num_ops);
}

#[test]
fn the_same_seed_gives_the_same_steps() {
    for seed in 1..=20 {
        let (first, second) = (random(seed, 100), random(seed, 100));
        assert_eq!(first.ops, second.ops, "seed {seed}");
        assert_eq!(first.outcome, second.outcome, "seed {seed}");
        assert!(first.outcome.is_ok(), "{:?}", first.outcome);
    }
}

/// A check can only fail where its case comes up.
#[test]
fn random_operations_bring_up_every_case() {
    let episodes: Vec<Episode> = (1..=300).map(|seed| random(seed, EPISODE_LEN)).collect();
    let sum = |figure: fn(&Episode) -> u64| episodes.iter().map(figure).sum::<u64>();
    let figures = [
        ("stop", sum(|episode| episode.stats.num_stop_requests), 100),
        ("length", sum(|episode| episode.stats.num_length_requests), 1000),
        ("cancelled", sum(|episode| episode.stats.num_cancelled_requests), 100),
        ("error", sum(|episode| episode.stats.num_error_requests), 100),
        ("cached prompt tokens", sum(|episode| episode.stats.num_cached_prompt_tokens), 1000),
        ("evictions", sum(|episode| episode.stats.num_evicted_blocks), 1000),
        ("preemptions", sum(|episode| episode.stats.num_preemptions), 100),
        ("recomputed tokens", sum(|episode| episode.stats.num_recomputed_tokens), 500),
        ("passed while waiting for a block in flight", sum(|episode| episode.num_passed as u64), 10),
        ("choices that start with pinned blocks", sum(|episode| episode.seen.forks), 500),
        ("of these without a cache", sum(|episode| episode.seen.unpublished_forks), 100),
        ("pins dropped for a decode", sum(|episode| episode.seen.starved_drops), 50),
        ("later choices that compute the prompt", sum(|episode| episode.seen.later_leaders), 30),
        ("plans that paused", sum(|episode| episode.seen.paused_plans), 500),
        ("prompt tokens with log-probabilities", sum(|episode| episode.seen.prompt_logprobs), 5000),
        ("of these after a preemption or another choice", sum(|episode| episode.seen.resumed_prompt_logprobs), 15),
        ("chunks shortened for want of logits", sum(|episode| episode.seen.short_of_logits), 500),
    ];
    for (name, count, at_least) in figures {
        assert!(count >= at_least, "{name}: only {count} in {} episodes; {figures:?}", episodes.len());
    }
}

/// Lists that random runs have once found to fail, so that they stay fixed.
fn check_regression(config: &SchedulerConfig, ops: &[Op]) {
    if let Err(message) = replay(config, ops) {
        panic!("{message}");
    }
}

fn submit(prompt: &[i32], max_tokens: Option<u64>, owner: u8, script: u64) -> Op {
    Op::Submit {
        prompt: prompt.to_vec(),
        n: 1,
        prompt_logprobs: None,
        max_tokens,
        owner,
        stop: None,
        ignore_eos: true,
        script,
    }
}

/// In the second step the third prompt continues the first one's block, while the second prompt fills a block with the same tokens and,
/// by collision, the same hash, but below another one.
#[test]
fn colliding_hashes_make_nobody_wait_for_a_block_of_another_prefix() {
    let config = SchedulerConfig {
        max_num_seqs: 3,
        max_num_batched_tokens: 16,
        num_blocks: 21,
        block_size: 2,
        max_prefill_chunk_tokens: Some(2),
        collide_hashes: true,
        ..SchedulerConfig::default()
    };
    let prompts: [&[i32]; 3] = [&[0, 1, 0, 0, 0, 0], &[1, 0, 1, 1, 0], &[0, 1, 1, 1, 0]];
    check_regression(&config, &prompts.map(|prompt| submit(prompt, Some(1), 0, 2)));
}

/// A twin has published what a preempted request generated after the cache was reset under it: it must find that when it resumes.
#[test]
fn a_resumed_request_finds_blocks_that_it_filled_after_a_reset() {
    let config = SchedulerConfig {
        max_num_seqs: 6,
        max_num_batched_tokens: 13,
        num_blocks: 31,
        max_model_len: 34,
        block_size: 1,
        max_prefill_chunk_tokens: Some(3),
        ..SchedulerConfig::default()
    };
    let twin = 11_364_813_722_185_914_715;
    let ops = [
        submit(&[1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1], Some(19), 3, 16_017_065_270_672_592_063),
        submit(
            &[1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1],
            Some(9),
            4,
            10_345_988_569_941_018_735,
        ),
        submit(&[0, 0, 0, 1, 0, 1, 0, 0, 1, 0], Some(7), 0, 5_379_423_574_687_673_930),
        submit(&[1, 1, 0], Some(12), 0, twin),
        Op::Finish { request: 0, choice: 0, num_tokens: 0 },
        submit(&[1, 1], None, 0, twin),
        submit(&[1, 1], None, 0, twin),
        Op::Step { errors: 0 },
        Op::Fail,
        Op::Step { errors: 0 },
        Op::Step { errors: 0 },
        Op::ResetPrefixCache,
    ];
    check_regression(&config, &ops);
}
