//! Deadlines: who is first, and who is dropped.

use cbrs_core::policy::Class;
use cbrs_core::{FinishReason, RequestSpec};

use crate::rig::{Rig, config, request};

fn with_ttft(seed: u64, ttft_deadline_ms: f64) -> RequestSpec {
    RequestSpec { ttft_deadline_ms: Some(ttft_deadline_ms), ..request(Class::Standard, "", seed, 20) }
}

#[test]
fn the_earliest_deadline_is_first_within_a_tenant() {
    let mut rig = Rig::fair(config(1, 512), |_| ());
    rig.submit(request(Class::Standard, "", 0, 20), 3).expect("it fits");
    rig.step();
    let plain = rig.submit(request(Class::Standard, "", 1, 20), 3).expect("it fits");
    let late = rig.submit(with_ttft(2, 90_000.0), 3).expect("it fits");
    let early = rig.submit(with_ttft(3, 50_000.0), 3).expect("it fits");
    let between = RequestSpec { deadline_ms: Some(70_000.0), ..request(Class::Standard, "", 4, 20) };
    let between = rig.submit(between, 3).expect("it fits");
    rig.drain();
    let mut order = [plain, late, early, between];
    order.sort_by_key(|id| rig.requests[id].first_step);
    assert_eq!(order, [early, between, late, plain]);
}

#[test]
fn arrival_alone_counts_without_edf() {
    let mut rig = Rig::fair(config(1, 512), |rules| rules.order = cbrs_core::policy::Order::Fcfs);
    let ids = [30_000.0, 20_000.0, 10_000.0].map(|ms| rig.submit(with_ttft(ms as u64, ms), 3).expect("it fits"));
    rig.drain();
    let steps = ids.map(|id| rig.requests[&id].first_step);
    assert!(steps.is_sorted(), "{steps:?}");
}

#[test]
fn a_waiter_past_its_deadline_is_dropped_before_it_costs_anything() {
    let mut rig = Rig::fair(config(1, 512), |_| ());
    let running = rig.submit(request(Class::Standard, "", 0, 20), 100).expect("it fits");
    rig.step();
    let waiter = rig.submit(with_ttft(1, 50.0), 3).expect("it fits");
    let patient = rig.submit(with_ttft(2, 50_000.0), 3).expect("it fits");
    while rig.now_ns < 100_000_000 {
        rig.step();
    }
    let known = &rig.requests[&waiter];
    let (reason, detail) = known.end.clone().expect("it was dropped");
    assert_eq!((reason, known.first_step), (FinishReason::Error, None));
    assert!(detail.expect("it is told why").starts_with("the deadline passed"));
    assert_eq!(rig.submitter().stats().num_expired_requests, 1);
    rig.drain();
    assert_eq!(rig.requests[&running].tokens.len(), 100);
    assert_eq!(rig.requests[&patient].tokens.len(), 3);
}

#[test]
fn a_deadline_for_the_first_token_does_not_end_who_has_started() {
    let mut rig = Rig::fair(config(2, 512), |_| ());
    let id = rig.submit(with_ttft(1, 20.0), 30).expect("it fits");
    rig.drain();
    assert_eq!(rig.requests[&id].tokens.len(), 30);
}

#[test]
fn a_deadline_for_the_end_ends_who_runs() {
    let mut rig = Rig::fair(config(2, 512), |_| ());
    let spec = RequestSpec { deadline_ms: Some(60.0), ..request(Class::Standard, "", 1, 20) };
    let id = rig.submit(spec, 1000).expect("it fits");
    rig.drain();
    let known = &rig.requests[&id];
    assert!(known.tokens.len() > 3 && known.tokens.len() < 20, "{}", known.tokens.len());
    assert!(matches!(known.end, Some((FinishReason::Error, _))));
}

#[test]
fn a_paused_engine_drops_waiters_too_and_says_when_it_has_to_look() {
    let mut rig = Rig::fair(config(2, 512), |_| ());
    rig.set_paused(true);
    let id = rig.submit(with_ttft(1, 20.0), 3).expect("it fits");
    rig.now_ns += 10_000_000;
    rig.step();
    assert_eq!(rig.scheduler.next_timer_ns(), Some(20_000_001));
    rig.now_ns = 20_000_001;
    rig.step();
    assert!(rig.requests[&id].end.is_some());
    assert_eq!(rig.scheduler.next_timer_ns(), None);
    rig.drain();
}

#[test]
fn a_missed_deadline_says_what_the_request_did_and_what_would_help() {
    let mut rig = Rig::fair(config(1, 512), |_| ());
    let spec = |class, seed| RequestSpec { deadline_ms: Some(100.0), ..request(class, "", seed, 20) };
    let displaced = rig.submit(spec(Class::Batch, 0), 500).expect("it fits");
    rig.step();
    rig.step();
    let running = rig.submit(spec(Class::Interactive, 1), 500).expect("it fits");
    let waiting = rig.submit(spec(Class::Batch, 2), 500).expect("it fits");
    rig.drain();
    let detail = |id: u64| rig.requests[&id].end.clone().and_then(|(_, detail)| detail).expect("it is told why");
    for (id, state, advice) in [
        (displaced, "the request waited again to go on;", "give a later deadline or a higher priority"),
        (running, "the request still ran;", "give a later deadline or a lower max_tokens"),
        (waiting, "the request still waited after 1", "or send it when less waits"),
    ] {
        let text = detail(id);
        assert!(text.starts_with("the deadline passed: ") && text.contains(state) && text.ends_with(advice), "{text}");
    }
}
