//! While paused no request starts; what has started goes on.

use std::thread;
use std::time::{Duration, Instant};

use cbrs_core::{FinishReason, Policy, RequestSpec, SchedulerConfig};

use crate::oracle::Oracle;
use crate::script::Script;

fn config() -> SchedulerConfig {
    SchedulerConfig { max_num_seqs: 2, num_blocks: 16, block_size: 4, max_model_len: 64, ..SchedulerConfig::default() }
}

fn started(oracle: &Oracle) -> Vec<usize> {
    let started = |&index: &usize| oracle.model().choices[index].is_started;
    (0..oracle.model().choices.len()).filter(started).collect()
}

#[test]
fn what_has_started_goes_on_with_all_its_choices_and_nothing_else_starts() {
    for policy in [Policy::Fcfs, Policy::Static] {
        let mut oracle = Oracle::new(SchedulerConfig { policy, ..config() });
        let spec = RequestSpec { n: 3, max_tokens: Some(2), ..RequestSpec::new((0..10).collect()) };
        oracle.submit(spec, Script::constant(9)).expect("the request is acceptable");
        oracle.step();
        oracle.set_paused(true);
        oracle.accept(&[50], 2, Script::constant(9));
        while oracle.model().choices[..3].iter().any(|choice| choice.end.is_none()) {
            oracle.step();
        }
        assert_eq!(started(&oracle), [0, 1, 2]);
        oracle.step();
        assert_eq!((oracle.batch().num_seqs(), oracle.scheduler().submitter().stats().num_waiting), (0, 1));
        oracle.set_paused(false);
        oracle.step();
        assert_eq!(started(&oracle), [0, 1, 2, 3]);
        oracle.drain();
    }
}

#[test]
fn a_preempted_sequence_resumes_and_a_queued_request_can_be_cancelled() {
    let mut oracle = Oracle::new(SchedulerConfig { num_blocks: 6, max_model_len: 24, ..config() });
    oracle.accept(&[1, 2, 3], 16, Script::constant(8));
    oracle.accept(&[4, 5, 6], 16, Script::constant(9));
    oracle.step();
    oracle.set_paused(true);
    let queued = oracle.accept(&[7], 16, Script::constant(9));
    while oracle.model().choices[1].end.is_none() {
        oracle.step();
    }
    assert!(oracle.scheduler().submitter().stats().num_preemptions > 0);
    assert_eq!(started(&oracle), [0, 1]);
    oracle.cancel(queued);
    oracle.step();
    assert_eq!(oracle.model().choices[queued].end, Some(FinishReason::Cancelled));
    oracle.close();
}

#[test]
fn who_waits_for_news_sleeps_while_paused_and_wakes_on_resume() {
    let mut oracle = Oracle::new(config());
    let submitter = oracle.scheduler().submitter();
    oracle.accept(&[1], 1, Script::constant(9));
    oracle.set_paused(true);
    oracle.step();
    assert_eq!(oracle.batch().num_seqs(), 0);
    // A waiting request is no news, so that a blocking step does not spin. A wait may end early without a reason, but not every time.
    let nap = Duration::from_millis(5);
    let has_slept = || {
        let start = Instant::now();
        submitter.wait_for_news(nap);
        start.elapsed() >= nap
    };
    assert!((0..20).any(|_| has_slept()), "something is taken for news again and again");
    let sleeper = thread::spawn({
        let submitter = submitter.clone();
        move || {
            while submitter.is_paused() {
                submitter.wait_for_news(Duration::from_secs(3600));
            }
        }
    });
    oracle.set_paused(false);
    sleeper.join().expect("it woke up");
    // Until a plan has seen it, the change is news, also for who comes late.
    submitter.wait_for_news(Duration::from_secs(3600));
    oracle.drain();
}
