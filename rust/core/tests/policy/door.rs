//! The door of a running engine: what is let in and refused.

use cbrs_core::policy::Class;
use cbrs_core::{Error, RequestSpec, SchedulerConfig};

use crate::rig::{Rig, config, request};

#[test]
fn displaced_requests_take_no_place_in_the_queue() {
    let config = SchedulerConfig { queue_capacity: 20, ..config(8, 2048) };
    let mut rig = Rig::fair(config, |rules| rules.fairness = cbrs_core::policy::Fairness::Off);
    for seed in 0..8 {
        rig.submit(request(Class::Batch, "", seed, 20), 200).expect("it fits");
    }
    rig.step();
    for seed in 8..24 {
        rig.submit(request(Class::Batch, "", seed, 20), 200).expect("batch may fill 16 of 20 places");
    }
    for seed in 24..32 {
        rig.submit(request(Class::Interactive, "", seed, 20), 100).expect("it displaces a batch request");
        rig.step();
    }
    assert_eq!(rig.submitter().stats().num_refused_requests, 0);
    for seed in 40..44 {
        rig.submit(request(Class::Interactive, "", seed, 20), 100).expect("4 places are kept for urgent requests");
    }
    let spec = request(Class::Interactive, "", 99, 20);
    let refused = rig.submitter().submit_at(spec, rig.now_ns).expect_err("now it is full");
    assert!(matches!(refused, Error::QueueFull { limit: 20, .. }), "{refused}");
    assert_eq!(rig.submitter().stats().num_refused_requests, 1);
    rig.drain();
}

/// Predicted service of ten requests like those before, which ended after 20 tokens by a stop string or by themselves.
fn predicted_after_short_outputs(by_stop_string: bool) -> f64 {
    let mut rig = Rig::fair(config(4, 2048), |_| ());
    for seed in 0..100 {
        let num_outputs = if by_stop_string { 1000 } else { 20 };
        let id = rig.submit(request(Class::Standard, "", seed, 20), num_outputs).expect("it fits");
        while rig.requests[&id].tokens.len() < 20 {
            rig.step();
        }
        if by_stop_string {
            rig.finish((id, 0));
            rig.step();
        }
        assert!(rig.requests[&id].end.is_some());
    }
    rig.step();
    rig.step();
    for seed in 100..114 {
        let spec = RequestSpec { max_tokens: Some(2000), ..request(Class::Standard, "", seed, 20) };
        rig.submit(spec, 20).expect("it fits");
    }
    rig.submitter().stats().queued_service_s
}

#[test]
fn outputs_that_end_at_a_stop_string_are_learned_from() {
    let [by_stop, by_eos] = [true, false].map(predicted_after_short_outputs);
    assert!((0.9..1.15).contains(&(by_stop / by_eos)), "{by_stop} s instead of {by_eos} s");
}

#[test]
fn the_predicted_service_is_that_of_as_many_as_memory_lets_run() {
    // 64 rows, and memory for a tenth of them.
    let mut rig = Rig::fair(config(64, 150), |rules| rules.admission = cbrs_core::policy::Admission::Guaranteed);
    let ids: Vec<u64> = (0..120)
        .map(|seed| {
            let spec = RequestSpec { max_tokens: Some(100), ..request(Class::Standard, "", seed, 256) };
            rig.submit(spec, 100).expect("it fits")
        })
        .collect();
    while rig.requests[&ids[39]].end.is_none() {
        rig.step();
    }
    let predicted_s = rig.submitter().stats().queued_service_s;
    let start_ns = rig.now_ns;
    while rig.requests[&ids[119]].first_step.is_none() {
        rig.step();
    }
    let waited_s = (rig.now_ns - start_ns) as f64 / 1e9;
    assert!((0.8..1.25).contains(&(predicted_s / waited_s)), "{predicted_s} s were predicted, {waited_s} s it took");
}

#[test]
fn what_came_before_service_was_known_is_counted_when_it_is() {
    let mut rig = Rig::fair(config(4, 2048), |rules| rules.max_queue_s = Some(1.0));
    let spec = |seed| RequestSpec { max_tokens: Some(100), ..request(Class::Standard, "", seed, 20) };
    for seed in 0..300 {
        rig.submit(spec(seed), 100).expect("nobody knows how long it takes");
    }
    for _ in 0..12 {
        rig.step();
    }
    let queued_s = rig.submitter().stats().queued_service_s;
    // 4 rows in steps of 5 ms: 100 tokens take about 125 ms of the engine.
    assert!((25.0..60.0).contains(&queued_s), "{queued_s} s for 296 requests");
    let refused = rig.submitter().submit_at(spec(999), rig.now_ns).expect_err("far more than a second waits");
    assert!(refused.retry_after_s().is_some_and(|seconds| seconds > 20.0), "{refused}");
    for (index, id) in rig.requests.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
        if index % 2 == 0 {
            rig.cancel(id);
        }
    }
    rig.drain();
}
