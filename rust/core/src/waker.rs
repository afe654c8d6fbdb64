//! `Waker`: how the engine thread sleeps until someone has something for it.
//!
//! Waking costs a fence and a load while nobody sleeps, so a busy engine is never paid for with a system call per
//! request. The two sides are each other's mirror:
//!
//! ```text
//! sleeper   sleeping = true;   fence(SeqCst);   ready()?     no: wait     yes: return
//! waker     push an item;      fence(SeqCst);   sleeping?    yes: notify  no: return
//! ```
//!
//! The fences have one order. If the sleeper's is first, the waker reads `sleeping == true`; if the waker's is first,
//! the sleeper's `ready` sees the item. So they cannot both walk past each other, whatever is Relaxed besides.
//!
//! Invariants: `sleeping` is written with the mutex held only. The mutex is held from the announcement to the wait, and
//! a waker that saw the announcement takes it before it notifies, so no notification falls between the check and the
//! wait. The first waker clears `sleeping`, so that a burst pays for one notification.

use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, fence};

/// Lets a thread sleep until another wakes it or time is up, without ever missing a wake-up.
///
/// Made for one sleeper and many wakers; a second sleeper is woken along with the first.
#[derive(Debug)]
pub struct Waker {
    /// Someone announced that it is going to sleep, and nobody has called it since.
    sleeping: AtomicBool,
    /// Threads that wait.
    num_sleepers: Mutex<usize>,
    wake_up: Condvar,
}

impl Waker {
    /// A waker on which nobody sleeps.
    pub fn new() -> Self {
        Self { sleeping: AtomicBool::new(false), num_sleepers: Mutex::new(0), wake_up: Condvar::new() }
    }

    /// Ends the sleep of the sleeper, if there is one. Call it *after* having made its `ready` true.
    pub fn wake(&self) {
        // Pairs with the fence in `sleep_unless`; see the head of the file.
        fence(Ordering::SeqCst);
        // Relaxed: the fences order it with the announcement, and nothing is read on its strength but the lock.
        if self.sleeping.load(Ordering::Relaxed) {
            let num_sleepers = self.num_sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            // The first waker to come here notifies, for all that saw the same announcement.
            let is_first = self.sleeping.load(Ordering::Relaxed);
            self.sleeping.store(false, Ordering::Relaxed);
            drop(num_sleepers);
            if is_first {
                self.wake_up.notify_all();
            }
        }
    }

    /// Sleeps until `wake` or for `timeout`, unless `ready()` holds after the announcement. May return early without
    /// a reason, so the caller looks for itself what there is.
    ///
    /// `ready` is called once, with the sleeper announced and a lock held: it must be short and must not call `wake`.
    pub fn sleep_unless(&self, timeout: Duration, ready: impl Fn() -> bool) {
        let mut num_sleepers = self.num_sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeping.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`; see the head of the file.
        fence(Ordering::SeqCst);
        if !ready() {
            *num_sleepers += 1;
            let waited = self.wake_up.wait_timeout(num_sleepers, timeout);
            num_sleepers = waited.unwrap_or_else(PoisonError::into_inner).0;
            *num_sleepers -= 1;
        }
        // Another sleeper still relies on the announcement.
        if *num_sleepers == 0 {
            self.sleeping.store(false, Ordering::Relaxed);
        }
    }
}

impl Default for Waker {
    fn default() -> Self {
        Self::new()
    }
}
