//! An output processor on a real scheduler whose model follows a script.

use std::time::{Duration, Instant};

use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};
use cbrs_text::{
    FinishedChoice, FinishedRequest, OutputChannel, OutputProcessor, Recipient, StopStrings, TextSpec, Tokenizer,
    Update,
};

use super::{END, byte_level};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// A scheduler whose model says `script`, by output position, to every request.
pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    pub(crate) processor: OutputProcessor,
    script: Vec<i32>,
    /// What a choice says at an output position, where the script has this token.
    pub(crate) say: fn(i32, i32, i32) -> i32,
    pub(crate) time_ns: u64,
}

impl Rig {
    pub(crate) fn new(script: &[i32]) -> Self {
        Self::with_tokenizer(script, Some(byte_level()))
    }

    pub(crate) fn with_tokenizer(script: &[i32], tokenizer: Option<Tokenizer>) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            num_blocks: 64,
            max_model_len: 128,
            vocab_size: Some(300),
            eos_token_ids: vec![END],
            ..SchedulerConfig::default()
        };
        let mut scheduler = Scheduler::new(config).unwrap();
        let processor = OutputProcessor::new(scheduler.submitter(), tokenizer).unwrap();
        scheduler.set_output_sink(Some(processor.sink()));
        Self { scheduler, processor, script: script.to_vec(), say: |_, _, token| token, time_ns: 0 }
    }

    pub(crate) fn submit(&self, max_tokens: u64, stops: &[&str]) -> u64 {
        let spec = RequestSpec { max_tokens: Some(max_tokens), ..RequestSpec::new(vec![1, 2, 3]) };
        self.submit_spec(spec, stops)
    }

    pub(crate) fn submit_spec(&self, spec: RequestSpec, stops: &[&str]) -> u64 {
        self.submit_text(spec, &stopping(stops))
    }

    pub(crate) fn submit_text(&self, spec: RequestSpec, text: &TextSpec) -> u64 {
        self.processor.submit(spec, text, recipient(7), self.time_ns).unwrap().as_u64()
    }

    pub(crate) fn stream(&self, spec: RequestSpec, text: &TextSpec, channel: &OutputChannel) -> u64 {
        let recipient = Recipient { index: 7, channel: Some(channel), is_whole: false };
        self.processor.submit(spec, text, recipient, self.time_ns).unwrap().as_u64()
    }

    /// Steps until `count` requests have sent their last update; returns all updates.
    pub(crate) fn finish_streams(&mut self, channel: &OutputChannel, count: usize) -> Vec<Update> {
        let start = Instant::now();
        let mut updates = channel.take();
        while updates.iter().filter(|update| update.is_last).count() < count {
            assert!(start.elapsed() < TIMEOUT, "{count} streams do not end: {updates:?}");
            if !self.step() {
                std::thread::sleep(Duration::from_millis(1));
            }
            updates.extend(channel.take());
        }
        updates
    }

    /// One step, one millisecond later; returns whether something ran.
    pub(crate) fn step(&mut self) -> bool {
        let batch = self.scheduler.batch();
        let samples = batch.sample_choices.iter().zip(&batch.sample_positions);
        let answer = |(&choice, &position): (&i32, &i32)| {
            (self.say)(choice, position, self.script[position as usize % self.script.len()])
        };
        let tokens: Vec<i32> = samples.map(answer).collect();
        let result = StepResult { token_ids: &tokens, ..StepResult::default() };
        self.time_ns += 1_000_000;
        let is_idle = self.scheduler.batch().num_samples() == 0;
        self.scheduler.step((!is_idle).then_some(&result), self.time_ns).unwrap();
        self.scheduler.batch().num_seqs() > 0
    }

    /// Steps until `count` requests have finished.
    pub(crate) fn finish(&mut self, count: usize) -> Vec<FinishedRequest> {
        let start = Instant::now();
        let mut finished = Vec::new();
        while finished.len() < count {
            assert!(start.elapsed() < TIMEOUT, "{} of {count} finished", finished.len());
            let ran = self.step();
            let wait = if ran { Duration::ZERO } else { Duration::from_millis(1) };
            finished.extend(self.processor.wait_finished(wait, 0));
        }
        assert_eq!(self.processor.num_live(), 0);
        finished
    }

    pub(crate) fn run(&mut self, max_tokens: u64, stops: &[&str]) -> FinishedChoice {
        self.submit(max_tokens, stops);
        self.finish_choice()
    }

    /// Steps until a request has finished; returns its only output.
    pub(crate) fn finish_choice(&mut self) -> FinishedChoice {
        only_choice(self.finish(1).pop().unwrap())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.scheduler.check_invariants();
        }
    }
}

pub(crate) fn recipient(index: u64) -> Recipient<'static> {
    Recipient { index, ..Recipient::default() }
}

pub(crate) fn stopping(stops: &[&str]) -> TextSpec {
    TextSpec::with_stops(StopStrings::new(stops).unwrap())
}

pub(crate) fn only_choice(mut request: FinishedRequest) -> FinishedChoice {
    assert_eq!(request.outputs.len(), 1);
    request.outputs.pop().unwrap()
}
