//! The door of a running engine: what is let in and refused.

use cbrs_core::policy::Class;
use cbrs_core::{Error, SchedulerConfig};

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
