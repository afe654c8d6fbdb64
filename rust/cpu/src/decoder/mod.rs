//! A whole decoder model: from the tokens of a batch to logits in one call.
//!
//! | module | owns |
//! | --- | --- |
//! | here | the parts of a model, and the check that they fit together |
//! | `args` | what a step gets, and every check of it |
//! | `step` | the rounds of a step, one after the other |
//! | `tokens` | norms and rotary positions, a token at a time |
//! | `workspace` | memory that is kept from step to step |
//!
//! Between the layers everything is f32 whatever the weights and the KV cache are.
//!
//! Invariants:
//! 1. A token's result depends on its own sequence only, bit for bit (see [`linear`](crate::linear) and the crate's page).
//! 2. Every shape is verified when the decoder is made, every index of a batch before a step reads or writes anything.
//! 3. Once a step of a size has run, further ones of that size allocate nothing.

mod args;
mod step;
mod tokens;
mod workspace;

use std::sync::{Arc, Mutex};

pub use args::StepArgs;
pub use workspace::StepTimes;

use crate::error::{Error, Result};
use crate::layout::check_len;
use crate::linear::{Activation, PackedMatrix};
use tokens::MAX_HEAD_DIM;
use workspace::Workspace;

/// A product's weights and bias.
#[derive(Debug, Clone)]
pub struct Linear {
    /// Weights `[out_features, in_features]`.
    pub matrix: Arc<PackedMatrix>,
    /// `[out_features]`.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    fn check(&self, argument: &'static str, out_features: usize, in_features: usize) -> Result<()> {
        check_len(argument, self.matrix.out_features(), out_features)?;
        check_len(argument, self.matrix.in_features(), in_features)?;
        self.bias.as_ref().map_or(Ok(()), |bias| check_len(argument, bias.len(), out_features))
    }
}

/// How some layers turn queries and keys: dimension `i` of a head together with `i + len`, by position.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// Angle per position of each pair; at most half a head.
    pub inverse_frequencies: Vec<f32>,
    /// Factor of sine and cosine.
    pub magnitude: f32,
}

/// One decoder layer; norm weights have the length of what they norm.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: Vec<f32>,
    /// Norm before the MLP.
    pub mlp_norm: Vec<f32>,
    /// Norm of what attention adds.
    pub after_attention: Option<Vec<f32>>,
    /// Norm of what the MLP adds.
    pub after_mlp: Option<Vec<f32>>,
    /// Norms of each query head and each key head.
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// Queries, keys and values of all heads, one after the other.
    pub qkv: Linear,
    /// From the heads back to the model's width.
    pub out: Linear,
    /// Gate and up projection, in two parts.
    pub gate_up: Linear,
    /// From the MLP back to the model's width.
    pub down: Linear,
    /// Which of the decoder's rotaries it uses.
    pub rotary: Option<usize>,
    /// As in [`AttentionArgs`](crate::AttentionArgs).
    pub sliding_window: Option<usize>,
}

/// Sizes and constants.
#[derive(Debug, Clone, Copy)]
pub struct DecoderShape {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on the attention scores.
    pub attention_scale: f32,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Activation of the MLP.
    pub activation: Activation,
}

/// Parts of a [`Decoder`].
#[derive(Debug)]
pub struct DecoderParts {
    /// Sizes and constants.
    pub shape: DecoderShape,
    /// Embeddings `[vocab_size, hidden_size]`.
    pub embedding: Arc<PackedMatrix>,
    /// Head `[vocab_size, hidden_size]`; may be the embedding itself.
    pub head: Arc<PackedMatrix>,
    /// Norm before the head.
    pub final_norm: Vec<f32>,
    /// Layers.
    pub layers: Vec<Layer>,
    /// Kinds of rotary positions that layers refer to.
    pub rotaries: Vec<Rotary>,
}

/// A model, checked, with the memory for its steps. One step runs at a time.
#[derive(Debug)]
pub struct Decoder {
    parts: DecoderParts,
    workspace: Mutex<Workspace>,
}

impl Decoder {
    /// Checks that the parts fit together.
    ///
    /// # Errors
    /// [`Error::ZeroDimension`], [`Error::Heads`], [`Error::Scale`], [`Error::Length`] naming the part,
    /// [`Error::Gate`], [`Error::Index`] for a rotary, [`Error::SlidingWindow`].
    pub fn new(parts: DecoderParts) -> Result<Self> {
        let shape = &parts.shape;
        let sizes = [
            ("num_heads", shape.num_heads),
            ("num_kv_heads", shape.num_kv_heads),
            ("head_dim", shape.head_dim),
            ("layers", parts.layers.len()),
        ];
        if let Some(&(dimension, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::ZeroDimension { dimension });
        }
        if !shape.num_heads.is_multiple_of(shape.num_kv_heads) {
            return Err(Error::Heads { num_heads: shape.num_heads, num_kv_heads: shape.num_kv_heads });
        }
        if !shape.attention_scale.is_finite() {
            return Err(Error::Scale { scale: shape.attention_scale });
        }
        let hidden_size = parts.embedding.in_features();
        check_len("head", parts.head.in_features(), hidden_size)?;
        check_len("head", parts.head.out_features(), parts.embedding.out_features())?;
        check_len("final_norm", parts.final_norm.len(), hidden_size)?;
        for rotary in &parts.rotaries {
            let pairs = rotary.inverse_frequencies.len();
            check_len("inverse_frequencies", pairs, pairs.min(shape.head_dim / 2))?;
        }
        parts.layers.iter().try_for_each(|layer| parts.check_layer(layer))?;
        Ok(Self { parts, workspace: Mutex::default() })
    }

    /// Sizes and constants.
    pub fn shape(&self) -> &DecoderShape {
        &self.parts.shape
    }

    /// Tokens that have an embedding.
    pub fn vocab_size(&self) -> usize {
        self.parts.embedding.out_features()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.parts.layers.len()
    }

    /// Bytes of all packed weights; a head that is the embedding counts once.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.parts.layers.iter().flat_map(|layer| [&layer.qkv, &layer.out, &layer.gate_up, &layer.down]);
        let head = (!Arc::ptr_eq(&self.parts.head, &self.parts.embedding)).then_some(&self.parts.head);
        let tables = [Some(&self.parts.embedding), head].into_iter().flatten();
        layers.map(|linear| &linear.matrix).chain(tables).map(|matrix| matrix.num_bytes()).sum()
    }

    /// Returns where the time of the steps since the last call went, and starts anew.
    pub fn take_times(&self) -> StepTimes {
        let mut workspace = self.workspace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        std::mem::take(&mut workspace.times)
    }
}

impl DecoderParts {
    fn hidden_size(&self) -> usize {
        self.embedding.in_features()
    }

    fn check_layer(&self, layer: &Layer) -> Result<()> {
        let (shape, width) = (&self.shape, self.hidden_size());
        let (queries, keys) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let inner = layer.down.matrix.in_features();
        layer.qkv.check("qkv", queries + 2 * keys, width)?;
        layer.out.check("out", width, queries)?;
        layer.gate_up.check("gate_up", 2 * inner, width)?;
        layer.down.check("down", width, inner)?;
        if layer.gate_up.matrix.num_parts() != 2 {
            return Err(Error::Gate { num_parts: layer.gate_up.matrix.num_parts() });
        }
        let norms = [
            ("attention_norm", Some(&layer.attention_norm)),
            ("mlp_norm", Some(&layer.mlp_norm)),
            ("after_attention", layer.after_attention.as_ref()),
            ("after_mlp", layer.after_mlp.as_ref()),
        ];
        for (name, norm) in norms {
            norm.map_or(Ok(()), |norm| check_len(name, norm.len(), width))?;
        }
        for norm in layer.head_norms.iter().flatten() {
            check_len("head_norms", norm.len(), shape.head_dim.min(MAX_HEAD_DIM))?;
        }
        if let Some(index) = layer.rotary.filter(|index| *index >= self.rotaries.len()) {
            let limit = self.rotaries.len();
            return Err(Error::Index { argument: "rotary", index: 0, value: index as i64, limit });
        }
        if layer.sliding_window == Some(0) { Err(Error::SlidingWindow) } else { Ok(()) }
    }
}
