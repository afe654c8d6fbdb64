//! What has come for one response and was not read yet.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use cbrs_text::Update;

#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    updates: Vec<Update>,
    waker: Option<Waker>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an update; returns whom to wake once all of this pass are delivered.
    pub(super) fn push(&self, update: Update) -> Option<Waker> {
        let mut state = self.lock();
        state.updates.push(update);
        state.waker.take()
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
