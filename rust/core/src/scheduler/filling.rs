//! Which blocks the plan being made will fill, by hash: so that a waiter finds out in O(1) that nobody is computing its next block.
//!
//! Collected once per plan, when the first waiter asks; a hash that is found is only a hint, to be verified by content.

use std::collections::HashSet;

use foldhash::fast::FixedState;

use super::{Planned, Scheduler};

#[derive(Debug, Default)]
pub(super) struct Filling {
    hashes: HashSet<u64, FixedState>,
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
            let (decodes, chunks) = (std::mem::take(&mut self.decodes), std::mem::take(&mut self.chunks));
            for &planned in decodes.iter().chain(&chunks) {
                self.note_filling(planned);
            }
            (self.decodes, self.chunks) = (decodes, chunks);
        }
        self.filling.hashes.contains(&hash)
    }

    /// Adds the blocks that `planned` fills, if they are being collected.
    pub(super) fn note_filling(&mut self, planned: Planned) {
        let row = self.rows.get(planned.row);
        if !self.filling.is_collected || !row.may_publish {
            return;
        }
        let computed_after = (row.num_computed_tokens + planned.num_tokens) as usize;
        let hashes = &self.sequences[row.sequence].hashes;
        let end = computed_after.div_ceil(self.config.block_size).min(hashes.len());
        let start = (row.num_published_blocks as usize).min(end);
        self.filling.hashes.extend(&hashes[start..end]);
    }
}
