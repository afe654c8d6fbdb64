//! Copying new keys and values to their slots.
//!
//! Invariants:
//! 1. Work is split by cache and KV head, whose elements never overlap: even slots given twice cannot race (the
//!    later token wins).

use crate::bf16;
use crate::dispatch::Kernels;
use crate::error::{Error, Result};
use crate::int8;
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
        if !self.key_cache.as_ref().has_type_of(&self.value_cache.as_ref()) {
            return Err(Error::CacheTypes);
        }
        self.key_cache.as_ref().check("key_cache", layout)?;
        self.value_cache.as_ref().check("value_cache", layout)?;
        let num_slots = layout.num_slots();
        let valid = -1..num_slots as i64;
        match self.slot_mapping.iter().position(|slot| !valid.contains(slot)) {
            None => Ok(()),
            Some(token) => Err(Error::Slot { token, slot: self.slot_mapping[token], num_slots }),
        }
    }
}

/// First elements of a layer's key and value cache, to be written by several threads at disjoint places.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KvTarget {
    F32([*mut f32; 2]),
    Bf16([*mut u16; 2]),
    Int8([*mut i8; 2]),
}

// SAFETY: the pointers stand for exclusive slices that outlive the round; each thread writes the places of its own tokens
// or heads only.
unsafe impl Sync for KvTarget {}

impl KvTarget {
    /// # Errors
    /// [`Error::CacheTypes`] if the two differ.
    pub(crate) fn new(key: &mut CacheMut<'_>, value: &mut CacheMut<'_>) -> Result<Self> {
        match (key, value) {
            (CacheMut::F32(key), CacheMut::F32(value)) => Ok(Self::F32([key.as_mut_ptr(), value.as_mut_ptr()])),
            (CacheMut::Bf16(key), CacheMut::Bf16(value)) => Ok(Self::Bf16([key.as_mut_ptr(), value.as_mut_ptr()])),
            (CacheMut::Int8(key), CacheMut::Int8(value)) => Ok(Self::Int8([key.as_mut_ptr(), value.as_mut_ptr()])),
            _ => Err(Error::CacheTypes),
        }
    }

    /// Writes one head of one token to the key (0) or value (1) cache of this layout, at `[block, kv_head, offset]`.
    ///
    /// # Safety
    /// The place and the length of `row` are inside the layout, the caches have its elements, and no other thread touches
    /// those of the place.
    pub(crate) unsafe fn write(&self, which: usize, layout: &CacheLayout, place: [usize; 3], row: &[f32]) {
        let [block, kv_head, offset] = place;
        let start = layout.row_offset(block, kv_head, offset);
        match self {
            // SAFETY: the caller promises the place; `row` is no part of a cache.
            Self::F32(caches) => unsafe {
                std::ptr::copy_nonoverlapping(row.as_ptr(), caches[which].add(start), row.len());
            },
            Self::Bf16(caches) => {
                for (index, value) in row.iter().enumerate() {
                    // SAFETY: the caller promises the place.
                    unsafe { caches[which].add(start + index).write(bf16::from_f32(*value)) };
                }
            }
            Self::Int8(caches) => {
                let [start, scale] = layout.int8_offsets(block, kv_head, offset);
                // SAFETY: the caller promises the place; its numbers and its factor are different bytes of the cache.
                unsafe {
                    let numbers = std::slice::from_raw_parts_mut(caches[which].add(start), row.len());
                    let bytes = int8::scale_bytes(int8::quantize(row, numbers));
                    caches[which].add(scale).cast::<[i8; int8::SCALE_BYTES]>().write(bytes);
                }
            }
        }
    }
}

impl Kernels {
    /// Writes keys and values to their slots; bf16 caches round to nearest, ties to even; those of 8
    /// bits as [`int8::quantize`] does.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Slot`], [`Error::CacheTypes`], [`Error::Forked`]; nothing is written then.
    pub fn write_kv(&self, mut args: WriteArgs<'_>) -> Result<()> {
        args.check()?;
        let target = KvTarget::new(&mut args.key_cache, &mut args.value_cache)?;
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
                // SAFETY: `check` showed slot < num_slots and the length of the cache, so the row is inside;
                // an item is the only one with its cache and head, which determine the elements written.
                unsafe { target.write(which, &layout, [block, kv_head, offset], row) };
            }
        };
        let parallel = key.len() >= PARALLEL_ELEMENTS;
        self.pool().for_each(2 * num_kv_heads, parallel, || (), |(), item| write_head(item))
    }
}
