//! Who is served and displaced by class; pauses of batch work; aging.

use cbrs_core::policy::{Admission, Class};

use crate::rig::{Rig, config, request};

#[test]
fn d01_what_is_planned_is_not_displaced_and_what_is_displaced_is_not_planned() {
    // Memory for two; the third, of a higher class, displaces the lowest one. The rig checks that nothing is both.
    let mut rig = Rig::fair(config(3, 24), |rules| rules.admission = Admission::Prompt);
    let batch = rig.submit(request(Class::Batch, "", 1, 100), 60).expect("it fits");
    let standard = rig.submit(request(Class::Standard, "", 2, 100), 60).expect("it fits");
    rig.step();
    rig.step();
    assert!(rig.is_running(batch) && rig.is_running(standard));
    let interactive = rig.submit(request(Class::Interactive, "", 3, 200), 20).expect("it fits");
    rig.step();
    rig.step();
    assert!(rig.is_running(interactive) && rig.is_running(standard) && !rig.is_running(batch));
    rig.drain();
}

#[test]
fn a_higher_class_displaces_a_lower_one_in_the_next_step_if_rows_are_full() {
    let mut rig = Rig::fair(config(4, 512), |_| ());
    let batch: Vec<u64> =
        (0..8).map(|seed| rig.submit(request(Class::Batch, "", seed, 40), 50).expect("it fits")).collect();
    rig.step();
    rig.step();
    assert_eq!(batch.iter().filter(|&&id| rig.is_running(id)).count(), 4);
    let first = rig.submit(request(Class::Interactive, "", 100, 40), 10).expect("it fits");
    rig.step();
    assert_eq!(rig.scheduled(first), 40, "its prompt is in the very next batch");
    let second = rig.submit(request(Class::Standard, "", 101, 40), 10).expect("it fits");
    rig.step();
    assert_eq!(rig.scheduled(second), 40);
    let stats = rig.submitter().stats();
    assert_eq!((stats.num_displacements, stats.num_preemptions), (2, 2));
    rig.drain();
}

#[test]
fn nobody_is_displaced_for_an_equal_class() {
    let mut rig = Rig::fair(config(2, 512), |_| ());
    for seed in 0..6 {
        rig.submit(request(Class::Interactive, "", seed, 40), 10).expect("it fits");
        rig.step();
    }
    rig.drain();
    assert_eq!(rig.submitter().stats().num_displacements, 0);
}

#[test]
fn prompts_of_higher_classes_come_before_batch_decodes() {
    let mut config = config(8, 2048);
    config.max_num_batched_tokens = 64;
    let mut rig = Rig::fair(config, |_| ());
    let batch = rig.submit(request(Class::Batch, "", 1, 30), 400).expect("it fits");
    let standard = rig.submit(request(Class::Standard, "", 2, 30), 400).expect("it fits");
    for _ in 0..4 {
        rig.step();
    }
    assert_eq!((rig.scheduled(batch), rig.scheduled(standard)), (1, 1));
    let long = rig.submit(request(Class::Interactive, "", 3, 3000), 5).expect("it fits");
    let (mut num_batch, mut num_steps) = (0, 0);
    while rig.requests[&long].tokens.is_empty() {
        rig.step();
        num_steps += 1;
        num_batch += rig.scheduled(batch);
        let is_prefilling = rig.scheduled(long) > 1;
        assert!(!is_prefilling || rig.scheduled(standard) == 1, "a standard decode advances in every step");
    }
    assert!(num_steps > 45 && (1..=3).contains(&num_batch), "{num_batch} of {num_steps}: it pauses, but not for ever");
    assert!((20..32).contains(&rig.checks.longest_batch_pause), "{}", rig.checks.longest_batch_pause);
    rig.drain();
}

#[test]
fn batch_work_takes_what_is_left() {
    let mut rig = Rig::fair(config(4, 512), |_| ());
    rig.submit(request(Class::Interactive, "", 1, 20), 30).expect("it fits");
    let batch: Vec<u64> =
        (2..5).map(|seed| rig.submit(request(Class::Batch, "", seed, 20), 30).expect("it fits")).collect();
    rig.step();
    rig.step();
    assert!(batch.iter().all(|&id| rig.scheduled(id) == 1), "all rows are in use");
    rig.drain();
}

#[test]
fn a_displaced_request_is_shielded_after_four_times() {
    let mut rig = Rig::fair(config(1, 512), |_| ());
    let batch = rig.submit(request(Class::Batch, "", 1, 20), 40).expect("it fits");
    rig.step();
    for seed in 0..4 {
        let urgent = rig.submit(request(Class::Interactive, "", 10 + seed, 20), 2).expect("it fits");
        rig.step();
        assert!(rig.is_running(urgent) && !rig.is_running(batch));
        while !rig.is_running(batch) {
            rig.step();
        }
    }
    let last = rig.submit(request(Class::Interactive, "", 99, 20), 2).expect("it fits");
    rig.step();
    assert!(rig.is_running(batch) && !rig.is_running(last), "it was displaced four times");
    rig.drain();
}

#[test]
fn an_aged_batch_request_starts_after_twenty_others() {
    let mut rig = Rig::fair(config(4, 2048), |rules| rules.aging_s = 1.0);
    let mut seed = 0;
    let mut urgent = |rig: &mut Rig| {
        seed += 1;
        rig.submit(request(Class::Interactive, "", seed, 16), 8).expect("it fits")
    };
    for _ in 0..8 {
        urgent(&mut rig);
    }
    rig.step();
    let batch = rig.submit(request(Class::Batch, "", 1_000_000, 200), 20).expect("it fits");
    let mut num_started_since_aged = 0;
    for _ in 0..2000 {
        // More than there is room for, all the time.
        while rig.requests.values().filter(|known| known.end.is_none()).count() < 12 {
            urgent(&mut rig);
        }
        let arrived_ns = rig.now_ns;
        rig.step();
        if arrived_ns > rig.aging_ns() {
            num_started_since_aged += rig.scheduler.output().started_request_ids.len();
        }
        if rig.requests[&batch].first_step.is_some() {
            break;
        }
    }
    assert!(rig.requests[&batch].first_step.is_some(), "it starves");
    assert!((10..=26).contains(&num_started_since_aged), "{num_started_since_aged} others started meanwhile");
    // It is not displaced either, and ends although interactive requests go on coming.
    for _ in 0..2000 {
        while rig.requests.values().filter(|known| known.end.is_none()).count() < 12 {
            urgent(&mut rig);
        }
        rig.step();
        if rig.requests[&batch].end.is_some() {
            break;
        }
    }
    assert!(rig.requests[&batch].end.is_some(), "it never ends");
    rig.drain();
}

#[test]
fn an_aged_request_that_waits_for_a_row_keeps_nobody_from_displacing() {
    let mut rig = Rig::fair(config(4, 2048), |rules| {
        rules.aging_s = 1.0;
        rules.aged_share = 1.0;
    });
    // Rows that nobody gives up soon, and more batch work, which is owed the next one.
    for seed in 0..8 {
        rig.submit(request(Class::Batch, "", seed, 40), 3000).expect("it fits");
    }
    while rig.now_ns < 2 * rig.aging_ns() {
        rig.step();
    }
    // Each row that is given up is an aged one's, which nobody displaces.
    for seed in 0..4 {
        let urgent = rig.submit(request(Class::Interactive, "", 100 + seed, 40), 3).expect("it fits");
        rig.step();
        assert_eq!(rig.scheduled(urgent), 40, "its prompt is in the very next batch");
        while rig.requests[&urgent].end.is_none() {
            rig.step();
        }
        rig.step();
    }
    rig.drain();
}

#[test]
fn a_cap_on_a_class_holds() {
    let mut rig = Rig::fair(config(8, 2048), |rules| rules.classes[Class::Batch as usize].max_num_seqs = Some(3));
    let ids: Vec<u64> =
        (0..10).map(|seed| rig.submit(request(Class::Batch, "", seed, 20), 20).expect("it fits")).collect();
    for _ in 0..30 {
        rig.step();
        assert!(ids.iter().filter(|&&id| rig.is_running(id)).count() <= 3);
    }
    rig.drain();
}
