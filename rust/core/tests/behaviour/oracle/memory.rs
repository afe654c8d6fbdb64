//! The KV oracle: a fake KV memory that stores, instead of keys and values, the exact prefix that each slot stands for.
//!
//! A slot stands for (tenant, salt, every token up to and including its position). Before a batch "runs", every position
//! that attention would read must hold exactly the reader's own prefix; a wrong block, a stale one, one that was never
//! written, or another tenant's cannot. Blocks are poisoned when they are allocated or freed, and failed steps leave garbage.

/// No prefix: mixing never yields it in practice, and a match would only hide a fault, never invent one.
const POISON: u64 = 0xDEAD_BEEF_DEAD_BEEF;

/// What each slot of the pool stands for.
#[derive(Debug)]
pub(crate) struct Memory {
    slots: Vec<u64>,
    block_size: usize,
}

impl Memory {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { slots: vec![POISON; num_blocks * block_size], block_size }
    }

    pub(crate) fn poison_block(&mut self, block: usize) {
        self.slots[block * self.block_size..][..self.block_size].fill(POISON);
    }

    /// Leaves garbage where `table` puts positions `start..end`.
    pub(crate) fn poison(&mut self, table: &[i32], start: usize, end: usize) {
        for position in start..end {
            let slot = self.slot(table, position);
            self.slots[slot] = POISON;
        }
    }

    /// Stores the prefixes of positions `start..end` where `table` puts them.
    pub(crate) fn write(&mut self, table: &[i32], prefix: &[u64], start: usize, end: usize) {
        for (position, &name) in prefix.iter().enumerate().take(end).skip(start) {
            let slot = self.slot(table, position);
            self.slots[slot] = name;
        }
    }

    /// Checks that positions `0..end` of a sequence are where `table` says, i.e. what attention reads.
    pub(crate) fn check(&self, table: &[i32], prefix: &[u64], end: usize) {
        for (position, &name) in prefix.iter().enumerate().take(end) {
            let slot = self.slot(table, position);
            let found = self.slots[slot];
            assert!(found != POISON, "position {position} reads slot {slot}, which nobody has written");
            assert!(found == name, "position {position} reads slot {slot}, which stands for another prefix");
        }
    }

    pub(crate) fn slot(&self, table: &[i32], position: usize) -> usize {
        table[position / self.block_size] as usize * self.block_size + position % self.block_size
    }
}
