//! PrefixCache: the exact content of every published block, found by hash, verified token by token.
//!
//! 1. A published block is known by (parent, tokens); its parent is published too, or is a root. Two published blocks
//!    never have the same parent and tokens.
//! 2. A hit compares parent and tokens: the hash only says where to look. So equal hashes give a verified hit or a miss.
//! 3. A published block's tokens are never written; unpublishing and unlinking are one operation.
//! 4. The tokens of a full block are stored even while it is not published: they are the only copy of what its holders have computed.
//! 5. A chain (`Chain`) knows of every block in it by a bit of its hash, so that most look-ups of what is not there read no block.
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
    /// The further blocks of the same bucket.
    link: Chain,
}

/// Blocks of one bucket: the first of them, and in the upper four bits, which no block needs, which hashes there may be among all of them.
///
/// A bit stands for a quarter of all hashes. Blocks that are gone may leave theirs behind; no bit is ever missing.
#[derive(Debug, Clone, Copy)]
struct Chain(u32);

impl Chain {
    const EMPTY: Self = Self(0);
    const INDEX_BITS: u32 = 28;

    /// The bit of a hash.
    fn bit(hash: u64) -> u32 {
        1 << (Self::INDEX_BITS + (hash as u32 & 3))
    }

    /// `block`, found by `hash`, before these.
    fn with_first(self, block: u32, hash: u64) -> Self {
        Self(block | Self::bit(hash) | self.0 >> Self::INDEX_BITS << Self::INDEX_BITS)
    }

    /// The first block, if one of them may have `hash`.
    fn first_for(self, hash: u64) -> Option<BlockId> {
        (self.0 & Self::bit(hash) != 0).then(|| BlockId(self.index()))
    }

    /// The first block, if there is one.
    fn first(self) -> Option<BlockId> {
        (self.0 >> Self::INDEX_BITS != 0).then(|| BlockId(self.index()))
    }

    fn index(self) -> u32 {
        self.0 & ((1 << Self::INDEX_BITS) - 1)
    }
}

#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: usize,
    tokens: Vec<i32>,
    entries: Vec<Entry>,
    /// Three buckets for four blocks.
    buckets: Vec<Chain>,
}

impl PrefixCache {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            tokens: zeroed_table(num_blocks * block_size),
            entries: table_of(Entry { hash: 0, parent: NONE, link: Chain::EMPTY }, num_blocks),
            buckets: table_of(Chain::EMPTY, (3 * num_blocks).div_ceil(4)),
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
        let mut chain = self.buckets[self.bucket(hash)];
        while let Some(block) = chain.first_for(hash) {
            let entry = &self.entries[block.index()];
            if entry.hash == hash && entry.parent == packed && self.tokens(block) == tokens {
                return Some(block);
            }
            chain = entry.link;
        }
        None
    }

    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch(&self.buckets, self.bucket(hash));
    }

    /// A block will be written.
    pub(crate) fn prefetch_block(&self, block: BlockId) {
        prefetch(&self.entries, block.index());
        prefetch(&self.tokens, block.index() * self.block_size);
    }

    pub(crate) fn prefetch_further(&self, hash: u64) {
        // Whether it is read is not asked here: a wrong guess of the processor would wait for the bucket.
        prefetch(&self.entries, self.buckets[self.bucket(hash)].index() as usize);
    }

    /// Enters a block that `find` does not know.
    pub(crate) fn insert(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[i32]) {
        self.store(block, tokens);
        let bucket = self.bucket(hash);
        let link = self.buckets[bucket];
        self.buckets[bucket] = link.with_first(block.0, hash);
        self.entries[block.index()] = Entry { hash, parent: parent.pack(), link };
    }

    /// Removes a published block and says what it continued.
    pub(crate) fn remove(&mut self, block: BlockId) -> Parent {
        let Entry { hash, parent, link } = self.entries[block.index()];
        self.unlink(block, hash, link);
        self.entries[block.index()] = Entry { hash, parent: NONE, link: Chain::EMPTY };
        Parent::unpack(parent)
    }

    /// Takes a block out of its bucket; `link` are those after it.
    fn unlink(&mut self, block: BlockId, hash: u64, link: Chain) {
        let bucket = self.bucket(hash);
        let head = self.buckets[bucket];
        if head.index() == block.0 {
            self.buckets[bucket] = link;
            return;
        }
        let mut at = head.index();
        while self.entries[at as usize].link.index() != block.0 {
            at = self.entries[at as usize].link.index();
        }
        let before = &mut self.entries[at as usize];
        before.link = link;
        // Only the chain that begins just before it forgets its bit: longer ones have most bits anyway.
        if at == head.index() {
            self.buckets[bucket] = link.with_first(at, before.hash);
        }
    }

    /// The upper half of the hash scaled to the number of buckets: any number of them will do, and no division.
    fn bucket(&self, hash: u64) -> usize {
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    /// Panics if a chain does not know of a block in it.
    pub(crate) fn check_chains(&self) {
        for &head in &self.buckets {
            let mut chain = head;
            while let Some(block) = chain.first() {
                let entry = &self.entries[block.index()];
                let known = entry.link.with_first(block.0, entry.hash);
                assert_eq!(chain.0 | known.0, chain.0, "a chain does not know of {block:?}, or of one after it");
                chain = entry.link;
            }
        }
    }

    /// Blocks that some bucket leads to, for the invariant check.
    pub(crate) fn linked_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.buckets.iter().flat_map(|&head| self.blocks_of(head))
    }

    fn blocks_of(&self, chain: Chain) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(chain.first(), |block| self.entries[block.index()].link.first())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_knows_which_hashes_may_be_in_it() {
        const PARENT: Parent = Parent::Root(RootId(0));
        let mut cache = PrefixCache::new(8, 1);
        // One bucket, three of the four bits; the last two share theirs.
        let hashes = [0, 1, 2, 6];
        for (block, &hash) in (0..).zip(&hashes) {
            assert_eq!(cache.find(PARENT, hash, &[7]), None);
            cache.insert(BlockId(block), PARENT, hash, &[7]);
            cache.check_chains();
        }
        assert_eq!(hashes.map(|hash| cache.find(PARENT, hash, &[7])), [0, 1, 2, 3].map(|block| Some(BlockId(block))));
        assert!(cache.buckets[0].first_for(3).is_none(), "no block is read for a hash that cannot be there");
        // From the middle, the end and the beginning.
        for (removed, left) in [(1, [0, 2, 6].as_slice()), (0, &[2, 6]), (3, &[2]), (2, &[])] {
            assert_eq!(cache.remove(BlockId(removed)), PARENT);
            cache.check_chains();
            let found: Vec<u64> = hashes.into_iter().filter(|&hash| cache.find(PARENT, hash, &[7]).is_some()).collect();
            assert_eq!(found, left);
        }
        assert!(cache.buckets[0].first().is_none());
    }

    #[test]
    fn a_chain_forgets_the_hash_of_a_removed_block() {
        let mut cache = PrefixCache::new(8, 1);
        for hash in [0, 1] {
            cache.insert(BlockId(hash as u32), Parent::Root(RootId(0)), hash, &[7]);
        }
        cache.remove(BlockId(0));
        assert!(cache.buckets[0].first_for(0).is_none());
        assert_eq!(cache.buckets[0].first_for(1), Some(BlockId(1)));
    }
}
