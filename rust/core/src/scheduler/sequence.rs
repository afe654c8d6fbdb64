//! Sequences: the choices that have started, running or preempted; and their place in the order of arrival.
//!
//! 1. A sequence lives from its first admission to its end; a request without one has not started, or all its started choices have ended.
//! 2. Its tokens are listed here (`known`) while it waits and until all but the last are computed. From then on they stand in the block pool
//!    and in its row's tail (`lanes.rs`), and are listed again if it is preempted.
//! 3. While it runs, its row or its lane is the only owner of how much is computed.
//! 4. There are never more sequences than rows: a choice starts only when no preempted one waits.

use std::ops::{Index, IndexMut};

use crate::block::NONE;
use crate::hash::PrefixHasher;
use crate::request::{MAX_CHOICES, RequestId};

/// Place of a choice in the order of arrival: requests by arrival, and the choices of a request by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Order(u64);

impl Order {
    pub(super) fn new(arrival: u64, choice: u32) -> Self {
        Self(arrival * u64::from(MAX_CHOICES) + u64::from(choice))
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
}

impl Known {
    pub(super) fn new(tokens: Vec<i32>, hashes: Vec<u64>) -> Self {
        Self { tokens: tokens.into_boxed_slice(), hashes: hashes.into_boxed_slice() }
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
    pub(super) request: RequestId,
    pub(super) order: Order,
    /// Absent = it decodes.
    pub(super) known: Option<Box<Known>>,
    /// Absent = it was preempted and waits.
    pub(super) row: Option<u32>,
    /// Computed tokens lost to a preemption and not yet computed again.
    pub(super) num_lost_tokens: u32,
    /// The next choice of the request that has started and not ended, or `NONE`.
    pub(super) next_sibling: u32,
}

const _: () = assert!(size_of::<Option<Sequence>>() <= 40, "a sequence is part of what a running one costs");

impl Sequence {
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
    entries: Vec<Option<Sequence>>,
    free: Vec<u32>,
}

impl Sequences {
    pub(super) fn new(max_num_seqs: usize) -> Self {
        let entries = std::iter::repeat_with(|| None).take(max_num_seqs).collect();
        Self { entries, free: (0..max_num_seqs as u32).rev().collect() }
    }

    pub(super) fn insert(&mut self, sequence: Sequence) -> u32 {
        let index = self.free.pop().expect("there are no more sequences than rows");
        self.entries[index as usize] = Some(sequence);
        index
    }

    pub(super) fn remove(&mut self, index: u32) -> Sequence {
        self.free.push(index);
        self.entries[index as usize].take().expect("a sequence ends once")
    }

    /// Sequences of one request in the order of their choices, from its first one on.
    pub(super) fn siblings(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((first != NONE).then_some(first), |&at| {
            let next = self[at].next_sibling;
            (next != NONE).then_some(next)
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        (0..).zip(&self.entries).filter_map(|(index, entry)| entry.as_ref().map(|sequence| (index, sequence)))
    }
}

impl Index<u32> for Sequences {
    type Output = Sequence;

    fn index(&self, index: u32) -> &Sequence {
        self.entries[index as usize].as_ref().expect("a listed sequence lives")
    }
}

impl IndexMut<u32> for Sequences {
    fn index_mut(&mut self, index: u32) -> &mut Sequence {
        self.entries[index as usize].as_mut().expect("a listed sequence lives")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_a_request_stand_between_it_and_the_next() {
        let last = MAX_CHOICES - 1;
        assert!(Order::new(3, 0) < Order::new(3, 1) && Order::new(3, last) < Order::new(4, 0));
        assert_eq!([Order::new(3, 0).choice(), Order::new(3, last).choice()], [0, last]);
    }
}
