//! Which blocks the plan being made will fill, by hash: so that a waiter finds out in O(1) that nobody is computing its next block.
//!
//! Collected once per plan, when the first waiter asks; a hash that is found is only a hint, to be verified by content, so that
//! the lower half of each will do.

use std::collections::HashSet;

use foldhash::fast::FixedState;

use super::lanes::IS_UNSAMPLED;
use super::{Planned, Scheduler};

#[derive(Debug, Default)]
pub(super) struct Filling {
    hashes: HashSet<u32, FixedState>,
    is_collected: bool,
}

impl Filling {
    pub(super) fn clear(&mut self) {
        self.hashes.clear();
        self.is_collected = false;
    }
}

impl Scheduler {
    /// Whether some sequence of this plan may be filling the block with this hash.
    pub(super) fn may_be_filling(&mut self, hash: u64) -> bool {
        if !self.filling.is_collected {
            self.filling.is_collected = true;
            for index in 0..self.pieces.len() {
                self.note_filling(self.pieces[index]);
            }
            for lane in self.unsampled_lanes() {
                self.note_filling_of(self.lanes.rows[lane] as u32, self.lanes.num_tokens[lane] as usize - 1, 1);
            }
        }
        self.filling.hashes.contains(&(hash as u32))
    }

    /// Planned lanes that compute the last token of a prompt, or of what was known before; nearly always none.
    pub(super) fn unsampled_lanes(&self) -> Vec<usize> {
        self.planned_lanes.iter().filter(|&lane| self.lanes.flags[lane] & IS_UNSAMPLED != 0).collect()
    }

    /// Adds the blocks that `planned` fills, if they are being collected.
    pub(super) fn note_filling(&mut self, planned: Planned) {
        if self.filling.is_collected {
            let num_computed = self.rows.get(planned.row).num_computed_tokens as usize;
            self.note_filling_of(planned.row, num_computed, planned.num_tokens as usize);
        }
    }

    /// Only blocks whose tokens are all known have a hash: not those that a decoding sequence fills with what it generates.
    fn note_filling_of(&mut self, row: u32, num_computed: usize, num_tokens: usize) {
        let row = self.rows.get(row);
        if !row.may_publish {
            return;
        }
        let hashes = &self.sequences[row.sequence].known().hashes;
        let block_size = self.config.block_size;
        let end = (num_computed + num_tokens).div_ceil(block_size).min(hashes.len());
        let start = (num_computed / block_size).min(end);
        self.filling.hashes.extend(hashes[start..end].iter().map(|&hash| hash as u32));
    }
}
