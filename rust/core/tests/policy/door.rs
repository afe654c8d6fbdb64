//! The door of a running engine: what is let in and refused.

use cbrs_core::policy::Class;
use cbrs_core::{Error, RefusalReason, RequestSpec, SchedulerConfig};

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
    let counted: Vec<_> = rig.submitter().refusals().filter(|&(_, _, number)| number > 0).collect();
    assert_eq!(counted, [(Class::Interactive, RefusalReason::QueueRequests, 1)]);
    rig.drain();
}

/// Runs requests of these lengths, one after another, until the cost of a step is known.
fn warm_up(rig: &mut Rig, num_outputs: usize) {
    for seed in 0..30 {
        let id = rig.submit(request(Class::Standard, "", seed, 20 + 30 * seed as usize), num_outputs).expect("it fits");
        while rig.requests[&id].end.is_none() {
            rig.step();
        }
    }
    while !rig.step_id.is_multiple_of(16) || rig.batch.is_empty() {
        rig.submit(request(Class::Standard, "", 50 + rig.step_id, 20), 3).expect("it fits");
        rig.step();
    }
    rig.step();
}

/// A prompt of 3,200 tokens that takes 96 ms to compute, with 50 ms for its first token.
fn hasty() -> RequestSpec {
    RequestSpec { ttft_deadline_ms: Some(50.0), ..request(Class::Standard, "", 77, 3200) }
}

#[test]
fn a_prompt_that_may_be_cached_is_not_refused_for_its_length() {
    for enable_prefix_caching in [true, false] {
        let mut rig = Rig::fair(SchedulerConfig { enable_prefix_caching, ..config(4, 2048) }, |_| ());
        warm_up(&mut rig, 3);
        let known = rig.submit(request(Class::Standard, "", 77, 3200), 3).expect("it has no deadline");
        while rig.requests[&known].end.is_none() {
            rig.step();
        }
        rig.step();
        if enable_prefix_caching {
            let id = rig.submit(hasty(), 3).expect("it is cached");
            let arrival_ns = rig.now_ns;
            while rig.requests[&id].tokens.is_empty() {
                rig.step();
            }
            assert!(rig.now_ns - arrival_ns < 50_000_000, "and its first token is in time");
            let told = RequestSpec { prompt_logprobs: Some(0), ..hasty() };
            let refused = rig.submitter().submit_at(told, rig.now_ns).expect_err("it takes nothing from the cache");
            assert!(matches!(refused, Error::DeadlineUnattainable { .. }), "{refused}");
        } else {
            let refused = rig.submitter().submit_at(hasty(), rig.now_ns).expect_err("it takes 96 ms");
            assert!(matches!(refused, Error::DeadlineUnattainable { retry_after_s: None, .. }), "{refused}");
            assert!(refused.to_string().contains("shorter prompt"), "{refused}");
        }
        rig.drain();
    }
}

#[test]
fn a_deadline_that_the_output_cannot_meet_is_refused_on_arrival() {
    let mut rig = Rig::fair(config(4, 2048), |_| ());
    warm_up(&mut rig, 100);
    // 100 tokens take half a second.
    let spec = |deadline_ms| RequestSpec { deadline_ms: Some(deadline_ms), ..request(Class::Standard, "", 99, 20) };
    let refused = rig.submitter().submit_at(spec(200.0), rig.now_ns).expect_err("it ends later");
    assert!(matches!(refused, Error::DeadlineUnattainable { token: "last", retry_after_s: None, .. }), "{refused}");
    let id = rig.submit(spec(700.0), 100).expect("it ends in time");
    let short = RequestSpec { max_tokens: Some(20), ..spec(200.0) };
    let short = rig.submit(short, 20).expect("20 tokens end in time");
    rig.drain();
    assert_eq!([id, short].map(|id| rig.requests[&id].tokens.len()), [100, 20]);
}

#[test]
fn who_comes_after_the_clock_was_read_is_not_aged() {
    let mut rig = Rig::fair(config(1, 512), |rules| rules.aging_s = 100.0);
    rig.now_ns = 5_000_000_000;
    let running = rig.submit(request(Class::Interactive, "", 0, 20), 40).expect("it fits");
    rig.step();
    let urgent: Vec<u64> =
        (1..4).map(|seed| rig.submit(request(Class::Interactive, "", seed, 20), 3).expect("it fits")).collect();
    // Its step reads the clock 1 s before it comes.
    rig.now_ns += 1_000_000_000;
    let batch = rig.submit(request(Class::Batch, "", 9, 20), 3).expect("it fits");
    rig.now_ns -= 1_000_000_000;
    rig.drain();
    let first_step = |id: &u64| rig.requests[id].first_step.expect("it has run");
    assert!(urgent.iter().all(|id| first_step(id) < first_step(&batch)), "batch is last");
    assert!(rig.requests[&running].end.is_some());
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
    let mut rig = Rig::fair(config(4, 2048), |_| ());
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
    let refused = RequestSpec { ttft_deadline_ms: Some(1000.0), ..spec(999) };
    let refused = rig.submitter().submit_at(refused, rig.now_ns).expect_err("far more than a second waits");
    assert!(refused.retry_after_s().is_some_and(|seconds| seconds > 20.0), "{refused}");
    for (index, id) in rig.requests.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
        if index % 2 == 0 {
            rig.cancel(id);
        }
    }
    rig.drain();
}

#[test]
fn under_a_bound_in_seconds_no_more_wait_than_there_are_rows_until_a_step_is_known() {
    for (max_queue_s, most) in [(Some(1.0), 4), (None, 100)] {
        let mut rig = Rig::fair(config(4, 2048), |rules| rules.max_queue_s = max_queue_s);
        let num_accepted =
            (0..100).filter(|&seed| rig.submit(request(Class::Standard, "", seed, 20), 3).is_some()).count();
        assert_eq!(num_accepted, most, "{max_queue_s:?}");
        rig.drain();
    }
}
