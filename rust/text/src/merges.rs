//! Byte pair merging of a word of any length, with pauses: what the tokenizers crate does at one go, which takes as long as the word is.
//!
//! The rule is the crate's: of all neighbours that merge, those that come first in the list of merges do so first, from left to right.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use foldhash::fast::RandomState;
use serde::Deserialize;

use crate::byte_level::byte_letter;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// A merge as a file writes it.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum MergeEntry {
    /// With a space in between.
    Text(String),
    Pair(String, String),
}

impl MergeEntry {
    fn pair(&self) -> Option<(&str, &str)> {
        match self {
            Self::Text(text) => text.split_once(' '),
            Self::Pair(left, right) => Some((left, right)),
        }
    }
}

/// The merges of a byte-level model.
#[derive(Debug)]
pub(crate) struct Merges {
    /// Ids of the 256 bytes.
    letters: Box<[u32]>,
    /// Rank and result of each pair of ids.
    by_pair: HashMap<(u32, u32), (u32, u32), RandomState>,
}

/// A part of a word.
#[derive(Debug, Clone, Copy)]
struct Part {
    id: u32,
    previous: u32,
    next: u32,
    is_gone: bool,
}

impl Merges {
    /// `None` if the vocabulary lacks a byte or a token of a merge.
    pub(crate) fn new(entries: &[MergeEntry], id_of: impl Fn(&str) -> Option<u32>) -> Option<Self> {
        let letters: Option<_> = (0..=255).map(|byte| id_of(byte_letter(byte).encode_utf8(&mut [0; 4]))).collect();
        let mut by_pair = HashMap::with_capacity_and_hasher(entries.len(), RandomState::default());
        let mut merged = String::new();
        for (entry, rank) in entries.iter().zip(0..) {
            let (left, right) = entry.pair()?;
            merged.clear();
            merged.extend([left, right]);
            by_pair.insert((id_of(left)?, id_of(right)?), (rank, id_of(&merged)?));
        }
        Some(Self { letters: letters?, by_pair })
    }

    /// Appends the ids of a word. `pause` is called again and again, with bytes of short words that would have taken as long.
    pub(crate) fn encode(&self, word: &str, ids: &mut Vec<i32>, mut pause: impl FnMut(usize)) {
        let mut parts = Vec::with_capacity(word.len());
        for (byte, at) in word.bytes().zip(0u32..) {
            let id = self.letters[usize::from(byte)];
            parts.push(Part { id, previous: at.wrapping_sub(1), next: at + 1, is_gone: false });
            pause(1);
        }
        if let Some(last) = parts.last_mut() {
            last.next = NONE;
        }
        // Rank, place, and what comes of it: one that has become something else meanwhile is passed over.
        let mut queue = BinaryHeap::new();
        for at in 0..parts.len() as u32 {
            queue.extend(self.merge_at(&parts, at).map(Reverse));
            pause(1);
        }
        while let Some(Reverse(merge)) = queue.pop() {
            pause(4);
            let (_, at, new_id) = merge;
            if parts[at as usize].is_gone || self.merge_at(&parts, at).is_none_or(|(_, _, id)| id != new_id) {
                continue;
            }
            let gone = parts[at as usize].next;
            let next = parts[gone as usize].next;
            parts[gone as usize].is_gone = true;
            parts[at as usize].id = new_id;
            parts[at as usize].next = next;
            if let Some(next) = parts.get_mut(next as usize) {
                next.previous = at;
            }
            let previous = parts[at as usize].previous;
            queue.extend(self.merge_at(&parts, previous).map(Reverse));
            queue.extend(self.merge_at(&parts, at).map(Reverse));
        }
        for part in &parts {
            ids.extend((!part.is_gone).then_some(part.id as i32));
            pause(1);
        }
    }

    /// Rank, place and result of merging the part at `at` with the one after it.
    fn merge_at(&self, parts: &[Part], at: u32) -> Option<(u32, u32, u32)> {
        let part = parts.get(at as usize)?;
        let right = parts.get(part.next as usize)?;
        let &(rank, id) = self.by_pair.get(&(part.id, right.id))?;
        Some((rank, at, id))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn id_of(token: &str) -> Option<u32> {
        let letter = (0..=255u8).find(|&byte| token == byte_letter(byte).to_string());
        letter
            .map(u32::from)
            .or_else(|| ["ab", "bc", "abc", "aa"].iter().position(|&known| known == token).map(|at| 256 + at as u32))
    }

    fn merges() -> Merges {
        let entries = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a")];
        let entries = entries.map(|(left, right)| MergeEntry::Pair(left.to_owned(), right.to_owned()));
        Merges::new(&entries, id_of).unwrap()
    }

    #[test]
    fn what_comes_first_in_the_list_merges_first_and_from_the_left() {
        let encode = |word: &str| {
            let mut ids = Vec::new();
            merges().encode(word, &mut ids, |_| ());
            ids
        };
        assert_eq!(encode("abc"), [258]);
        assert_eq!(encode("bcab"), [257, 256]);
        assert_eq!(encode("aaab"), [259, 256], "ab before aa");
        assert_eq!(encode("aaaaa"), [259, 259, 97]);
        assert_eq!(encode(""), [0; 0]);
        assert!(Merges::new(&[MergeEntry::Text("a d".to_owned())], id_of).is_none(), "nothing is called \"ad\"");
    }

    #[test]
    fn no_run_without_a_pause_grows_with_the_word() {
        for len in [1_000, 10_000] {
            let (mut num_pauses, mut ids) = (0, Vec::new());
            merges().encode(&"a".repeat(len), &mut ids, |_| num_pauses += 1);
            assert!(
                num_pauses >= 3 * len + len / 2,
                "{num_pauses} pauses: for each byte three, and for each merge one"
            );
            assert_eq!(ids, vec![259; len / 2]);
        }
    }
}
