//! A response that is wanted: as long as its ticket lives. Dropping an unfinished one cancels what it submitted.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use cbrs_core::{FinishReason, RequestId, Submitter};
use cbrs_text::{End, Update};

use super::mailbox::Mailbox;
use crate::access::{self, ApiKey};
use crate::access_log::{Entry, Tally};
use crate::app::App;
use crate::error::ApiError;
use crate::lifecycle::Active;

/// The requests of the core that one HTTP request became, and its names.
#[derive(Debug)]
pub(crate) struct Submitted {
    id: String,
    /// What the client calls it.
    name: Option<String>,
    /// The key that it was sent with, if keys are configured.
    owner: Option<Arc<ApiKey>>,
    requests: Mutex<Vec<RequestId>>,
    is_cancelled: AtomicBool,
}

impl Submitted {
    pub(super) fn new(id: String, name: Option<String>, owner: Option<Arc<ApiKey>>) -> Self {
        Self { id, name, owner, requests: Mutex::default(), is_cancelled: AtomicBool::new(false) }
    }

    /// The id that the response carries.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Whether a caller may see, cancel and read it; for others it does not exist.
    pub(crate) fn is_visible_to(&self, caller: Option<&ApiKey>) -> bool {
        access::may_see(caller, self.owner.as_deref())
    }

    /// All its names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.id.as_str()).chain(self.name.as_deref())
    }

    /// Adds a request that was submitted; it is cancelled at once if all were.
    pub(super) fn add(&self, request: RequestId, submitter: &Submitter) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.push(request);
        if self.is_cancelled.load(Ordering::Relaxed) {
            submitter.cancel(request);
        }
    }

    /// Asks for the end of all because somebody wants it; returns whether one of them was live.
    pub(crate) fn cancel(&self, submitter: &Submitter) -> bool {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock orders it for `add`.
        self.is_cancelled.store(true, Ordering::Relaxed);
        cancel(&requests, submitter)
    }

    /// Asks for the end of all because the server ends, which is what their readers are told.
    pub(crate) fn cut(&self, submitter: &Submitter) {
        cancel(&self.requests.lock().unwrap_or_else(PoisonError::into_inner), submitter);
    }
}

/// Returns whether one of them was live.
fn cancel(requests: &[RequestId], submitter: &Submitter) -> bool {
    requests.iter().filter(|&&request| submitter.cancel(request)).count() > 0
}

/// Holds a response's place: its names, its mailbox, and its count until its entry takes that over.
#[derive(Debug)]
pub(crate) struct Ticket {
    app: Arc<App>,
    submitted: Arc<Submitted>,
    mailbox: Arc<Mailbox>,
    indices: Range<u64>,
    /// Indices whose last update has not come.
    num_open: usize,
    /// What is known of the request, and what is to be known.
    entry: Option<Arc<Entry>>,
    tally: Tally,
    /// Absent once the entry has it.
    active: Option<Active>,
}

impl Ticket {
    /// Counts a request in, under its names.
    ///
    /// # Errors
    /// 503 while the server is draining.
    pub(super) fn open(app: &Arc<App>, submitted: Submitted, num_prompts: usize) -> Result<Self, ApiError> {
        let active = app.lifecycle.begin().ok_or_else(|| ApiError::unavailable("the server is shutting down"))?;
        let (app, submitted, mailbox) = (Arc::clone(app), Arc::new(submitted), Arc::default());
        let indices = app.router.open(&mailbox, num_prompts);
        app.names.add(&submitted);
        let (entry, tally, active) = (None, Tally::default(), Some(active));
        Ok(Self { app, submitted, mailbox, indices, num_open: num_prompts, entry, tally, active })
    }

    /// Tells `entry` what comes of the request, which counts as under way until its answer is written.
    pub(super) fn log_to(&mut self, entry: Option<Arc<Entry>>) {
        if let (Some(entry), Some(active)) = (&entry, self.active.take()) {
            entry.count(active);
        }
        self.entry = entry;
    }

    pub(super) fn indices(&self) -> Range<u64> {
        self.indices.clone()
    }

    pub(crate) fn submitted(&self) -> &Arc<Submitted> {
        &self.submitted
    }

    /// Swaps what has come for `empty`; pending while nothing has.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, empty: &mut Vec<Update>) -> Poll<()> {
        self.mailbox.poll_take(cx, empty)
    }

    /// Waits for news and swaps it for `empty`.
    pub(crate) async fn take(&self, empty: &mut Vec<Update>) {
        std::future::poll_fn(|cx| self.poll_take(cx, empty)).await;
    }

    /// Number of the prompt that an update is about.
    pub(crate) fn prompt(&self, update: &Update) -> usize {
        (update.index - self.indices.start) as usize
    }

    /// Notes that an update was read; returns whether it was the last one.
    pub(crate) fn note(&mut self, update: &Update) -> bool {
        self.tally.add(update);
        self.num_open -= usize::from(update.is_last);
        self.num_open == 0
    }

    /// Why a choice has no proper end, if it has none.
    pub(crate) fn end_error(&self, end: &End) -> Option<ApiError> {
        end_error(end, self.submitted.is_cancelled.load(Ordering::Relaxed))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.num_open > 0 {
            self.submitted.cut(&self.app.engine.submitter);
            self.tally.add_reason(FinishReason::Cancelled);
        }
        if let Some(entry) = &self.entry {
            entry.finish(self.tally);
        }
        self.app.names.remove(&self.submitted);
        self.app.router.close(self.indices.clone());
    }
}

/// Why a choice has no proper end, if it has none; `is_cancelled`: somebody asked for it.
pub(crate) fn end_error(end: &End, is_cancelled: bool) -> Option<ApiError> {
    match end.finish_reason {
        FinishReason::Stop | FinishReason::Length => None,
        FinishReason::Cancelled if is_cancelled => Some(ApiError::cancelled()),
        FinishReason::Cancelled => Some(ApiError::unavailable("the server or its engine is shutting down")),
        FinishReason::Error => Some(ApiError::failed(end.error.as_deref().unwrap_or("the engine failed"))),
    }
}
