//! From step outputs to results: one consumer thread that detokenizes, finds stop strings, and collects or streams results.
//!
//! 1. Every accepted request ends in exactly one `FinishedRequest`, or in one last `Update` of its channel, also when the
//!    engine or the processor is closed.
//! 2. No event is missed: a request is registered under the lock that the consumer takes for each step output.
//! 3. The engine thread copies and wakes, whatever the consumer does; the consumer never calls into the engine but to
//!    finish a choice at a stop string, on the path that never waits.
//! 4. Locks are taken in one order: the live requests, then a channel or the finished ones.

mod channel;
mod choice;
mod event;
mod finished;
mod live;
mod mailbox;
mod prepared;
#[cfg(test)]
mod tests;
mod timings;

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cbrs_core::fault;
use cbrs_core::{Error, FinishReason, ListError, OutputSink, RequestId, RequestSpec, Result, StepOutput, Submitter};

use crate::stream::TextStream;
use crate::text_spec::TextSpec;
use crate::tokenizer::Tokenizer;
use channel::{Channel, Outbox};
pub use channel::{OutputChannel, TokenIds, Update};
pub use choice::End;
use finished::FinishedQueue;
pub use finished::{FinishedChoice, FinishedRequest, StopReason};
use live::{Draft, LiveRequest, Progress};
use mailbox::{MailSink, Mailbox};
pub use prepared::Prepared;
use timings::Recorder;
pub use timings::Timings;

type LiveMap = HashMap<u64, LiveRequest, foldhash::fast::RandomState>;

/// What runs on the consumer thread and what the callers share with it.
#[derive(Debug)]
struct Shared {
    mailbox: Mailbox,
    live: Mutex<Live>,
    finished: FinishedQueue,
    submitter: Submitter,
    timings: Timings,
}

#[derive(Debug, Default)]
struct Live {
    requests: LiveMap,
    /// Nobody reads step outputs any more: nothing may be registered.
    is_closed: bool,
}

/// Who gets what comes of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Recipient<'a> {
    /// Number that comes back with the result and with every update.
    pub index: u64,
    /// Where to send updates; without it the result is kept until it is taken as a whole.
    pub channel: Option<&'a OutputChannel>,
    /// Send one update for each choice, when it ends.
    pub is_whole: bool,
}

impl Recipient<'_> {
    /// Whether each token is sent as it comes.
    fn is_streamed(&self) -> bool {
        self.channel.is_some() && !self.is_whole
    }
}

/// Submits requests and turns the engine's step outputs into their results.
///
/// ```
/// # use std::time::Duration;
/// # use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};
/// # use cbrs_text::{OutputProcessor, Recipient, TextSpec};
/// let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
/// let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
/// scheduler.set_output_sink(Some(processor.sink()));
/// let spec = RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![1, 2, 3]) };
/// processor.submit(spec, &TextSpec::default(), Recipient::default(), scheduler_time()).unwrap();
/// scheduler.step(None, 1).unwrap();
/// scheduler.step(Some(&StepResult { token_ids: &[7], ..StepResult::default() }), 2).unwrap();
/// let finished = processor.wait_finished(Duration::from_secs(5), 0);
/// assert_eq!(finished[0].outputs[0].token_ids, [7]);
/// # fn scheduler_time() -> u64 { 0 }
/// ```
#[derive(Debug)]
pub struct OutputProcessor {
    shared: Arc<Shared>,
    tokenizer: Option<Tokenizer>,
    consumer: Mutex<Option<JoinHandle<()>>>,
    /// Process that the consumer runs in: a fork of it has no consumer, and its locks may be held for ever.
    process: u32,
}

impl OutputProcessor {
    /// Starts the consumer thread. Without a tokenizer results have ids and no text.
    ///
    /// # Errors
    /// What the operating system says if it has no thread to give.
    pub fn new(submitter: Submitter, tokenizer: Option<Tokenizer>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            mailbox: Mailbox::default(),
            live: Mutex::default(),
            finished: FinishedQueue::default(),
            submitter,
            timings: Timings::default(),
        });
        let consumer = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("cbrs-text".to_owned()).spawn(move || consumer.run())?;
        Ok(Self { shared, tokenizer, consumer: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// The sink to attach to the scheduler of the submitter, once; when it is dropped, live requests end as cancelled.
    pub fn sink(&self) -> Box<dyn OutputSink> {
        Box::new(MailSink(Arc::clone(&self.shared)))
    }

    /// Submits a request; `now_ns` is the time on the engine's clock.
    ///
    /// # Errors
    /// Whatever `Submitter::submit` refuses; `Closed` after `close`, for a closed channel and in a forked process; what
    /// `TextSpec` can have wrong, such as stop strings without a tokenizer.
    pub fn submit(
        &self,
        mut spec: RequestSpec,
        text: &TextSpec,
        recipient: Recipient<'_>,
        now_ns: u64,
    ) -> Result<RequestId> {
        if self.is_fork() {
            return Err(Error::Closed);
        }
        let draft = self.draft(&mut spec, text, recipient, now_ns)?;
        let reserved = self.shared.submitter.reserve(spec, now_ns)?;
        let prepared = Prepared::new(self, reserved, &draft, recipient.channel);
        let id = prepared.ids().next().expect("one was reserved");
        prepared.submit().map(|()| id)
    }

    /// Prepares several prompts that come together, all or none, each with the parameters of `spec`; the recipient's index is that of the first,
    /// and counts up.
    ///
    /// # Errors
    /// Whatever `Submitter::reserve_list` refuses; `Closed` in a forked process; what `TextSpec` can have wrong.
    pub fn prepare_list<'a>(
        &'a self,
        mut spec: RequestSpec,
        prompts: Vec<Vec<i32>>,
        text: &TextSpec,
        recipient: Recipient<'a>,
        now_ns: u64,
    ) -> Result<Prepared<'a>, ListError> {
        let about_all = |error| ListError { index: None, error };
        if self.is_fork() {
            return Err(about_all(Error::Closed));
        }
        let draft = self.draft(&mut spec, text, recipient, now_ns).map_err(about_all)?;
        let reserved = self.shared.submitter.reserve_list(&spec, prompts, now_ns)?;
        Ok(Prepared::new(self, reserved, &draft, recipient.channel))
    }

    /// What is remembered of requests with these parameters, whatever their prompts.
    fn draft(&self, spec: &mut RequestSpec, text: &TextSpec, recipient: Recipient<'_>, now_ns: u64) -> Result<Draft> {
        text.validate(self.tokenizer.is_some())?;
        if let Some(tokenizer) = &self.tokenizer {
            text.add_bad_words(tokenizer, &mut spec.bad_words_token_ids)?;
        }
        let mut draft = Draft::new(spec, recipient.index, now_ns);
        draft.stream = self.stream(text, spec.sampling.min_tokens);
        draft.is_whole = recipient.is_whole;
        // A stop string ends the request: each token that comes after it is in vain.
        let is_hurried = recipient.is_streamed() || !text.stops.is_empty();
        draft.hurry = is_hurried.then(|| self.shared.mailbox.hurry());
        Ok(draft)
    }

    /// As `submit`, with `prompt` as the prompt of `spec`: it is tokenized by this thread, with special tokens.
    ///
    /// # Errors
    /// As `submit`; `Tokenizer` if there is none or it cannot express the text.
    pub fn submit_text(
        &self,
        prompt: &str,
        spec: RequestSpec,
        text: &TextSpec,
        recipient: Recipient<'_>,
        now_ns: u64,
    ) -> Result<RequestId> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(Error::Tokenizer { message: "a text needs a tokenizer; give token ids".to_owned() });
        };
        let prompt_token_ids = tokenizer.encode(prompt, true)?;
        self.submit(RequestSpec { prompt_token_ids, ..spec }, text, recipient, now_ns)
    }

    fn stream(&self, text: &TextSpec, min_tokens: u32) -> Option<TextStream> {
        let tokenizer = self.tokenizer.clone().filter(|_| text.detokenize)?;
        let stream = TextStream::new(tokenizer, text.stops.clone(), text.skip_special_tokens);
        Some(stream.keeping_stop(text.include_stop_str_in_output).with_min_tokens(min_tokens))
    }

    /// Takes finished requests, in the order in which they finished; at most `max`, 0 = all.
    pub fn take_finished(&self, max: usize) -> Vec<FinishedRequest> {
        fault::point("text: take");
        if self.is_fork() { Vec::new() } else { self.shared.finished.take(max) }
    }

    /// As `take_finished`, but waits for the first one, until the timeout or `close`.
    pub fn wait_finished(&self, timeout: Duration, max: usize) -> Vec<FinishedRequest> {
        if self.is_fork() { Vec::new() } else { self.shared.finished.wait(timeout, max) }
    }

    /// How long requests wait and how fast they run, since this was made.
    pub fn timings(&self) -> &Timings {
        &self.shared.timings
    }

    /// Requests that are submitted and not finished.
    pub fn num_live(&self) -> usize {
        if self.is_fork() { 0 } else { self.shared.lock_live().requests.len() }
    }

    /// Whether no further result will come: the processor or the engine was closed, or this is a forked process.
    pub fn is_closed(&self) -> bool {
        self.is_fork() || self.shared.lock_live().is_closed
    }

    /// Reads what the engine has already told, cancels what is still live, and ends the thread. Results stay to be taken.
    pub fn close(&self) {
        if self.is_fork() {
            return;
        }
        self.shared.mailbox.close();
        let thread = self.consumer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the consumer was reported where it happened; its requests have ended.
            let _ = thread.join();
        }
    }

    fn is_fork(&self) -> bool {
        std::process::id() != self.process
    }
}

impl Drop for OutputProcessor {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock_live(&self) -> MutexGuard<'_, Live> {
        // The map is consistent between any two operations on it, and a panic closes it.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The consumer thread: applies step outputs until the mailbox ends, then ends what is left.
    fn run(&self) {
        // Both outlive a panic: what a step had told by then is delivered.
        let (mut outbox, mut ended) = (Outbox::default(), Vec::new());
        let applied = catch_unwind(AssertUnwindSafe(|| {
            let mut outputs = Vec::new();
            while self.mailbox.receive(&mut outputs) {
                for output in &outputs {
                    self.apply(output, &mut outbox, &mut ended);
                }
            }
        }));
        self.finished.extend(ended);
        match applied {
            Ok(()) => self.end_all(FinishReason::Cancelled, None, &mut outbox),
            Err(_) => self.end_all(FinishReason::Error, Some("the text thread broke"), &mut outbox),
        }
    }

    fn apply(&self, output: &StepOutput, outbox: &mut Outbox, ended: &mut Vec<FinishedRequest>) {
        let mut live = self.lock_live();
        let mut recorder = Recorder::new(&self.timings);
        live.start(output, &self.timings);
        fault::point("text: consumer");
        for event in event::events(output) {
            let Some(request) = live.requests.get_mut(&event.request) else { continue };
            match request.apply(&event, outbox, &mut recorder) {
                Progress::GoesOn => {}
                Progress::Stopped { num_tokens, stop } => {
                    let id = RequestId::from_u64(event.request);
                    self.submitter.finish(id, event.choice as i32, num_tokens, Some(stop));
                }
                Progress::Ended => {
                    ended.extend(live.requests.remove(&event.request).and_then(LiveRequest::into_finished));
                }
            }
        }
        // Who has got an answer finds it counted.
        drop(recorder);
        // Before the lock is given back: once nothing is live, everything can be taken.
        self.finished.extend(std::mem::take(ended));
        outbox.deliver();
    }

    fn cancel_all_of(&self, channel: &Arc<Channel>) {
        let live = self.lock_live();
        let mut ids: Vec<u64> =
            live.requests.values().filter(|request| request.tells(channel)).map(LiveRequest::id).collect();
        // What the engine is told must not depend on the order of a map.
        ids.sort_unstable();
        for id in ids {
            self.submitter.cancel(RequestId::from_u64(id));
        }
    }

    fn end_all(&self, reason: FinishReason, error: Option<&str>, outbox: &mut Outbox) {
        let mut live = self.lock_live();
        live.is_closed = true;
        let mut left: Vec<LiveRequest> = std::mem::take(&mut live.requests).into_values().collect();
        left.sort_unstable_by_key(LiveRequest::id);
        let error = error.map(Arc::from);
        let mut recorder = Recorder::new(&self.timings);
        let ended = left.into_iter().filter_map(|mut request| {
            self.submitter.cancel(RequestId::from_u64(request.id()));
            request.end_now(reason, error.as_ref(), outbox, &mut recorder);
            request.into_finished()
        });
        let ended = ended.collect();
        drop(recorder);
        self.finished.extend(ended);
        self.finished.close();
        outbox.deliver();
    }
}

impl Live {
    /// Forgets requests that the engine has not taken.
    fn forget(&mut self, ids: &[RequestId]) {
        for id in ids {
            self.requests.remove(&id.as_u64());
        }
    }

    /// Reads what a step output says about requests besides their events: first admissions and prompts.
    fn start(&mut self, output: &StepOutput, timings: &Timings) {
        let started = output.started_request_ids.iter().zip(&output.started_num_cached_tokens);
        for (id, &num_cached_tokens) in started {
            if let Some(request) = self.requests.get_mut(id) {
                request.start(output.time_ns, num_cached_tokens as usize, timings);
            }
        }
        let prompt_rows = output.prompt_logprob_requests.iter().zip(&output.prompt_logprob_positions);
        for (row, (id, &position)) in prompt_rows.enumerate() {
            if let Some(request) = self.requests.get_mut(id) {
                request.add_prompt_logprobs(position as usize, output.prompt_logprobs.row(row));
            }
        }
    }
}
