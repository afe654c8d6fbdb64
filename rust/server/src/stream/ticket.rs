//! A response that is wanted: as long as its ticket lives. Dropping an unfinished one cancels what it submitted.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};

use cbrs_core::FinishReason;
use cbrs_core::policy::Class;
use cbrs_text::{End, Update};

use super::mailbox::{Mailbox, Rest};
use super::submitted::Submitted;
use crate::access_log::{CLIENT_CLOSED, Entry, Tally};
use crate::app::App;
use crate::error::ApiError;
use crate::lifecycle::Active;

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
    /// Whose rate is charged for the work of preparing it, if it is never submitted.
    debtor: Option<Debtor>,
}

/// Who pays for prompts that are prepared in vain, as for `/tokenize`: otherwise leaving in time would be a way round the rate.
pub(super) type Debtor = (Option<Arc<str>>, Class);

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
        let (entry, tally, active, debtor) = (None, Tally::default(), Some(active), None);
        Ok(Self { app, submitted, mailbox, indices, num_open: num_prompts, entry, tally, active, debtor })
    }

    /// Tells `entry` what comes of the request, which counts as under way until its answer is written.
    pub(super) fn log_to(&mut self, entry: Arc<Entry>) {
        if let Some(active) = self.active.take() {
            entry.count(active);
        }
        self.entry = Some(entry);
    }

    /// Names who pays if it is dropped before `settle`.
    pub(super) fn owe(&mut self, debtor: Debtor) {
        self.debtor = Some(debtor);
    }

    /// It has been paid for, or cost nothing.
    pub(super) fn settle(&mut self) {
        self.debtor = None;
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
        end_error(end, self.submitted.is_cancelled())
    }

    /// Notes an error that the reader is told in mid-stream.
    pub(crate) fn note_error(&self, error: &ApiError) {
        if let Some(entry) = &self.entry {
            entry.fail(error.code());
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some((tenant, class)) = self.debtor.take() {
            // If that is above the rate, the next one is refused before it costs any.
            let _ = self.app.engine.submitter.charge_request(tenant.as_ref(), class, (self.app.engine.clock)());
        }
        self.app.names.remove(&self.submitted);
        if self.num_open > 0 {
            self.submitted.cut(&self.app.engine.submitter);
            self.tally.add_reason(FinishReason::Cancelled);
        }
        if !self.leaves_rest() {
            self.app.router.close(self.indices.clone());
        }
    }
}

impl Ticket {
    /// Tells its line of the access log what came of it, if there is one; returns whether the line waits for more, since it is to tell all that
    /// the engine has done.
    fn leaves_rest(&mut self) -> bool {
        let Some(entry) = self.entry.take() else { return false };
        if self.num_open == 0 {
            entry.finish(self.tally);
            return false;
        }
        entry.fail(CLIENT_CLOSED);
        let rest = Rest { entry, tally: self.tally, num_open: self.num_open, indices: self.indices.clone() };
        self.app.router.count_rest(&self.mailbox, rest)
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
