//! BlockPool: who holds each block, and in which order unheld ones are reused.
//!
//! 1. Every block is free (unheld, content meaningless), cached (unheld, published) or used (held):
//!    free + cached + used = total, always.
//! 2. `ref_count` is the number of holders. A cached block is on the eviction list, a free one on the free list, a used one on neither.
//! 3. Eviction takes the least recently released block. A sequence releases its blocks deepest first and a holder of a block
//!    holds its parent too, so a child always stands before its parent on the list: no published child outlives its parent.
//! 4. Evicting a block unpublishes it in the same operation; a held block is never evicted.
//!
//! Free blocks are a stack; the eviction list is linked by index. Every operation is O(1) (publishing compares one block's tokens).
//!
//! Memory per block: holders 4, links 8, place on the stack 4, besides what the prefix cache has (`prefix.rs`).

use super::prefix::{Parent, PrefixCache, Published};
use super::roots::{RootId, RootTable};
use super::{BlockId, NONE};
use crate::error::{Error, Result};
use crate::memory::{prefetch, table_of};

/// Who holds a block, and its neighbours on the eviction list while it is cached.
#[derive(Debug, Clone, Copy)]
struct Hold {
    ref_count: u32,
    prev: u32,
    next: u32,
}

/// The pool of KV blocks with its prefix cache.
///
/// ```
/// use cbrs_core::block::BlockPool;
/// let mut pool = BlockPool::new(4, 16);
/// let block = pool.allocate().unwrap();
/// assert_eq!(pool.num_used(), 1);
/// pool.release(block).unwrap();
/// assert!(pool.release(block).is_err(), "nobody holds it any more");
/// ```
#[derive(Debug)]
pub struct BlockPool {
    holds: Vec<Hold>,
    /// Free blocks, the one to be given out next at the end: an allocation waits for no memory but the stack's.
    free: Vec<BlockId>,
    /// Least recently released, evicted first.
    lru_head: u32,
    lru_tail: u32,
    num_cached: usize,
    num_evictions: u64,
    cache: PrefixCache,
    roots: RootTable,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks of `block_size` tokens.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            holds: table_of(Hold { ref_count: 0, prev: NONE, next: NONE }, num_blocks),
            free: (0..num_blocks as u32).rev().map(BlockId).collect(),
            lru_head: NONE,
            lru_tail: NONE,
            num_cached: 0,
            num_evictions: 0,
            cache: PrefixCache::new(num_blocks, block_size),
            roots: RootTable::new(),
        }
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.holds.len()
    }

    /// Unheld blocks without content.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Unheld published blocks.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// Held blocks.
    pub fn num_used(&self) -> usize {
        self.num_blocks() - self.num_free() - self.num_cached
    }

    /// Blocks that can be allocated now: free ones and, by eviction, cached ones.
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_cached
    }

    /// Published blocks that were reused for other content so far.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// Holders of a block.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.holds[block.index()].ref_count
    }

    /// Takes a free block, or evicts the least recently released cached one. `None` if every block is held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => {
                // It is filled in some steps, and the next one is given out in some: what is written then should be there.
                self.cache.prefetch_block(block);
                if let Some(next) = self.free.last() {
                    prefetch(&self.holds, next.index());
                }
                block
            }
            None => self.evict()?,
        };
        self.holds[block.index()].ref_count = 1;
        Some(block)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = BlockId((self.lru_head != NONE).then_some(self.lru_head)?);
        self.lru_remove(block);
        self.unpublish(block);
        self.num_evictions += 1;
        Some(block)
    }

    /// Adds a holder to a published or held block.
    pub fn acquire(&mut self, block: BlockId) {
        let count = &mut self.holds[block.index()].ref_count;
        *count += 1;
        if *count == 1 {
            assert!(self.cache.is_published(block), "an unheld block that can be acquired is published");
            self.lru_remove(block);
        }
    }

    /// Removes a holder. The last one leaves a published block cached, and any other free.
    ///
    /// # Errors
    /// `BlockNotHeld` if nobody holds it (or it is not of this pool); nothing changes then.
    pub fn release(&mut self, block: BlockId) -> Result<()> {
        if self.try_release(block) { Ok(()) } else { Err(Error::BlockNotHeld { block: block.0 }) }
    }

    /// Removes a holder of a block that is held: one in a table, or pinned.
    pub(crate) fn give_back(&mut self, block: BlockId) {
        assert!(self.try_release(block), "{block:?} stood in a table and nobody held it");
    }

    /// Without an `Error`, whose making and dropping costs more than the rest.
    fn try_release(&mut self, block: BlockId) -> bool {
        let Some(hold) = self.holds.get_mut(block.index()).filter(|hold| hold.ref_count > 0) else { return false };
        hold.ref_count -= 1;
        if hold.ref_count == 0 {
            if self.cache.is_published(block) {
                self.lru_push(block);
            } else {
                self.free.push(block);
            }
        }
        true
    }

    /// Finds the published block that continues `parent` with exactly `tokens`. Does not take a reference.
    pub fn find(&self, parent: Parent, hash: u64, tokens: &[i32]) -> Option<BlockId> {
        self.cache.find(parent, hash, tokens)
    }

    /// A look-up of `hash` comes soon.
    pub(crate) fn prefetch(&self, hash: u64) {
        self.cache.prefetch(hash);
    }

    /// The same, once what `prefetch` asked for may have arrived.
    pub(crate) fn prefetch_further(&self, hash: u64) {
        self.cache.prefetch_further(hash);
    }

    /// Makes a held, filled block findable, unless an equal one already is.
    pub fn publish(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[i32]) -> Published {
        if let Some(existing) = self.cache.find(parent, hash, tokens) {
            return Published::Duplicate(existing);
        }
        debug_assert!(self.ref_count(block) > 0, "only a held block is published");
        if let Parent::Root(root) = parent {
            self.roots.acquire(root);
        }
        self.cache.insert(block, parent, hash, tokens);
        Published::Yes
    }

    /// Keeps the tokens of a held block that its holders have filled but that must not be published.
    pub fn store(&mut self, block: BlockId, tokens: &[i32]) {
        debug_assert!(self.ref_count(block) > 0, "only a held block is filled");
        self.cache.store(block, tokens);
    }

    /// Whether a block can be found by others.
    pub fn is_published(&self, block: BlockId) -> bool {
        self.cache.is_published(block)
    }

    /// What a published block continues.
    pub fn parent(&self, block: BlockId) -> Option<Parent> {
        self.cache.parent(block)
    }

    /// Hash of a published block.
    pub fn hash(&self, block: BlockId) -> u64 {
        self.cache.hash(block)
    }

    /// Tokens of a block that was published or stored, as long as it is held or cached.
    pub fn tokens(&self, block: BlockId) -> &[i32] {
        self.cache.tokens(block)
    }

    /// Unpublishes every block; cached ones become free, held ones stay with their holders.
    pub fn reset_prefix_cache(&mut self) {
        for index in 0..self.num_blocks() as u32 {
            let block = BlockId(index);
            if self.cache.is_published(block) {
                self.unpublish(block);
                if self.ref_count(block) == 0 {
                    self.lru_remove(block);
                    self.free.push(block);
                }
            }
        }
    }

    /// Hash that stands before the first block of each chain with this root.
    pub(crate) fn root_hash(&self, root: RootId) -> u64 {
        self.roots.hash(root)
    }

    pub(crate) fn roots(&mut self) -> &mut RootTable {
        &mut self.roots
    }

    fn unpublish(&mut self, block: BlockId) {
        if let Parent::Root(root) = self.cache.remove(block) {
            self.roots.release(root);
        }
    }

    fn lru_push(&mut self, block: BlockId) {
        let tail = std::mem::replace(&mut self.lru_tail, block.0);
        let hold = &mut self.holds[block.index()];
        (hold.prev, hold.next) = (tail, NONE);
        match tail {
            NONE => self.lru_head = block.0,
            tail => self.holds[tail as usize].next = block.0,
        }
        self.num_cached += 1;
    }

    fn lru_remove(&mut self, block: BlockId) {
        let Hold { prev, next, .. } = self.holds[block.index()];
        match prev {
            NONE => self.lru_head = next,
            prev => self.holds[prev as usize].next = next,
        }
        match next {
            NONE => self.lru_tail = prev,
            next => self.holds[next as usize].prev = prev,
        }
        self.num_cached -= 1;
    }

    /// Cached blocks in the order in which they would be evicted.
    pub fn eviction_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors((self.lru_head != NONE).then_some(self.lru_head), |&at| {
            let next = self.holds[at as usize].next;
            (next != NONE).then_some(next)
        })
        .map(BlockId)
    }

    /// Panics with what is wrong if an invariant of this module does not hold. `O(num_blocks)`.
    ///
    /// `live_root_refs` counts the live requests of each root.
    pub(crate) fn check_invariants(&self, live_root_refs: &std::collections::BTreeMap<u32, u32>) {
        let mut place = vec![0u8; self.num_blocks()];
        for &block in &self.free {
            assert_eq!(self.ref_count(block), 0, "free {block:?} has holders");
            assert!(!self.cache.is_published(block), "free {block:?} is published");
            assert_eq!(place[block.index()], 0, "{block:?} stands twice on the free list");
            place[block.index()] = 1;
        }
        let mut position = vec![usize::MAX; self.num_blocks()];
        for (index, block) in self.eviction_order().enumerate() {
            assert_eq!(self.ref_count(block), 0, "cached {block:?} has holders");
            assert!(self.cache.is_published(block), "cached {block:?} is not published");
            assert_eq!(place[block.index()], 0, "{block:?} stands on two lists");
            place[block.index()] = 2;
            position[block.index()] = index;
        }
        assert_eq!(self.eviction_order().count(), self.num_cached, "cached blocks are miscounted");
        for (index, &kind) in place.iter().enumerate() {
            assert_eq!(kind == 0, self.holds[index].ref_count > 0, "block {index} is neither free nor cached nor held");
        }
        self.check_published(&position, live_root_refs);
    }

    fn check_published(&self, position: &[usize], live_root_refs: &std::collections::BTreeMap<u32, u32>) {
        self.cache.check_chains();
        let mut linked = vec![false; self.num_blocks()];
        let mut root_refs = live_root_refs.clone();
        for block in self.cache.linked_blocks() {
            assert!(!linked[block.index()], "{block:?} is linked twice");
            linked[block.index()] = true;
            let parent = self.cache.parent(block).expect("a linked block is published");
            match parent {
                Parent::Root(root) => *root_refs.entry(root.0).or_default() += 1,
                Parent::Block(parent) => {
                    assert!(self.cache.is_published(parent), "{block:?} outlives its parent {parent:?}");
                    let (child_refs, parent_refs) = (self.ref_count(block), self.ref_count(parent));
                    assert!(child_refs == 0 || parent_refs > 0, "{block:?} is held, its parent {parent:?} is not");
                    let (child_at, parent_at) = (position[block.index()], position[parent.index()]);
                    assert!(child_at == usize::MAX || child_at < parent_at, "{parent:?} is evicted before {block:?}");
                }
            }
        }
        for index in 0..self.num_blocks() as u32 {
            let block = BlockId(index);
            assert_eq!(linked[block.index()], self.cache.is_published(block), "{block:?} is published but not linked");
        }
        for (&root, &count) in root_refs.iter().filter(|&(&root, _)| root != 0) {
            assert_eq!(self.roots.ref_count(super::RootId(root)), count, "root {root} is miscounted");
        }
        assert_eq!(self.roots.len(), root_refs.keys().filter(|&&root| root != 0).count(), "a root leaked");
    }
}
