//! Interned roots of the prefix cache: one small number for each (tenant, salt) that something still refers to.
//!
//! 1. Two requests have the same root exactly when tenant and salt are equal; an absent one is a value of its own.
//! 2. A root lives as long as a live request or a published first block refers to it, so the table cannot grow without bound.
//! 3. Root 0 is (no tenant, no salt) and always lives.

use std::collections::HashMap;
use std::sync::Arc;

/// Root of prefix chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RootId(pub(crate) u32);

type RootKey = (Option<Arc<str>>, Option<Arc<str>>);

#[derive(Debug, Default)]
struct Root {
    key: RootKey,
    /// Hash that stands before the first block.
    hash: u64,
    ref_count: u32,
}

#[derive(Debug)]
pub(crate) struct RootTable {
    roots: Vec<Root>,
    ids: HashMap<RootKey, RootId>,
    free: Vec<RootId>,
}

impl RootTable {
    pub(crate) fn new() -> Self {
        Self { roots: vec![Root::default()], ids: HashMap::new(), free: Vec::new() }
    }

    /// Finds or makes the root of this tenant and salt, whose hash is `hash`, and takes a reference to it.
    pub(crate) fn intern(&mut self, tenant: Option<&Arc<str>>, salt: Option<&Arc<str>>, hash: u64) -> RootId {
        if tenant.is_none() && salt.is_none() {
            self.roots[0].hash = hash;
            return RootId(0);
        }
        let key = (tenant.cloned(), salt.cloned());
        let id = match self.ids.get(&key) {
            Some(&id) => id,
            None => self.insert(key, hash),
        };
        self.acquire(id);
        id
    }

    fn insert(&mut self, key: RootKey, hash: u64) -> RootId {
        let root = Root { key: key.clone(), hash, ref_count: 0 };
        let id = if let Some(id) = self.free.pop() {
            self.roots[id.0 as usize] = root;
            id
        } else {
            self.roots.push(root);
            RootId(self.roots.len() as u32 - 1)
        };
        self.ids.insert(key, id);
        id
    }

    pub(crate) fn acquire(&mut self, id: RootId) {
        if id.0 != 0 {
            self.roots[id.0 as usize].ref_count += 1;
        }
    }

    pub(crate) fn release(&mut self, id: RootId) {
        if id.0 == 0 {
            return;
        }
        let root = &mut self.roots[id.0 as usize];
        root.ref_count = root.ref_count.checked_sub(1).expect("a released root has a reference");
        if root.ref_count == 0 {
            let key = std::mem::take(&mut root.key);
            self.ids.remove(&key);
            self.free.push(id);
        }
    }

    /// Hash that stands before the first block of each chain with this root.
    pub(crate) fn hash(&self, id: RootId) -> u64 {
        self.roots[id.0 as usize].hash
    }

    pub(crate) fn ref_count(&self, id: RootId) -> u32 {
        self.roots[id.0 as usize].ref_count
    }

    /// Roots that are alive besides root 0.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }
}
