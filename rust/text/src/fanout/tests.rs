//! Requests with several choices and log-probabilities, fed with step outputs.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use cbrs_core::histogram::Histogram;
use cbrs_core::{FinishReason, LogprobRows, RequestId, RequestSpec, SamplingSpec, StepOutput};
use proptest::prelude::*;

use super::channel::{Outbox, OutputChannel, Update};
use super::event::events;
use super::finished::{FinishedRequest, StopReason};
use super::live::{Draft, LiveRequest, Progress};
use super::timings::{Recorder, Timings};
use crate::{StopStrings, TextStream, Tokenizer};

const VOCAB: &str = r#"{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "?",
    "vocab": {"red": 0, "blue": 1, "cat": 2, "dog": 3, "?": 4}}}"#;
const ID: u64 = 1 << 32;

/// An event: choice, token, finish reason.
type Told = (i32, i32, Option<FinishReason>);

struct Rig {
    request: Option<LiveRequest>,
    outbox: Outbox,
    finished: Option<FinishedRequest>,
    timings: Timings,
}

impl Rig {
    fn new(spec: &RequestSpec, stops: &[&str], channel: Option<&OutputChannel>) -> Self {
        let mut draft = Draft::new(spec, 7, 0);
        let tokenizer = Tokenizer::from_json(VOCAB).unwrap();
        draft.stream = Some(TextStream::new(tokenizer, StopStrings::new(stops).unwrap(), true));
        draft.channel = channel.map(OutputChannel::sender);
        let request = Some(LiveRequest::new(RequestId::from_u64(ID), draft.with(spec.prompt_token_ids.clone(), 7)));
        Self { request, outbox: Outbox::default(), finished: None, timings: Timings::default() }
    }

    /// Applies one step; returns the choices that found a stop string, with their numbers of tokens.
    fn step(&mut self, output: &StepOutput) -> Vec<(usize, u32)> {
        let mut stopped = Vec::new();
        let mut recorder = Recorder::new(&self.timings);
        for event in events(output) {
            let Some(request) = &mut self.request else { break };
            match request.apply(&event, &mut self.outbox, &mut recorder) {
                Progress::GoesOn => {}
                Progress::Stopped { num_tokens, .. } => stopped.push((event.choice, num_tokens)),
                Progress::Ended => self.finished = self.request.take().and_then(LiveRequest::into_finished),
            }
        }
        self.outbox.deliver();
        stopped
    }
}

fn spec(n: u32, logprobs: Option<u32>) -> RequestSpec {
    let sampling = SamplingSpec { logprobs, ..SamplingSpec::default() };
    RequestSpec { n, sampling, ..RequestSpec::new(vec![9, 9, 9]) }
}

/// A step output; with log-probabilities of `-(token + 1)` for each token and of `-8` for another one.
fn output(time_ns: u64, told: &[Told], has_logprobs: bool) -> StepOutput {
    let mut output = StepOutput { time_ns, ..StepOutput::default() };
    for (index, &(choice, token, finish)) in told.iter().enumerate() {
        output.request_ids.push(ID);
        output.choice_ids.push(choice);
        output.token_ids.push(token);
        output.finish_reasons.push(finish.map_or(0, |reason| reason as u8));
        output.stop_ids.push(-1);
        if finish == Some(FinishReason::Error) {
            output.details.push((index as u32, format!("choice {choice} broke").into()));
        }
        if has_logprobs && token >= 0 {
            output.logprob_events.push(index as i32);
            output.logprobs.push(&[token, 4], &[-(token as f32) - 1.0, -8.0], token + 1);
        }
    }
    output
}

fn rows(tokens: &[i32]) -> LogprobRows {
    let mut rows = LogprobRows::default();
    for &token in tokens {
        rows.push(&[token, 4], &[-(token as f32) - 1.0, -8.0], token + 1);
    }
    rows
}

/// Values of a histogram: how many, and their sum.
fn total(histogram: &Histogram) -> (u64, u64) {
    (histogram.counts().iter().sum(), histogram.sum())
}

#[test]
fn times_are_counted_once() {
    let mut rig = Rig::new(&spec(2, None), &[], None);
    rig.request.as_mut().unwrap().start(5, 0, &rig.timings);
    rig.step(&output(10, &[(0, 0, None)], false));
    rig.step(&output(17, &[(0, 1, None), (1, 0, None)], false));
    rig.step(&output(20, &[(0, 1, Some(FinishReason::Length)), (1, 2, None)], false));
    rig.step(&output(24, &[(0, 3, None), (1, 2, Some(FinishReason::Stop))], false));
    let timings = &rig.timings;
    assert_eq!(timings.num_output_tokens(), 6, "what comes after the end is not counted");
    assert_eq!(total(&timings.queue), (1, 5));
    assert_eq!(total(&timings.first_token), (1, 10));
    assert_eq!(total(&timings.prefill), (1, 5));
    assert_eq!(total(&timings.inter_token), (4, 7 + 3 + 3 + 4));
    assert_eq!(total(&timings.decode), (1, 14));
    assert_eq!(total(&timings.end_to_end), (1, 24));
    assert_eq!(total(&timings.prompt_tokens), (1, 3));
    assert_eq!(total(&timings.output_tokens), (2, 6));
    assert_eq!(timings.num_ends().map(|(_, number)| number), [1, 1, 0, 0]);
}

#[test]
fn a_request_that_does_not_end_by_itself_has_no_length() {
    let mut rig = Rig::new(&spec(2, None), &[], None);
    rig.step(&output(10, &[(0, 0, None), (1, 0, Some(FinishReason::Error))], false));
    rig.step(&output(12, &[(0, 0, Some(FinishReason::Length))], false));
    let timings = &rig.timings;
    assert_eq!((total(&timings.end_to_end), total(&timings.decode)), ((0, 0), (0, 0)));
    assert_eq!(total(&timings.output_tokens), (1, 2));
    assert_eq!(timings.num_ends().map(|(_, number)| number), [0, 1, 0, 1]);
}

#[test]
fn a_request_ends_with_the_last_of_its_choices() {
    let mut rig = Rig::new(&spec(3, Some(1)), &[], None);
    rig.step(&output(10, &[(0, 0, None)], true));
    rig.step(&output(20, &[(0, 1, Some(FinishReason::Length)), (2, 2, None), (1, 3, None)], true));
    rig.step(&output(30, &[(1, -1, Some(FinishReason::Error)), (2, 0, None)], true));
    assert!(rig.finished.is_none());
    // What comes for a choice after its end, or for none, changes nothing.
    rig.step(&output(35, &[(0, 3, None), (1, -1, Some(FinishReason::Stop)), (3, 0, None), (-1, 0, None)], true));
    rig.step(&output(40, &[(2, 1, Some(FinishReason::Stop))], true));
    let finished = rig.finished.unwrap();
    assert_eq!((finished.index, finished.request_id), (7, ID));
    assert_eq!(finished.error.as_deref(), Some("choice 1 broke"));
    assert_eq!((finished.first_token_ns, finished.finished_ns), (Some(10), 40));
    let outputs: Vec<_> =
        finished.outputs.iter().map(|o| (o.index, &o.token_ids[..], o.text.as_str(), o.finish_reason)).collect();
    assert_eq!(
        outputs,
        [
            (0, &[0, 1][..], "red blue", FinishReason::Length),
            (1, &[3][..], "dog", FinishReason::Error),
            (2, &[2, 0, 1][..], "cat red", FinishReason::Stop),
        ]
    );
    let errors: Vec<_> = finished.outputs.iter().map(|output| output.error.as_deref()).collect();
    assert_eq!(errors, [None, Some("choice 1 broke"), None]);
    assert_eq!(
        finished.outputs.iter().map(|output| output.first_token_ns).collect::<Vec<_>>(),
        [Some(10), Some(20), Some(20)]
    );
    assert_eq!(finished.outputs[2].inter_token_latencies_s, [1e-8, 1e-8]);
    for output in &finished.outputs {
        assert_eq!(output.logprobs, Some(rows(&output.token_ids)));
        let sum: i32 = output.token_ids.iter().map(|token| -token - 1).sum();
        assert_eq!((output.cumulative_logprob, output.num_logprobs), (Some(f64::from(sum)), Some(1)));
    }
}

#[test]
fn tokens_after_a_stop_string_are_dropped_with_their_logprobs() {
    let mut rig = Rig::new(&spec(2, Some(1)), &["blue"], None);
    assert!(rig.step(&output(1, &[(0, 0, None), (1, 2, None)], true)).is_empty());
    assert_eq!(rig.step(&output(2, &[(0, 1, None), (1, 3, None)], true)), [(0, 2)]);
    assert!(rig.step(&output(3, &[(0, 2, None), (1, 1, Some(FinishReason::Length))], true)).is_empty());
    rig.step(&output(4, &[(0, -1, Some(FinishReason::Cancelled))], true));
    let finished = rig.finished.unwrap();
    let stop = Some(StopReason::Text("blue".into()));
    for (output, text, tokens) in
        [(&finished.outputs[0], "red ", vec![0, 1]), (&finished.outputs[1], "cat dog ", vec![2, 3, 1])]
    {
        assert_eq!((output.text.as_str(), &output.token_ids), (text, &tokens));
        assert_eq!((output.finish_reason, &output.stop_reason), (FinishReason::Stop, &stop));
        assert_eq!(output.logprobs, Some(rows(&tokens)));
        assert_eq!(output.inter_token_latencies_s.len(), tokens.len() - 1);
    }
    assert_eq!(finished.error, None);
}

#[test]
fn a_request_without_tokens_has_empty_logprobs() {
    let mut rig = Rig::new(&spec(1, Some(0)), &[], None);
    rig.step(&output(1, &[(0, -1, Some(FinishReason::Cancelled))], true));
    let output = &rig.finished.unwrap().outputs[0];
    assert_eq!((&output.logprobs, output.cumulative_logprob), (&Some(LogprobRows::default()), Some(0.0)));
}

#[test]
fn logprobs_of_the_prompt_are_those_of_the_whole_prompt_or_none() {
    for num_rows in 0..=2 {
        let channel = OutputChannel::new().unwrap();
        let asking = RequestSpec { prompt_logprobs: Some(1), ..spec(2, None) };
        for channel in [None, Some(&channel)] {
            let mut rig = Rig::new(&asking, &[], channel);
            for position in 1..=num_rows {
                let (ids, values) = ([position as i32, 4], [-1.0, -8.0]);
                rig.request.as_mut().unwrap().add_prompt_logprobs(position, (&ids, &values, 3));
            }
            rig.step(&output(1, &[(0, 0, None)], false));
            rig.step(&output(2, &[(0, 0, Some(FinishReason::Length)), (1, 1, Some(FinishReason::Length))], false));
            if channel.is_none() {
                let rows = rig.finished.unwrap().prompt_logprobs;
                assert_eq!(rows.map(|rows| rows.len()), (num_rows == 2).then_some(2));
            }
        }
        let updates = channel.take();
        let given: Vec<_> =
            updates.iter().map(|update| update.prompt_logprobs.as_ref().map(|rows| rows.len())).collect();
        assert_eq!(given, [(num_rows == 2).then_some(2), None, None]);
        let prompts: Vec<_> = updates.iter().map(|update| update.prompt_token_ids.clone()).collect();
        assert_eq!(prompts, [Some(vec![9, 9, 9]), None, None]);
    }
}

#[test]
fn what_has_no_end_when_the_engine_goes_gets_one_for_each_choice() {
    let channel = OutputChannel::new().unwrap();
    let mut rig = Rig::new(&spec(3, None), &[], Some(&channel));
    rig.step(&output(1, &[(0, 0, None), (1, 1, Some(FinishReason::Length))], false));
    let error: Arc<str> = "gone".into();
    rig.request.as_mut().unwrap().end_now(
        FinishReason::Error,
        Some(&error),
        &mut rig.outbox,
        &mut Recorder::new(&rig.timings),
    );
    rig.outbox.deliver();
    let updates = channel.take();
    let ends: Vec<_> = updates[2..].iter().map(|u| (u.choice, u.end.clone().unwrap().error, u.is_last)).collect();
    assert_eq!(ends, [(0, Some(Arc::clone(&error)), false), (2, Some(error), true)]);
}

/// What one choice says in total, however it was told.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    tokens: Vec<i32>,
    logprobs: Option<LogprobRows>,
    end: Option<(FinishReason, Option<StopReason>, Option<Arc<str>>)>,
}

fn joined(updates: &[Update], n: usize, has_logprobs: bool) -> Vec<Said> {
    let empty = || Said { logprobs: has_logprobs.then(LogprobRows::default), ..Said::default() };
    let mut said: Vec<Said> = (0..n).map(|_| empty()).collect();
    for update in updates {
        let choice = &mut said[update.choice as usize];
        assert!(choice.end.is_none(), "an update after the end of its choice");
        assert!(!update.token_ids.is_empty() || update.end.is_some(), "an update that says nothing");
        choice.text.push_str(&update.text);
        choice.tokens.extend(&update.token_ids);
        assert_eq!(update.logprobs.is_some(), has_logprobs);
        if let (Some(all), Some(new)) = (&mut choice.logprobs, &update.logprobs) {
            assert_eq!(new.len(), update.token_ids.len());
            (0..new.len()).for_each(|row| {
                let (ids, values, rank) = new.row(row);
                all.push(ids, values, rank);
            });
        }
        choice.end = update.end.clone().map(|end| (end.finish_reason, end.stop_reason, end.error));
    }
    said
}

fn told() -> impl Strategy<Value = Told> {
    let finish = prop_oneof![
        8 => Just(None),
        1 => prop_oneof![
            Just(FinishReason::Stop),
            Just(FinishReason::Length),
            Just(FinishReason::Cancelled),
            Just(FinishReason::Error)
        ]
        .prop_map(Some)
    ];
    (0..4i32, -1..4i32, finish).prop_filter("an event says something", |told| told.1 >= 0 || told.2.is_some())
}

proptest! {
    #[test]
    fn the_updates_of_a_choice_joined_are_its_result(
        n in 1..=4u32,
        steps in proptest::collection::vec(proptest::collection::vec(told(), 1..5), 0..12),
        has_logprobs: bool,
        stops in proptest::collection::vec(prop_oneof!["red cat", " blue", "dog", "t d"], 0..3),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let channel = OutputChannel::new().unwrap();
        let asking = spec(n, has_logprobs.then_some(1));
        let mut whole = Rig::new(&asking, &stops, None);
        let mut streamed = Rig::new(&asking, &stops, Some(&channel));
        for (time_ns, told) in steps.iter().enumerate() {
            let output = output(time_ns as u64, told, has_logprobs);
            prop_assert_eq!(whole.step(&output), streamed.step(&output));
        }
        for rig in [&mut whole, &mut streamed] {
            if let Some(mut request) = rig.request.take() {
                request.end_now(FinishReason::Cancelled, None, &mut rig.outbox, &mut Recorder::new(&rig.timings));
                rig.finished = request.into_finished();
            }
            rig.outbox.deliver();
        }
        prop_assert!(streamed.finished.is_none());
        let finished = whole.finished.unwrap();
        let updates = channel.take();
        let expected: Vec<Said> = finished
            .outputs
            .into_iter()
            .map(|o| Said {
                text: o.text,
                tokens: o.token_ids,
                logprobs: o.logprobs,
                end: Some((o.finish_reason, o.stop_reason, o.error)),
            })
            .collect();
        prop_assert_eq!(joined(&updates, n as usize, has_logprobs), expected);
        let lasts: Vec<_> = updates.iter().map(|update| update.is_last).collect();
        prop_assert_eq!(lasts.iter().filter(|&&is_last| is_last).count(), 1);
        prop_assert_eq!(lasts.last(), Some(&true));
    }
}
