//! What a step gets, and every check of it.

use super::Decoder;
use crate::attention::BatchIndex;
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, CacheMut, check_len};

/// Arguments of [`Kernels::decode`](crate::Kernels::decode): the arrays of a batch, `T` tokens long.
#[derive(Debug)]
pub struct StepArgs<'a> {
    /// Result `[len(logits_index), vocab_size]`; written.
    pub logits: &'a mut [f32],
    /// Key and value cache of each layer; written and read.
    pub caches: Vec<[CacheMut<'a>; 2]>,
    /// Shape of all caches.
    pub layout: CacheLayout,
    /// Tokens `[T]`.
    pub token_ids: &'a [i32],
    /// Their positions `[T]`.
    pub positions: &'a [i32],
    /// Which tokens' logits are wanted.
    pub logits_index: &'a [i32],
    /// Where keys and values go `[T]`: `block * block_size + offset`, or -1 for a token that is not written.
    pub slot_mapping: &'a [i64],
    /// Sequences and their blocks.
    pub index: BatchIndex<'a>,
}

impl StepArgs<'_> {
    /// Verifies every shape and every index.
    pub(crate) fn check(&self, decoder: &Decoder) -> Result<()> {
        let (shape, layout) = (decoder.shape(), &self.layout);
        check_len("caches", self.caches.len(), decoder.num_layers())?;
        check_len("num_kv_heads", layout.num_kv_heads(), shape.num_kv_heads)?;
        check_len("head_dim", layout.head_dim(), shape.head_dim)?;
        for [key, value] in &self.caches {
            if !key.as_ref().has_type_of(&value.as_ref()) {
                return Err(Error::CacheTypes);
            }
            key.as_ref().check("key_cache", layout)?;
            value.as_ref().check("value_cache", layout)?;
        }
        let (num_tokens, vocab_size) = (self.token_ids.len(), decoder.vocab_size());
        check_len("positions", self.positions.len(), num_tokens)?;
        check_len("slot_mapping", self.slot_mapping.len(), num_tokens)?;
        check_len("logits", self.logits.len(), self.logits_index.len().saturating_mul(vocab_size))?;
        check_below("token_ids", self.token_ids, vocab_size)?;
        check_below("positions", self.positions, i32::MAX as usize)?;
        check_below("logits_index", self.logits_index, num_tokens)?;
        let valid = -1..layout.num_slots() as i64;
        if let Some(token) = self.slot_mapping.iter().position(|slot| !valid.contains(slot)) {
            return Err(Error::Slot { token, slot: self.slot_mapping[token], num_slots: layout.num_slots() });
        }
        self.index.check_queries(num_tokens)?;
        // The widest window sees all blocks that the others see.
        let layers = decoder.parts.layers.iter();
        let widest = layers.map(|layer| layer.sliding_window.unwrap_or(usize::MAX)).max();
        (0..self.index.seq_lens.len()).try_for_each(|sequence| self.index.check_blocks(layout, widest, sequence))
    }
}

fn check_below(argument: &'static str, values: &[i32], limit: usize) -> Result<()> {
    let bad = values.iter().position(|value| usize::try_from(*value).map_or(true, |value| value >= limit));
    match bad {
        None => Ok(()),
        Some(index) => Err(Error::Index { argument, index, value: values[index].into(), limit }),
    }
}
