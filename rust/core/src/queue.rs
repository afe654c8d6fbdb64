//! `RequestQueue`: the way in. A bounded ring for many producers that never waits and can be closed.
//!
//! The scheme is Dmitry Vyukov's bounded queue with a stamp in every slot. Where his stamp is a position, ours says
//! *lap and state*, so that "free in the next lap" and "filled in this lap" differ even when the ring has one slot.
//!
//! ```text
//! tail   u64   position << 1 | closed     next position to push to; the closed bit is set once and stays
//! head   u64   position                   next position to pop from
//! position     lap << index_bits | index  of a slot; after the last slot comes slot 0 of the next lap
//! stamp  u64   2 * lap                    free, waits for the push of this lap
//!              2 * lap + 1                filled by the push of this lap
//! ```
//!
//! A position is lap and index, not a count, so that any capacity is exact and neither is found by a division.
//!
//! A push claims a position by moving `tail`, writes the item, then publishes it by the stamp; a pop claims by moving
//! `head`, takes the item out, then frees the slot by the stamp. Whoever moved the counter is the only one who touches
//! the slot until it writes the next stamp. Positions have 63 bits, at least 2^62 of them are used, and they do not wrap in the life
//! of a process.
//!
//! Invariants: a position is claimed by one push and one pop; `head <= tail <= head + capacity` (over slots not yet
//! freed, counted by position); after `close` the tail never moves, hence nothing is accepted any more; each item is handed out or dropped
//! once.
//!
//! Nobody spins: a full ring, a closed one, and one whose next item is still being written are answered at once. A
//! producer that is stopped between claim and publish holds back the items behind it, never another producer, as long
//! as there are free slots; it is expected to wake the consumer after its push.

use std::fmt;
use std::mem::MaybeUninit;

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Ordering, UnsafeCell};

/// Bit of `tail` that says that the queue is closed.
const CLOSED: u64 = 1;

struct Slot<T> {
    stamp: AtomicU64,
    item: UnsafeCell<MaybeUninit<T>>,
}

/// Bounded, lock-free, first in first out queue; any number of producers and consumers.
///
/// ```
/// use cbrs_core::queue::{PushError, RequestQueue};
/// let queue = RequestQueue::new(1);
/// assert_eq!(queue.push("a"), Ok(()));
/// assert_eq!(queue.push("b"), Err(PushError::Full("b")));
/// queue.close();
/// assert_eq!(queue.push("c"), Err(PushError::Closed("c")));
/// assert_eq!(queue.pop(), Some("a"));
/// assert_eq!(queue.pop(), None);
/// ```
pub struct RequestQueue<T> {
    /// Written by producers, and once by `close`.
    tail: CachePadded<AtomicU64>,
    /// Written by the consumer.
    head: CachePadded<AtomicU64>,
    slots: Box<[Slot<T>]>,
    /// Low bits of a position that are the index of its slot.
    index_bits: u32,
}

/// Why a push was refused; gives the item back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PushError<T> {
    /// Every slot is taken.
    Full(T),
    /// The queue was closed.
    Closed(T),
}

impl<T> PushError<T> {
    /// The item that was refused.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(item) | Self::Closed(item) => item,
        }
    }
}

impl<T> fmt::Debug for PushError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "Full(..)",
            Self::Closed(_) => "Closed(..)",
        })
    }
}

// SAFETY: an item is written by the thread that claimed its position and read by the one that claimed it for the pop,
// never by two at once (see `push` and `pop`), so sharing the queue only ever moves items between threads.
#[expect(unsafe_code, reason = "the cells make the ring !Sync by default")]
unsafe impl<T: Send> Sync for RequestQueue<T> {}

impl<T> RequestQueue<T> {
    /// An empty, open queue.
    ///
    /// # Panics
    /// If `capacity` is 0.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a queue needs at least one slot");
        let slot = |_| Slot { stamp: AtomicU64::new(0), item: UnsafeCell::new(MaybeUninit::uninit()) };
        Self {
            tail: CachePadded::new(AtomicU64::new(0)),
            head: CachePadded::new(AtomicU64::new(0)),
            slots: (0..capacity).map(slot).collect(),
            index_bits: capacity.next_power_of_two().trailing_zeros(),
        }
    }

    fn index(&self, position: u64) -> usize {
        (position & ((1 << self.index_bits) - 1)) as usize
    }

    fn lap(&self, position: u64) -> u64 {
        position >> self.index_bits
    }

    /// The slot of `position` and its stamp when free for that position.
    fn slot(&self, position: u64) -> (&Slot<T>, u64) {
        (&self.slots[self.index(position)], 2 * self.lap(position))
    }

    /// The position after `position`.
    fn after(&self, position: u64) -> u64 {
        let is_last = self.index(position) + 1 == self.capacity();
        if is_last { (self.lap(position) + 1) << self.index_bits } else { position + 1 }
    }

    /// How many positions come before `position`.
    fn count(&self, position: u64) -> u64 {
        self.lap(position) * self.capacity() as u64 + self.index(position) as u64
    }

    /// Appends `item`; returns at once, also when there is no room.
    ///
    /// # Errors
    /// `Closed` after `close`, `Full` if the slot that comes next still holds an item. Both give the item back.
    pub fn push(&self, item: T) -> Result<(), PushError<T>> {
        // Relaxed: the counter only proposes a position. The stamp says whether it can be had, the exchange whether
        // it was.
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            if tail & CLOSED != 0 {
                return Err(PushError::Closed(item));
            }
            let (slot, free) = self.slot(tail >> 1);
            // Acquire: pairs with the Release of the pop that freed the slot, so that its read ends before our write.
            let stamp = slot.stamp.load(Ordering::Acquire);
            if stamp < free {
                // The item of the lap before is still there.
                return Err(PushError::Full(item));
            }
            if stamp > free {
                // Another producer had this position since we read the tail.
                tail = self.tail.load(Ordering::Relaxed);
                continue;
            }
            // Relaxed: the exchange decides who writes the slot, and publishes nothing; the stamp does. It fails if
            // `close` came first, as the closed bit is part of the same word.
            let next = self.after(tail >> 1) << 1;
            match self.tail.compare_exchange_weak(tail, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    Self::fill(slot, item);
                    // Release: pairs with the Acquire of the pop of this position, which then sees the item.
                    slot.stamp.store(free + 1, Ordering::Release);
                    return Ok(());
                }
                Err(current) => tail = current,
            }
        }
    }

    /// Takes the oldest item out. `None` if there is none, or if the oldest is still being written by its producer.
    pub fn pop(&self) -> Option<T> {
        // Relaxed: as in `push`.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            let (slot, free) = self.slot(head);
            // Acquire: pairs with the Release of the push of this position, so that we see the item it wrote.
            let stamp = slot.stamp.load(Ordering::Acquire);
            if stamp <= free {
                return None;
            }
            if stamp > free + 1 {
                // Another consumer had this position since we read the head.
                head = self.head.load(Ordering::Relaxed);
                continue;
            }
            match self.head.compare_exchange_weak(head, self.after(head), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    let item = Self::take(slot);
                    // Release: pairs with the Acquire of the push of the next lap; our read is over before it writes.
                    slot.stamp.store(free + 2, Ordering::Release);
                    return Some(item);
                }
                Err(current) => head = current,
            }
        }
    }

    #[expect(unsafe_code, reason = "writes through the cell of a claimed slot")]
    fn fill(slot: &Slot<T>, item: T) {
        // SAFETY: the caller moved `tail` past this slot's position while its stamp was `free`. No other push claims
        // the position again, and no pop touches the slot before the caller has stored `free + 1`.
        slot.item.with_mut(|cell| unsafe { cell.write(MaybeUninit::new(item)) });
    }

    #[expect(unsafe_code, reason = "reads through the cell of a claimed slot")]
    fn take(slot: &Slot<T>) -> T {
        // SAFETY: the caller read the stamp `free + 1`, so the item is written and visible, then moved `head` past
        // this position, so it alone reads the item; no push touches the slot before it has stored `free + 2`.
        slot.item.with_mut(|cell| unsafe { cell.read().assume_init() })
    }

    /// Ends acceptance: every later push fails, what is inside can still be popped. Closing twice changes nothing.
    pub fn close(&self) {
        // Relaxed: it stops the tail, and carries no data. Whoever sees the bit can accept nothing.
        self.tail.fetch_or(CLOSED, Ordering::Relaxed);
    }

    /// Whether `close` was called.
    pub fn is_closed(&self) -> bool {
        self.tail.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Whether the queue is closed and every accepted item has been popped: nothing will ever come out again.
    ///
    /// `is_closed() && is_empty()` says less: a push that came before the close may still be writing its item.
    pub fn is_drained(&self) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        tail & CLOSED != 0 && self.head.load(Ordering::Relaxed) == tail >> 1
    }

    /// Whether a pop would find nothing now. Items that are still being written do not count.
    pub fn is_empty(&self) -> bool {
        let (slot, free) = self.slot(self.head.load(Ordering::Relaxed));
        // Acquire is not needed for the answer; it lets the caller see what happened before the push.
        slot.stamp.load(Ordering::Acquire) <= free
    }

    /// Number of items, those being written included. A snapshot, exact while nobody pushes or pops.
    pub fn len(&self) -> usize {
        let head = self.count(self.head.load(Ordering::Relaxed));
        (self.num_pushed().saturating_sub(head) as usize).min(self.capacity())
    }

    /// Number of items that were ever accepted.
    pub fn num_pushed(&self) -> u64 {
        self.count(self.tail.load(Ordering::Relaxed) >> 1)
    }

    /// Most items at a time.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }
}

impl<T> Drop for RequestQueue<T> {
    fn drop(&mut self) {
        // `&mut self`: no push is under way, so every claimed item is published and `pop` finds them all.
        while self.pop().is_some() {}
    }
}

impl<T> fmt::Debug for RequestQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestQueue")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .field("closed", &self.is_closed())
            .finish()
    }
}
