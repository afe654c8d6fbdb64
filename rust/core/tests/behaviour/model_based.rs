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
fn run_episodes(next_seed: &AtomicU64, num_done: &AtomicU64, num_ops: u64, has_failed: &AtomicBool) -> Result<(), String> {
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

/// Lists that random runs have once found to fail, so that they stay fixed.
fn check_regression(config: SchedulerConfig, ops: &[Op]) {
    if let Err(message) = replay(&config, ops) {
        panic!("{message}");
    }
}
