//! The door as a whole, with manual times, and whether it keeps its promises.

use std::collections::BinaryHeap;

use super::*;
use crate::policy::PolicyConfig;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

pub(super) fn door(queue_capacity: usize, rules: PolicyConfig) -> AdmissionControl {
    let config = SchedulerConfig { queue_capacity, max_num_seqs: 4, rules: Some(rules), ..SchedulerConfig::default() };
    AdmissionControl::new(&config.validate().expect("the configuration is valid"))
}

/// Every request of `prompt` tokens and at least 100 output tokens takes 100 ms + 1 ms for each prompt token.
pub(super) fn publish_plain(door: &AdmissionControl) {
    door.publish(&ServiceFigures {
        ns_per_prompt_token: 1e6,
        ns_per_output_token: 1e6,
        expected_output_tokens: [100.0; 3],
        likely_output_tokens: [40.0; 3],
        ns_per_step: 5e6,
        num_startable: 0,
    });
}

/// Rules of `fcfs`, besides what `change` says.
pub(super) fn fcfs(change: impl FnOnce(&mut PolicyConfig)) -> PolicyConfig {
    let mut rules = PolicyConfig::fcfs();
    change(&mut rules);
    rules
}

pub(super) fn fair(change: impl FnOnce(&mut PolicyConfig)) -> PolicyConfig {
    let mut rules = PolicyConfig::fair();
    change(&mut rules);
    rules
}

/// An arrival at time 0 of a request without a prompt to speak of.
pub(super) fn arrival(limits: &TenantLimits, class: Class) -> Arrival<'_> {
    Arrival {
        num_requests: 1,
        tenant: None,
        limits,
        class,
        num_prompt_tokens: 0,
        num_cacheable_tokens: 0,
        max_tokens: 1000,
        num_choices: 1,
        deadline_ns: None,
        end_deadline_ns: None,
        now_ns: 0,
    }
}

/// Reserves until it is refused.
fn fill(door: &AdmissionControl, arrival: &Arrival<'_>) -> (Vec<Reservation>, Error) {
    let mut held = Vec::new();
    loop {
        match door.reserve(arrival) {
            Ok(reservation) => held.push(reservation),
            Err(error) => return (held, error),
        }
    }
}

pub(super) fn end(door: &AdmissionControl, held: impl IntoIterator<Item = Reservation>) {
    for reservation in held {
        door.release(&reservation);
        door.leave(reservation.tenant);
    }
}

#[test]
fn a_class_fills_its_part_of_the_bounds() {
    let rules = fcfs(|rules| rules.classes = PolicyConfig::fair().classes);
    let limits = TenantLimits::default();
    let door = door(100, rules);
    let mut all = Vec::new();
    for (class, limit) in [(Class::Batch, 80), (Class::Standard, 95), (Class::Interactive, 100)] {
        let (held, refused) = fill(&door, &arrival(&limits, class));
        assert_eq!(refused, Error::QueueFull { queued: limit, limit, retry_after_s: UNKNOWN_RETRY_S });
        all.extend(held);
        assert_eq!(all.len(), limit);
    }
    end(&door, all);
    door.check_drained();
    assert_eq!((door.refusals().total(), door.refused().num_requests), (3, 3));
}

#[test]
fn without_a_model_nobody_is_refused_for_time() {
    let limits = TenantLimits::default();
    let door = door(10, fcfs(|rules| rules.max_queue_s = Some(0.001)));
    let hasty = Arrival { deadline_ns: Some(1), ..arrival(&limits, Class::Standard) };
    let (held, refused) = fill(&door, &hasty);
    // As many as there are rows.
    assert_eq!((held.len(), refused), (4, Error::QueueFull { queued: 4, limit: 4, retry_after_s: 1.0 }));
    end(&door, held);
    door.check_drained();
}

#[test]
fn the_bound_in_seconds_holds_and_opens_again_at_nine_tenths() {
    let limits = TenantLimits::default();
    let door = door(1000, fcfs(|rules| rules.max_queue_s = Some(1.0)));
    publish_plain(&door);
    let request = arrival(&limits, Class::Standard);
    let (mut held, refused) = fill(&door, &request);
    assert_eq!(held.len(), 10);
    assert!((door.queued_service_s() - 1.0).abs() < 1e-9);
    assert!(door.load().is_refusing);
    // A tenth of a second until there is room.
    assert_eq!(refused, Error::QueueTooLong { predicted_s: 1.0, limit_s: 1.0, retry_after_s: 0.100_001 });
    end(&door, held.drain(..1));
    let refused = door.reserve(&request).expect_err("9/10 are left");
    // The one before has 100 ms at 0.9 of the capacity.
    assert_eq!(refused.retry_after_s().map(|seconds| (seconds * 1e6) as u64), Some(211_112));
    end(&door, held.drain(..1));
    assert!(!door.load().is_refusing);
    held.push(door.reserve(&request).expect("8/10 are left"));
    end(&door, held);
    door.check_drained();
}

#[test]
fn more_urgent_work_makes_a_class_wait_longer() {
    let limits = TenantLimits::default();
    let door = door(1000, fcfs(|rules| rules.max_queue_s = Some(1.0)));
    publish_plain(&door);
    door.publish_load(&LoadFigures { class_loads: [0.25, 0.25, 7.0], ..LoadFigures::default() });
    let (batch, refused) = fill(&door, &arrival(&limits, Class::Batch));
    assert_eq!(batch.len(), 5, "interactive and standard take half of the capacity");
    assert_eq!(refused, Error::QueueTooLong { predicted_s: 1.0, limit_s: 1.0, retry_after_s: 0.2 });
    let (standard, _) = fill(&door, &arrival(&limits, Class::Standard));
    assert_eq!(standard.len(), 7, "interactive takes a quarter");
    let (interactive, _) = fill(&door, &arrival(&limits, Class::Interactive));
    assert_eq!(interactive.len(), 10);
    assert!(matches!(door.reserve(&arrival(&limits, Class::Batch)), Err(Error::QueueTooLong { .. })));
    end(&door, batch.into_iter().chain(standard).chain(interactive));
    door.check_drained();
}

#[test]
fn a_deadline_that_cannot_be_met_is_refused_with_both_times() {
    let limits = TenantLimits::default();
    let door = door(1000, PolicyConfig::fcfs());
    publish_plain(&door);
    let request = Arrival { num_prompt_tokens: 50, deadline_ns: Some(400 * MS), ..arrival(&limits, Class::Standard) };
    let (held, refused) = fill(&door, &request);
    assert_eq!(held.len(), 3, "the third waits for 300 ms and computes its prompt for 50");
    let Error::DeadlineUnattainable { token: "first", predicted_ms, deadline_ms, retry_after_s: Some(retry_after_s) } =
        refused
    else {
        panic!("{refused}")
    };
    assert!((predicted_ms - 500.0).abs() < 1e-6 && (deadline_ms - 400.0).abs() < 1e-6, "{predicted_ms} {deadline_ms}");
    // 450 ms wait, and 350 are allowed; to a tenth below that.
    assert!((retry_after_s - (0.45 - 0.35 * 0.9)).abs() < 1e-6, "{retry_after_s}");
    assert!(door.reserve(&Arrival { deadline_ns: Some(501 * MS), ..request }).is_ok(), "a later one is attainable");
    let hopeless = Arrival { num_prompt_tokens: 500, ..request };
    assert!(matches!(door.reserve(&hopeless), Err(Error::DeadlineUnattainable { retry_after_s: None, .. })));
    assert_eq!(door.refused().num_requests, 1, "its own prompt is too long, whatever the load");
    // The next step has room for five.
    door.publish(&ServiceFigures {
        ns_per_prompt_token: 1e6,
        ns_per_output_token: 1e6,
        expected_output_tokens: [100.0; 3],
        num_startable: 5,
        ..ServiceFigures::default()
    });
    assert!(door.reserve(&request).is_ok(), "the fifth would start at once");
    assert!(matches!(door.reserve(&hopeless), Err(Error::DeadlineUnattainable { retry_after_s: None, .. })));
    assert_eq!(door.refused().num_requests, 1);
    assert!(door.reserve(&Arrival { num_cacheable_tokens: 496, ..hopeless }).is_ok(), "who knows what is cached");
}

#[test]
fn a_deadline_for_the_end_is_refused_if_few_outputs_are_so_short() {
    let limits = TenantLimits::default();
    let door = door(1000, PolicyConfig::fcfs());
    publish_plain(&door);
    let of = |deadline_ms: u64| Arrival {
        num_prompt_tokens: 50,
        deadline_ns: Some(deadline_ms * MS),
        end_deadline_ns: Some(deadline_ms * MS),
        ..arrival(&limits, Class::Standard)
    };
    // 50 ms for its prompt, and nine of ten outputs take 39 steps of 5 ms after their first token.
    let refused = door.reserve(&of(244)).expect_err("it would end after 245 ms");
    let text = refused.to_string();
    assert!(text.contains("the last token is predicted after 245.0 ms, but the deadline is after 244.0"), "{text}");
    assert!(text.ends_with("give a later deadline or a lower max_tokens") && !text.contains("try again"), "{text}");
    assert_eq!((refused.retry_after_s(), door.refused().num_requests), (None, 0), "the load is not the cause");
    assert!(door.reserve(&of(245)).is_ok());
    let refused = door.reserve(&of(300)).expect_err("it waits for 150 ms, too");
    assert!(refused.retry_after_s().is_some() && refused.to_string().contains("last token"), "{refused}");
    let short = Arrival { max_tokens: 3, ..of(244) };
    assert!(door.reserve(&short).is_ok(), "150 ms of waiting, 50 ms, and two steps");
}

#[test]
fn a_flooding_tenant_leaves_room_for_others() {
    for max_queue_s in [None, Some(10.0)] {
        let capacity = if max_queue_s.is_some() { 1000 } else { 100 };
        let door = door(capacity, fair(|rules| rules.max_queue_s = max_queue_s));
        publish_plain(&door);
        let (limits, [flooder, polite, other]) =
            (TenantLimits::default(), ["flooder", "polite", "other"].map(Arc::from));
        let of = |tenant| Arrival { tenant: Some(tenant), ..arrival(&limits, Class::Interactive) };
        let (mut held, refused) = fill(&door, &of(&flooder));
        assert_eq!(held.len(), 80, "four times what is free");
        let what = if max_queue_s.is_some() { "seconds of work" } else { "requests" };
        let Error::TenantQueueFull { tenant, what: told, queued, limit, .. } = &refused else { panic!("{refused}") };
        assert_eq!((&**tenant, *told), ("flooder", what), "{refused}");
        assert!(queued >= limit, "{refused}");
        let hasty = Arrival { deadline_ns: Some(250 * MS), ..of(&polite) };
        held.push(door.reserve(&hasty).expect("nothing of its own waits"));
        held.push(door.reserve(&hasty).expect("0.1 s of its own, and two tenants take turns"));
        let refused = door.reserve(&hasty).expect_err("0.2 s of its own, and two tenants take turns");
        assert!(matches!(refused, Error::DeadlineUnattainable { predicted_ms: 399.0..401.0, .. }), "{refused}");
        held.push(door.reserve(&of(&polite)).expect("without a deadline it may wait"));
        let (others, refused) = fill(&door, &of(&other));
        assert!(matches!(refused, Error::TenantQueueFull { .. } | Error::QueueTooLong { .. }), "{refused}");
        assert!(others.len() >= 10, "it has its part of what the flooder has left: {}", others.len());
        end(&door, held.into_iter().chain(others));
        door.check_drained();
    }
}

#[test]
fn heavier_tenants_wait_less() {
    let door = door(1000, PolicyConfig::fair());
    publish_plain(&door);
    let (light, heavy) = (TenantLimits::default(), TenantLimits { weight: 3.0, ..TenantLimits::default() });
    let names = ["light", "heavy"].map(Arc::from);
    let of_light = Arrival { tenant: Some(&names[0]), ..arrival(&light, Class::Standard) };
    let of_heavy = Arrival { tenant: Some(&names[1]), ..arrival(&heavy, Class::Standard) };
    for _ in 0..3 {
        assert!(door.reserve(&of_light).is_ok() && door.reserve(&of_heavy).is_ok());
    }
    let wait_us = |arrival: &Arrival<'_>| {
        let hasty = Arrival { deadline_ns: Some(1), ..*arrival };
        match door.reserve(&hasty) {
            Err(Error::DeadlineUnattainable { predicted_ms, .. }) => (predicted_ms * 1e3).round() as u64,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(wait_us(&of_heavy), 400_000, "0.3 s of its own at 3/4");
    assert_eq!(wait_us(&of_light), 600_000, "0.3 s of its own at 1/4, but no more than all that waits");
}

#[test]
fn rates_of_a_tenant_are_charged_for_what_is_let_in() {
    let limits = TenantLimits { requests_per_min: Some(30.0), tokens_per_min: Some(6000.0), ..TenantLimits::default() };
    let gold: Arc<str> = Arc::from("gold");
    let rules = fcfs(|rules| rules.tenants = [(Arc::clone(&gold), limits.clone())].into());
    let door = door(3, rules);
    let request =
        Arrival { tenant: Some(&gold), num_prompt_tokens: 1000, now_ns: 5 * S, ..arrival(&limits, Class::Batch) };
    let (held, refused) = fill(&door, &request);
    assert_eq!((held.len(), refused), (3, Error::QueueFull { queued: 3, limit: 3, retry_after_s: 1.0 }));
    end(&door, held);
    let (mut held, refused) = fill(&door, &request);
    assert_eq!(held.len(), 3, "the refused one was not charged");
    assert!(matches!(refused, Error::TenantOverRate { .. }), "6000 tokens are used: {refused}");
    let expected =
        |what, limit, retry_after_s| Error::TenantOverRate { tenant: Arc::clone(&gold), what, limit, retry_after_s };
    assert_eq!(refused, expected("tokens_per_min", 6000.0, 10.0));
    end(&door, held.drain(1..));
    door.charge_output(held[0].tenant, 50, 5 * S);
    assert_eq!(door.reserve(&request), Err(expected("tokens_per_min", 6000.0, 10.5)), "outputs are paid for later");
    let small = Arrival { num_prompt_tokens: 1, now_ns: 66 * S, ..request };
    let mut num_accepted = 0;
    let refused = loop {
        match door.reserve(&small) {
            Ok(reservation) => end(&door, [reservation]),
            Err(refused) => break refused,
        }
        num_accepted += 1;
    };
    assert_eq!((num_accepted, refused), (30, expected("requests_per_min", 30.0, 2.0)));
    assert_eq!(door.refused().num_requests, 1, "only the full queue is a matter of load");
    let stranger = Arrival { tenant: None, limits: &TenantLimits::default(), ..request };
    end(&door, [door.reserve(&stranger).expect("others have no rate")]);
    end(&door, held);
    door.check_drained();
}

#[test]
fn rates_hold_however_many_tenants_come() {
    let limits = TenantLimits { requests_per_min: Some(1.0), ..TenantLimits::default() };
    let mut door = door(16, fcfs(|rules| rules.default_tenant = limits.clone()));
    let names: Vec<Arc<str>> = (0..2000).map(|index| Arc::from(format!("tenant {index}"))).collect();
    let come = |door: &AdmissionControl, name: &Arc<str>| {
        let reservation = door.reserve(&Arrival { tenant: Some(name), ..arrival(&limits, Class::Standard) })?;
        end(door, [reservation]);
        Ok(())
    };
    for name in &names {
        assert_eq!(come(&door, name), Ok(()), "a small queue is no reason to know few tenants");
    }
    for name in &names {
        assert!(matches!(come(&door, name), Err(Error::TenantOverRate { .. })), "{name} has used its minute");
    }
    // A table that is full.
    door.tenants = TenantTable::new(8).into();
    let results: Vec<_> = names.iter().map(|name| come(&door, name)).collect();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 16);
    let refused = results.into_iter().find_map(Result::err).expect("there are 16 cells");
    assert!(matches!(refused, Error::TooManyTenants { retry_after_s: UNKNOWN_RETRY_S, .. }), "{refused}");
    let free = TenantLimits::default();
    let unlimited = Arrival { tenant: Some(&names[99]), ..arrival(&free, Class::Standard) };
    end(&door, [door.reserve(&unlimited).expect("there is nothing to count")]);
    door.check_drained();
}

#[test]
fn a_full_queue_promises_when_a_tenth_of_it_is_gone() {
    let limits = TenantLimits::default();
    let door = door(20, PolicyConfig::fcfs());
    publish_plain(&door);
    door.publish_load(&LoadFigures { base_load: 0.5, ..LoadFigures::default() });
    let (held, refused) = fill(&door, &arrival(&limits, Class::Standard));
    assert_eq!(held.len(), 20);
    let Error::QueueFull { queued: 20, limit: 20, retry_after_s } = refused else { panic!("{refused}") };
    // 3 of 20 requests of 0.1 s; nobody is let in meanwhile.
    assert!((retry_after_s - 0.3).abs() < 1e-6, "{retry_after_s}");
    // The one before has its 0.1 s at 0.4 of the capacity.
    let refused = door.reserve(&arrival(&limits, Class::Standard)).expect_err("the queue is full");
    assert!(refused.retry_after_s().is_some_and(|seconds| (seconds - 0.55).abs() < 1e-6), "{refused}");
}

#[test]
fn the_bounds_in_requests_and_tokens_open_again_at_nine_tenths() {
    let limits = TenantLimits::default();
    for bounds_tokens in [false, true] {
        let max_queued_tokens = bounds_tokens.then_some(50);
        let config = SchedulerConfig { queue_capacity: 50, max_queued_tokens, ..SchedulerConfig::default() };
        let door = AdmissionControl::new(&config.validate().expect("the configuration is valid"));
        let of = |num_prompt_tokens| Arrival { num_prompt_tokens, ..arrival(&limits, Class::Standard) };
        let mut held = vec![door.reserve(&of(1)).expect("there is room")];
        if bounds_tokens {
            assert!(door.reserve(&of(50)).is_err_and(|error| error.to_string().contains("at most 50 may wait now")));
        }
        assert!(!door.load().is_refusing, "one prompt that is too large closes nothing");
        let (more, refused) = fill(&door, &of(1));
        held.extend(more);
        assert_eq!(held.len(), 50, "{refused}");
        for num_left in (45..50).rev() {
            end(&door, held.drain(..1));
            let refused = door.reserve(&of(1)).expect_err("9/10 are left");
            assert!(refused.to_string().contains("at most 45 may"), "{num_left} are left: {refused}");
            assert!(door.load().is_refusing);
        }
        end(&door, held.drain(..1));
        assert!(!door.load().is_refusing);
        let (more, _) = fill(&door, &of(1));
        assert_eq!(more.len(), 6, "the refusing has ended");
        end(&door, held.into_iter().chain(more));
        door.check_drained();
    }
}

#[test]
fn a_tenant_whose_part_is_full_closes_the_class_for_nobody_else() {
    for max_queue_s in [None, Some(10.0)] {
        let capacity = if max_queue_s.is_some() { 1000 } else { 100 };
        let door = door(capacity, fair(|rules| rules.max_queue_s = max_queue_s));
        publish_plain(&door);
        let (limits, [a, b]) = (TenantLimits::default(), ["a", "b"].map(Arc::from));
        let of = |tenant| Arrival { tenant: Some(tenant), ..arrival(&limits, Class::Interactive) };
        let mut others: Vec<_> = (0..32).map(|_| door.reserve(&of(&b)).expect("there is room")).collect();
        let (mut held, refused) = fill(&door, &of(&a));
        assert!(matches!(refused, Error::TenantQueueFull { .. }), "{refused}");
        // Four times what is free: 4 * (100 - 32 - own).
        assert_eq!(held.len(), 55);
        assert!(!door.load().is_refusing, "only its own part is full");
        let (more, _) = fill(&door, &of(&b));
        others.extend(more);
        assert_eq!(others.len(), 36, "four times what a has left");
        // The tenant itself waits until a tenth of what it had is gone.
        end(&door, others.drain(..10));
        end(&door, held.drain(..5));
        let refused = door.reserve(&of(&a)).expect_err("50 of 55 are left");
        assert!(matches!(refused, Error::TenantQueueFull { .. }), "{refused}");
        end(&door, held.drain(..1));
        held.push(door.reserve(&of(&a)).expect("49 of 55 are left"));
        end(&door, held.into_iter().chain(others));
        door.check_drained();
    }
}

#[test]
fn messages_tell_the_limit_and_when_to_come_back() {
    let error = Error::QueueTooLong { predicted_s: 31.25, limit_s: 30.0, retry_after_s: 2.5 };
    let text = error.to_string();
    assert!(["31.250 s", "30.000", "max_queue_s", "2.500 s"].iter().all(|part| text.contains(part)), "{text}");
    let error = Error::TenantOverRate { tenant: "gold".into(), what: "tokens_per_min", limit: 6e3, retry_after_s: 1.0 };
    assert_eq!(error.to_string(), "tenant \"gold\" is above its tokens_per_min of 6000; try again in 1.000 s");
    assert_eq!(Error::Closed.retry_after_s(), None);
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    fn exponential(&mut self) -> f64 {
        -self.uniform().ln()
    }

    fn normal(&mut self) -> f64 {
        (2.0 * self.exponential()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// What happens, the earliest first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Fresh,
    Return,
    Done,
}

#[derive(Debug, Default)]
struct Outcome {
    num_refused: u64,
    num_returns: u64,
    num_kept: u64,
    last_return_ns: u64,
}

/// One server that works off the queue in order of arrival; outputs are log-normal around 128 tokens. Poisson arrivals at half of its
/// capacity, and ten times its capacity for 5 s. The refused come back when they were told, once.
fn burst(door: &AdmissionControl, deadline_ns: Option<u64>, seed: u64) -> Outcome {
    const BURST: std::ops::Range<u64> = 30 * S..35 * S;
    // The `gpu` profile of the benchmarks: 64 rows.
    let (per_prompt_token, per_output_token) = (30_000.0, 5e6 / 64.0 + 30_000.0 + 40.0 * 320.0);
    door.publish(&ServiceFigures {
        ns_per_prompt_token: per_prompt_token,
        ns_per_output_token: per_output_token,
        expected_output_tokens: [128.0; 3],
        likely_output_tokens: [50.0; 3],
        ns_per_step: 7e6,
        num_startable: 0,
    });
    let mean_ns = 256.0 * per_prompt_token + 128.0 * per_output_token;
    let limits = TenantLimits::default();
    let (mut random, mut rates, mut outcome) = (Random(seed), Rates::default(), Outcome::default());
    let mut events = BinaryHeap::from([std::cmp::Reverse((0, Event::Fresh))]);
    let mut queue: std::collections::VecDeque<(Reservation, u64)> = std::collections::VecDeque::new();
    let mut is_busy = false;
    while let Some(std::cmp::Reverse((now_ns, event))) = events.pop() {
        match event {
            Event::Done => is_busy = false,
            Event::Fresh | Event::Return => {
                let request =
                    Arrival { num_prompt_tokens: 256, deadline_ns, now_ns, ..arrival(&limits, Class::Interactive) };
                let answer = door.reserve(&request);
                if event == Event::Return {
                    outcome.num_returns += 1;
                    outcome.num_kept += u64::from(answer.is_ok());
                    outcome.last_return_ns = now_ns;
                }
                match answer {
                    Ok(reservation) => {
                        rates.enter(reservation.class, u64::from(reservation.service_us));
                        let num_output_tokens = 128.0 * (0.7 * random.normal() - 0.245).exp();
                        let service = 256.0 * per_prompt_token + num_output_tokens * per_output_token;
                        queue.push_back((reservation, service as u64));
                    }
                    Err(refused) if event == Event::Fresh => {
                        outcome.num_refused += 1;
                        let seconds = refused.retry_after_s().expect("it was refused because of load");
                        events.push(std::cmp::Reverse((now_ns + (seconds * 1e9) as u64, Event::Return)));
                    }
                    Err(_) => {}
                }
                if event == Event::Fresh {
                    let load = if BURST.contains(&now_ns) { 10.0 } else { 0.5 };
                    let next_ns = now_ns + (random.exponential() * mean_ns / load) as u64;
                    if next_ns < 300 * S {
                        events.push(std::cmp::Reverse((next_ns, Event::Fresh)));
                    }
                }
            }
        }
        if !is_busy && let Some((reservation, service_ns)) = queue.pop_front() {
            end(door, [reservation]);
            is_busy = true;
            events.push(std::cmp::Reverse((now_ns + service_ns, Event::Done)));
        }
        rates.tick(now_ns, door);
    }
    door.check_drained();
    outcome
}

/// Its name, its door, and a deadline of all requests.
type Scenario<'a> = (&'a str, &'a dyn Fn() -> AdmissionControl, Option<u64>);

#[test]
fn nine_of_ten_who_come_back_when_they_were_told_are_admitted() {
    let bound_in_seconds = |seconds| move |rules: &mut PolicyConfig| rules.max_queue_s = Some(seconds);
    let scenarios: [Scenario<'_>; 6] = [
        ("2 s", &|| door(100_000, fcfs(bound_in_seconds(2.0))), None),
        ("10 s", &|| door(100_000, fcfs(bound_in_seconds(10.0))), None),
        ("30 s", &|| door(100_000, fcfs(bound_in_seconds(30.0))), None),
        ("2 s, fair", &|| door(100_000, fair(bound_in_seconds(2.0))), None),
        ("deadlines of 2 s", &|| door(100_000, PolicyConfig::fcfs()), Some(2 * S)),
        ("100 requests", &|| door(100, PolicyConfig::fcfs()), None),
    ];
    for (name, make, deadline_ns) in scenarios {
        for seed in 0..5 {
            let outcome = burst(&make(), deadline_ns, seed);
            assert!(outcome.num_refused > 500, "{name}, seed {seed}: {outcome:?}");
            assert_eq!(outcome.num_returns, outcome.num_refused);
            let part = outcome.num_kept as f64 / outcome.num_returns as f64;
            assert!(part >= 0.9, "{name}, seed {seed}: {part:.3} of {outcome:?}");
        }
    }
}
