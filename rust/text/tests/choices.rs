//! Several choices of one request through engine and consumer: each has its own text and end, the request one result.

#![allow(clippy::unwrap_used)]

mod common;

use cbrs_core::{FinishReason, RequestSpec};
use cbrs_text::{FinishedChoice, OutputChannel, StopReason, TextSpec};
use common::rig::{Rig, stopping};
use common::{END, HELLO, WORLD};

fn spec(n: u32, max_tokens: u64) -> RequestSpec {
    RequestSpec { n, max_tokens: Some(max_tokens), ..RequestSpec::new(vec![1, 2, 3]) }
}

/// Every choice says "hello world" again and again, but choice 1 ends after two tokens.
fn rig() -> Rig {
    let mut rig = Rig::new(&[HELLO, WORLD]);
    rig.say = |choice, position, token| if (choice, position) == (1, 2) { END } else { token };
    rig
}

fn told(output: &FinishedChoice) -> (u32, &str, usize, FinishReason) {
    (output.index, &output.text, output.token_ids.len(), output.finish_reason)
}

#[test]
fn each_choice_has_its_own_text_and_end() {
    let mut rig = rig();
    rig.submit_text(spec(3, 5), &TextSpec::default());
    let finished = rig.finish(1).pop().unwrap();
    let outputs: Vec<_> = finished.outputs.iter().map(told).collect();
    assert_eq!(
        outputs,
        [
            (0, "hello worldhello worldhello", 5, FinishReason::Length),
            (1, "hello world", 3, FinishReason::Stop),
            (2, "hello worldhello worldhello", 5, FinishReason::Length),
        ]
    );
    assert_eq!(finished.first_token_ns, finished.outputs[0].first_token_ns);
}

#[test]
fn a_stop_string_ends_the_choice_that_said_it() {
    let mut rig = rig();
    // More choices than rows: some start when others have ended.
    rig.submit_text(spec(7, 20), &stopping(&["dhe"]));
    let finished = rig.finish(1).pop().unwrap();
    assert_eq!(finished.outputs.len(), 7);
    for output in &finished.outputs {
        let expected = match output.index {
            1 => (1, "hello world", 3, FinishReason::Stop),
            index => (index, "hello worl", 3, FinishReason::Stop),
        };
        assert_eq!(told(output), expected);
        let stop = (output.index != 1).then(|| StopReason::Text("dhe".into()));
        assert_eq!(output.stop_reason, stop);
    }
}

#[test]
fn streamed_choices_joined_are_the_result() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = rig();
    rig.stream(spec(4, 7), &stopping(&["never"]), &channel);
    let updates = rig.finish_streams(&channel, 1);
    rig.submit_text(spec(4, 7), &stopping(&["never"]));
    let finished = rig.finish(1).pop().unwrap();
    for output in &finished.outputs {
        let own = || updates.iter().filter(|update| update.choice == output.index);
        assert_eq!(own().map(|update| update.text.as_str()).collect::<String>(), output.text);
        assert_eq!(own().flat_map(|update| update.token_ids.clone()).collect::<Vec<_>>(), output.token_ids);
        let ends: Vec<_> = own().filter_map(|update| update.end.clone()).collect();
        assert_eq!((ends.len(), ends[0].finish_reason), (1, output.finish_reason));
    }
    assert!(updates.last().unwrap().is_last);
    assert_eq!(updates.iter().filter(|update| update.prompt_token_ids.is_some()).count(), 1);
}

#[test]
fn g24_128_choices_all_end() {
    let mut rig = rig();
    rig.submit_text(spec(128, 2), &TextSpec::default());
    let finished = rig.finish(1).pop().unwrap();
    assert!(
        finished
            .outputs
            .iter()
            .enumerate()
            .all(|(i, output)| told(output) == (i as u32, "hello world", 2, FinishReason::Length))
    );
}

#[test]
fn a_cancel_ends_every_choice_and_the_request_once() {
    let channel = OutputChannel::new().unwrap();
    for streamed in [false, true] {
        for num_steps in 0..5 {
            let mut rig = rig();
            let id = if streamed {
                rig.stream(spec(6, 50), &TextSpec::default(), &channel)
            } else {
                rig.submit_text(spec(6, 50), &TextSpec::default())
            };
            for _ in 0..num_steps {
                rig.step();
            }
            rig.scheduler.submitter().cancel(cbrs_core::RequestId::from_u64(id));
            if streamed {
                let updates = rig.finish_streams(&channel, 1);
                assert_eq!(updates.iter().filter(|update| update.end.is_some()).count(), 6);
                assert!(updates.last().unwrap().is_last);
            } else {
                let finished = rig.finish(1).pop().unwrap();
                assert_eq!(finished.outputs.len(), 6);
                assert_eq!(finished.outputs[0].finish_reason, FinishReason::Cancelled);
            }
        }
    }
}
