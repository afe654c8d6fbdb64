//! Another policy while the engine runs.

use std::sync::Arc;

use cbrs_core::policy::{Admission, Class, Fairness, Order, PolicyConfig, TenantLimits};
use cbrs_core::{Error, Policy, Scheduler, SchedulerConfig};

use crate::rig::{Rig, config, request};

fn limits(change: impl FnOnce(&mut TenantLimits)) -> TenantLimits {
    let mut limits = TenantLimits::default();
    change(&mut limits);
    limits
}

fn fair(tenants: &[(&str, TenantLimits)]) -> PolicyConfig {
    let tenants = tenants.iter().map(|(name, limits)| (Arc::from(*name), limits.clone())).collect();
    PolicyConfig { tenants, ..PolicyConfig::fair() }
}

/// Output tokens of a tenant so far.
fn num_tokens(rig: &Rig, tenant: &str) -> usize {
    let of_tenant = rig.requests.values().filter(|known| known.tenant.as_deref() == Some(tenant));
    of_tenant.map(|known| known.tokens.len()).sum()
}

fn num_running(rig: &Rig, tenant: &str) -> usize {
    let of_tenant = rig.requests.iter().filter(|(_, known)| known.tenant.as_deref() == Some(tenant));
    of_tenant.filter(|&(&id, _)| rig.is_running(id)).count()
}

#[test]
fn other_weights_hold_for_those_that_wait_and_run() {
    let mut rig = Rig::fair(config(8, 8192), |_| ());
    for seed in 0..400 {
        for (index, tenant) in ["a", "b"].into_iter().enumerate() {
            let spec = request(Class::Standard, tenant, 1000 * index as u64 + seed, 20);
            rig.submit(spec, 40).expect("the queue has room");
        }
    }
    let run = |rig: &mut Rig| {
        let before = [num_tokens(rig, "a"), num_tokens(rig, "b")];
        for _ in 0..1200 {
            rig.step();
        }
        (num_tokens(rig, "a") - before[0]) as f64 / (num_tokens(rig, "b") - before[1]) as f64
    };
    let ratio = run(&mut rig);
    assert!((0.9..1.1).contains(&ratio), "equal shares: {ratio}");
    rig.set_policy(fair(&[("a", limits(|limits| limits.weight = 3.0))])).expect("weights may change");
    let ratio = run(&mut rig);
    assert!((2.5..3.5).contains(&ratio), "three shares of four: {ratio}");
    rig.drain();
}

#[test]
fn a_lower_bound_on_what_runs_lets_the_running_ones_end() {
    let mut rig = Rig::fair(config(8, 8192), |_| ());
    for seed in 0..20 {
        rig.submit(request(Class::Standard, "a", seed, 20), 30).expect("it fits");
    }
    rig.step();
    assert_eq!(num_running(&rig, "a"), 8);
    rig.set_policy(fair(&[("a", limits(|limits| limits.max_num_seqs = Some(2)))])).expect("caps may change");
    rig.step();
    assert_eq!(num_running(&rig, "a"), 8, "nobody is thrown out");
    while num_running(&rig, "a") > 2 {
        rig.step();
    }
    let mut capped = fair(&[]);
    capped.classes[Class::Standard as usize].max_num_seqs = Some(1);
    rig.set_policy(capped).expect("caps may change");
    while num_running(&rig, "a") > 1 {
        rig.step();
    }
    for _ in 0..20 {
        rig.step();
        assert!(num_running(&rig, "a") <= 1);
    }
    rig.drain();
    assert_eq!(rig.submitter().stats().num_preemptions, 0);
}

#[test]
fn rates_and_caps_hold_for_requests_that_come_afterwards() {
    for rules in [PolicyConfig::fcfs(), PolicyConfig::fair()] {
        // In one line nothing is counted by tenant before the first rate.
        let mut rig = Rig::new(SchedulerConfig { rules: Some(rules.clone()), ..config(8, 8192) });
        let first = rig.submit(request(Class::Standard, "a", 1, 20), 50).expect("there is no rate yet");
        rig.step();
        let rate = limits(|limits| (limits.requests_per_min, limits.max_tokens) = (Some(2.0), Some(10)));
        let tenants = [(Arc::from("a"), rate)].into();
        rig.set_policy(PolicyConfig { tenants, ..rules.clone() }).expect("a rate of requests may come");
        for seed in 2..4 {
            rig.submit(request(Class::Standard, "a", seed, 20), 50).expect("two a minute");
        }
        let spec = request(Class::Standard, "a", 4, 20);
        let refused = rig.submitter().submit_at(spec, rig.now_ns).expect_err("three are too many");
        assert!(matches!(refused, Error::TenantOverRate { limit: 2.0, .. }), "{refused}");
        rig.submit(request(Class::Standard, "b", 5, 20), 50).expect("it has no rate");
        rig.set_policy(rules).expect("a rate may go");
        rig.submit(request(Class::Standard, "a", 6, 20), 50).expect("there is no rate any more");
        rig.step();
        rig.drain();
        let tokens = |id: u64| rig.requests[&id].tokens.len();
        assert_eq!(tokens(first), 50, "it was there before the cap");
        let capped = rig.requests.values().filter(|known| known.tokens.len() == 10).count();
        assert_eq!(capped, 2, "those that came under the cap");
    }
}

#[test]
fn what_the_scheduler_is_built_of_stays() {
    let rig = Rig::fair(config(8, 8192), |_| ());
    let refused = |change: fn(&mut PolicyConfig)| {
        let mut policy = rig.submitter().policy();
        change(&mut policy);
        let error = rig.submitter().set_policy(policy).expect_err("it cannot change");
        assert_eq!(rig.submitter().policy(), PolicyConfig::fair(), "nothing has changed");
        error.to_string()
    };
    assert!(refused(|policy| policy.order = Order::Fcfs).starts_with("order"));
    assert!(refused(|policy| policy.admission = Admission::Guaranteed).starts_with("admission"));
    assert!(refused(|policy| policy.fairness = Fairness::Off).starts_with("fairness"));
    assert!(refused(|policy| policy.aged_share = 7.0).starts_with("aged_share"));
}

#[test]
fn one_line_counts_no_tokens_afterwards() {
    let rig = Rig::new(SchedulerConfig { rules: Some(PolicyConfig::fcfs()), ..config(8, 8192) });
    let default_tenant = limits(|limits| limits.tokens_per_min = Some(100.0));
    let refused = rig.submitter().set_policy(PolicyConfig { default_tenant, ..PolicyConfig::fcfs() });
    let refused = refused.expect_err("nobody has counted so far").to_string();
    assert!(refused.starts_with("tokens_per_min"), "{refused}");
}

#[test]
fn a_fixed_group_and_a_closed_engine_have_no_other_policy() {
    let fixed = Scheduler::new(SchedulerConfig { policy: Policy::Static, ..SchedulerConfig::default() });
    let refused =
        fixed.expect("it is valid").submitter().set_policy(PolicyConfig::fcfs()).expect_err("it has no rules");
    assert!(refused.to_string().starts_with("policy"), "{refused}");
    let submitter = Scheduler::new(SchedulerConfig::default()).expect("it is valid").submitter();
    assert_eq!(submitter.set_policy(PolicyConfig::fcfs()), Err(Error::Closed));
}

#[test]
fn the_class_of_requests_that_name_none_is_the_tenants() {
    let rig = Rig::fair(config(8, 8192), |_| ());
    assert_eq!(rig.submitter().default_class(Some("a")), Class::Standard);
    let policy = fair(&[("a", limits(|limits| limits.priority = Some(Class::Batch)))]);
    rig.submitter().set_policy(policy).expect("defaults may change");
    assert_eq!(rig.submitter().default_class(Some("a")), Class::Batch);
    assert_eq!(rig.submitter().default_class(None), Class::Standard);
}
