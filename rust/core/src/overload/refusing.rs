//! `Refusing`: hysteresis of a bound on what waits. Whoever has refused goes on refusing until less than 9/10 of what waited then is left.
//!
//! It is about a queue that is full, not about one request that is too large for what is left of it.

use crate::sync::{AtomicU64, Ordering};

/// What waited when a queue began to refuse; 0 = it does not refuse.
#[derive(Debug)]
pub(crate) struct Refusing {
    level: AtomicU64,
}

impl Refusing {
    /// Refuses nobody.
    pub(crate) fn new() -> Self {
        Self { level: AtomicU64::new(0) }
    }

    /// Refuses until less than 9/10 of `queued` is left; gives what waited when it began to.
    pub(crate) fn start(&self, queued: u64) -> u64 {
        let queued = queued.max(1);
        // Relaxed, here and below: the word stands for itself.
        let begun = self.level.compare_exchange(0, queued, Ordering::Relaxed, Ordering::Relaxed);
        begun.map_or_else(|level| level, |_| queued)
    }

    /// Whether it has refused, and what waits has not become less since.
    pub(crate) fn is_on(&self, queued: impl FnOnce() -> u64) -> bool {
        is_above_low_water(self.level.load(Ordering::Relaxed), queued)
    }

    /// The same at the door, where the refusing ends: a refusal after that begins anew. If it goes on: up to where.
    pub(crate) fn keeps_on(&self, queued: impl FnOnce() -> u64) -> Option<u64> {
        let level = self.level.load(Ordering::Relaxed);
        let is_refusing = is_above_low_water(level, queued);
        if level > 0 && !is_refusing {
            let _ = self.level.compare_exchange(level, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        is_refusing.then(|| low_water(level))
    }

    /// Something of size `requested` was refused, as `queued` of at most `limit` waits: how much has to go before it has room, and whether
    /// nobody is let in until then. It begins to refuse if the queue is full, or nearly so.
    pub(crate) fn note(&self, queued: u64, requested: u64, limit: u64) -> Shortage {
        let is_closed = queued >= low_water(limit) || self.is_on(|| queued);
        let over = queued.saturating_add(requested).saturating_sub(limit);
        let above = if is_closed { (queued + 1).saturating_sub(low_water(self.start(queued.min(limit)))) } else { 0 };
        Shortage { excess: over.max(above).min(queued), is_closed }
    }
}

/// What keeps a request out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// What has to leave the queue before there is room.
    pub(crate) excess: u64,
    /// Whether nobody is let in until then.
    pub(crate) is_closed: bool,
}

fn is_above_low_water(level: u64, queued: impl FnOnce() -> u64) -> bool {
    if level == 0 {
        return false;
    }
    let queued = queued();
    queued > 0 && queued >= low_water(level)
}

/// Where a queue that was full has room again.
pub(crate) fn low_water(level: u64) -> u64 {
    level - level / 10
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_refuses_until_a_tenth_of_it_is_gone() {
        let refusing = Refusing::new();
        assert_eq!(refusing.keeps_on(|| 100), None);
        assert_eq!(refusing.note(100, 1, 100), Shortage { excess: 11, is_closed: true });
        assert_eq!(refusing.note(95, 1, 100), Shortage { excess: 6, is_closed: true });
        assert_eq!((refusing.keeps_on(|| 90), refusing.is_on(|| 90)), (Some(90), true));
        assert_eq!((refusing.is_on(|| 89), refusing.keeps_on(|| 89)), (false, None));
        assert_eq!(refusing.keeps_on(|| 99), None, "that was the end of it");
        refusing.start(0);
        assert_eq!(refusing.keeps_on(|| 0), None, "nothing waits");
    }

    #[test]
    fn what_is_too_large_for_the_rest_closes_nothing() {
        let refusing = Refusing::new();
        assert_eq!(refusing.note(50, 60, 100), Shortage { excess: 10, is_closed: false });
        assert_eq!(refusing.note(50, 600, 100), Shortage { excess: 50, is_closed: false }, "not more than there is");
        assert_eq!(refusing.keeps_on(|| 50), None);
    }

    #[test]
    fn a_queue_that_is_longer_than_its_bound_refuses_until_it_is_shorter() {
        let refusing = Refusing::new();
        assert_eq!(refusing.note(1000, 1, 100), Shortage { excess: 911, is_closed: true });
        assert_eq!(refusing.keeps_on(|| 91), Some(90));
        assert_eq!(refusing.keeps_on(|| 89), None);
    }
}
