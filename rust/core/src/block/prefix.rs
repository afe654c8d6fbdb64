//! PrefixCache: the exact content of every published block, found by hash, verified token by token.
//!
//! 1. A published block is known by (parent, tokens); its parent is published too, or is a root. Two published blocks
//!    never have the same parent and tokens.
//! 2. A hit compares parent and tokens: the hash only says where to look. So equal hashes give a verified hit or a miss.
//! 3. A published block's tokens are never written; unpublishing and unlinking are one operation.
//! 4. The tokens of a full block are stored even while it is not published: they are the only copy of what its holders have computed.
//!
//! Memory per block: hash 8, parent 4, link 4 (together, since a look-up reads all three), bucket head 3, and 4 per token.

use super::{BlockId, NONE, RootId};
use crate::memory::{prefetch, table_of, zeroed_table};

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

/// What a look-up compares, a quarter of a cache line per block.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u64,
    /// Packed parent; `NONE` = not published.
    parent: u32,
    /// Next block of the same bucket.
    link: u32,
}

#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: usize,
    tokens: Vec<i32>,
    entries: Vec<Entry>,
    /// First block of each bucket; three buckets for four blocks.
    buckets: Vec<u32>,
}

impl PrefixCache {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            tokens: zeroed_table(num_blocks * block_size),
            entries: table_of(Entry { hash: 0, parent: NONE, link: NONE }, num_blocks),
            buckets: table_of(NONE, (3 * num_blocks).div_ceil(4)),
        }
    }

    pub(crate) fn is_published(&self, block: BlockId) -> bool {
        self.entries[block.index()].parent != NONE
    }

    pub(crate) fn parent(&self, block: BlockId) -> Option<Parent> {
        let packed = self.entries[block.index()].parent;
        (packed != NONE).then(|| Parent::unpack(packed))
    }

    /// Hash under which a published block can be found.
    pub(crate) fn hash(&self, block: BlockId) -> u64 {
        debug_assert!(self.is_published(block), "an unpublished block has no hash");
        self.entries[block.index()].hash
    }

    pub(crate) fn tokens(&self, block: BlockId) -> &[i32] {
        &self.tokens[block.index() * self.block_size..][..self.block_size]
    }

    /// Keeps what a full block contains, without letting others find it.
    pub(crate) fn store(&mut self, block: BlockId, tokens: &[i32]) {
        debug_assert!(!self.is_published(block), "a published block is never written");
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(tokens);
    }

    /// Finds the published block that continues `parent` with exactly `tokens`.
    pub(crate) fn find(&self, parent: Parent, hash: u64, tokens: &[i32]) -> Option<BlockId> {
        let packed = parent.pack();
        let mut at = self.buckets[self.bucket(hash)];
        while at != NONE {
            let block = BlockId(at);
            let entry = &self.entries[block.index()];
            if entry.hash == hash && entry.parent == packed && self.tokens(block) == tokens {
                return Some(block);
            }
            at = entry.link;
        }
        None
    }

    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch(&self.buckets, self.bucket(hash));
    }

    pub(crate) fn prefetch_further(&self, hash: u64) {
        let first = self.buckets[self.bucket(hash)];
        if first != NONE {
            prefetch(&self.entries, first as usize);
        }
    }

    /// Enters a block that `find` does not know.
    pub(crate) fn insert(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[i32]) {
        self.store(block, tokens);
        let bucket = self.bucket(hash);
        let link = std::mem::replace(&mut self.buckets[bucket], block.0);
        self.entries[block.index()] = Entry { hash, parent: parent.pack(), link };
    }

    /// Removes a published block and says what it continued.
    pub(crate) fn remove(&mut self, block: BlockId) -> Parent {
        let Entry { hash, parent, link } = self.entries[block.index()];
        let bucket = self.bucket(hash);
        if self.buckets[bucket] == block.0 {
            self.buckets[bucket] = link;
        } else {
            let mut at = self.buckets[bucket] as usize;
            while self.entries[at].link != block.0 {
                at = self.entries[at].link as usize;
            }
            self.entries[at].link = link;
        }
        self.entries[block.index()] = Entry { hash, parent: NONE, link: NONE };
        Parent::unpack(parent)
    }

    /// The upper half of the hash scaled to the number of buckets: any number of them will do, and no division.
    fn bucket(&self, hash: u64) -> usize {
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    /// Blocks that some bucket leads to, for the invariant check.
    pub(crate) fn linked_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.buckets.iter().flat_map(|&head| {
            std::iter::successors((head != NONE).then_some(head), |&at| {
                let next = self.entries[at as usize].link;
                (next != NONE).then_some(next)
            })
            .map(BlockId)
        })
    }
}
