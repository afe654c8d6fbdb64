//! From step outputs to finished requests: one consumer thread that detokenizes, finds stop strings and collects results.
//!
//! 1. Every accepted request ends in exactly one `FinishedRequest`, also when the engine or the processor is closed.
//! 2. No event is missed: a request is registered under the lock that the consumer takes for each step output.
//! 3. The engine thread copies and wakes, whatever the consumer does; the consumer never calls into the engine but to
//!    finish a request at a stop string, on the path that never waits.
//!
//! What a caller reads are whole results today. A stream of deltas taps `LiveRequest` where the consumer has applied a step.

mod finished;
mod live;
mod mailbox;

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use cbrs_core::{Error, FinishReason, OutputSink, RequestId, RequestSpec, Result, StepOutput, Submitter};

use crate::stop::StopStrings;
use crate::stream::TextStream;
use crate::tokenizer::Tokenizer;
use finished::FinishedQueue;
pub use finished::{FinishedRequest, StopReason};
use live::{Event, LiveRequest, Progress};
use mailbox::{MailSink, Mailbox};

type LiveMap = HashMap<u64, LiveRequest, foldhash::fast::RandomState>;

/// What runs on the consumer thread and what the callers share with it.
#[derive(Debug)]
struct Shared {
    mailbox: Mailbox,
    live: Mutex<Live>,
    finished: FinishedQueue,
    submitter: Submitter,
}

#[derive(Debug, Default)]
struct Live {
    requests: LiveMap,
    /// Nobody reads step outputs any more: nothing may be registered.
    is_closed: bool,
}

/// Submits requests and turns the engine's step outputs into their results.
///
/// ```
/// # use std::time::Duration;
/// # use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};
/// # use cbrs_text::{OutputProcessor, StopStrings};
/// let mut scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
/// let processor = OutputProcessor::new(scheduler.submitter(), None).unwrap();
/// scheduler.set_output_sink(Some(processor.sink()));
/// let spec = RequestSpec { max_tokens: Some(1), ..RequestSpec::new(vec![1, 2, 3]) };
/// processor.submit(spec, &StopStrings::default(), 0, scheduler_time()).unwrap();
/// scheduler.step(None, 1).unwrap();
/// scheduler.step(Some(&StepResult { token_ids: &[7], ..StepResult::default() }), 2).unwrap();
/// let finished = processor.wait_finished(Duration::from_secs(5), 0);
/// assert_eq!(finished[0].token_ids, [7]);
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
        });
        let consumer = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("cbrs-text".to_owned()).spawn(move || consumer.run())?;
        Ok(Self { shared, tokenizer, consumer: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// The sink to attach to the scheduler of the submitter, once; when it is dropped, live requests end as cancelled.
    pub fn sink(&self) -> Box<dyn OutputSink> {
        Box::new(MailSink(Arc::clone(&self.shared)))
    }

    /// Submits a request; `index` comes back with its result, `now_ns` is the time on the engine's clock.
    ///
    /// # Errors
    /// Whatever `Submitter::submit` refuses; `Closed` after `close` and in a forked process; `Tokenizer` for stop strings
    /// without a tokenizer.
    pub fn submit(&self, spec: RequestSpec, stops: &StopStrings, index: u64, now_ns: u64) -> Result<RequestId> {
        if self.tokenizer.is_none() && !stops.is_empty() {
            return Err(Error::Tokenizer { message: "stop strings need a tokenizer; use stop_token_ids".to_owned() });
        }
        if self.is_fork() {
            return Err(Error::Closed);
        }
        let stream = self.tokenizer.clone().map(|tokenizer| TextStream::new(tokenizer, stops.clone(), true));
        let prompt = spec.prompt_token_ids.clone();
        let mut live = self.shared.lock_live();
        if live.is_closed {
            return Err(Error::Closed);
        }
        // The consumer cannot look for this request before it is registered: it needs the lock for that.
        let id = self.shared.submitter.submit(spec)?;
        live.requests.insert(id.as_u64(), LiveRequest::new(id, index, prompt, stream, now_ns));
        Ok(id)
    }

    /// As `submit`, with `prompt` as the prompt of `spec`: it is tokenized by this thread, with special tokens.
    ///
    /// # Errors
    /// As `submit`; `Tokenizer` if there is none or it cannot express the text.
    pub fn submit_text(
        &self,
        prompt: &str,
        spec: RequestSpec,
        stops: &StopStrings,
        index: u64,
        now_ns: u64,
    ) -> Result<RequestId> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(Error::Tokenizer { message: "a text needs a tokenizer; give token ids".to_owned() });
        };
        let prompt_token_ids = tokenizer.encode(prompt, true)?;
        self.submit(RequestSpec { prompt_token_ids, ..spec }, stops, index, now_ns)
    }

    /// Takes finished requests, in the order in which they finished; at most `max`, 0 = all.
    pub fn take_finished(&self, max: usize) -> Vec<FinishedRequest> {
        if self.is_fork() { Vec::new() } else { self.shared.finished.take(max) }
    }

    /// As `take_finished`, but waits for the first one, until the timeout or `close`.
    pub fn wait_finished(&self, timeout: Duration, max: usize) -> Vec<FinishedRequest> {
        if self.is_fork() { Vec::new() } else { self.shared.finished.wait(timeout, max) }
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
        let applied = catch_unwind(AssertUnwindSafe(|| {
            let mut outputs = Vec::new();
            while self.mailbox.receive(&mut outputs) {
                for output in &outputs {
                    self.apply(output);
                }
            }
        }));
        match applied {
            Ok(()) => self.end_all(FinishReason::Cancelled, None),
            Err(_) => self.end_all(FinishReason::Error, Some("the text thread broke")),
        }
    }

    fn apply(&self, output: &StepOutput) {
        let mut ended = Vec::new();
        let mut live = self.lock_live();
        let started = output.started_request_ids.iter().zip(&output.started_num_cached_tokens);
        for (id, &num_cached_tokens) in started {
            if let Some(request) = live.requests.get_mut(id) {
                request.start(output.time_ns, num_cached_tokens as usize);
            }
        }
        for index in 0..output.len() {
            let id = output.request_ids[index];
            let Some(request) = live.requests.get_mut(&id) else { continue };
            match request.apply(Event::read(output, index)) {
                Progress::GoesOn => {}
                Progress::Stopped { num_tokens, stop } => {
                    let choice = output.choice_ids[index];
                    self.submitter.finish(RequestId::from_u64(id), choice, num_tokens, Some(stop));
                }
                Progress::Ended => ended.extend(live.requests.remove(&id).map(LiveRequest::into_finished)),
            }
        }
        // Before the lock is given back: once nothing is live, everything can be taken.
        self.finished.extend(ended);
    }

    fn end_all(&self, reason: FinishReason, error: Option<&str>) {
        let mut live = self.lock_live();
        live.is_closed = true;
        let mut left: Vec<LiveRequest> = std::mem::take(&mut live.requests).into_values().collect();
        left.sort_unstable_by_key(LiveRequest::id);
        let ended = left.into_iter().map(|mut request| {
            self.submitter.cancel(RequestId::from_u64(request.id()));
            request.end_now(reason, error);
            request.into_finished()
        });
        self.finished.extend(ended.collect());
        self.finished.close();
    }
}
