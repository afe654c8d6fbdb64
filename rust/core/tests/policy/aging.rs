//! Aging: whatever waits long gets its share, also when it has started, and a share is a floor.

use cbrs_core::policy::{Admission, Class, ClassLimits, TenantLimits};

use crate::rig::{Rig, config, request};

const SECOND_NS: u64 = 1_000_000_000;

/// Keeps more interactive requests coming than there is room for, until a time or until a request has ended.
fn flood(rig: &mut Rig, until_ns: u64, awaited: u64, (num_live, prompt, outputs): (usize, usize, usize)) {
    let mut seed = 1_000_000 + rig.step_id;
    while rig.now_ns < until_ns && rig.requests[&awaited].end.is_none() {
        let is_live = |known: &&crate::rig::Known| known.class == Class::Interactive && known.end.is_none();
        for _ in rig.requests.values().filter(is_live).count()..num_live {
            seed += 1;
            rig.submit(request(Class::Interactive, "", seed, prompt), outputs).expect("it fits");
        }
        rig.step();
        rig.requests.retain(|&id, known| known.end.is_none() || id == awaited);
    }
}

#[test]
fn a_displaced_batch_request_resumes_and_ends_beside_a_flood() {
    let mut rig = Rig::fair(config(2, 512), |rules| rules.aging_s = 0.2);
    let batch = rig.submit(request(Class::Batch, "", 1, 16), 40).expect("it fits");
    for _ in 0..3 {
        rig.step();
    }
    flood(&mut rig, 20 * SECOND_NS, batch, (6, 16, 8));
    assert!(rig.requests[&batch].end.is_some(), "it starves with {} tokens", rig.requests[&batch].tokens.len());
    rig.drain();
}

#[test]
fn later_choices_of_a_batch_request_end_beside_a_flood() {
    let mut rig = Rig::fair(config(4, 512), |rules| rules.aging_s = 0.2);
    let spec = cbrs_core::RequestSpec { n: 4, ..request(Class::Batch, "", 1, 40) };
    let batch = rig.submit(spec, 8).expect("it fits");
    rig.step();
    rig.step();
    flood(&mut rig, 20 * SECOND_NS, batch, (10, 16, 8));
    let num_tokens: Vec<usize> = rig.requests[&batch].choices.iter().map(|choice| choice.num_tokens).collect();
    assert!(rig.requests[&batch].end.is_some(), "its choices have {num_tokens:?} tokens");
    rig.drain();
}

#[test]
fn a_batch_prompt_that_has_started_is_computed_beside_a_flood_of_prompts() {
    let mut rig = Rig::fair(config(64, 2048), |rules| rules.aging_s = 0.2);
    let batch = rig.submit(request(Class::Batch, "", 1, 2000), 2).expect("it fits");
    rig.step();
    rig.step();
    flood(&mut rig, 20 * SECOND_NS, batch, (10, 200, 1));
    assert!(rig.requests[&batch].end.is_some(), "it holds its row and blocks, and gets nothing");
    rig.drain();
}

#[test]
fn who_is_held_back_by_a_cap_of_its_own_does_not_keep_others_from_aging() {
    let mut rig = Rig::fair(config(4, 2048), |rules| {
        rules.aging_s = 0.2;
        rules.tenants.insert("capped".into(), TenantLimits { max_num_seqs: Some(1), ..TenantLimits::default() });
    });
    for seed in 0..2 {
        rig.submit(request(Class::Interactive, "capped", seed, 16), 3000).expect("it fits");
    }
    rig.step();
    rig.step();
    let batch = rig.submit(request(Class::Batch, "other", 9, 16), 4).expect("it fits");
    flood(&mut rig, 5 * SECOND_NS, batch, (8, 16, 8));
    assert!(rig.requests[&batch].end.is_some(), "it starves behind a request that its own cap holds back");
    rig.drain();
}

#[test]
fn a_class_at_its_cap_does_not_keep_others_from_aging() {
    let mut rig = Rig::fair(config(4, 2048), |rules| {
        rules.aging_s = 0.2;
        rules.classes[Class::Standard as usize] = ClassLimits { max_num_seqs: Some(1), ..ClassLimits::default() };
    });
    for seed in 0..20 {
        rig.submit(request(Class::Standard, "", seed, 16), 3000).expect("it fits");
    }
    rig.step();
    rig.step();
    let batch = rig.submit(request(Class::Batch, "", 99, 16), 4).expect("it fits");
    flood(&mut rig, 5 * SECOND_NS, batch, (8, 16, 8));
    assert!(rig.requests[&batch].end.is_some(), "it starves behind requests of a class at its cap");
    rig.requests.retain(|_, known| known.class != Class::Standard || known.end.is_some());
}

#[test]
fn the_aged_share_is_a_floor_and_not_a_ceiling() {
    let mut rig = Rig::fair(config(4, 2048), |rules| rules.aging_s = 0.1);
    // Full rows keep it waiting until it is aged and owed a start.
    for seed in 0..30 {
        rig.submit(request(Class::Interactive, "", seed, 16), 30).expect("it fits");
    }
    let aged = rig.submit(request(Class::Batch, "", 99, 3000), 2).expect("it fits");
    while rig.requests[&aged].first_step.is_none() {
        rig.step();
    }
    let mut scheduled = vec![rig.scheduled(aged)];
    while rig.requests[&aged].tokens.is_empty() {
        rig.step();
        scheduled.push(rig.scheduled(aged));
    }
    // The budget is 256; at most three others decode or have a prompt of 16 tokens.
    assert!(scheduled.len() <= 3000 / 200 + 2, "{scheduled:?}");
    rig.drain();
}

#[test]
fn a_shielded_prompt_gets_a_twentieth_of_a_full_budget_and_leaves_the_rest() {
    let mut rig = Rig::fair(config(8, 2048), |rules| {
        rules.aging_s = 0.1;
        rules.admission = Admission::Prompt;
    });
    let batch = rig.submit(request(Class::Batch, "", 1, 3000), 2).expect("it fits");
    rig.step();
    rig.step();
    let long: Vec<u64> =
        (0..4).map(|seed| rig.submit(request(Class::Interactive, "", 10 + seed, 3900), 2).expect("it fits")).collect();
    let since_ns = rig.now_ns;
    let mut shares = Vec::new();
    while long.iter().any(|id| rig.requests[id].tokens.is_empty()) {
        rig.step();
        if rig.now_ns > since_ns + rig.aging_ns() + 50_000_000 && rig.requests[&batch].tokens.is_empty() {
            shares.push(rig.scheduled(batch));
        }
    }
    // 5 % of 256 tokens are less than a block.
    assert!(shares.len() > 20 && shares.iter().take(20).all(|&num_tokens| num_tokens == 16), "{shares:?}");
    rig.drain();
}
