//! Whoever fits starts and ends in time, however many others go on coming.

use cbrs_core::SchedulerConfig;
use cbrs_core::policy::{Admission, Class, Fairness, PolicyConfig, Victim};

use crate::rig::{Rig, request};
use crate::rng::Rng;

const NUM_STEPS: u64 = 3000;
/// Steps in which a request of at most 40 prompt tokens and 8 outputs has to have ended, whatever the policy, besides its wait while it is not
/// aged. The longest seen are about half of it.
const MAX_STEPS: u64 = 1200;

fn random_rules(rng: &mut Rng) -> PolicyConfig {
    PolicyConfig {
        fairness: [Fairness::Off, Fairness::Weighted][rng.below(2)],
        admission: [Admission::Prompt, Admission::Estimated, Admission::Guaranteed][rng.below(3)],
        victim: [Victim::Newest, Victim::Cost][rng.below(2)],
        max_overtakes: rng.below(17) as u8,
        max_preemptions: rng.below(6) as u8,
        max_prefill_interval: rng.within(1, 8) as u32,
        max_batch_pause_steps: rng.within(2, 32) as u32,
        aging_s: rng.within(1, 6) as f64 / 20.0,
        aged_share: [0.05, 0.1, 0.3][rng.below(3)],
        target_itl_ms: rng.one_in(3).then(|| rng.within(4, 20) as f64),
        ..PolicyConfig::fair()
    }
}

/// Keeps as many requests of a class and tenant alive as are asked for.
fn keep_coming(rng: &mut Rng, rig: &mut Rig, (class, tenant): (Class, &str), num_live: usize) {
    let is_of = |known: &crate::rig::Known| {
        known.end.is_none() && known.class == class && known.tenant.as_deref() == Some(tenant)
    };
    for _ in rig.requests.values().filter(|known| is_of(known)).count()..num_live {
        let (len, num_outputs) = (rng.within(1, 12), rng.within(1, 6));
        rig.submit(request(class, tenant, rng.next(), len), num_outputs).expect("the queue is long");
    }
}

/// Interactive and standard requests go on coming; now and then there is one that is watched.
fn flood(seed: u64, has_ample_memory: bool) {
    let mut rng = Rng::new(seed);
    let max_num_seqs = rng.within(1, 6);
    let config = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: rng.within(4, 48),
        num_blocks: if has_ample_memory { 16 * (max_num_seqs + 1) } else { rng.within(16, 24) },
        block_size: 4,
        max_model_len: 60,
        rules: Some(random_rules(&mut rng)),
        ..SchedulerConfig::default()
    };
    let mut rig = Rig::new(config);
    // Each of those that run can be displaced by a higher class and for another tenant; then the next row that is given up is its own.
    rig.checks.start_slack = has_ample_memory.then_some(4 * max_num_seqs as u64);
    let aging_steps = rig.aging_ns() / rig.profile.a;
    let mut watched = Vec::new();
    for _ in 0..NUM_STEPS {
        for flow in [(Class::Interactive, "a"), (Class::Interactive, "b"), (Class::Standard, "a")] {
            keep_coming(&mut rng, &mut rig, flow, max_num_seqs + 1);
        }
        if watched.len() < 4 && rng.one_in(20) {
            let class = [Class::Standard, Class::Batch, Class::Batch][rng.below(3)];
            let (len, num_outputs) = (rng.within(1, 40), rng.within(1, 8));
            let id = rig.submit(request(class, "watched", rng.next(), len), num_outputs).expect("it fits");
            watched.push((id, rig.step_id));
        }
        rig.step();
        watched.retain(|(id, since)| {
            let num_steps = rig.step_id - since;
            let known = &rig.requests[id];
            assert!(num_steps <= MAX_STEPS + aging_steps, "{id} has not ended: {known:?}");
            known.end.is_none()
        });
        rig.requests.retain(|_, known| known.end.is_none());
    }
    assert!(!has_ample_memory || rig.checks.num_kept_promises.aged_waits > 0, "nobody was aged");
    rig.drain();
}

#[test]
fn nobody_starves_whatever_the_policy() {
    (0..12).for_each(|seed| flood(seed, true));
}

#[test]
fn nobody_starves_where_memory_is_scarce() {
    (100..112).for_each(|seed| flood(seed, false));
}
