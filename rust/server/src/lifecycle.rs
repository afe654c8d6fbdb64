//! From ready over draining to closed, and how many requests are under way.
//!
//! A request is under way from its submission on, and every other answer from its head on, until the last byte of the answer is with the
//! system or nobody wants it any more.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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

/// A request or an answer that is under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Active(Arc<Lifecycle>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.lock().num_active -= 1;
        self.0.changed.notify_all();
    }
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

    /// Counts a request in; none is taken once the server ends.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Active> {
        let mut state = self.lock();
        if state.phase != Phase::Ready {
            return None;
        }
        state.num_active += 1;
        Some(Active(Arc::clone(self)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_under_way_is_waited_for_and_nothing_more_is_taken() {
        let lifecycle = Arc::new(Lifecycle::default());
        let active = lifecycle.begin();
        assert!(active.is_some());
        lifecycle.drain();
        assert!(lifecycle.begin().is_none() && lifecycle.num_active() == 1);
        assert!(!lifecycle.wait_idle(Duration::from_millis(1)));
        let waiting = Arc::clone(&lifecycle);
        let waiter = std::thread::spawn(move || waiting.wait_idle(Duration::from_secs(60)));
        drop(active);
        assert!(waiter.join().expect("it waits and ends"));
    }
}
