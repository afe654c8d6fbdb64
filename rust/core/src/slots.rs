//! `SlotTable`: who is alive. A fixed table of request slots; an id names a slot and the generation that lives in it.
//!
//! ```text
//! states[slot]  u64   (generation - 1) << 32 | cancelled << 1 | live
//! next[slot]    u32   the free slot below this one, or NONE, less `slot + 1`; meaningful while this slot is free
//! free          u64   tag << 32 | topmost free slot, or NONE
//! ```
//!
//! So a table of zeros is one of free slots, each with the following one below it, and takes no memory until slots are used.
//!
//! Generation and flags share one word, so "is it still that request" and "was it not cancelled before" are one
//! compare-exchange. The free list is a stack (R. K. Treiber's) of indices; every acquire changes the tag, so that an
//! acquire that was overtaken by others which took the same slot, and gave it back, fails instead of installing a stale
//! `next` (ABA). The tag would have to wrap, 2^32 acquires inside one pause, to be mistaken.
//!
//! Invariants: a slot is live or in the free list, never both; a free slot's word holds the generation of its next
//! life; generations start at 1 and never are 0, so that 0 is no id.

use crossbeam_utils::CachePadded;

use crate::request::RequestId;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, ZeroedTable};

const LIVE: u64 = 1;
const CANCELLED: u64 = 2;
/// "No slot" in `next` and `free`.
const NONE: u32 = u32::MAX;

/// Fixed table of request slots; all methods may be called from any thread.
///
/// ```
/// let table = cbrs_core::slots::SlotTable::new(1);
/// let id = table.acquire().unwrap();
/// assert!(table.acquire().is_none());
/// assert!(table.request_cancel(id));
/// assert!(!table.request_cancel(id));
/// table.release(id);
/// assert!(!table.is_live(id));
/// ```
#[derive(Debug)]
pub struct SlotTable {
    free: CachePadded<AtomicU64>,
    /// Not beside `states`, which every thread reads.
    num_free: CachePadded<AtomicUsize>,
    states: Box<[AtomicU64]>,
    next: Box<[AtomicU32]>,
}

impl SlotTable {
    /// A table of `num_slots` free slots.
    ///
    /// # Panics
    /// If `num_slots` is above 2^32 - 2.
    pub fn new(num_slots: usize) -> Self {
        assert!(num_slots < NONE as usize, "{num_slots} request slots, but at most {} are possible", NONE - 1);
        let first = if num_slots == 0 { NONE } else { 0 };
        let next = AtomicU32::zeroed_table(num_slots);
        if let Some(last) = next.last() {
            last.store(relative(NONE, num_slots as u32 - 1), Ordering::Relaxed);
        }
        Self {
            free: CachePadded::new(AtomicU64::new(u64::from(first))),
            num_free: CachePadded::new(AtomicUsize::new(num_slots)),
            states: AtomicU64::zeroed_table(num_slots),
            next,
        }
    }

    /// Takes a free slot for a new request; `None` if all are taken.
    pub fn acquire(&self) -> Option<RequestId> {
        // Acquire, here and on failure: the list is changed by exchanges only, so whichever value we read continues
        // the release sequence of every release before it, and we see the `next` (and the state) that it wrote.
        let mut free = self.free.load(Ordering::Acquire);
        let index = loop {
            let index = free as u32;
            if index == NONE {
                return None;
            }
            // Relaxed: if another thread takes the slot meanwhile, this may be stale, and the exchange fails by the tag.
            let below = self.next[index as usize].load(Ordering::Relaxed).wrapping_add(index + 1);
            let tag = (free >> 32).wrapping_add(1);
            let rest = tag << 32 | u64::from(below);
            // Relaxed on success: it hands out nothing, and as an exchange it keeps earlier releases visible.
            match self.free.compare_exchange_weak(free, rest, Ordering::Relaxed, Ordering::Acquire) {
                Ok(_) => break index,
                Err(current) => free = current,
            }
        };
        self.num_free.fetch_sub(1, Ordering::Relaxed);
        let state = &self.states[index as usize];
        // Relaxed: the slot is ours, and who gets the id gets it from us, after this store. A cancel with a stale or
        // invented id changes nothing while the live bit is unset.
        let generation = (state.load(Ordering::Relaxed) >> 32) as u32 + 1;
        state.store(live_state(generation), Ordering::Relaxed);
        Some(RequestId::new(generation, index))
    }

    /// Whether `id` names a request that has not been released.
    pub fn is_live(&self, id: RequestId) -> bool {
        self.states
            .get(id.slot() as usize)
            .is_some_and(|state| state.load(Ordering::Relaxed) & !CANCELLED == live_state(id.generation()))
    }

    /// Marks `id` as cancelled; true only for the first call while it lives. Any number may be given as id.
    pub fn request_cancel(&self, id: RequestId) -> bool {
        let Some(state) = self.states.get(id.slot() as usize) else {
            return false;
        };
        let live = live_state(id.generation());
        // One attempt is enough: another generation, a free slot, and a cancel before this one all mean "no", and none
        // of them can turn back. Relaxed: the flag only elects the one who reports the cancel; the report carries itself.
        state.compare_exchange(live, live | CANCELLED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Ends the life of `id` and gives its slot back.
    ///
    /// # Panics
    /// If `id` is not live: someone released it twice, or invented it.
    pub fn release(&self, id: RequestId) {
        let index = id.slot();
        let slot_state =
            self.states.get(index as usize).unwrap_or_else(|| panic!("{id:?} is outside the request table"));
        let generation = id.generation();
        let next_generation = if generation == u32::MAX { 1 } else { generation + 1 };
        let mut state = slot_state.load(Ordering::Relaxed);
        loop {
            assert!(state & !CANCELLED == live_state(generation), "{id:?} was released, but is not live");
            let dead = state_of(next_generation);
            // Relaxed: the free list publishes the word. Fails at most once in earnest, for a cancel that came between.
            match slot_state.compare_exchange_weak(state, dead, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(current) => state = current,
            }
        }
        // Before the slot can be taken, so that the count never goes below zero.
        self.num_free.fetch_add(1, Ordering::Relaxed);
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            self.next[index as usize].store(relative(free as u32, index), Ordering::Relaxed);
            let with_slot = free & !u64::from(u32::MAX) | u64::from(index);
            // Release: pairs with the Acquire in `acquire`; whoever takes the slot sees its state and `next`.
            match self.free.compare_exchange_weak(free, with_slot, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(current) => free = current,
            }
        }
    }

    /// Number of free slots. A snapshot, exact while nobody acquires or releases.
    pub fn num_free(&self) -> usize {
        self.num_free.load(Ordering::Relaxed)
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.states.len()
    }
}

/// The word of a slot in which `generation` is the next to live. No word has that of generation 0, which is no id's.
fn state_of(generation: u32) -> u64 {
    u64::from(generation.wrapping_sub(1)) << 32
}

/// The word of a slot in which `generation` lives and has not been cancelled.
fn live_state(generation: u32) -> u64 {
    state_of(generation) | LIVE
}

/// How `next[index]` names a slot below it.
fn relative(below: u32, index: u32) -> u32 {
    below.wrapping_sub(index + 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_generation_after_the_last_is_one() {
        let table = SlotTable::new(1);
        table.states[0].store(state_of(u32::MAX), Ordering::Relaxed);
        let last = table.acquire().expect("one slot is free");
        assert_eq!(last.generation(), u32::MAX);
        table.release(last);
        assert_eq!(table.acquire().map(RequestId::generation), Some(1));
    }

    #[test]
    fn the_lowest_slots_are_the_first_and_generation_zero_is_nobodys() {
        let table = SlotTable::new(3);
        let ids: Vec<_> = std::iter::from_fn(|| table.acquire()).collect();
        assert_eq!(ids.iter().map(|id| (id.generation(), id.slot())).collect::<Vec<_>>(), [(1, 0), (1, 1), (1, 2)]);
        assert!((0..4).all(|slot| !table.is_live(RequestId::new(0, slot))));
        for id in ids {
            table.release(id);
        }
        let again: Vec<_> = std::iter::from_fn(|| table.acquire()).map(|id| (id.generation(), id.slot())).collect();
        assert_eq!(again, [(2, 2), (2, 1), (2, 0)]);
        assert!((0..4).all(|slot| !table.is_live(RequestId::new(0, slot))));
        assert!(SlotTable::new(0).acquire().is_none());
    }
}
