//! From ready over draining to closed, and how many requests are under way.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the server does with new requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Phase {
    /// Takes them.
    #[default]
    Ready,
    /// Refuses them and finishes those under way.
    Draining,
}

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    num_active: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    state: Mutex<State>,
    changed: Condvar,
}

impl Lifecycle {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub(crate) fn drain(&self) {
        self.lock().phase = Phase::Draining;
    }

    /// Counts a request in; false once none is taken any more.
    pub(crate) fn begin(&self) -> bool {
        let mut state = self.lock();
        let is_taken = state.phase == Phase::Ready;
        state.num_active += usize::from(is_taken);
        is_taken
    }

    /// Counts a request out.
    pub(crate) fn end(&self) {
        self.lock().num_active -= 1;
        self.changed.notify_all();
    }

    pub(crate) fn num_active(&self) -> usize {
        self.lock().num_active
    }

    /// Waits until no request is under way; returns whether that is so.
    pub(crate) fn wait_idle(&self, timeout: Duration) -> bool {
        let is_busy = |state: &mut State| state.num_active > 0;
        let (state, _) =
            self.changed.wait_timeout_while(self.lock(), timeout, is_busy).unwrap_or_else(PoisonError::into_inner);
        state.num_active == 0
    }
}
