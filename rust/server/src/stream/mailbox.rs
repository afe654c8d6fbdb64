//! What has come for one response and was not read yet; after the response, what comes for its line of the access log.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use cbrs_text::Update;

use crate::access_log::{Entry, Tally};

#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    updates: Vec<Update>,
    waker: Option<Waker>,
    /// Nobody reads any more, but what comes is counted.
    rest: Option<Rest>,
}

/// What still comes of a request that nobody wants any more; when all has come, its line of the access log is told.
#[derive(Debug)]
pub(super) struct Rest {
    pub(super) entry: Arc<Entry>,
    pub(super) tally: Tally,
    /// Indices whose last update has not come.
    pub(super) num_open: usize,
    pub(super) indices: Range<u64>,
}

impl Rest {
    /// Counts an update; returns whether it was the last one.
    fn add(&mut self, update: &Update) -> bool {
        self.tally.add(update);
        self.num_open = self.num_open.saturating_sub(usize::from(update.is_last));
        self.num_open == 0
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        self.entry.finish(self.tally);
    }
}

/// What is to be done after an update was delivered.
#[derive(Debug)]
pub(super) enum Delivered {
    /// Wake whoever waits, once all of this pass are delivered.
    Wake(Option<Waker>),
    /// Nothing will come for these indices any more.
    Over(Range<u64>),
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an update.
    pub(super) fn push(&self, update: Update) -> Delivered {
        let mut state = self.lock();
        if let Some(rest) = &mut state.rest {
            let is_over = rest.add(&update);
            return if is_over { Delivered::Over(rest.indices.clone()) } else { Delivered::Wake(None) };
        }
        state.updates.push(update);
        Delivered::Wake(state.waker.take())
    }

    /// Counts what comes from now on, and what was not read; returns whether something will come.
    pub(super) fn count_rest(&self, mut rest: Rest) -> bool {
        let mut state = self.lock();
        let mut is_over = rest.num_open == 0;
        for update in state.updates.drain(..) {
            is_over = rest.add(&update);
        }
        if !is_over {
            state.rest = Some(rest);
        }
        !is_over
    }

    /// Swaps what has come for `empty`; pending while nothing has.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, empty: &mut Vec<Update>) -> Poll<()> {
        debug_assert!(empty.is_empty(), "what was read before is gone");
        let mut state = self.lock();
        if state.updates.is_empty() {
            match &mut state.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        std::mem::swap(&mut state.updates, empty);
        Poll::Ready(())
    }
}
