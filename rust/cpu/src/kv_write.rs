//! Copying new keys and values to their slots.
//!
//! Invariants:
//! 1. Work is split by cache and KV head, whose elements never overlap: even slots given twice cannot race (the
//!    later token wins).

use crate::bf16;
use crate::dispatch::Kernels;
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, CacheMut, check_len};

/// Below this many elements waking threads costs more than the copy.
const PARALLEL_ELEMENTS: usize = 1 << 17;

/// Arguments of [`Kernels::write_kv`].
#[derive(Debug)]
pub struct WriteArgs<'a> {
    /// New keys `[num_tokens, num_kv_heads, head_dim]`.
    pub key: &'a [f32],
    /// New values, same shape.
    pub value: &'a [f32],
    /// Key cache of one layer; written.
    pub key_cache: CacheMut<'a>,
    /// Value cache of the same layer; written.
    pub value_cache: CacheMut<'a>,
    /// Shape of both caches.
    pub layout: CacheLayout,
    /// `[num_tokens]`: `block * block_size + offset`, or -1 for a token that is not written.
    pub slot_mapping: &'a [i64],
}

impl WriteArgs<'_> {
    fn check(&self) -> Result<()> {
        let layout = &self.layout;
        let token_len = layout.num_kv_heads() * layout.head_dim();
        let expected = self.slot_mapping.len().saturating_mul(token_len);
        check_len("key", self.key.len(), expected)?;
        check_len("value", self.value.len(), expected)?;
        check_len("key_cache", self.key_cache.len(), layout.num_elements())?;
        check_len("value_cache", self.value_cache.len(), layout.num_elements())?;
        let num_slots = layout.num_slots();
        let valid = -1..num_slots as i64;
        match self.slot_mapping.iter().position(|slot| !valid.contains(slot)) {
            None => Ok(()),
            Some(token) => Err(Error::Slot { token, slot: self.slot_mapping[token], num_slots }),
        }
    }
}

/// First element of a cache, to be written by several threads at disjoint places.
enum Target {
    F32(*mut f32),
    Bf16(*mut u16),
}

// SAFETY: the pointer comes from an exclusive slice that outlives the call, and each thread writes the elements
// of its own cache and head only.
unsafe impl Sync for Target {}

impl Target {
    fn new(cache: &mut CacheMut<'_>) -> Self {
        match cache {
            CacheMut::F32(data) => Self::F32(data.as_mut_ptr()),
            CacheMut::Bf16(data) => Self::Bf16(data.as_mut_ptr()),
        }
    }

    /// Writes one head of one token.
    ///
    /// # Safety
    /// `offset..offset + row.len()` is inside the cache, and no other thread touches these elements.
    unsafe fn write(&self, offset: usize, row: &[f32]) {
        match self {
            // SAFETY: the caller promises the range; `row` is another allocation, shared, so it cannot overlap.
            Self::F32(start) => unsafe {
                std::ptr::copy_nonoverlapping(row.as_ptr(), start.add(offset), row.len());
            },
            Self::Bf16(start) => {
                for (index, value) in row.iter().enumerate() {
                    // SAFETY: the caller promises the range.
                    unsafe { start.add(offset + index).write(bf16::from_f32(*value)) };
                }
            }
        }
    }
}

impl Kernels {
    /// Writes keys and values to their slots; bf16 caches round to nearest, ties to even.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Slot`], [`Error::Forked`]; nothing is written then.
    pub fn write_kv(&self, mut args: WriteArgs<'_>) -> Result<()> {
        args.check()?;
        let targets = [Target::new(&mut args.key_cache), Target::new(&mut args.value_cache)];
        let (key, value, slot_mapping) = (args.key, args.value, args.slot_mapping);
        let layout = args.layout;
        let (num_kv_heads, head_dim) = (layout.num_kv_heads(), layout.head_dim());
        let write_head = |item: usize| {
            let (which, kv_head) = (item / num_kv_heads, item % num_kv_heads);
            let rows = [key, value][which].chunks_exact(head_dim);
            let rows = rows.skip(kv_head).step_by(num_kv_heads);
            for (row, &slot) in rows.zip(slot_mapping) {
                let Ok(slot) = usize::try_from(slot) else {
                    continue;
                };
                let (block, offset) = (slot / layout.block_size(), slot % layout.block_size());
                let start = layout.row_offset(block, kv_head, offset);
                // SAFETY: `check` showed slot < num_slots and the length of the cache, so the row is inside;
                // an item is the only one with its cache and head, which determine the elements written.
                unsafe { targets[which].write(start, row) };
            }
        };
        let parallel = key.len() >= PARALLEL_ELEMENTS;
        self.pool().for_each(2 * num_kv_heads, parallel, || (), |(), item| write_head(item))
    }
}
