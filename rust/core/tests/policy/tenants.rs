//! Shares of tenants, displacement for them, caps.

use std::collections::BTreeMap;
use std::sync::Arc;

use cbrs_core::policy::{Class, Fairness, PolicyConfig, TenantLimits};

use crate::rig::{Rig, config, request};
use crate::rng::Rng;

fn weighted(weights: &[(&str, f64)]) -> impl Fn(&mut PolicyConfig) {
    let tenants: Vec<(Arc<str>, TenantLimits)> = weights
        .iter()
        .map(|&(name, weight)| (Arc::from(name), TenantLimits { weight, ..TenantLimits::default() }))
        .collect();
    move |rules| rules.tenants.extend(tenants.iter().cloned())
}

#[test]
fn a_polite_tenant_runs_in_the_next_step_beside_a_flood() {
    let mut rig = Rig::fair(config(8, 4096), |_| ());
    for seed in 0..100 {
        rig.submit(request(Class::Standard, "flood", seed, 60), 300).expect("it fits");
    }
    for _ in 0..20 {
        rig.step();
    }
    for seed in 0..10 {
        let polite = rig.submit(request(Class::Standard, "polite", 1000 + seed, 60), 20).expect("it fits");
        rig.step();
        assert!(rig.scheduled(polite) > 0, "its prompt waits");
        while rig.requests[&polite].end.is_none() {
            rig.step();
        }
        for _ in 0..40 {
            rig.step();
        }
    }
    let stats = rig.submitter().stats();
    assert_eq!(stats.num_displacements, 10, "one for each");
    rig.drain();
}

#[test]
fn one_sequence_is_displaced_in_a_step_and_only_down_to_equal_shares() {
    let mut rig = Rig::fair(config(8, 4096), |_| ());
    let flood: Vec<u64> =
        (0..20).map(|seed| rig.submit(request(Class::Standard, "a", seed, 40), 400).expect("it fits")).collect();
    for _ in 0..4 {
        rig.step();
    }
    let other: Vec<u64> =
        (0..20).map(|seed| rig.submit(request(Class::Standard, "b", 100 + seed, 40), 400).expect("it fits")).collect();
    for num_displaced in 1..10 {
        rig.step();
        let running = |ids: &[u64]| ids.iter().filter(|&&id| rig.is_running(id)).count();
        let expected = num_displaced.min(4);
        assert_eq!((running(&flood), running(&other)), (8 - expected, expected));
    }
    rig.drain();
}

/// Tokens of service by tenant: prompts once, outputs twice.
fn service(rig: &Rig) -> BTreeMap<Arc<str>, u64> {
    let mut service = BTreeMap::new();
    for known in rig.requests.values().filter(|known| known.first_step.is_some()) {
        let tenant = known.tenant.clone().expect("each has one");
        *service.entry(tenant).or_default() += (known.num_prompt_tokens + 2 * known.tokens.len()) as u64;
    }
    service
}

#[test]
fn weights_decide_the_shares_of_service() {
    let mut rig = Rig::fair(config(16, 8192), weighted(&[("a", 1.0), ("b", 2.0), ("c", 4.0)]));
    let mut rng = Rng::new(3);
    let mut seed = 0;
    for _ in 0..6000 {
        for tenant in ["a", "b", "c"] {
            let waits = rig.requests.values().filter(|known| {
                known.end.is_none() && known.first_step.is_none() && known.tenant.as_deref() == Some(tenant)
            });
            for _ in waits.count()..4 {
                seed += 1;
                let (len, num_outputs) = (rng.within(10, 100), rng.within(5, 120));
                rig.submit(request(Class::Standard, tenant, seed, len), num_outputs).expect("it fits");
            }
        }
        rig.step();
        rig.requests.retain(|_, known| known.end.is_none() || known.first_step.is_some());
    }
    let service = service(&rig);
    let total: u64 = service.values().sum();
    for (tenant, weight) in [("a", 1.0), ("b", 2.0), ("c", 4.0)] {
        let share = service[tenant] as f64 / total as f64;
        assert!((share * 7.0 / weight - 1.0).abs() < 0.05, "{tenant} has {share:.3} of the service");
    }
}

/// The difference in weighted service between two tenants that always have something waiting never exceeds what is in flight: all rows with
/// the longest outputs, and a prompt, for the smaller weight. The most that is seen is a third of that.
#[test]
fn always_backlogged_tenants_stay_close_whatever_the_lengths_and_weights() {
    for (seed, weights) in
        [[1.0, 1.0], [1.0, 1.0], [1.0, 3.0], [4.0, 1.0], [0.5, 2.0], [1.0, 8.0]].into_iter().enumerate()
    {
        let mut rng = Rng::new(seed as u64);
        let [of_a, of_b] = weights;
        let mut rig = Rig::fair(config(6, 4096), weighted(&[("a", of_a), ("b", of_b)]));
        let bound = (6.0 * 2.0 * 80.0 + 200.0) / of_a.min(of_b);
        let (mut next, mut service) = (0, BTreeMap::from([("a", 0.0), ("b", 0.0)]));
        for step in 0..1500 {
            for tenant in ["a", "b"] {
                let waiting = rig.requests.values().filter(|known| {
                    known.end.is_none() && known.first_step.is_none() && known.tenant.as_deref() == Some(tenant)
                });
                // More than may start in one plan.
                for _ in waiting.count()..8 {
                    next += 1;
                    // One tenant has short requests, the other long ones, and they change roles.
                    let is_long = (tenant == "a") == (step / 300 % 2 == 0);
                    let (len, num_outputs) =
                        if is_long { (rng.within(100, 200), 80) } else { (rng.within(1, 8), rng.within(1, 4)) };
                    rig.submit(request(Class::Standard, tenant, next, len), num_outputs).expect("it fits");
                }
            }
            rig.step();
            // What has ended is counted once and forgotten.
            let now = self::service(&rig);
            let of = |tenant: &str, weight: f64| {
                (service[tenant] + now.get(tenant).map_or(0.0, |&count| count as f64)) / weight
            };
            let (a, b) = (of("a", of_a), of("b", of_b));
            assert!((a - b).abs() <= bound, "seed {seed}, step {step}: {a} against {b}, weights {weights:?}");
            rig.requests.retain(|_, known| {
                if known.end.is_some() {
                    let tenant = if known.tenant.as_deref() == Some("a") { "a" } else { "b" };
                    *service.get_mut(tenant).expect("both are there") +=
                        (known.num_prompt_tokens + 2 * known.tokens.len()) as f64;
                }
                known.end.is_none()
            });
        }
        rig.drain();
    }
}

#[test]
fn a_tenant_that_was_idle_does_not_save_up() {
    let mut rig = Rig::fair(config(4, 4096), |_| ());
    rig.submit(request(Class::Standard, "late", 1, 10), 2).expect("it fits");
    for seed in 0..60 {
        rig.submit(request(Class::Standard, "busy", 10 + seed, 50), 60).expect("it fits");
    }
    for _ in 0..300 {
        rig.step();
    }
    let before = service(&rig);
    for seed in 0..60 {
        rig.submit(request(Class::Standard, "late", 100 + seed, 50), 60).expect("it fits");
    }
    for _ in 0..300 {
        rig.step();
    }
    let after = service(&rig);
    let gained = |tenant: &str| (after[tenant] - before[tenant]) as f64;
    let ratio = gained("late") / gained("busy");
    assert!((0.7..1.6).contains(&ratio), "{ratio}");
    rig.drain();
}

#[test]
fn a_cap_on_a_tenant_holds_and_keeps_nobody_else_waiting() {
    let limits = TenantLimits { max_num_seqs: Some(2), ..TenantLimits::default() };
    let mut rig = Rig::fair(config(8, 4096), |rules| {
        rules.tenants.insert("capped".into(), limits);
    });
    let capped: Vec<u64> =
        (0..10).map(|seed| rig.submit(request(Class::Standard, "capped", seed, 20), 50).expect("it fits")).collect();
    let other: Vec<u64> =
        (0..6).map(|seed| rig.submit(request(Class::Standard, "other", 50 + seed, 20), 50).expect("it fits")).collect();
    rig.step();
    rig.step();
    assert_eq!(capped.iter().filter(|&&id| rig.is_running(id)).count(), 2);
    assert!(other.iter().all(|&id| rig.is_running(id)));
    rig.drain();
}

#[test]
fn a_thousand_tenants_come_and_go() {
    let mut rig = Rig::fair(config(16, 4096), |_| ());
    let mut rng = Rng::new(9);
    for round in 0..30 {
        for _ in 0..40 {
            let tenant = format!("tenant {}", rng.below(1000));
            let class = Class::ALL[rng.below(3)];
            rig.submit(request(class, &tenant, rng.next(), rng.within(1, 60)), rng.within(1, 20)).expect("it fits");
        }
        for _ in 0..(if round % 3 == 0 { 200 } else { 5 }) {
            rig.step();
        }
        rig.requests.retain(|_, known| known.end.is_none());
    }
    rig.drain();
}

/// Prompt tokens count when they are submitted, output tokens when they are generated, and both once; whether tenants share by weight or not.
#[test]
fn each_token_counts_once_against_the_rate() {
    for fairness in [Fairness::Off, Fairness::Weighted] {
        let limits = TenantLimits { tokens_per_min: Some(200.0), ..TenantLimits::default() };
        let mut rig = Rig::fair(config(4, 256), |rules| {
            rules.fairness = fairness;
            rules.tenants.insert("a".into(), limits);
        });
        rig.submit(request(Class::Standard, "a", 1, 100), 50).expect("it is within the rate");
        rig.drain();
        // 100 and 50 are used, and a token comes back in 300 ms.
        assert!(rig.now_ns < 600_000_000, "it took {} ns", rig.now_ns);
        assert!(rig.submit(request(Class::Standard, "a", 2, 53), 1).is_none(), "{fairness:?}: less was counted");
        assert!(rig.submit(request(Class::Standard, "a", 3, 49), 1).is_some(), "{fairness:?}: more was counted");
        rig.drain();
    }
}

#[test]
fn a_tenant_displaces_at_the_cap_of_its_class_too() {
    let mut rig = Rig::fair(config(16, 2048), |rules| {
        rules.classes[Class::Standard as usize].max_num_seqs = Some(8);
    });
    for seed in 0..20 {
        rig.submit(request(Class::Standard, "flood", seed, 20), 400).expect("it fits");
    }
    for _ in 0..4 {
        rig.step();
    }
    let polite = rig.submit(request(Class::Standard, "polite", 99, 20), 4).expect("it fits");
    rig.step();
    assert!(rig.scheduled(polite) > 0, "the rows of the class are what is scarce");
    rig.drain();
}
