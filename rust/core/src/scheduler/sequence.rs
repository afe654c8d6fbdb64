//! Sequences: the choices that have started, running or preempted; and their place in the order of arrival.
//!
//! 1. A sequence lives from its first admission to its end; a request without one has not started, or all its started choices have ended.
//! 2. Its tokens are listed here (`known`) while it waits and until all but the last are computed. From then on they stand in the block pool
//!    and in its row's tail (`lanes.rs`), and are listed again if it is preempted.
//! 3. While it runs, its row or its lane is the only owner of how much is computed.
//! 4. Without classes and tenants there are never more sequences than rows: a choice starts only when no preempted one waits. Otherwise
//!    a displaced sequence may wait while others start, up to `MAX_PER_ROW` sequences for each row.

use std::ops::{Index, IndexMut};

use crate::block::NONE;
use crate::hash::PrefixHasher;
use crate::policy::Class;
use crate::request::MAX_CHOICES;

/// Most sequences for each row, running and preempted.
pub(crate) const MAX_PER_ROW: usize = 4;

/// Place of a choice in the order of service: by class, then requests by arrival, and the choices of a request by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Order(u64);

/// Where the class stands in an order.
const CLASS_SHIFT: u32 = 62;

impl Order {
    pub(super) fn new(class: Class, arrival: u64, choice: u32) -> Self {
        Self((class as u64) << CLASS_SHIFT | (arrival * u64::from(MAX_CHOICES) + u64::from(choice)))
    }

    /// The place before everything of a class.
    pub(super) fn first_of(class: Class) -> Self {
        Self((class as u64) << CLASS_SHIFT)
    }

    pub(super) fn class(self) -> Class {
        Class::ALL[(self.0 >> CLASS_SHIFT) as usize]
    }

    pub(super) fn choice(self) -> u32 {
        (self.0 % u64::from(MAX_CHOICES)) as u32
    }
}

/// Tokens of a sequence that has to compute them.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    /// Prompt, then generated tokens.
    pub(super) tokens: Box<[i32]>,
    /// Chained hash of each leading full block, as far as it was needed.
    pub(super) hashes: Box<[u64]>,
    /// Computed tokens lost to a preemption and not yet computed again.
    pub(super) num_lost_tokens: u32,
    /// Leading tokens that were charged to the tenant before a preemption.
    pub(super) num_charged_tokens: u32,
}

impl Known {
    pub(super) fn new(tokens: Vec<i32>, hashes: Vec<u64>) -> Self {
        Self {
            tokens: tokens.into_boxed_slice(),
            hashes: hashes.into_boxed_slice(),
            num_lost_tokens: 0,
            num_charged_tokens: 0,
        }
    }

    /// Knows the hash of each of the first `num_blocks` blocks, all of them full, of a prefix that begins at `root_hash`.
    pub(super) fn hash_blocks(&mut self, root_hash: u64, num_blocks: usize, hasher: &PrefixHasher, block_size: usize) {
        let num_hashed = self.hashes.len();
        if num_hashed >= num_blocks {
            return;
        }
        let mut hashes = std::mem::take(&mut self.hashes).into_vec();
        hashes.reserve_exact(num_blocks - num_hashed);
        for tokens in self.tokens.chunks_exact(block_size).take(num_blocks).skip(num_hashed) {
            hashes.push(hasher.extend(hashes.last().copied().unwrap_or(root_hash), tokens));
        }
        self.hashes = hashes.into_boxed_slice();
    }
}

/// A choice that has started and not ended.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Slot of its request; `NONE` = it is absent.
    pub(super) slot: u32,
    pub(super) order: Order,
    /// Absent = it decodes.
    pub(super) known: Option<Box<Known>>,
    /// `NONE` = it was preempted and waits. Of an absent sequence: the next absent one.
    pub(super) row: u32,
}

const _: () = assert!(size_of::<Sequence>() <= 24, "a sequence is part of what a running one costs");

impl Sequence {
    /// What stands at a number that no sequence has.
    const fn absent(next: u32) -> Self {
        Self { slot: NONE, order: Order(0), known: None, row: next }
    }

    pub(super) fn is_running(&self) -> bool {
        self.row != NONE
    }

    /// What a sequence knows that waits or computes more than its last token.
    pub(super) fn known(&self) -> &Known {
        self.known.as_ref().expect("only a decoding sequence has given up its list of tokens")
    }

    pub(super) fn known_mut(&mut self) -> &mut Known {
        self.known.as_mut().expect("only a decoding sequence has given up its list of tokens")
    }
}

/// All sequences, by number.
#[derive(Debug)]
pub(super) struct Sequences {
    entries: Vec<Sequence>,
    /// One more than the next choice of the same request that has started and not ended, or 0. Few requests have several.
    siblings: Vec<u32>,
    /// An absent one, or `NONE`.
    first_free: u32,
    max_len: usize,
}

impl Sequences {
    /// Room for as many sequences as there are rows; more can be made, up to `MAX_PER_ROW` for each.
    pub(super) fn new(max_num_seqs: usize) -> Self {
        let num_seqs = max_num_seqs as u32;
        let link = |index| if index < num_seqs { index } else { NONE };
        Self {
            entries: (1..=num_seqs).map(|next| Sequence::absent(link(next))).collect(),
            siblings: vec![0; max_num_seqs],
            first_free: link(0),
            max_len: max_num_seqs * MAX_PER_ROW,
        }
    }

    /// Whether no further choice may start.
    pub(super) fn is_full(&self) -> bool {
        self.first_free == NONE && self.entries.len() >= self.max_len
    }

    pub(super) fn insert(&mut self, sequence: Sequence) -> u32 {
        assert!(!self.is_full(), "the caller has seen room for a sequence");
        let index = self.first_free;
        if index == NONE {
            self.entries.push(sequence);
            self.siblings.push(0);
            return self.entries.len() as u32 - 1;
        }
        let absent = std::mem::replace(&mut self.entries[index as usize], sequence);
        self.first_free = absent.row;
        index
    }

    pub(super) fn remove(&mut self, index: u32) -> Sequence {
        let absent = Sequence::absent(self.first_free);
        let sequence = std::mem::replace(&mut self.entries[index as usize], absent);
        assert_ne!(sequence.slot, NONE, "a sequence ends once");
        self.first_free = index;
        sequence
    }

    /// The next choice of the request, or `NONE`.
    pub(super) fn next_sibling(&self, index: u32) -> u32 {
        self.siblings[index as usize].checked_sub(1).unwrap_or(NONE)
    }

    /// Sets that.
    pub(super) fn set_next_sibling(&mut self, index: u32, next: u32) {
        let (entry, next) = (&mut self.siblings[index as usize], next.wrapping_add(1));
        // Nearly always there is none, and was none.
        if *entry != next {
            *entry = next;
        }
    }

    /// Sequences of one request in the order of their choices, from its first one on.
    pub(super) fn siblings(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((first != NONE).then_some(first), |&at| {
            let next = self.next_sibling(at);
            (next != NONE).then_some(next)
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.entries).filter(|(_, sequence)| sequence.slot != NONE)
    }
}

impl Index<u32> for Sequences {
    type Output = Sequence;

    fn index(&self, index: u32) -> &Sequence {
        let sequence = &self.entries[index as usize];
        debug_assert_ne!(sequence.slot, NONE, "a listed sequence lives");
        sequence
    }
}

impl IndexMut<u32> for Sequences {
    fn index_mut(&mut self, index: u32) -> &mut Sequence {
        let sequence = &mut self.entries[index as usize];
        debug_assert_ne!(sequence.slot, NONE, "a listed sequence lives");
        sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_a_request_stand_between_it_and_the_next() {
        let last = MAX_CHOICES - 1;
        let order = |arrival, choice| Order::new(Class::Standard, arrival, choice);
        assert!(order(3, 0) < order(3, 1) && order(3, last) < order(4, 0));
        assert_eq!([order(3, 0).choice(), order(3, last).choice()], [0, last]);
    }

    #[test]
    fn classes_stand_one_after_the_other() {
        let [interactive, standard, batch] = Class::ALL.map(|class| Order::new(class, 1 << 40, 5));
        assert!(interactive < Order::first_of(Class::Standard) && Order::first_of(Class::Standard) < standard);
        assert!(standard < Order::first_of(Class::Batch) && Order::first_of(Class::Batch) < batch);
        assert_eq!([interactive, standard, batch].map(Order::class), Class::ALL);
        assert_eq!(batch.choice(), 5);
    }
}
