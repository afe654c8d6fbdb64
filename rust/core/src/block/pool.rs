//! BlockPool: who holds each block, and in which order unheld ones are reused.
//!
//! 1. Every block is free (unheld, content meaningless), cached (unheld, published) or used (held):
//!    free + cached + used = total, always.
//! 2. `ref_count` is the number of holders. A cached block is on the eviction list, a free one on the free list, a used one on neither.
//! 3. Eviction takes the least recently released block. A sequence releases its blocks deepest first and a holder of a block
//!    holds its parent too, so a child always stands before its parent on the list: no published child outlives its parent.
//! 4. Evicting a block unpublishes it in the same operation; a held block is never evicted.
//!
//! Lists are linked by index inside two arrays; every operation is O(1) (publishing compares one block's tokens).

use super::prefix::{Parent, PrefixCache, Published};
use super::roots::RootTable;
use super::{BlockId, NONE};
use crate::error::{Error, Result};

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
    ref_counts: Vec<u32>,
    /// Links of the free list (`next` only) and the eviction list.
    next: Vec<u32>,
    prev: Vec<u32>,
    free_head: u32,
    /// Least recently released, evicted first.
    lru_head: u32,
    lru_tail: u32,
    num_free: usize,
    num_cached: usize,
    num_evictions: u64,
    cache: PrefixCache,
    roots: RootTable,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks of `block_size` tokens.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            ref_counts: vec![0; num_blocks],
            next: (1..=num_blocks as u32).map(|next| if next as usize == num_blocks { NONE } else { next }).collect(),
            prev: vec![NONE; num_blocks],
            free_head: if num_blocks == 0 { NONE } else { 0 },
            lru_head: NONE,
            lru_tail: NONE,
            num_free: num_blocks,
            num_cached: 0,
            num_evictions: 0,
            cache: PrefixCache::new(num_blocks, block_size),
            roots: RootTable::new(),
        }
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.ref_counts.len()
    }

    /// Unheld blocks without content.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Unheld published blocks.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// Held blocks.
    pub fn num_used(&self) -> usize {
        self.num_blocks() - self.num_free - self.num_cached
    }

    /// Blocks that can be allocated now: free ones and, by eviction, cached ones.
    pub fn num_available(&self) -> usize {
        self.num_free + self.num_cached
    }

    /// Published blocks that were reused for other content so far.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// Holders of a block.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.index()]
    }

    /// Takes a free block, or evicts the least recently released cached one. `None` if every block is held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = if self.free_head == NONE {
            let block = BlockId((self.lru_head != NONE).then_some(self.lru_head)?);
            self.lru_remove(block);
            self.unpublish(block);
            self.num_evictions += 1;
            block
        } else {
            let block = BlockId(self.free_head);
            self.free_head = self.next[block.index()];
            self.num_free -= 1;
            block
        };
        self.ref_counts[block.index()] = 1;
        Some(block)
    }

    /// Adds a holder to a published or held block.
    pub fn acquire(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
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
        let count = self.ref_counts.get_mut(block.index()).filter(|count| **count > 0);
        let count = count.ok_or(Error::BlockNotHeld { block: block.0 })?;
        *count -= 1;
        if *count == 0 {
            if self.cache.is_published(block) {
                self.lru_push(block);
            } else {
                self.free_push(block);
            }
        }
        Ok(())
    }

    /// Finds the published block that continues `parent` with exactly `tokens`. Does not take a reference.
    pub fn find(&self, parent: Parent, hash: u64, tokens: &[i32]) -> Option<BlockId> {
        self.cache.find(parent, hash, tokens)
    }

    /// Makes a held, filled block findable, unless an equal one already is.
    pub fn publish(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[i32]) -> Published {
        if let Some(existing) = self.cache.find(parent, hash, tokens) {
            return Published::Duplicate(existing);
        }
        debug_assert!(self.ref_counts[block.index()] > 0, "only a held block is published");
        if let Parent::Root(root) = parent {
            self.roots.acquire(root);
        }
        self.cache.insert(block, parent, hash, tokens);
        Published::Yes
    }

    /// Whether a block can be found by others.
    pub fn is_published(&self, block: BlockId) -> bool {
        self.cache.is_published(block)
    }

    /// What a published block continues.
    pub fn parent(&self, block: BlockId) -> Option<Parent> {
        self.cache.parent(block)
    }

    /// Tokens of a published block.
    pub fn tokens(&self, block: BlockId) -> &[i32] {
        self.cache.tokens(block)
    }

    /// Unpublishes every block; cached ones become free, held ones stay with their holders.
    pub fn reset_prefix_cache(&mut self) {
        for index in 0..self.num_blocks() as u32 {
            let block = BlockId(index);
            if self.cache.is_published(block) {
                self.unpublish(block);
                if self.ref_counts[block.index()] == 0 {
                    self.lru_remove(block);
                    self.free_push(block);
                }
            }
        }
    }

    pub(crate) fn roots(&mut self) -> &mut RootTable {
        &mut self.roots
    }

    fn unpublish(&mut self, block: BlockId) {
        if let Parent::Root(root) = self.cache.remove(block) {
            self.roots.release(root);
        }
    }

    fn free_push(&mut self, block: BlockId) {
        self.next[block.index()] = self.free_head;
        self.free_head = block.0;
        self.num_free += 1;
    }

    fn lru_push(&mut self, block: BlockId) {
        let index = block.index();
        self.prev[index] = self.lru_tail;
        self.next[index] = NONE;
        match self.lru_tail {
            NONE => self.lru_head = block.0,
            tail => self.next[tail as usize] = block.0,
        }
        self.lru_tail = block.0;
        self.num_cached += 1;
    }

    fn lru_remove(&mut self, block: BlockId) {
        let (prev, next) = (self.prev[block.index()], self.next[block.index()]);
        match prev {
            NONE => self.lru_head = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => self.lru_tail = prev,
            next => self.prev[next as usize] = prev,
        }
        self.num_cached -= 1;
    }

    fn list(&self, head: u32) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors((head != NONE).then_some(head), |&at| {
            let next = self.next[at as usize];
            (next != NONE).then_some(next)
        })
        .map(BlockId)
    }

    /// Cached blocks in the order in which they would be evicted.
    pub fn eviction_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.list(self.lru_head)
    }

    /// Panics with what is wrong if an invariant of this module does not hold. `O(num_blocks)`.
    ///
    /// `live_root_refs` counts the live requests of each root.
    pub(crate) fn check_invariants(&self, live_root_refs: &std::collections::BTreeMap<u32, u32>) {
        let mut place = vec![0u8; self.num_blocks()];
        for block in self.list(self.free_head) {
            assert_eq!(self.ref_counts[block.index()], 0, "free {block:?} has holders");
            assert!(!self.cache.is_published(block), "free {block:?} is published");
            assert_eq!(place[block.index()], 0, "{block:?} stands twice on the free list");
            place[block.index()] = 1;
        }
        let mut position = vec![usize::MAX; self.num_blocks()];
        for (index, block) in self.eviction_order().enumerate() {
            assert_eq!(self.ref_counts[block.index()], 0, "cached {block:?} has holders");
            assert!(self.cache.is_published(block), "cached {block:?} is not published");
            assert_eq!(place[block.index()], 0, "{block:?} stands on two lists");
            place[block.index()] = 2;
            position[block.index()] = index;
        }
        let num_on_free_list = self.list(self.free_head).count();
        assert_eq!(num_on_free_list, self.num_free, "free blocks are miscounted");
        assert_eq!(self.eviction_order().count(), self.num_cached, "cached blocks are miscounted");
        for (index, &kind) in place.iter().enumerate() {
            assert_eq!(kind == 0, self.ref_counts[index] > 0, "block {index} is neither free nor cached nor held");
        }
        self.check_published(&position, live_root_refs);
    }

    fn check_published(&self, position: &[usize], live_root_refs: &std::collections::BTreeMap<u32, u32>) {
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
