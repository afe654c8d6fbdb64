//! Chained hash of prompt blocks: `hash(block) = H(hash(parent), tokens)`, rooted in (tenant, salt).
//!
//! Only a way to find candidates quickly: a hit is always verified by content (`block/prefix.rs`), so neither a
//! collision nor the key of the hash can change a result. Computed on the submitting thread.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::FixedState;

/// Hashes blocks of one scheduler.
#[derive(Debug, Clone)]
pub(crate) struct PrefixHasher {
    state: FixedState,
    block_size: usize,
    /// Test hook: every block gets the same hash, so that only verification tells blocks apart.
    collide: bool,
}

impl PrefixHasher {
    pub(crate) fn new(seed: u64, block_size: usize, collide: bool) -> Self {
        Self { state: FixedState::with_seed(seed), block_size, collide }
    }

    /// Hash that stands before the first block of every prompt with this tenant and salt.
    pub(crate) fn root(&self, tenant: Option<&str>, salt: Option<&str>) -> u64 {
        self.finish(self.state.hash_one((tenant, salt)))
    }

    /// Key of a tenant, "" for requests that name none. Never collided on purpose.
    pub(crate) fn tenant(&self, name: &str) -> u64 {
        self.state.hash_one(name)
    }

    /// Hash of a full block below `parent`.
    pub(crate) fn extend(&self, parent: u64, tokens: &[i32]) -> u64 {
        debug_assert_eq!(tokens.len(), self.block_size);
        let mut hasher = self.state.build_hasher();
        hasher.write_u64(parent);
        let (pairs, rest) = tokens.as_chunks::<2>();
        for &[low, high] in pairs {
            hasher.write_u64(u64::from(low as u32) | u64::from(high as u32) << 32);
        }
        for &token in rest {
            hasher.write_u32(token as u32);
        }
        self.finish(hasher.finish())
    }

    /// Hashes of all full blocks of `tokens`, in order.
    pub(crate) fn chain(&self, root: u64, tokens: &[i32]) -> Vec<u64> {
        let mut hashes = Vec::with_capacity(tokens.len() / self.block_size + 1);
        let mut parent = root;
        for block in tokens.chunks_exact(self.block_size) {
            parent = self.extend(parent, block);
            hashes.push(parent);
        }
        hashes
    }

    fn finish(&self, hash: u64) -> u64 {
        if self.collide { 0 } else { hash }
    }
}
