//! PrefixCache: the exact content of every published block, found by hash, verified token by token.
//!
//! 1. A published block is known by (parent, tokens); its parent is published too, or is a root. Two published blocks
//!    never have the same parent and tokens.
//! 2. A hit compares parent and tokens: the hash only says where to look. So equal hashes give a verified hit or a miss.
//! 3. A published block's tokens are never written; unpublishing and unlinking are one operation.
//!
//! Memory per block: hash 8, parent 4, link 4, about 6 of bucket heads, and 4 per token.

use super::{BlockId, NONE, RootId};

/// What a block continues: a root (tenant and salt), or a published block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// First block of a prompt.
    Root(RootId),
    /// Continues this block.
    Block(BlockId),
}

/// Roots and blocks share one u32: pools have at most 2^28 blocks, so the top bit tells them apart.
const ROOT_BIT: u32 = 1 << 31;

impl Parent {
    fn pack(self) -> u32 {
        match self {
            Self::Root(root) => root.0 | ROOT_BIT,
            Self::Block(block) => block.0,
        }
    }

    fn unpack(packed: u32) -> Self {
        if packed & ROOT_BIT == 0 { Self::Block(BlockId(packed)) } else { Self::Root(RootId(packed & !ROOT_BIT)) }
    }
}

/// Outcome of `BlockPool::publish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The block can now be found by others.
    Yes,
    /// This other block already stands for the same prefix.
    Duplicate(BlockId),
}

#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: usize,
    tokens: Vec<i32>,
    hashes: Vec<u64>,
    /// Packed parent; `NONE` = not published.
    parents: Vec<u32>,
    /// Next block of the same bucket.
    links: Vec<u32>,
    buckets: Vec<u32>,
}

impl PrefixCache {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            tokens: vec![0; num_blocks * block_size],
            hashes: vec![0; num_blocks],
            parents: vec![NONE; num_blocks],
            links: vec![NONE; num_blocks],
            buckets: vec![NONE; num_blocks.next_power_of_two()],
        }
    }

    pub(crate) fn is_published(&self, block: BlockId) -> bool {
        self.parents[block.index()] != NONE
    }

    pub(crate) fn parent(&self, block: BlockId) -> Option<Parent> {
        let packed = self.parents[block.index()];
        (packed != NONE).then(|| Parent::unpack(packed))
    }

    pub(crate) fn tokens(&self, block: BlockId) -> &[i32] {
        &self.tokens[block.index() * self.block_size..][..self.block_size]
    }

    /// Finds the published block that continues `parent` with exactly `tokens`.
    pub(crate) fn find(&self, parent: Parent, hash: u64, tokens: &[i32]) -> Option<BlockId> {
        let packed = parent.pack();
        let mut at = self.buckets[self.bucket(hash)];
        while at != NONE {
            let index = at as usize;
            let block = BlockId(at);
            if self.hashes[index] == hash && self.parents[index] == packed && self.tokens(block) == tokens {
                return Some(block);
            }
            at = self.links[index];
        }
        None
    }

    /// Enters a block that `find` does not know.
    pub(crate) fn insert(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[i32]) {
        let index = block.index();
        debug_assert!(self.parents[index] == NONE, "a block is published once");
        let bucket = self.bucket(hash);
        self.tokens[index * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.hashes[index] = hash;
        self.parents[index] = parent.pack();
        self.links[index] = self.buckets[bucket];
        self.buckets[bucket] = block.0;
    }

    /// Removes a published block and says what it continued.
    pub(crate) fn remove(&mut self, block: BlockId) -> Parent {
        let index = block.index();
        let bucket = self.bucket(self.hashes[index]);
        let next = self.links[index];
        if self.buckets[bucket] == block.0 {
            self.buckets[bucket] = next;
        } else {
            let mut at = self.buckets[bucket] as usize;
            while self.links[at] != block.0 {
                at = self.links[at] as usize;
            }
            self.links[at] = next;
        }
        self.links[index] = NONE;
        Parent::unpack(std::mem::replace(&mut self.parents[index], NONE))
    }

    fn bucket(&self, hash: u64) -> usize {
        (hash >> 32 ^ hash) as usize & (self.buckets.len() - 1)
    }

    /// Blocks that some bucket leads to, for the invariant check.
    pub(crate) fn linked_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.buckets.iter().flat_map(|&head| {
            std::iter::successors((head != NONE).then_some(head), |&at| {
                let next = self.links[at as usize];
                (next != NONE).then_some(next)
            })
            .map(BlockId)
        })
    }
}
