//! Which prefixes must be in the prefix cache right now, in which block, and which block must go next.

use std::collections::HashMap;

use cbrs_core::block::{BlockId, BlockPool};

use super::requests::Choice;

/// What the prefix cache must hold.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Published prefix of each block.
    content: Vec<Option<u64>>,
    /// Block of each published prefix: never two of the same.
    block_of: HashMap<u64, i32>,
    was_held: Vec<bool>,
    /// Operation in which each block lost its last holder.
    released_at: Vec<u64>,
    /// Blocks evicted by the plan being checked.
    evicted: Vec<usize>,
}

impl Cache {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self {
            content: vec![None; num_blocks],
            block_of: HashMap::new(),
            was_held: vec![false; num_blocks],
            released_at: vec![0; num_blocks],
            evicted: Vec::new(),
        }
    }

    /// A completed step filled `block`. Returns the block that stands for the same prefix already, if there is one.
    pub(crate) fn publish(&mut self, prefix: u64, block: i32) -> Option<i32> {
        if let Some(&existing) = self.block_of.get(&prefix) {
            // It gets a holder, who may end in this very operation.
            self.was_held[existing as usize] = true;
            return Some(existing);
        }
        assert!(self.content[block as usize].is_none(), "block {block} was written while it was published");
        self.content[block as usize] = Some(prefix);
        self.block_of.insert(prefix, block);
        None
    }

    /// Leading blocks of the request that are in the cache.
    pub(crate) fn hits(&self, request: &Choice, block_size: usize) -> usize {
        let is_present = |column: usize| self.block_of.contains_key(&request.block_prefix(column, block_size));
        (0..request.max_hits(block_size)).take_while(|&column| is_present(column)).count()
    }

    pub(crate) fn block(&self, prefix: u64) -> Option<i32> {
        self.block_of.get(&prefix).copied()
    }

    /// `block` was given to a sequence for new content: what it held is gone.
    pub(crate) fn reuse(&mut self, block: i32) {
        if let Some(prefix) = self.content[block as usize].take() {
            self.block_of.remove(&prefix);
            self.evicted.push(block as usize);
        }
    }

    pub(crate) fn reset(&mut self) {
        self.content.fill(None);
        self.block_of.clear();
    }

    /// Checks that what was evicted was released no later than anything that stayed; returns how many blocks were.
    pub(crate) fn check_evictions(&mut self, pool: &BlockPool, operation: u64) -> usize {
        let evicted = std::mem::take(&mut self.evicted);
        for &gone in &evicted {
            let gone_at = if self.was_held[gone] { operation } else { self.released_at[gone] };
            for (kept, content) in self.content.iter().enumerate() {
                if content.is_some() && !self.was_held[kept] && pool.ref_count(BlockId::new(kept as u32)) == 0 {
                    let kept_at = self.released_at[kept];
                    assert!(
                        gone_at <= kept_at,
                        "block {gone} was evicted before block {kept}, which was released earlier"
                    );
                }
            }
        }
        evicted.len()
    }

    /// Compares with the pool after an operation and notes who was released in it. Returns the number of cached blocks.
    pub(crate) fn check(&mut self, pool: &BlockPool, holders: &[u32], operation: u64) -> usize {
        let mut num_cached = 0;
        for (index, &holders) in holders.iter().enumerate() {
            let block = BlockId::new(index as u32);
            assert_eq!(pool.ref_count(block), holders, "{block:?} has other holders than the tables say");
            let is_published = self.content[index].is_some();
            assert_eq!(pool.is_published(block), is_published, "{block:?} is published (left), or must be (right)");
            num_cached += usize::from(is_published && holders == 0);
            if self.was_held[index] && holders == 0 {
                self.released_at[index] = operation;
            }
            self.was_held[index] = holders > 0;
        }
        num_cached
    }

    /// For the search over states: what is published, by block.
    pub(crate) fn contents(&self) -> &[Option<u64>] {
        &self.content
    }
}
