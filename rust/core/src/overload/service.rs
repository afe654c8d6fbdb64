//! `QueuedService`: the predicted service of what waits, by class, and its bound.
//!
//! A class may wait for its own requests and those of more urgent classes, so its bound holds for their sum: the more urgent ones are read,
//! the own one is changed by a compare-exchange. Service of less urgent classes neither delays a class nor is counted for it.
//!
//! A class that has refused because its queue was full goes on refusing until the sum is below 9/10 of what it was then (`refusing.rs`).
//!
//! Invariants: no class alone ever holds more than its bound (besides one request that found nothing before it); what is held is
//! what was reserved and not yet released.

use crossbeam_utils::CachePadded;

use super::refusing::Refusing;
use crate::policy::Class;
use crate::sync::{AtomicU64, Ordering};

/// Microseconds of predicted service in the queue.
///
/// ```
/// use cbrs_core::overload::QueuedService;
/// use cbrs_core::policy::Class;
/// let queued = QueuedService::new();
/// assert_eq!(queued.reserve(Class::Standard, 60, 100), Ok(()));
/// assert_eq!(queued.reserve(Class::Standard, 60, 100), Err(60));
/// assert_eq!(queued.reserve(Class::Interactive, 60, 100), Ok(()), "standard requests do not delay it");
/// queued.release(Class::Standard, 60);
/// assert_eq!(queued.ahead_of(Class::Batch), 60);
/// ```
#[derive(Debug)]
pub struct QueuedService {
    /// On one line: they are read together.
    classes: CachePadded<[AtomicU64; 3]>,
    refusing: [Refusing; 3],
}

impl Default for QueuedService {
    fn default() -> Self {
        Self::new()
    }
}

impl QueuedService {
    /// Nothing waits.
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            classes: CachePadded::new([zero(), zero(), zero()]),
            refusing: [Refusing::new(), Refusing::new(), Refusing::new()],
        }
    }

    /// Adds `service_us` to a class if what it waits for stays within `limit_us`, or if there is nothing to wait for.
    ///
    /// # Errors
    /// What it would wait for.
    pub fn reserve(&self, class: Class, service_us: u64, limit_us: u64) -> Result<(), u64> {
        let own = &self.classes[class as usize];
        // Relaxed, here and below: the words stand for themselves.
        let mut queued = own.load(Ordering::Relaxed);
        loop {
            let ahead = self.more_urgent_than(class) + queued;
            if ahead > 0 && ahead.saturating_add(service_us) > limit_us {
                return Err(ahead);
            }
            match own.compare_exchange_weak(queued, queued + service_us, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(current) => queued = current,
            }
        }
    }

    /// Takes off what `reserve` has added.
    ///
    /// # Panics
    /// If less is reserved.
    pub fn release(&self, class: Class, service_us: u64) {
        let queued = self.classes[class as usize].fetch_sub(service_us, Ordering::Relaxed);
        assert!(queued >= service_us, "{service_us} us of service were given back, but {queued} us were reserved");
    }

    /// Service of the classes before this one.
    pub fn more_urgent_than(&self, class: Class) -> u64 {
        self.classes[..class as usize].iter().map(|queued| queued.load(Ordering::Relaxed)).sum()
    }

    /// Service that a request of this class waits for.
    pub fn ahead_of(&self, class: Class) -> u64 {
        self.classes[..=class as usize].iter().map(|queued| queued.load(Ordering::Relaxed)).sum()
    }

    /// Service of all classes.
    pub fn total(&self) -> u64 {
        self.ahead_of(Class::Batch)
    }

    /// Makes a class refuse until less than 9/10 of what it waits for now is left; gives what it was when it began to.
    pub fn start_refusing(&self, class: Class) -> u64 {
        self.refusing(class).start(self.ahead_of(class))
    }

    /// Whether a class has refused, and what it waits for has not become less since.
    pub fn is_refusing(&self, class: Class) -> bool {
        self.refusing(class).is_on(|| self.ahead_of(class))
    }

    /// The same at the door, where the refusing ends: a refusal after that begins anew. If it goes on: until so much is left.
    pub fn keeps_refusing(&self, class: Class) -> Option<u64> {
        self.refusing(class).keeps_on(|| self.ahead_of(class))
    }

    pub(crate) fn refusing(&self, class: Class) -> &Refusing {
        &self.refusing[class as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use Class::{Batch, Interactive, Standard};

    #[test]
    fn a_class_waits_for_itself_and_what_is_more_urgent() {
        let queued = QueuedService::new();
        assert_eq!(queued.reserve(Batch, 30, 80), Ok(()));
        assert_eq!(queued.reserve(Interactive, 40, 100), Ok(()));
        assert_eq!([Interactive, Standard, Batch].map(|class| queued.ahead_of(class)), [40, 40, 70]);
        assert_eq!(queued.reserve(Batch, 11, 80), Err(70));
        assert_eq!(queued.reserve(Batch, 10, 80), Ok(()));
        assert_eq!(queued.reserve(Standard, 56, 95), Err(40), "what batch has waiting does not count");
        assert_eq!(queued.reserve(Standard, 55, 95), Ok(()));
        assert_eq!((queued.total(), queued.more_urgent_than(Batch)), (135, 95));
    }

    #[test]
    fn what_is_larger_than_the_bound_is_let_in_when_nothing_is_before_it() {
        let queued = QueuedService::new();
        assert_eq!(queued.reserve(Standard, 500, 100), Ok(()));
        assert_eq!(queued.reserve(Standard, 1, 100), Err(500));
        queued.release(Standard, 500);
        assert_eq!(queued.reserve(Standard, 1, u64::MAX), Ok(()));
    }

    #[test]
    fn refusing_goes_on_until_a_tenth_is_gone() {
        let queued = QueuedService::new();
        queued.reserve(Standard, 100, 100).expect("there is room");
        assert!(!queued.is_refusing(Standard));
        queued.start_refusing(Standard);
        queued.release(Standard, 10);
        assert!(queued.is_refusing(Standard) && !queued.is_refusing(Interactive));
        queued.start_refusing(Standard);
        queued.release(Standard, 1);
        assert!(!queued.is_refusing(Standard), "89 of 100 are left");
        queued.reserve(Standard, 5, 100).expect("there is room");
        assert_eq!(queued.keeps_refusing(Standard), Some(90), "nobody has asked at the door meanwhile");
        queued.release(Standard, 5);
        assert_eq!(queued.keeps_refusing(Standard), None);
        queued.reserve(Standard, 5, 100).expect("there is room");
        assert_eq!(queued.keeps_refusing(Standard), None, "the refusing has ended");
        queued.release(Standard, 5);
        queued.release(Standard, 89);
        queued.start_refusing(Standard);
        assert!(!queued.is_refusing(Standard), "nothing waits");
    }

    #[test]
    #[should_panic(expected = "5 us of service were given back, but 4 us were reserved")]
    fn giving_back_more_than_was_reserved_panics() {
        let queued = QueuedService::new();
        queued.reserve(Batch, 4, 10).expect("there is room");
        queued.release(Batch, 5);
    }
}
