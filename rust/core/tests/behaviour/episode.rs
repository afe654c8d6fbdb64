//! One configuration and a list of operations: run with the oracle, replayed, or replayed bare for its trace alone.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use cbrs_core::{Error, RequestId, Scheduler, SchedulerConfig, Stats, StepResult, Submitter};

use crate::fake;
use crate::ops::{Mistake, Op, random_config, random_op, request};
use crate::oracle::{Oracle, Seen, digest};
use crate::rng::{Rng, mix};
use crate::script::{Script, run};

/// What a list of operations led to.
#[derive(Debug)]
pub(crate) struct Episode {
    pub(crate) config: SchedulerConfig,
    pub(crate) ops: Vec<Op>,
    /// Digest of all steps, or what went wrong.
    pub(crate) outcome: Result<u64, String>,
    /// What has been counted until the end.
    pub(crate) stats: Stats,
    /// Waiting requests that a later one was admitted before, because they waited for a block in flight.
    pub(crate) num_passed: usize,
    pub(crate) seen: Seen,
}

/// Draws a configuration and `num_ops` operations from the seed, runs them, drains, and replays them with other hashes.
pub(crate) fn random(seed: u64, num_ops: usize) -> Episode {
    let mut rng = Rng::new(seed);
    let config = random_config(&mut rng);
    let mut ops = Vec::with_capacity(2 * num_ops);
    let (mut stats, mut num_passed, mut seen) = (Stats::default(), 0, Seen::default());
    let outcome = quietly(|| {
        let mut oracle = Oracle::new(config.clone());
        let mut trace = 0;
        for _ in 0..num_ops {
            let op = random_op(&mut rng, &oracle);
            ops.push(op.clone());
            apply(&mut oracle, &op, &mut trace);
        }
        ops.push(Op::SetPaused(false));
        apply(&mut oracle, &Op::SetPaused(false), &mut trace);
        while !oracle.is_at_rest() {
            ops.push(Op::Step { errors: 0 });
            apply(&mut oracle, &Op::Step { errors: 0 }, &mut trace);
            assert!(ops.len() < 100 * (num_ops + 100), "{} requests never end", oracle.model().live.len());
        }
        stats = oracle.scheduler().submitter().stats();
        num_passed = oracle.model().choices.iter().filter(|request| request.overtaken > 0).count();
        seen = oracle.model().seen;
        rest(&mut oracle, rng.one_in(4));
        check_trace(&config, &ops, trace);
        trace
    });
    Episode { config, ops, outcome, stats, num_passed, seen }
}

/// Runs a list of operations with the oracle, drains, and replays it with other hashes.
pub(crate) fn replay(config: &SchedulerConfig, ops: &[Op]) -> Result<u64, String> {
    quietly(|| {
        let mut oracle = Oracle::new(config.clone());
        let mut trace = 0;
        for op in ops {
            apply(&mut oracle, op, &mut trace);
        }
        oracle.drain();
        rest(&mut oracle, true);
        check_trace(config, ops, trace);
        trace
    })
}

fn rest(oracle: &mut Oracle, close: bool) {
    oracle.scheduler().check_drained();
    if close {
        oracle.close();
    }
}

/// Neither the key of the hash nor collisions may show anywhere, and the same operations give the same steps.
fn check_trace(config: &SchedulerConfig, ops: &[Op], trace: u64) {
    let other_hashes =
        SchedulerConfig { hash_seed: mix(config.hash_seed), collide_hashes: !config.collide_hashes, ..config.clone() };
    assert_eq!(bare_trace(&other_hashes, ops), trace, "other prefix hashes give other steps");
}

pub(crate) fn apply(oracle: &mut Oracle, op: &Op, trace: &mut u64) {
    let num_requests = oracle.model().requests.len();
    match op {
        Op::Submit { .. } => {
            let (spec, script) = request(op).expect("it is a submit");
            // The oracle has compared the answer with the right one; a refusal is as good as an acceptance here.
            let _ = oracle.submit(spec, script);
        }
        Op::Step { errors } => oracle.step_with_errors(*errors),
        Op::BadStep(mistake) => bad_step(oracle, *mistake),
        Op::Fail => oracle.fail("the device is gone"),
        Op::Cancel(request) if num_requests > 0 => {
            let choice = oracle.model().requests[request % num_requests].choices.start;
            oracle.cancel(choice);
        }
        Op::Finish { request, choice, num_tokens } if num_requests > 0 => {
            let choices = oracle.model().requests[request % num_requests].choices.clone();
            let choice = choices.start + choice % choices.len();
            oracle.finish(choice, *num_tokens, (num_tokens % 2 == 0).then_some("END"));
        }
        Op::ResetPrefixCache => oracle.reset_prefix_cache(),
        Op::SetPaused(is_paused) => oracle.set_paused(*is_paused),
        Op::Cancel(_) | Op::Finish { .. } => {}
    }
    *trace = mix(*trace ^ digest(oracle.scheduler()));
}

/// Offers a wrong result, if the batch in flight allows one of this kind.
fn bad_step(oracle: &mut Oracle, mistake: Mistake) {
    let (step_id, num_samples) = (oracle.batch().step_id, oracle.batch().num_samples());
    if !oracle.scheduler().is_in_flight() {
        return;
    }
    if let Mistake::NoPromptLogprobs | Mistake::FewPromptLogprobs = mistake {
        bad_prompt_logprobs(oracle, mistake == Mistake::FewPromptLogprobs);
        return;
    }
    if num_samples == 0 {
        return;
    }
    let mut tokens = vec![0; num_samples];
    let logprobs = fake::logprobs(oracle.batch(), oracle.scheduler().sampling(), &tokens);
    let prompt_logprobs = fake::prompt_logprobs(oracle.batch());
    let starts: Vec<i32> =
        (0..=num_samples as i32).map(|start| start + i32::from(start as usize == num_samples)).collect();
    let right = StepResult {
        logprobs: logprobs.as_ref().map(fake::Matrix::lend),
        prompt_logprobs: prompt_logprobs.as_ref().map(fake::Matrix::lend),
        ..StepResult::default()
    };
    let (field, expected, got) = ("token_ids", num_samples, num_samples + 1);
    match mistake {
        Mistake::NoResult => oracle.refuse(None, &Error::MissingResult { step_id, num_samples }),
        Mistake::WrongStep => {
            let result = StepResult { step_id: Some(step_id + 1), token_ids: &tokens, ..StepResult::default() };
            oracle.refuse(Some(&result), &Error::WrongStep { expected: step_id, got: step_id + 1 });
        }
        Mistake::TooLong => {
            tokens.push(0);
            let result = StepResult { token_ids: &tokens, ..StepResult::default() };
            oracle.refuse(Some(&result), &Error::ResultLength { field, step_id, expected, got });
        }
        Mistake::OutOfVocabulary => {
            let limit = oracle.model().config.vocab_size.expect("random configurations have a vocabulary");
            let (position, token, vocab_size) = (num_samples - 1, i64::from(limit), i64::from(limit));
            tokens[position] = limit as i32;
            let result = StepResult { token_ids: &tokens, ..right };
            oracle.refuse(Some(&result), &Error::ResultToken { step_id, position, token, vocab_size });
        }
        Mistake::NoLogprobs => bad_logprobs(oracle, &tokens),
        Mistake::NoPromptLogprobs | Mistake::FewPromptLogprobs => unreachable!("they need no samples"),
        Mistake::Start => {
            let (position, expected) = (num_samples, num_samples as i32);
            let result = StepResult { token_ids: &tokens, token_start: Some(&starts), ..right };
            oracle.refuse(Some(&result), &Error::ResultTokenStart { position, expected, got: expected + 1 });
        }
    }
}

/// Offers a result without the log-probabilities of its tokens, if somebody wants them.
fn bad_logprobs(oracle: &mut Oracle, tokens: &[i32]) {
    if fake::logprobs(oracle.batch(), oracle.scheduler().sampling(), tokens).is_none() {
        return;
    }
    let (field, step_id, expected, got) = ("logprobs", oracle.batch().step_id, tokens.len(), 0);
    let result = StepResult { token_ids: tokens, ..StepResult::default() };
    oracle.refuse(Some(&result), &Error::ResultLength { field, step_id, expected, got });
}

/// Offers a result that says nothing about prompts, or too little, if somebody wants to know.
fn bad_prompt_logprobs(oracle: &mut Oracle, has_some: bool) {
    let Some(matrix) = fake::prompt_logprobs(oracle.batch()) else { return };
    let tokens = oracle.run_batch();
    let logprobs = fake::logprobs(oracle.batch(), oracle.scheduler().sampling(), &tokens);
    let expected = oracle.batch().prompt_rows.len();
    let matrix = matrix.shortened();
    let result = StepResult {
        token_ids: &tokens,
        logprobs: logprobs.as_ref().map(fake::Matrix::lend),
        prompt_logprobs: has_some.then(|| matrix.lend()),
        ..StepResult::default()
    };
    let (field, step_id, got) = ("prompt_logprobs", oracle.batch().step_id, if has_some { expected - 1 } else { 0 });
    // A batch without samples needs a result all the same.
    let result = (has_some || !tokens.is_empty()).then_some(&result);
    oracle.refuse(result, &Error::ResultLength { field, step_id, expected, got });
}

/// The digest of the same operations on a scheduler that nobody watches.
fn bare_trace(config: &SchedulerConfig, ops: &[Op]) -> u64 {
    let mut scheduler = Scheduler::new(config.clone()).expect("the configuration was valid before");
    let submitter = scheduler.submitter();
    let mut accepted: Vec<(RequestId, Vec<Script>)> = Vec::new();
    let (mut trace, mut now_ns) = (0, 0);
    for op in ops {
        match op {
            Op::Submit { .. } => {
                let (spec, script) = request(op).expect("it is a submit");
                let scripts = script.into_choices(spec.n);
                accepted.extend(submitter.submit(spec).ok().map(|id| (id, scripts)));
            }
            Op::Step { errors } => {
                now_ns += 1;
                bare_step(&mut scheduler, &accepted, *errors, now_ns);
            }
            Op::Fail => {
                // Whether there was a batch to fail shows in the steps that follow.
                let _ = scheduler.fail(scheduler.batch().step_id, "the device is gone");
            }
            Op::ResetPrefixCache => scheduler.reset_prefix_cache(),
            Op::Cancel(_) | Op::Finish { .. } | Op::SetPaused(_) | Op::BadStep(_) => {
                bare_control(&submitter, &accepted, op)
            }
        }
        trace = mix(trace ^ digest(&scheduler));
    }
    trace
}

fn bare_control(submitter: &Submitter, accepted: &[(RequestId, Vec<Script>)], op: &Op) {
    match op {
        Op::Cancel(request) if !accepted.is_empty() => {
            submitter.cancel(accepted[request % accepted.len()].0);
        }
        Op::Finish { request, choice, num_tokens } if !accepted.is_empty() => {
            let reason = (num_tokens % 2 == 0).then(|| "END".into());
            let (id, scripts) = &accepted[request % accepted.len()];
            submitter.finish(*id, (choice % scripts.len()) as i32, *num_tokens as u32, reason);
        }
        Op::SetPaused(true) => submitter.pause(),
        Op::SetPaused(false) => submitter.resume(),
        _ => {}
    }
}

fn bare_step(scheduler: &mut Scheduler, accepted: &[(RequestId, Vec<Script>)], errors: u64, now_ns: u64) {
    let mut tokens = Vec::new();
    if scheduler.is_in_flight() {
        let script = |id, number: i32| {
            &accepted.iter().rev().find(|(other, _)| *other == id).expect("the id was given out").1[number as usize]
        };
        tokens = run(scheduler.batch(), script);
    }
    let row_error: Vec<u8> = (0..tokens.len()).map(|index| u8::from(index < 64 && errors >> index & 1 == 1)).collect();
    let batch = scheduler.batch();
    let in_flight = scheduler.is_in_flight();
    let logprobs = in_flight.then(|| fake::logprobs(batch, scheduler.sampling(), &tokens)).flatten();
    let prompt_logprobs = in_flight.then(|| fake::prompt_logprobs(batch)).flatten();
    let has_answer = !tokens.is_empty() || prompt_logprobs.is_some();
    let result = StepResult {
        token_ids: &tokens,
        row_error: Some(&row_error),
        logprobs: logprobs.as_ref().map(fake::Matrix::lend),
        prompt_logprobs: prompt_logprobs.as_ref().map(fake::Matrix::lend),
        ..StepResult::default()
    };
    scheduler.step(has_answer.then_some(&result), now_ns).expect("the same result was right before");
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `action` and gives the message of its panic, which is not printed.
pub(crate) fn quietly<T>(action: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let message = info.to_string();
            if IS_QUIET.get() {
                LAST_PANIC.set(message);
            } else {
                default(info);
            }
        }));
    });
    let was_quiet = IS_QUIET.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(action));
    IS_QUIET.set(was_quiet);
    outcome.map_err(|_| LAST_PANIC.take())
}

thread_local! {
    static LAST_PANIC: Cell<String> = const { Cell::new(String::new()) };
}
