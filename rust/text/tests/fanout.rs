//! The output processor on a real scheduler: results, stop strings, ends, and that no event is missed.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cbrs_core::{Error, FinishReason, RequestSpec, Scheduler, SchedulerConfig, StepResult};
use cbrs_text::{FinishedRequest, OutputProcessor, StopReason, TextSpec};
use common::rig::{Rig, TIMEOUT, only_choice, recipient, stopping};
use common::{END, HELLO, NEWLINE, SPACE_C3, WORLD, byte_level, spm, spm_word};

fn text(stop: &str) -> StopReason {
    StopReason::Text(stop.into())
}

#[test]
fn a_request_ends_with_its_text_ids_and_times() {
    let mut rig = Rig::new(&[HELLO, WORLD]);
    rig.submit(3, &[]);
    let result = rig.finish(1).pop().unwrap();
    assert_eq!((result.index, &result.prompt_token_ids[..]), (7, &[1, 2, 3][..]));
    assert_eq!((&result.error, &result.prompt_logprobs), (&None, &None));
    assert_eq!(result.arrival_ns, 0);
    assert_eq!(result.first_scheduled_ns, Some(1_000_000));
    assert_eq!(result.first_token_ns, Some(2_000_000));
    assert_eq!(result.finished_ns, 4_000_000);
    let output = only_choice(result);
    assert_eq!((output.index, output.text.as_str()), (0, "hello worldhello"));
    assert_eq!(output.token_ids, [HELLO, WORLD, HELLO]);
    assert_eq!((output.finish_reason, output.stop_reason, output.error), (FinishReason::Length, None, None));
    assert_eq!(output.first_token_ns, Some(2_000_000));
    assert_eq!(output.inter_token_latencies_s, [0.001, 0.001]);
    assert_eq!((output.num_logprobs, output.logprobs, output.cumulative_logprob), (None, None, None));
}

#[test]
fn the_token_that_ends_the_output_stays_in_the_ids_and_not_in_the_text() {
    let mut rig = Rig::new(&[HELLO, END, WORLD]);
    let result = rig.run(9, &[]);
    assert_eq!((result.text.as_str(), &result.token_ids[..]), ("hello", &[HELLO, END][..]));
    assert_eq!((result.finish_reason, result.stop_reason), (FinishReason::Stop, None));
    let spec = RequestSpec { stop_token_ids: vec![HELLO], max_tokens: Some(9), ..RequestSpec::new(vec![1]) };
    rig.submit_spec(spec, &[]);
    let result = rig.finish_choice();
    assert_eq!((result.text.as_str(), &result.token_ids[..]), ("", &[HELLO][..]));
    assert_eq!(result.stop_reason, Some(StopReason::Token(HELLO)));
    let spec = RequestSpec { ignore_eos: true, max_tokens: Some(3), ..RequestSpec::new(vec![1]) };
    rig.submit_spec(spec, &[]);
    assert_eq!(rig.finish_choice().text, "hello world");
}

#[test]
fn f01_a_stop_string_across_tokens_ends_the_request_before_it() {
    let mut rig = Rig::new(&[HELLO, WORLD, 33]);
    let result = rig.run(60, &["o wor"]);
    assert_eq!((result.text.as_str(), result.stop_reason), ("hell", Some(text("o wor"))));
    assert_eq!((result.finish_reason, &result.token_ids[..]), (FinishReason::Stop, &[HELLO, WORLD][..]));
    let stats = rig.scheduler.submitter().stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_used_blocks), (0, 0, 0));
}

#[test]
fn a_stop_string_that_is_complete_with_the_last_token_wins_over_length() {
    let mut rig = Rig::new(&[HELLO, WORLD]);
    let result = rig.run(2, &["world"]);
    assert_eq!((result.text.as_str(), result.finish_reason), ("hello ", FinishReason::Stop));
    assert_eq!(result.stop_reason, Some(text("world")));
}

#[test]
fn a_stop_string_made_of_flushed_bytes_ends_the_text_too() {
    let mut rig = Rig::new(&[HELLO, SPACE_C3]);
    assert_eq!(rig.run(2, &[]).text, "hello \u{FFFD}");
    let result = rig.run(2, &[" \u{FFFD}"]);
    assert_eq!((result.text.as_str(), result.finish_reason), ("hello", FinishReason::Stop));
}

#[test]
fn what_was_held_back_for_a_stop_string_comes_out_at_the_end() {
    let mut rig = Rig::new(&[HELLO]);
    assert_eq!(rig.run(1, &["lo world"]).text, "hello");
}

#[test]
fn e06_a_cancel_in_the_step_of_the_stop_gives_exactly_one_end() {
    let mut rig = Rig::new(&[HELLO, WORLD, 33]);
    for round in 0..10_000u32 {
        let id = rig.submit(20, &["world"]);
        for _ in 0..round % 4 {
            rig.step();
        }
        rig.scheduler.submitter().cancel(cbrs_core::RequestId::from_u64(id));
        let result = rig.finish(1).pop().unwrap();
        assert_eq!(result.request_id, id);
        let result = only_choice(result);
        match result.finish_reason {
            FinishReason::Cancelled => assert_eq!(result.stop_reason, None),
            FinishReason::Stop => {
                assert_eq!((result.text.as_str(), result.stop_reason), ("hello ", Some(text("world"))));
            }
            other => panic!("round {round} ended with {other:?}"),
        }
        assert!(rig.processor.take_finished(0).is_empty());
    }
}

#[test]
fn a_failed_step_gives_its_message_and_leaves_neighbours_alone() {
    let mut rig = Rig::new(&[HELLO]);
    let failing = rig.submit(5, &[]);
    rig.step();
    let step_id = rig.scheduler.batch().step_id;
    let later = rig.submit(1, &[]);
    rig.scheduler.fail(step_id, "the model fell over").unwrap();
    rig.scheduler.step(None, 2_000_000).unwrap();
    let results: HashMap<u64, FinishedRequest> =
        rig.finish(2).into_iter().map(|result| (result.request_id, result)).collect();
    assert_eq!(results[&failing].error.as_deref(), Some("the model fell over"));
    let (failed, done) = (&results[&failing].outputs[0], &results[&later].outputs[0]);
    assert_eq!((failed.finish_reason, failed.error.as_deref()), (FinishReason::Error, Some("the model fell over")));
    assert_eq!((done.text.as_str(), done.finish_reason), ("hello", FinishReason::Length));
}

#[test]
fn closing_the_engine_ends_every_live_request_once() {
    let mut rig = Rig::new(&[HELLO]);
    for _ in 0..6 {
        rig.submit(50, &[]);
    }
    rig.step();
    rig.step();
    rig.scheduler.submitter().close();
    rig.step();
    let mut results = Vec::new();
    while results.len() < 6 {
        let more = rig.processor.wait_finished(TIMEOUT, 0);
        assert!(!more.is_empty(), "{} of 6 have ended", results.len());
        results.extend(more);
    }
    assert_eq!(rig.processor.num_live(), 0);
    assert!(results.iter().all(|result| result.outputs[0].finish_reason == FinishReason::Cancelled));
    let refused = rig.processor.submit(RequestSpec::new(vec![1]), &TextSpec::default(), recipient(0), 0);
    assert_eq!(refused.unwrap_err(), Error::Closed);
}

#[test]
fn closing_the_processor_ends_live_requests_and_keeps_results() {
    let mut rig = Rig::new(&[HELLO]);
    rig.submit(1, &[]);
    rig.submit(50, &[]);
    rig.step();
    rig.step();
    rig.processor.close();
    rig.processor.close();
    let reasons: Vec<_> = rig.processor.take_finished(0).iter().map(|result| result.outputs[0].finish_reason).collect();
    assert_eq!(reasons, [FinishReason::Length, FinishReason::Cancelled]);
    let refused = rig.processor.submit(RequestSpec::new(vec![1]), &TextSpec::default(), recipient(0), 0);
    assert_eq!(refused.unwrap_err(), Error::Closed);
    assert!(rig.processor.is_closed());
    // The engine was told as well: its rows are free after the next step.
    rig.step();
    rig.step();
    assert_eq!(rig.scheduler.submitter().stats().num_running, 0);
}

#[test]
fn dropping_the_engine_ends_live_requests_without_waiting() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
    let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
    scheduler.set_output_sink(Some(processor.sink()));
    processor.submit(RequestSpec::new(vec![1]), &TextSpec::default(), recipient(3), 0).unwrap();
    drop(scheduler);
    let finished = processor.wait_finished(TIMEOUT, 0);
    assert_eq!((finished[0].index, finished[0].outputs[0].finish_reason), (3, FinishReason::Cancelled));
    let start = Instant::now();
    assert!(processor.wait_finished(TIMEOUT, 0).is_empty(), "nothing can come any more");
    assert!(start.elapsed() < TIMEOUT / 2);
}

#[test]
fn dropping_a_processor_without_closing_it_ends_its_thread() {
    for _ in 0..50 {
        let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
        let processor = OutputProcessor::new(scheduler.submitter(), Some(byte_level())).unwrap();
        scheduler.set_output_sink(Some(processor.sink()));
        processor.submit(RequestSpec::new(vec![1]), &TextSpec::default(), recipient(0), 0).unwrap();
        drop(processor);
        scheduler.step(None, 1).unwrap();
    }
    #[cfg(target_os = "linux")]
    {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
            let name = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
            (name.trim() == "cbrs-text").then_some(())
        });
        assert!(threads.count() < 20, "threads of dropped processors are still there");
    }
}

#[test]
fn e07_a_step_that_fails_when_nobody_listens_leaves_the_engine_running() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
    let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
    scheduler.set_output_sink(Some(processor.sink()));
    processor.submit(RequestSpec::new(vec![1, 2, 3]), &TextSpec::default(), recipient(0), 0).unwrap();
    scheduler.step(None, 1).unwrap();
    drop(processor);
    scheduler.fail(scheduler.batch().step_id, "the model fell over").unwrap();
    let next = scheduler.submitter().submit(RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![4]) }).unwrap();
    scheduler.step(None, 2).unwrap();
    scheduler.step(Some(&StepResult { token_ids: &[7], ..StepResult::default() }), 3).unwrap();
    assert_eq!(
        (scheduler.output().request_ids.last(), scheduler.output().token_ids.last()),
        (Some(&next.as_u64()), Some(&7))
    );
    scheduler.check_invariants();
}

#[test]
fn stop_strings_without_a_tokenizer_are_refused() {
    let scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
    let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
    let error =
        processor.submit(RequestSpec::new(vec![1]), &stopping(&["x"]), recipient(0), 0).unwrap_err().to_string();
    assert!(error.contains("stop strings need a tokenizer"), "{error}");
    let error = processor.submit_text("x", RequestSpec::default(), &TextSpec::default(), recipient(0), 0).unwrap_err();
    assert!(error.to_string().contains("a text needs a tokenizer"), "{error}");
    assert_eq!(processor.num_live(), 0);
}

#[test]
fn e03_a_cancelled_request_leaves_no_entry_behind() {
    let mut rig = Rig::new(&[HELLO]);
    let first = rig.submit(50, &[]);
    assert!(rig.scheduler.submitter().cancel(cbrs_core::RequestId::from_u64(first)));
    assert_eq!(rig.finish_choice().finish_reason, FinishReason::Cancelled);
    let second = rig.submit(1, &[]);
    assert_ne!(first, second);
    assert_eq!(rig.finish_choice().text, "hello");
}

#[test]
fn no_event_is_missed_while_other_threads_submit() {
    const THREADS: usize = 3;
    const REQUESTS: usize = 200;
    let mut rig = Rig::new(&[HELLO, WORLD]);
    let processor = Arc::new(OutputProcessor::new(rig.scheduler.submitter(), Some(byte_level())).unwrap());
    rig.scheduler.set_output_sink(Some(processor.sink()));
    let submitters: Vec<_> = (0..THREADS)
        .map(|_| {
            let processor = Arc::clone(&processor);
            std::thread::spawn(move || {
                for index in 0..REQUESTS {
                    let max_tokens = Some(index as u64 % 3 + 1);
                    let spec = RequestSpec { max_tokens, ..RequestSpec::new(vec![1, 2]) };
                    let stops: &[&str] = if index % 2 == 0 { &[] } else { &["wor"] };
                    processor.submit(spec, &stopping(stops), recipient(index as u64), 0).unwrap();
                }
            })
        })
        .collect();
    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (processor, done) = (Arc::clone(&processor), Arc::clone(&done));
        std::thread::spawn(move || {
            let mut finished = Vec::new();
            let start = Instant::now();
            while finished.len() < THREADS * REQUESTS && start.elapsed() < TIMEOUT {
                finished.extend(processor.wait_finished(Duration::from_millis(100), 5));
            }
            done.store(true, Ordering::Release);
            finished
        })
    };
    while !done.load(Ordering::Acquire) {
        rig.step();
    }
    for submitter in submitters {
        submitter.join().unwrap();
    }
    let finished = reader.join().unwrap();
    assert_eq!(finished.len(), THREADS * REQUESTS);
    for result in finished {
        let is_stopped = result.index % 2 == 1 && result.index % 3 > 0;
        let text = match (is_stopped, result.index % 3) {
            (true, _) => "hello ",
            (false, 0) => "hello",
            (false, 1) => "hello world",
            (false, _) => "hello worldhello",
        };
        assert_eq!(result.outputs[0].text, text, "index {}", result.index);
        let reason = if is_stopped { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(result.outputs[0].finish_reason, reason);
    }
    assert_eq!(processor.num_live(), 0);
}

#[test]
fn the_stop_string_stays_in_the_text_if_asked_for() {
    let mut rig = Rig::new(&[HELLO, WORLD, 33]);
    let spec = || RequestSpec { max_tokens: Some(20), ..RequestSpec::new(vec![1]) };
    let keeping = TextSpec { include_stop_str_in_output: true, ..stopping(&["o w"]) };
    rig.submit_text(spec(), &keeping);
    let result = rig.finish_choice();
    assert_eq!((result.text.as_str(), result.stop_reason), ("hello w", Some(text("o w"))));
    assert_eq!(result.token_ids, [HELLO, WORLD]);
}

#[test]
fn special_tokens_are_left_out_of_the_text_unless_asked_for() {
    let mut rig = Rig::new(&[HELLO, END, WORLD]);
    let spec = || RequestSpec { ignore_eos: true, max_tokens: Some(3), ..RequestSpec::new(vec![1]) };
    rig.submit_text(spec(), &TextSpec::default());
    assert_eq!(rig.finish_choice().text, "hello world");
    rig.submit_text(spec(), &TextSpec { skip_special_tokens: false, ..TextSpec::default() });
    assert_eq!(rig.finish_choice().text, "hello<|end|> world");
}

#[test]
fn without_detokenizing_there_are_ids_and_no_text_and_stop_strings_are_refused() {
    let mut rig = Rig::new(&[HELLO, WORLD]);
    let ids_only = TextSpec { detokenize: false, ..TextSpec::default() };
    let spec = || RequestSpec { max_tokens: Some(2), ..RequestSpec::new(vec![1]) };
    rig.submit_text(spec(), &ids_only);
    let result = rig.finish_choice();
    assert_eq!((result.text.as_str(), &result.token_ids[..]), ("", &[HELLO, WORLD][..]));
    let refused = TextSpec { detokenize: false, ..stopping(&["x"]) };
    let error = rig.processor.submit(spec(), &refused, recipient(0), 0).unwrap_err().to_string();
    assert!(error.contains("detokenize=False leaves out; use stop_token_ids"), "{error}");
    assert_eq!(rig.processor.num_live(), 0);
}

#[test]
fn g08_a_stop_string_counts_only_after_min_tokens() {
    let mut rig = Rig::new(&[HELLO, WORLD]);
    for (min_tokens, stop, expected, num_tokens) in [
        (0, "hello", "", 1),
        // It is complete with the third token, which is the first to be searched.
        (2, "hello", "hello world", 3),
        (3, "hello", "hello worldhello world", 5),
        // Begun in the second token, which is not searched: only the next one counts.
        (2, "dhello", "hello worldhello worl", 5),
        (8, "hello", "hello worldhello worldhello worldhello world", 9),
    ] {
        let mut spec = RequestSpec { max_tokens: Some(9), ..RequestSpec::new(vec![1]) };
        spec.sampling.min_tokens = min_tokens;
        rig.submit_spec(spec, &[stop]);
        let result = rig.finish_choice();
        assert_eq!((result.text.as_str(), result.token_ids.len()), (expected, num_tokens), "after {min_tokens}");
        assert_eq!((result.finish_reason, result.stop_reason), (FinishReason::Stop, Some(text(stop))));
    }
}

#[test]
fn what_is_left_at_the_end_of_min_tokens_is_not_searched() {
    let mut rig = Rig::new(&[HELLO, SPACE_C3]);
    let mut spec = RequestSpec { max_tokens: Some(2), ..RequestSpec::new(vec![1]) };
    spec.sampling.min_tokens = 2;
    rig.submit_spec(spec, &["\u{FFFD}"]);
    let result = rig.finish_choice();
    assert_eq!((result.text.as_str(), result.finish_reason), ("hello \u{FFFD}", FinishReason::Length));
}

/// Token sequences that the scheduler bans for a request with these bad words.
fn banned(tokenizer: cbrs_text::Tokenizer, bad_words: &[&str], given: &[&[i32]]) -> Vec<Vec<i32>> {
    let mut rig = Rig::with_tokenizer(&[HELLO], Some(tokenizer));
    let bad_words = bad_words.iter().map(|&word| word.to_owned()).collect();
    let spec = RequestSpec {
        max_tokens: Some(1),
        bad_words_token_ids: given.iter().map(|word| word.to_vec()).collect(),
        ..RequestSpec::new(vec![1])
    };
    rig.submit_text(spec, &TextSpec { bad_words, ..TextSpec::default() });
    rig.step();
    let tables = &rig.scheduler.batch().new_row_tables;
    let ids = |ends: &[i32]| tables.bad_word_ids[ends[0] as usize..ends[1] as usize].to_vec();
    let banned = tables.bad_word_start.windows(2).map(ids).collect();
    rig.finish(1);
    banned
}

#[test]
fn bad_words_are_banned_with_and_without_a_leading_space() {
    let byte = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
    assert_eq!(banned(byte_level(), &["cat"], &[]), [byte("cat"), byte(" cat")]);
    assert_eq!(banned(byte_level(), &["  cat", "cat"], &[]), [byte("cat"), byte(" cat")], "none comes twice");
    assert_eq!(banned(byte_level(), &[" "], &[]), [byte(" ")], "a space is all there is");
    // A newline is an added token of its own.
    assert_eq!(banned(byte_level(), &["\n"], &[&[5, 6]]), [vec![5, 6], vec![NEWLINE], vec![32, NEWLINE]]);
    // This one marks the start of a text as if a space were before it: both forms begin with the mark.
    assert_eq!(banned(spm(), &["ab"], &[]), [["▁", "a", "b"].map(spm_word)]);
}

#[test]
fn bad_words_out_of_bounds_are_refused_with_the_numbers() {
    let rig = Rig::new(&[HELLO]);
    let refusal = |bad_words: Vec<String>| {
        let text = TextSpec { bad_words, ..TextSpec::default() };
        rig.processor.submit(RequestSpec::new(vec![1]), &text, recipient(0), 0).unwrap_err()
    };
    let many = vec!["x".to_owned(); 257];
    assert_eq!(refusal(many), Error::TooManyEntries { name: "bad_words", len: 257, limit: 256 });
    for len in [0, 257] {
        let error = refusal(vec!["é".repeat(len)]);
        assert_eq!(error.to_string(), format!("bad_words is {len} characters long, but must be 1 to 256"));
    }
    let scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
    let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
    let text = TextSpec { bad_words: vec!["x".to_owned()], ..TextSpec::default() };
    let error = processor.submit(RequestSpec::new(vec![1]), &text, recipient(0), 0).unwrap_err().to_string();
    assert!(error.contains("bad_words need a tokenizer; use bad_words_token_ids"), "{error}");
}

#[test]
fn a_truncated_prompt_is_the_one_in_the_result() {
    let mut rig = Rig::new(&[HELLO]);
    for (truncate, expected) in [(2, vec![4, 5]), (9, vec![1, 2, 3, 4, 5]), (-1, vec![1, 2, 3, 4, 5])] {
        let spec = RequestSpec {
            truncate_prompt_tokens: Some(truncate),
            max_tokens: Some(1),
            ..RequestSpec::new(vec![1, 2, 3, 4, 5])
        };
        rig.submit_spec(spec, &[]);
        assert_eq!(rig.finish(1)[0].prompt_token_ids, expected);
    }
    let long = RequestSpec { truncate_prompt_tokens: Some(-1), ..RequestSpec::new(vec![1; 500]) };
    rig.submit_spec(long, &[]);
    assert_eq!(rig.finish(1)[0].prompt_token_ids.len(), 127);
}
