//! Budgets in time: a latency target shapes the steps.

use cbrs_core::policy::Class;
use cbrs_core::{RequestSpec, SchedulerConfig};

use crate::rig::{CPU, GPU, Profile, Rig, config, request};

fn large() -> SchedulerConfig {
    SchedulerConfig { max_num_batched_tokens: 8192, max_model_len: 60_000, ..config(80, 40_000) }
}

/// Longest time between two tokens of a request.
fn worst_itl_ms(rig: &Rig, id: u64, from: usize) -> f64 {
    let times = &rig.requests[&id].times_ns[from..];
    times.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e6).fold(0.0, f64::max)
}

/// Decodes that have run for a while, so that the model of the cost has learned.
fn decoding(rig: &mut Rig, num_seqs: u64, target_itl_ms: Option<f64>) -> Vec<u64> {
    for seed in 0..30 {
        rig.submit(request(Class::Standard, "", 1_000_000 + seed, 20 + seed as usize * 40), 3 + seed as usize)
            .expect("it fits");
        for _ in 0..4 {
            rig.step();
        }
    }
    let spec = |seed| RequestSpec { target_itl_ms, ..request(Class::Standard, "", seed, 500) };
    let ids: Vec<u64> = (0..num_seqs).map(|seed| rig.submit(spec(seed), 3000).expect("it fits")).collect();
    for _ in 0..100 {
        rig.step();
    }
    assert!(ids.iter().all(|id| rig.requests[id].tokens.len() > 5));
    ids
}

#[test]
fn a_target_holds_while_long_prompts_are_computed() {
    let mut rig = Rig::new(large());
    let ids = decoding(&mut rig, 64, Some(30.0));
    let from = rig.requests[&ids[0]].times_ns.len();
    let prompts: Vec<u64> =
        (0..4).map(|seed| rig.submit(request(Class::Standard, "", 500 + seed, 12_000), 2).expect("it fits")).collect();
    let started_ns = rig.now_ns;
    while prompts.iter().any(|id| rig.requests[id].end.is_none()) {
        rig.step();
    }
    let worst = worst_itl_ms(&rig, ids[0], from);
    assert!(worst <= 33.0 && worst > 25.0, "{worst} ms");
    // A token of a prompt costs 0.03 ms: what a step of 30 ms has left beside 64 decodes is used.
    let rate = 48_000.0 / ((rig.now_ns - started_ns) as f64 / 1e9);
    assert!(rate > 20_000.0, "{rate} tokens/s");
}

#[test]
fn a_long_context_counts() {
    let mut rig = Rig::new(large());
    rig.profile.c = 400;
    let ids = decoding(&mut rig, 40, Some(50.0));
    let long = rig.submit(request(Class::Standard, "", 900, 50_000), 200).expect("it fits");
    let from = rig.requests[&ids[0]].times_ns.len();
    while rig.requests[&long].tokens.len() < 20 {
        rig.step();
    }
    assert!(worst_itl_ms(&rig, ids[0], from) <= 55.0);
}

#[test]
fn a_prompt_gets_a_chunk_in_every_eighth_step_even_if_the_target_cannot_be_met() {
    let mut rig = Rig::new(large());
    let _ids = decoding(&mut rig, 63, None);
    let spec = RequestSpec { target_itl_ms: Some(1.0), ..request(Class::Standard, "", 800, 10) };
    let hasty = rig.submit(spec, 3000).expect("it fits");
    while rig.requests[&hasty].tokens.len() < 5 {
        rig.step();
    }
    let prompt = rig.submit(request(Class::Standard, "", 900, 100), 2).expect("it fits");
    let (mut without, mut num_chunks) = (0, 0);
    while rig.requests[&prompt].tokens.is_empty() {
        rig.step();
        let num_tokens = rig.scheduled(prompt);
        without = if num_tokens == 0 { without + 1 } else { 0 };
        num_chunks += usize::from(num_tokens > 0);
        assert!(num_tokens <= 16, "one block breaks the target, and no more");
        assert!(without < 8, "it gets nothing for {without} steps");
    }
    assert!(num_chunks >= 100 / 16);
}

#[test]
fn a_prompt_gets_its_chunk_in_every_eighth_step_beside_a_shielded_one() {
    let mut rig = Rig::fair(large(), |rules| {
        rules.aging_s = 0.1;
        rules.aged_share = 1.0;
    });
    let _ids = decoding(&mut rig, 60, None);
    let spec = RequestSpec { target_itl_ms: Some(1.0), ..request(Class::Standard, "", 800, 10) };
    let hasty = rig.submit(spec, 3000).expect("it fits");
    while rig.requests[&hasty].tokens.len() < 5 {
        rig.step();
    }
    let shielded = rig.submit(request(Class::Batch, "", 801, 14_000), 2).expect("it fits");
    let until_ns = rig.now_ns + 2_000_000_000;
    while rig.now_ns < until_ns {
        rig.step();
    }
    assert!(rig.is_running(shielded) && rig.requests[&shielded].tokens.is_empty(), "it goes on for long");
    let prompt = rig.submit(request(Class::Interactive, "", 900, 100), 2).expect("it fits");
    let (mut without, mut num_shielded) = (0, 0);
    while rig.requests[&prompt].tokens.is_empty() {
        rig.step();
        without = if rig.scheduled(prompt) == 0 { without + 1 } else { 0 };
        assert!(without < 8, "it gets nothing for {without} steps");
        num_shielded += rig.scheduled(shielded);
    }
    assert!(num_shielded > 0, "and the shielded one goes on");
}

/// A long context makes each chunk of it dear, while the short prompts of lower classes would fit the time that is left.
#[test]
fn cheap_chunks_of_lower_classes_are_none_of_the_highest_one() {
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 512, ..large() });
    rig.profile = Profile { a: 5_000_000, b: 30_000, c: 4_000 };
    let _ids = decoding(&mut rig, 4, None);
    let spec = RequestSpec { target_itl_ms: Some(16.0), ..request(Class::Standard, "", 800, 10) };
    let hasty = rig.submit(spec, 3000).expect("it fits");
    while rig.requests[&hasty].tokens.len() < 5 {
        rig.step();
    }
    let long = rig.submit(request(Class::Interactive, "", 900, 3000), 2).expect("it fits");
    let (mut without, mut longest) = (0, 0);
    let mut num_steps = 0;
    while rig.requests[&long].tokens.is_empty() {
        for seed in 0..2 {
            rig.submit(request(Class::Batch, "", 10_000 + 2 * num_steps + seed, 40), 2).expect("it fits");
        }
        rig.step();
        num_steps += 1;
        without = if rig.scheduled(long) == 0 { without + 1 } else { 0 };
        longest = longest.max(without);
        assert!(without < 8, "it gets nothing for {without} steps");
    }
    assert!(longest > 1, "it was never denied in {num_steps} steps");
    rig.requests.retain(|_, known| known.end.is_none());
}

/// Token budget > d > m > latency target.
#[test]
fn decodes_come_before_the_chunk_that_is_due_and_the_token_budget_before_both() {
    let config = SchedulerConfig { max_num_batched_tokens: 4, ..config(8, 400) };
    let mut rig = Rig::fair(config, |_| ());
    let spec = |seed| RequestSpec { target_itl_ms: Some(1.0), ..request(Class::Standard, "", seed, 3) };
    let ids: Vec<u64> = (0..4).map(|seed| rig.submit(spec(seed), 300).expect("it fits")).collect();
    while ids.iter().any(|id| rig.requests[id].tokens.is_empty()) {
        rig.step();
    }
    let prompt = rig.submit(request(Class::Interactive, "", 9, 40), 2).expect("it fits");
    for _ in 0..30 {
        rig.step();
        assert!(ids.iter().all(|&id| rig.scheduled(id) == 1) && rig.scheduled(prompt) == 0, "d before m");
    }
    // One decode less: a token of the budget is left for the chunk that is due, whatever the target.
    rig.cancel(ids[0]);
    let mut num_tokens = Vec::new();
    for _ in 0..24 {
        rig.step();
        num_tokens.push(rig.scheduled(prompt));
    }
    assert_eq!(num_tokens.iter().sum::<usize>(), 3, "m before the target: {num_tokens:?}");
    rig.drain();
}

#[test]
fn batch_decodes_give_way_to_a_target() {
    let mut rig = Rig::new(large());
    rig.profile.b = 300_000;
    let ids = decoding(&mut rig, 8, Some(12.0));
    let batch: Vec<u64> =
        (0..20).map(|seed| rig.submit(request(Class::Batch, "", 700 + seed, 30), 600).expect("it fits")).collect();
    for _ in 0..300 {
        rig.step();
    }
    let from = rig.requests[&ids[0]].times_ns.len();
    for _ in 0..200 {
        rig.step();
    }
    let mut times: Vec<f64> =
        rig.requests[&ids[0]].times_ns[from..].windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e6).collect();
    times.sort_unstable_by(f64::total_cmp);
    let worst = times[times.len() - 1];
    assert!(worst <= 1.1 * 12.0, "{worst}: the batch decodes that are due are spread over the steps");
    assert!(batch.iter().all(|id| rig.requests[id].tokens.len() > 4), "and all of them advance");
}

#[test]
fn without_a_target_nothing_is_held_back() {
    let mut rig = Rig::new(large());
    let _ids = decoding(&mut rig, 64, None);
    let prompt = rig.submit(request(Class::Standard, "", 900, 12_000), 2).expect("it fits");
    rig.step();
    assert_eq!(rig.scheduled(prompt), 8192 - 64);
}

#[test]
fn no_step_is_much_too_long_before_the_cost_is_known() {
    for (profile, target_ms, num_seqs) in
        [(GPU, 50.0, 64), (GPU, 20.0, 1), (CPU, 150.0, 64), (CPU, 150.0, 3), (CPU, 60.0, 1)]
    {
        let mut rig = Rig::new(large());
        rig.profile = profile;
        let spec = |seed| RequestSpec { target_itl_ms: Some(target_ms), ..request(Class::Standard, "", seed, 500) };
        let ids: Vec<u64> = (0..num_seqs).map(|seed| rig.submit(spec(seed), 3000).expect("it fits")).collect();
        let long = rig.submit(request(Class::Standard, "", 900, 30_000), 20).expect("it fits");
        let mut num_steps = 0;
        while rig.requests[&long].tokens.is_empty() {
            rig.step();
            num_steps += 1;
        }
        let worst = ids.iter().map(|&id| worst_itl_ms(&rig, id, 0)).fold(0.0, f64::max);
        assert!(worst <= 1.5 * target_ms, "{profile:?}, {num_seqs}: {worst} ms, target {target_ms} ms");
        // What a step of the target's length computes of the long prompt, and no less than half of that.
        let tokens = (target_ms * 1e6 - profile.a as f64) / profile.b as f64 - num_seqs as f64;
        let fewest = (30_000 + 500 * num_seqs) as f64 / tokens.min(8192.0);
        assert!(f64::from(num_steps) <= 2.0 * fewest + 16.0, "{profile:?}: {num_steps} steps, at least {fewest}");
    }
}
