//! CPU kernels of cbrs: matrix products, writing keys and values into the paged KV cache, attention over it, and sampling.
//!
//! One call does one whole batch (of attention, one layer). The batch is given as the flat arrays that the scheduler
//! makes (`slot_mapping`, `query_start`, `seq_lens`, `row_ids`, `block_tables`); the crate knows no request.
//!
//! | module | owns |
//! | --- | --- |
//! | [`linear`] | products of a batch with packed weights |
//! | [`layout`] | the shape of a cache and every index computed from it |
//! | [`kv_write`] | copying new keys and values to their slots |
//! | [`int8`] | keys and values in 8 bits |
//! | [`attention`] | attention over the cache: checks, work items, inner loops generic over the instruction set |
//! | [`sampling`] | from logits to tokens and log-probabilities |
//! | `simd` | the few vector operations those loops need, per instruction set |
//! | [`decoder`] | a whole model: the tokens of a batch to logits in one call |
//! | [`dispatch`] | which instruction set runs, found at run time |
//! | [`pool`] | the threads; they sleep while there is no work |
//! | [`probe`] | what the machine can do at most, measured |
//! | [`reference`](mod@reference) | the meaning of attention as scalar code, which the fast one is tested against |
//!
//! Invariants:
//! 1. Every shape and every index is verified before the first read or write. A bad argument is an [`Error`]
//!    and changes nothing.
//! 2. The result of a sequence depends on its own queries and cache content only. Keys are reduced in tiles of
//!    64 and chunks of 256 positions counted from position 0, in ascending order, with the same arithmetic for each query row;
//!    so neither neighbours, threads, block size, the place of its blocks, nor the chunks in which a prompt was computed change
//!    a bit of it.
//! 3. A query at position `i` reads exactly the slots of positions `0..=i`, or of the last `window` of them.

pub mod attention;
pub mod bf16;
mod buffer;
pub mod decoder;
pub mod dispatch;
mod error;
pub mod int8;
pub mod kv_write;
pub mod layout;
pub mod linear;
pub mod pool;
pub mod probe;
pub mod reference;
pub mod sampling;
mod simd;

pub use attention::{AttentionArgs, BatchIndex};
pub use decoder::{Decoder, DecoderParts, StepArgs};
pub use dispatch::{Isa, Kernels};
pub use error::{Error, Result};
pub use kv_write::WriteArgs;
pub use layout::{CacheLayout, CacheMut, CacheRef};
pub use linear::{Activation, LinearArgs, PackedMatrix, Then, WeightType, WeightsRef};
