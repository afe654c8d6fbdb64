//! Norms and rotary positions, a token at a time, and keys and values on their way to the cache.

use std::ops::Range;

use super::{DecoderShape, Rotary};
use crate::dispatch::Isa;
use crate::kv_write::KvTarget;
use crate::layout::CacheLayout;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};
use crate::simd::{Simd, sum};

/// Divides by the root mean square and multiplies with `weight`; `to` is written or added to.
///
/// # Safety
/// The CPU has `isa`; `from` and `to` have the length of `weight`.
pub(super) unsafe fn norm(isa: Isa, from: &[f32], weight: &[f32], eps: f32, to: &mut [f32], adds: bool) {
    // SAFETY: passed on.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => norm_avx512(from, weight, eps, to, adds),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => norm_avx2(from, weight, eps, to, adds),
            _ => norm_row::<Portable<8>>(from, weight, eps, to, adds),
        }
    }
}

/// # Safety
/// As for [`norm`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn norm_avx512(from: &[f32], weight: &[f32], eps: f32, to: &mut [f32], adds: bool) {
    // SAFETY: passed on; this function has the features.
    unsafe { norm_row::<Avx512>(from, weight, eps, to, adds) }
}

/// # Safety
/// As for [`norm`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn norm_avx2(from: &[f32], weight: &[f32], eps: f32, to: &mut [f32], adds: bool) {
    // SAFETY: passed on; this function has the features.
    unsafe { norm_row::<Avx2>(from, weight, eps, to, adds) }
}

/// # Safety
/// As for [`norm`] and [`Simd`].
#[inline(always)]
unsafe fn norm_row<S: Simd>(from: &[f32], weight: &[f32], eps: f32, to: &mut [f32], adds: bool) {
    let len = weight.len();
    let (from, weight, to) = (&from[..len], &weight[..len], &mut to[..len]);
    let whole = len - len % S::LANES;
    // SAFETY: the caller promises the instruction set; whole vectors below `whole` are inside all three.
    unsafe {
        let mut squares = [S::splat(0.0); 2];
        for (index, start) in (0..whole).step_by(S::LANES).enumerate() {
            let x = S::load(from.as_ptr().add(start));
            squares[index % 2] = S::mul_add(x, x, squares[index % 2]);
        }
        let mut total = sum::<S>(S::add(squares[0], squares[1]));
        for x in &from[whole..] {
            total += x * x;
        }
        let scale = 1.0 / (total / len as f32 + eps).sqrt();
        let factor = S::splat(scale);
        for start in (0..whole).step_by(S::LANES) {
            let scaled = S::mul(S::load(from.as_ptr().add(start)), factor);
            let mut normed = S::mul(scaled, S::load(weight.as_ptr().add(start)));
            let place = to.as_mut_ptr().add(start);
            if adds {
                normed = S::add(S::load(place), normed);
            }
            S::store(place, normed);
        }
        for index in whole..len {
            let normed = from[index] * scale * weight[index];
            to[index] = if adds { to[index] + normed } else { normed };
        }
    }
}

/// Writes cosine and sine of a token's angles, `[2, pairs]`.
pub(super) fn write_angles(rotary: &Rotary, position: i32, angles: &mut [f32]) {
    let (cosines, sines) = angles.split_at_mut(rotary.inverse_frequencies.len());
    for ((frequency, cosine), sine) in rotary.inverse_frequencies.iter().zip(cosines).zip(sines) {
        let (s, c) = (position as f32 * frequency).sin_cos();
        (*cosine, *sine) = (c * rotary.magnitude, s * rotary.magnitude);
    }
}

/// Turns one head in place; dimensions without an angle stay.
fn rotate(head: &mut [f32], angles: &[f32]) {
    let pairs = angles.len() / 2;
    let (cosines, sines) = angles.split_at(pairs);
    let (first, rest) = head.split_at_mut(pairs);
    let pairs = first.iter_mut().zip(&mut rest[..pairs]);
    for ((a, b), (cosine, sine)) in pairs.zip(cosines.iter().zip(sines)) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}

/// Where the heads of a step's tokens go.
pub(super) struct Heads<'a> {
    pub(super) isa: Isa,
    pub(super) shape: &'a DecoderShape,
    /// Norms of query and key heads.
    pub(super) norms: Option<&'a [Vec<f32>; 2]>,
    /// `[T, 2, pairs]`.
    pub(super) angles: Option<(&'a [f32], usize)>,
    pub(super) layout: CacheLayout,
    pub(super) slot_mapping: &'a [i64],
    pub(super) cache: KvTarget,
}

impl Heads<'_> {
    /// Norms and turns queries and keys of some tokens, and writes queries to `query`, keys and values to the cache.
    ///
    /// `qkv` and `query` hold these tokens only.
    ///
    /// # Safety
    /// The CPU has `isa`. Slots and layout were checked, and no other thread writes the slots of these tokens.
    pub(super) unsafe fn place(&self, tokens: Range<usize>, qkv: &mut [f32], query: &mut [f32]) {
        let DecoderShape { num_heads, num_kv_heads, head_dim, norm_eps, .. } = *self.shape;
        let num_all = num_heads + 2 * num_kv_heads;
        let rows = qkv.chunks_exact_mut(num_all * head_dim).zip(query.chunks_exact_mut(num_heads * head_dim));
        for (token, (heads, query)) in tokens.zip(rows) {
            let angles = self.angles.map(|(angles, len)| &angles[token * len..(token + 1) * len]);
            for (index, head) in heads.chunks_exact_mut(head_dim).take(num_heads + num_kv_heads).enumerate() {
                if let Some(norms) = self.norms {
                    let mut normed = [0.0; MAX_HEAD_DIM];
                    let normed = &mut normed[..head_dim];
                    // SAFETY: the caller promises the instruction set; all three have `head_dim` elements.
                    unsafe { norm(self.isa, head, &norms[usize::from(index >= num_heads)], norm_eps, normed, false) };
                    head.copy_from_slice(normed);
                }
                if let Some(angles) = angles {
                    rotate(head, angles);
                }
            }
            let (queries, keys_values) = heads.split_at(num_heads * head_dim);
            query.copy_from_slice(queries);
            let Ok(slot) = usize::try_from(self.slot_mapping[token]) else { continue };
            let (block, offset) = (slot / self.layout.block_size(), slot % self.layout.block_size());
            for (index, head) in keys_values.chunks_exact(head_dim).enumerate() {
                let place = [block, index % num_kv_heads, offset];
                // SAFETY: the slot was checked; the caller promises that no other thread has it.
                unsafe { self.cache.write(index / num_kv_heads, &self.layout, place, head) };
            }
        }
    }
}

/// Largest head with norms.
pub(super) const MAX_HEAD_DIM: usize = 1024;
