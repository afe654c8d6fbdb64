//! Output as it comes: updates are the result in parts, wake-ups are few, and readers that are slow or gone hurt nobody.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use cbrs_core::{Error, FinishReason, RequestSpec, Scheduler, SchedulerConfig, StepOutput};
use cbrs_text::{OutputChannel, OutputProcessor, Recipient, StopReason, TextSpec, Update};
use common::rig::{Rig, TIMEOUT, stopping};
use common::{END, HELLO, SPACE_C3, WORLD};

fn spec(max_tokens: u64) -> RequestSpec {
    RequestSpec { max_tokens: Some(max_tokens), ..RequestSpec::new(vec![1, 2, 3]) }
}

fn texts(updates: &[Update]) -> Vec<&str> {
    updates.iter().map(|update| update.text.as_str()).collect()
}

fn reason(update: &Update) -> Option<FinishReason> {
    update.end.as_ref().map(|end| end.finish_reason)
}

/// Takes updates until one is the last of its request.
fn wait_for_last(channel: &OutputChannel) -> Vec<Update> {
    let start = Instant::now();
    let mut updates = Vec::new();
    while !updates.iter().any(|update: &Update| update.is_last) {
        assert!(start.elapsed() < TIMEOUT, "no last update: {updates:?}");
        std::thread::sleep(Duration::from_millis(1));
        updates.extend(channel.take());
    }
    updates
}

#[test]
fn f08_every_token_is_one_update_with_the_text_that_it_completes() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO, SPACE_C3, 0xA9, WORLD]);
    let id = rig.stream(spec(4), &TextSpec::default(), &channel);
    let updates = rig.finish_streams(&channel, 1);
    assert_eq!(texts(&updates), ["hello", " ", "é", " world"]);
    assert!(updates.iter().all(|update| update.request_id == id && update.index == 7 && update.choice == 0));
    assert!(updates.iter().all(|update| update.token_ids.len() == 1 && update.logprobs.is_none()));
    assert_eq!(updates[0].prompt_token_ids, Some(vec![1, 2, 3]));
    assert!(updates[1..].iter().all(|update| update.prompt_token_ids.is_none()));
    assert_eq!(updates.iter().map(reason).collect::<Vec<_>>(), [None, None, None, Some(FinishReason::Length)]);
    assert_eq!(updates.iter().map(|update| update.is_last).collect::<Vec<_>>(), [false, false, false, true]);
    let times = |update: &Update| (update.arrival_ns, update.first_scheduled_ns, update.time_ns);
    assert_eq!(times(&updates[0]), (0, Some(1_000_000), 2_000_000));
    assert_eq!(times(&updates[3]), (0, Some(1_000_000), 5_000_000));
    assert!(rig.processor.take_finished(0).is_empty(), "a streamed request has no other result");
}

#[test]
fn a_choice_told_as_a_whole_is_the_parts_joined() {
    let [parts, whole] = [(); 2].map(|()| OutputChannel::new().unwrap());
    let mut rig = Rig::new(&[HELLO, SPACE_C3, 0xA9, WORLD]);
    let request = || RequestSpec { n: 2, ..spec(4) };
    rig.stream(request(), &stopping(&[" wor"]), &parts);
    let parts = rig.finish_streams(&parts, 1);
    let recipient = Recipient { index: 8, channel: Some(&whole), is_whole: true };
    rig.processor.submit(request(), &stopping(&[" wor"]), recipient, rig.time_ns).unwrap();
    let whole = rig.finish_streams(&whole, 1);
    assert_eq!(whole.iter().map(|update| update.choice).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(whole.iter().map(|update| update.is_last).collect::<Vec<_>>(), [false, true]);
    assert_eq!(whole[0].prompt_token_ids, Some(vec![1, 2, 3]));
    for told in &whole {
        let mine = || parts.iter().filter(|part| part.choice == told.choice);
        assert_eq!(told.text, mine().map(|part| part.text.as_str()).collect::<String>());
        assert_eq!(told.token_ids.as_slice(), mine().flat_map(|part| part.token_ids.clone()).collect::<Vec<_>>());
        assert_eq!(reason(told), Some(FinishReason::Stop));
    }
}

#[test]
fn a_choice_told_as_a_whole_is_told_when_it_is_cancelled() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO]);
    let recipient = Recipient { index: 8, channel: Some(&channel), is_whole: true };
    let id = rig.processor.submit(spec(100), &TextSpec::default(), recipient, 0).unwrap();
    for _ in 0..4 {
        assert!(rig.step());
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(channel.take().is_empty(), "nothing is told while it goes on");
    assert!(rig.scheduler.submitter().cancel(id));
    let updates = rig.finish_streams(&channel, 1);
    assert_eq!((updates.len(), reason(&updates[0])), (1, Some(FinishReason::Cancelled)));
    assert_eq!(updates[0].token_ids.as_slice(), [HELLO; 3]);
}

#[test]
fn c03_the_first_update_carries_the_first_token_and_admission_makes_none() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO]);
    // Two chunks of 64 before the first token.
    let prompt = RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![1; 100]) };
    rig.stream(prompt, &TextSpec::default(), &channel);
    for _ in 0..2 {
        assert!(rig.step());
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(channel.take().is_empty());
    let updates = rig.finish_streams(&channel, 1);
    assert_eq!((updates.len(), &updates[0].token_ids[..]), (1, &[HELLO][..]));
}

#[test]
fn f01_nothing_of_a_stop_string_is_sent_and_the_end_names_it() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO, WORLD, 33]);
    rig.stream(spec(60), &stopping(&["o wor"]), &channel);
    let updates = rig.finish_streams(&channel, 1);
    assert_eq!(texts(&updates), ["hell", "", ""]);
    let tokens: Vec<_> = updates.iter().flat_map(|update| &update.token_ids).copied().collect();
    assert_eq!(tokens, [HELLO, WORLD], "later tokens do not belong to the output");
    let end = updates[2].end.as_ref().unwrap();
    assert_eq!((end.finish_reason, &end.stop_reason), (FinishReason::Stop, &Some(StopReason::Text("o wor".into()))));
    let keeping = TextSpec { include_stop_str_in_output: true, ..stopping(&["o wor"]) };
    rig.stream(spec(60), &keeping, &channel);
    assert_eq!(texts(&rig.finish_streams(&channel, 1)), ["hello", " wor", ""], "nothing needs to be held back");
}

#[test]
fn what_was_held_back_comes_with_the_end() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO, SPACE_C3, END]);
    rig.stream(spec(9), &stopping(&["lo there"]), &channel);
    let updates = rig.finish_streams(&channel, 1);
    assert_eq!(texts(&updates), ["hel", "", "lo \u{FFFD}"]);
    assert_eq!((updates[2].token_ids.as_slice(), reason(&updates[2])), (&[END][..], Some(FinishReason::Stop)));
}

#[test]
fn a_failed_step_sends_its_message() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO]);
    rig.stream(spec(5), &TextSpec::default(), &channel);
    rig.step();
    rig.scheduler.fail(rig.scheduler.batch().step_id, "the model fell over").unwrap();
    rig.scheduler.step(None, 2_000_000).unwrap();
    let updates = wait_for_last(&channel);
    assert_eq!(updates.len(), 1);
    assert_eq!(updates[0].end.as_ref().unwrap().error.as_deref(), Some("the model fell over"));
    assert!(updates[0].token_ids.is_empty());
}

#[test]
fn every_stream_ends_when_the_engine_or_the_processor_is_closed() {
    for close_engine in [true, false] {
        let channel = OutputChannel::new().unwrap();
        let mut rig = Rig::new(&[HELLO]);
        for _ in 0..6 {
            rig.stream(spec(50), &TextSpec::default(), &channel);
        }
        rig.step();
        rig.step();
        if close_engine {
            rig.scheduler.submitter().close();
            rig.step();
        } else {
            rig.processor.close();
        }
        let mut updates = Vec::new();
        while updates.iter().filter(|update: &&Update| update.is_last).count() < 6 {
            updates.extend(wait_for_last(&channel));
        }
        let ends = updates.iter().filter_map(reason).collect::<Vec<_>>();
        assert_eq!(ends, [FinishReason::Cancelled; 6]);
        assert!(updates.iter().filter(|update| update.is_last).all(|update| update.end.is_some()));
        let refused = rig.processor.submit(
            spec(1),
            &TextSpec::default(),
            Recipient { index: 0, channel: Some(&channel), is_whole: false },
            0,
        );
        assert_eq!(refused.unwrap_err(), Error::Closed);
        for _ in 0..2 {
            if !close_engine {
                rig.step();
            }
        }
    }
}

#[test]
fn a_panic_of_the_consumer_ends_every_stream_with_an_error() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO]);
    let id = rig.stream(spec(50), &TextSpec::default(), &channel);
    rig.step();
    rig.step();
    // An output that no scheduler would make: an event without the rest of its arrays.
    let broken = StepOutput { request_ids: vec![id], ..StepOutput::default() };
    rig.processor.sink().publish(&broken);
    let updates = wait_for_last(&channel);
    assert_eq!(texts(&updates), ["hello", ""]);
    assert_eq!(updates[1].end.as_ref().unwrap().error.as_deref(), Some("the text thread broke"));
    assert!(rig.processor.is_closed());
    rig.step();
    rig.step();
    assert_eq!(rig.scheduler.submitter().stats().num_running, 0);
}

#[test]
fn a_reader_that_never_takes_delays_nobody_and_loses_nothing() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&[HELLO, WORLD]);
    for round in 0..50 {
        rig.stream(spec(100), &TextSpec::default(), &channel);
        let other = rig.run(100, &[]);
        assert_eq!(other.token_ids.len(), 100, "round {round}");
    }
    while rig.processor.num_live() > 0 {
        rig.step();
    }
    let updates = channel.take();
    assert_eq!(updates.len(), 50 * 100);
    assert_eq!(updates.iter().map(|update| update.text.len()).sum::<usize>(), 50 * 50 * "hello world".len());
    assert_eq!(updates.iter().filter(|update| update.is_last).count(), 50);
}

#[test]
fn closing_a_channel_cancels_its_requests_and_no_others() {
    for drop_it in [false, true] {
        let channel = OutputChannel::new().unwrap();
        let mut rig = Rig::new(&[HELLO]);
        // Running and waiting ones.
        for _ in 0..6 {
            rig.stream(spec(100), &TextSpec::default(), &channel);
        }
        rig.submit(3, &[]);
        rig.step();
        rig.step();
        if drop_it {
            drop(channel);
        } else {
            channel.close();
            channel.close();
            assert!(channel.is_closed() && channel.fileno().is_none());
            let refused = rig.processor.submit(
                spec(1),
                &TextSpec::default(),
                Recipient { index: 0, channel: Some(&channel), is_whole: false },
                0,
            );
            assert_eq!(refused.unwrap_err(), Error::Closed);
            assert_eq!(rig.finish(1)[0].outputs[0].token_ids.len(), 3);
            assert!(channel.take().is_empty());
            continue;
        }
        assert_eq!(rig.finish(1)[0].outputs[0].token_ids.len(), 3);
        assert_eq!(rig.scheduler.submitter().stats().num_running, 0);
    }
}

#[test]
fn a_channel_may_belong_to_several_engines() {
    let channel = OutputChannel::new().unwrap();
    let mut rigs = [Rig::new(&[HELLO]), Rig::new(&[WORLD])];
    let ids = rigs.each_ref().map(|rig| rig.stream(spec(50), &TextSpec::default(), &channel));
    assert_eq!(ids[0], ids[1], "ids are an engine's own");
    for rig in &mut rigs {
        rig.step();
        rig.step();
    }
    channel.close();
    for rig in &mut rigs {
        let start = Instant::now();
        while rig.processor.num_live() > 0 {
            assert!(start.elapsed() < TIMEOUT);
            rig.step();
        }
    }
}

#[test]
fn a_channel_outlives_its_engine() {
    let channel = OutputChannel::new().unwrap();
    let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
    let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
    scheduler.set_output_sink(Some(processor.sink()));
    let recipient = Recipient { index: 3, channel: Some(&channel), is_whole: false };
    processor.submit(RequestSpec::new(vec![1]), &TextSpec::default(), recipient, 0).unwrap();
    drop(scheduler);
    let updates = wait_for_last(&channel);
    assert_eq!((updates[0].index, reason(&updates[0])), (3, Some(FinishReason::Cancelled)));
    drop(processor);
    assert!(channel.fileno().is_some());
    channel.close();
}

#[cfg(target_os = "linux")]
#[test]
fn channels_leave_no_file_descriptor_behind() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut rig = Rig::new(&[HELLO]);
    let before = count();
    for round in 0..200 {
        let channel = OutputChannel::new().unwrap();
        rig.stream(spec(2), &TextSpec::default(), &channel);
        if round % 2 == 0 {
            rig.finish_streams(&channel, 1);
        }
    }
    while rig.processor.num_live() > 0 {
        rig.step();
    }
    // Tests that run beside this one have some open as well.
    assert!(count() < before + 100, "{} descriptors more", count() - before);
}
