//! Many tenants whose requests lack memory, and those who would fit behind them.

use cbrs_core::SchedulerConfig;
use cbrs_core::policy::{Admission, Class, PolicyConfig};

use crate::rig::{Rig, config, request};
use crate::rng::Rng;

/// A pool of 40 blocks, 30 of them held for 150 steps, in which a request of 200 tokens does not fit.
fn crowded(change: impl FnOnce(&mut PolicyConfig)) -> (Rig, u64) {
    let mut rig = Rig::fair(config(64, 40), |rules| {
        rules.admission = Admission::Prompt;
        rules.max_preemptions = 0;
        change(rules);
    });
    let holder = rig.submit(request(Class::Interactive, "holder", 1, 480), 150).expect("it fits");
    rig.step();
    (rig, holder)
}

fn submit_large(rig: &mut Rig, class: Class, num_requests: u64, tenant: impl Fn(u64) -> String) -> Vec<u64> {
    let submit = |index| rig.submit(request(class, &tenant(index), 100 + index, 200), 3).expect("it fits alone");
    (0..num_requests).map(submit).collect()
}

#[test]
fn tenants_whose_requests_do_not_fit_do_not_keep_others_from_starting() {
    let (mut rig, holder) = crowded(|_| {});
    let large = submit_large(&mut rig, Class::Interactive, 60, |index| format!("large {index}"));
    rig.step();
    let small = rig.submit(request(Class::Interactive, "small", 2, 10), 3).expect("it fits");
    let mut num_steps = 0;
    while rig.requests[&small].first_step.is_none() {
        rig.step();
        num_steps += 1;
        assert!(num_steps <= 4, "each step gets further in the line");
    }
    assert!(rig.requests[&holder].end.is_none() && large.iter().all(|id| rig.requests[id].first_step.is_none()));
    // All of them start as soon as there is room, those that have waited longest first.
    rig.drain();
    let starts: Vec<u64> = large.iter().map(|id| rig.requests[id].first_step.expect("it ran")).collect();
    assert!(starts.is_sorted(), "{starts:?}");
}

#[test]
fn a_tenant_with_many_requests_that_do_not_fit_does_not_keep_another_from_starting() {
    let (mut rig, _) = crowded(|_| {});
    submit_large(&mut rig, Class::Interactive, 40, |_| String::from("large"));
    rig.step();
    let small = rig.submit(request(Class::Interactive, "small", 2, 10), 3).expect("it fits");
    rig.step();
    assert!(rig.requests[&small].first_step.is_some());
    rig.drain();
}

#[test]
fn while_any_of_many_lacks_memory_nothing_of_a_lower_class_starts() {
    let (mut rig, holder) = crowded(|_| {});
    let large = submit_large(&mut rig, Class::Interactive, 60, |index| format!("large {index}"));
    let batch = rig.submit(request(Class::Batch, "batch", 2, 10), 3).expect("it fits");
    for num_left in (0..large.len()).rev() {
        rig.step();
        assert!(!rig.is_running(batch) && rig.requests[&holder].end.is_none());
        rig.cancel(large[num_left]);
    }
    rig.step();
    assert!(rig.is_running(batch), "nobody lacks memory now");
    rig.drain();
}

#[test]
fn those_that_lack_memory_behind_a_cap_keep_no_lower_class_from_starting() {
    let (mut rig, _) = crowded(|rules| rules.classes[Class::Standard as usize].max_num_seqs = Some(2));
    submit_large(&mut rig, Class::Standard, 60, |index| format!("large {index}"));
    for seed in 0..2 {
        rig.submit(request(Class::Standard, "small", 2 + seed, 10), 40).expect("it fits");
    }
    let batch = rig.submit(request(Class::Batch, "batch", 4, 10), 3).expect("it fits");
    for _ in 0..8 {
        rig.step();
    }
    assert!(rig.is_running(batch) || rig.requests[&batch].end.is_some(), "the cap is what keeps the others");
    rig.drain();
}

/// The rig sees that something is planned in every step, and that all end.
#[test]
fn many_tenants_come_and_go_where_memory_is_scarce() {
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let admission = [Admission::Prompt, Admission::Estimated, Admission::Guaranteed][rng.below(3)];
        let mut rig = Rig::fair(config(rng.within(4, 24), 40), |rules| {
            rules.admission = admission;
            rules.max_overtakes = [0, 2, 16][rng.below(3)];
            rules.classes[rng.below(3)].max_num_seqs = rng.one_in(2).then(|| rng.within(1, 4));
        });
        for _ in 0..600 {
            let live: Vec<u64> =
                rig.requests.iter().filter(|(_, known)| known.end.is_none()).map(|(&id, _)| id).collect();
            match rng.below(100) {
                0..40 if live.len() < 120 => {
                    let len = if rng.one_in(3) { rng.within(1, 40) } else { rng.within(150, 500) };
                    let tenant = format!("tenant {}", rng.below(100));
                    let class = [Class::Interactive, Class::Standard, Class::Standard, Class::Batch][rng.below(4)];
                    rig.submit(request(class, &tenant, rng.next(), len), rng.within(1, 40)).expect("it fits alone");
                }
                40..46 if !live.is_empty() => rig.cancel(live[rng.below(live.len())]),
                46..49 => rig.set_paused(rng.one_in(4)),
                _ => rig.step(),
            }
        }
        rig.drain();
    }
}

/// The rig counts who overtakes whom; here that is tried as often as possible.
#[test]
fn nobody_is_overtaken_more_than_k_times_whatever_k() {
    for max_overtakes in [0, 1, 2, 3, 5, 9, 16] {
        let mut rng = Rng::new(u64::from(max_overtakes));
        let config = SchedulerConfig { enable_prefix_caching: false, ..config(12, 40) };
        let mut rig = Rig::fair(config, |rules| {
            rules.admission = Admission::Prompt;
            rules.max_overtakes = max_overtakes;
            rules.aging_s = 1e3;
        });
        let mut most = 0;
        for _ in 0..1500 {
            if rig.requests.len() < 40 {
                let len = if rng.one_in(8) { rng.within(300, 550) } else { rng.within(1, 20) };
                rig.submit(request(Class::Standard, "", rng.next(), len), rng.within(1, 20)).expect("it fits alone");
            }
            rig.step();
            most = rig.requests.values().map(|known| known.overtakes.iter().sum()).fold(most, u32::max);
            rig.requests.retain(|_, known| known.end.is_none());
        }
        assert_eq!(most, u32::from(max_overtakes), "that many small ones would fit before a large one");
        rig.drain();
    }
}
