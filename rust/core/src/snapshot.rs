//! `Snapshot`: numbers that one thread publishes and others read, without a lock that either could hold up.
//!
//! A sequence lock: the version is odd while the numbers are being written. A reader that saw an odd version, or another one
//! afterwards, has not read one snapshot but parts of two, and reads again. The writer never waits for a reader.
//!
//! Invariant: what `try_read` gives was published by one call of `publish`.

use crate::sync::{AtomicU64, Ordering, fence};

/// `N` numbers; one thread at a time publishes, any thread reads.
///
/// ```
/// let snapshot = cbrs_core::snapshot::Snapshot::new([1, 2]);
/// snapshot.publish([3, 4]);
/// assert_eq!(snapshot.read(), [3, 4]);
/// ```
#[derive(Debug)]
pub struct Snapshot<const N: usize> {
    version: AtomicU64,
    numbers: [AtomicU64; N],
}

impl<const N: usize> Snapshot<N> {
    /// A snapshot that holds `numbers`.
    pub fn new(numbers: [u64; N]) -> Self {
        Self { version: AtomicU64::new(0), numbers: numbers.map(AtomicU64::new) }
    }

    /// Replaces the numbers. Never waits. Calls must not overlap.
    pub fn publish(&self, numbers: [u64; N]) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Pairs with the Acquire fence of a reader: one that sees a number of ours sees the odd version, too.
        fence(Ordering::Release);
        for (published, number) in self.numbers.iter().zip(numbers) {
            published.store(number, Ordering::Relaxed);
        }
        // Release: a reader that sees this version sees the numbers.
        self.version.store(version + 2, Ordering::Release);
    }

    /// Reads the numbers; `None` if they were being replaced meanwhile.
    pub fn try_read(&self) -> Option<[u64; N]> {
        let before = self.version.load(Ordering::Acquire);
        let numbers = std::array::from_fn(|index| self.numbers[index].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(numbers)
    }

    /// Reads the numbers, as often as it takes: a publication is some stores long.
    pub fn read(&self) -> [u64; N] {
        loop {
            if let Some(numbers) = self.try_read() {
                return numbers;
            }
            std::thread::yield_now();
        }
    }
}
