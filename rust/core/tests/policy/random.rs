//! Random policies and operations: the rig checks every step, the core its invariants.

use std::sync::Arc;

use cbrs_core::policy::{Admission, Class, Fairness, Order, PolicyConfig, TenantLimits, Victim};
use cbrs_core::{RequestSpec, SchedulerConfig};

use crate::rig::Rig;
use crate::rng::Rng;

const TENANTS: [&str; 4] = ["", "a", "b", "c"];

fn random_rules(rng: &mut Rng) -> PolicyConfig {
    let mut rules = if rng.one_in(4) { PolicyConfig::fcfs() } else { PolicyConfig::fair() };
    if rng.one_in(2) {
        rules.fairness = [Fairness::Off, Fairness::Weighted][rng.below(2)];
        rules.order = [Order::Fcfs, Order::Edf][rng.below(2)];
        rules.admission = [Admission::Prompt, Admission::Estimated, Admission::Guaranteed][rng.below(3)];
        rules.victim = [Victim::Newest, Victim::Cost][rng.below(2)];
    }
    rules.max_overtakes = rng.below(17) as u8;
    rules.max_preemptions = rng.within(0, 5) as u8;
    rules.max_batch_pause_steps = rng.within(2, 32) as u32;
    rules.aging_s = rng.within(0, 20) as f64 / 20.0;
    rules.target_itl_ms = rng.one_in(4).then(|| rng.within(5, 40) as f64);
    if rules.fairness == Fairness::Weighted {
        for tenant in TENANTS {
            let max_num_seqs = rng.one_in(6).then(|| rng.within(1, 3));
            let weight = [0.5, 1.0, 3.0][rng.below(3)];
            rules.tenants.insert(Arc::from(tenant), TenantLimits { weight, max_num_seqs, ..TenantLimits::default() });
        }
    }
    if rng.one_in(6) {
        rules.classes[rng.below(3)].max_num_seqs = Some(rng.within(1, 3));
    }
    rules
}

fn random_config(rng: &mut Rng) -> SchedulerConfig {
    let max_num_seqs = rng.within(1, 8);
    let block_size = rng.within(1, 8);
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + rng.within(1, 40),
        num_blocks: rng.within(8, 60),
        block_size,
        max_model_len: rng.within(16, 120),
        enable_prefix_caching: !rng.one_in(3),
        max_prefill_chunk_tokens: rng.one_in(3).then(|| rng.within(1, 12)),
        rules: Some(random_rules(rng)),
        ..SchedulerConfig::default()
    }
}

fn submit(rng: &mut Rng, rig: &mut Rig) {
    let max_model_len = rig.scheduler.config().max_model_len;
    let len = rng.within(1, (max_model_len / 2).max(1));
    let room = max_model_len - len;
    let num_outputs = rng.within(1, room.min(30));
    let tenant = TENANTS[rng.below(TENANTS.len())];
    let common = rng.within(0, 20);
    let prompt = (0..len).map(|index| 2 + (if index < common { index } else { rng.below(50) }) as i32).collect();
    let ms = |rng: &mut Rng| rng.within(1, 1000) as f64;
    let spec = RequestSpec {
        priority: Some(Class::ALL[rng.below(3)]),
        tenant: (!tenant.is_empty()).then(|| Arc::from(tenant)),
        ttft_deadline_ms: rng.one_in(6).then(|| ms(rng)),
        deadline_ms: rng.one_in(10).then(|| ms(rng)),
        target_itl_ms: rng.one_in(8).then(|| rng.within(4, 60) as f64),
        ..RequestSpec::new(prompt)
    };
    rig.submit(spec, num_outputs);
}

fn episode(seed: u64, num_ops: usize) -> [u64; 4] {
    let mut rng = Rng::new(seed);
    let mut rig = Rig::new(random_config(&mut rng));
    let load = rng.within(2, 30);
    for _ in 0..num_ops {
        match rng.below(100) {
            0..30 if rig.requests.values().filter(|known| known.end.is_none()).count() < load => {
                submit(&mut rng, &mut rig);
            }
            0..90 => rig.step(),
            90..93 => {
                let live: Vec<u64> =
                    rig.requests.iter().filter(|(_, known)| known.end.is_none()).map(|(&id, _)| id).collect();
                if !live.is_empty() {
                    rig.cancel(live[rng.below(live.len())]);
                }
            }
            93..95 => rig.set_paused(rng.one_in(3)),
            95..98 => rig.now_ns += rng.within(1, 300) as u64 * 1_000_000,
            _ => rig.scheduler.reset_prefix_cache(),
        }
    }
    rig.drain();
    let stats = rig.submitter().stats();
    [stats.num_preemptions, stats.num_displacements, stats.num_expired_requests, stats.num_recomputed_tokens]
}

#[test]
fn random_policies_keep_their_promises() {
    let total: usize = std::env::var("CBRS_RANDOM_OPS").ok().and_then(|text| text.parse().ok()).unwrap_or(1_000_000);
    let first: u64 = std::env::var("CBRS_RANDOM_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    // Fewer operations than the model-based test: a step costs more here.
    let num_episodes = (total / 20 / 400).clamp(1, 4000) as u64;
    let mut sums = [0; 4];
    for seed in first..first + num_episodes {
        match std::panic::catch_unwind(|| episode(seed, 400)) {
            Ok(counts) => (0..4).for_each(|index| sums[index] += counts[index]),
            Err(panic) => {
                let message = panic.downcast_ref::<String>().map_or("it panicked", String::as_str);
                panic!("seed {seed} fails; repeat with CBRS_RANDOM_SEED={seed} CBRS_RANDOM_OPS=8000: {message}");
            }
        }
    }
    let names = ["preemptions", "displacements", "expired", "recomputed"];
    if num_episodes >= 100 {
        assert!(sums.iter().all(|&sum| sum > 100), "{names:?}: {sums:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_steps() {
    assert_eq!(episode(17, 400), episode(17, 400));
}
