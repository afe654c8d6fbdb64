//! `Promises`: when a refused request may come back and be admitted.
//!
//! Each refusal books the service of its request in a virtual line of promised returns, which is worked off by the part of the capacity that
//! the base load leaves. So a later refusal gets a later time, and those who come back when they were told come at a rate that the
//! engine can take. The line is one word: the time at which everybody who was promised a return has come (as in a `Bucket`).
//!
//! Invariants: promises do not get earlier while the line is not empty; none is before the queue has drained to where it has room.

use crate::sync::{AtomicU64, Ordering};

/// Load that the base and the promised returns make together at most.
const TARGET_LOAD: f64 = 0.9;
/// Part of the capacity that promised returns get at least: time passes for them under any base load.
const MIN_SHARE: f64 = 0.1;
/// Nobody is told to wait longer.
const MAX_WAIT_NS: u64 = 3600 * 1_000_000_000;

/// How the queue will drain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Service that waits and has to be done before there is room, in nanoseconds.
    pub excess_ns: u64,
    /// Whether nobody is let in until then.
    pub is_closed: bool,
    /// Service that arrives per second besides promised returns.
    pub base_load: f64,
}

/// The line of promised returns.
///
/// ```
/// use cbrs_core::overload::{Outlook, Promises};
/// let promises = Promises::new();
/// let outlook = Outlook { excess_ns: 100, is_closed: true, base_load: 0.4 };
/// assert_eq!(promises.book(1000, 50, outlook), 1100, "when the queue has room");
/// assert_eq!(promises.book(1000, 50, outlook), 1200, "half of the capacity is left for the one before: 50 / 0.5");
/// ```
#[derive(Debug)]
pub struct Promises {
    horizon_ns: AtomicU64,
}

impl Default for Promises {
    fn default() -> Self {
        Self::new()
    }
}

impl Promises {
    /// Nothing promised.
    pub fn new() -> Self {
        Self { horizon_ns: AtomicU64::new(0) }
    }

    /// Books the return of a request with this much service; gives the time at which it may come back.
    pub fn book(&self, now_ns: u64, service_ns: u64, outlook: Outlook) -> u64 {
        let share = (TARGET_LOAD - outlook.base_load).clamp(MIN_SHARE, TARGET_LOAD);
        let turn_ns = (service_ns as f64 / share) as u64;
        let latest = now_ns.saturating_add(MAX_WAIT_NS);
        // Relaxed: the word stands for itself.
        let mut horizon = self.horizon_ns.load(Ordering::Relaxed);
        loop {
            let promised = outlook.room_at(now_ns, horizon).min(latest);
            // Never back: others were promised what comes before.
            let next = promised.saturating_add(turn_ns).min(latest).max(horizon);
            match self.horizon_ns.compare_exchange_weak(horizon, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return promised,
                Err(current) => horizon = current,
            }
        }
    }

    /// When the last of those who were promised a return has come.
    pub fn horizon_ns(&self) -> u64 {
        self.horizon_ns.load(Ordering::Relaxed)
    }
}

impl Outlook {
    /// When the queue has room, and those who were promised a return have come.
    fn room_at(self, now_ns: u64, horizon_ns: u64) -> u64 {
        let share = (TARGET_LOAD - self.base_load).clamp(MIN_SHARE, TARGET_LOAD);
        let free = (1.0 - self.base_load).max(MIN_SHARE);
        if self.is_closed {
            return horizon_ns.max(now_ns.saturating_add(self.excess_ns));
        }
        // While promised returns come, the queue drains by what they and the base leave; afterwards by what the base leaves.
        let line_ns = horizon_ns.saturating_sub(now_ns);
        let drained_ns = (line_ns as f64 * (free - share).max(0.0)) as u64;
        let rest_ns = self.excess_ns.saturating_sub(drained_ns);
        horizon_ns.max(now_ns).saturating_add((rest_ns as f64 / free) as u64)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn outlook(excess_ns: u64, is_closed: bool, base_load: f64) -> Outlook {
        Outlook { excess_ns, is_closed, base_load }
    }

    #[test]
    fn the_line_is_worked_off_by_what_the_base_leaves() {
        for (base_load, turn_ns) in [(0.0, S * 10 / 9), (0.5, S * 5 / 2), (0.85, S * 10), (9.0, S * 10)] {
            let promises = Promises::new();
            let times = [0; 3].map(|_| promises.book(S, S, outlook(0, true, base_load)));
            for (index, time) in times.into_iter().enumerate() {
                let expected = S + index as u64 * turn_ns;
                assert!(time.abs_diff(expected) <= 10, "{time} instead of {expected} at a base load of {base_load}");
            }
        }
    }

    #[test]
    fn no_promise_is_before_the_queue_has_room() {
        let promises = Promises::new();
        assert_eq!(promises.book(0, S, outlook(3 * S, true, 0.4)), 3 * S, "nobody is let in meanwhile");
        assert_eq!(promises.horizon_ns(), 5 * S);
        assert_eq!(promises.book(0, 0, outlook(7 * S, true, 0.4)), 7 * S);
        // Open: until 7 s the queue drains by 0.6 - 0.5 of the capacity, then by 0.6.
        let time = promises.book(0, 0, outlook(S, false, 0.4));
        assert!(time.abs_diff(7 * S + S / 2) <= 10, "{time}");
        let promises = Promises::new();
        assert_eq!(promises.book(0, S, outlook(3 * S, false, 0.5)), 6 * S, "the base is let in meanwhile");
    }

    #[test]
    fn nobody_is_told_to_wait_longer_than_an_hour() {
        let promises = Promises::new();
        assert_eq!(promises.book(S, u64::MAX, outlook(0, true, 0.0)), S);
        assert_eq!(promises.book(S, S, outlook(u64::MAX, false, 0.0)), S + MAX_WAIT_NS);
        assert_eq!(promises.book(S, S, outlook(0, true, 0.0)), S + MAX_WAIT_NS);
    }
}
