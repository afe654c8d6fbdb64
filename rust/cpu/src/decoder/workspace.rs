//! Memory that is kept from step to step.

use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{DecoderParts, StepArgs};
use crate::attention::plan::{HeadShape, Plan};
use crate::attention::tile::Scratch;
use crate::linear::Quantized;

/// Where the time of some steps went, as seen by the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTimes {
    /// Steps that were measured.
    pub steps: u64,
    /// Products with weights, activations included.
    pub linears: Duration,
    /// Attention.
    pub attention: Duration,
    /// Embeddings, norms, rotary positions and KV writes.
    pub tokens: Duration,
}

/// Buffers of one step; they only ever grow.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// `[T, hidden_size]`.
    pub(super) hidden: Vec<f32>,
    /// The same normed, or what is about to be added to it.
    pub(super) normed: Vec<f32>,
    /// `[T, num_heads + 2 num_kv_heads, head_dim]`.
    pub(super) qkv: Vec<f32>,
    /// Placed queries `[T, num_heads, head_dim]`.
    pub(super) query: Vec<f32>,
    /// What the heads gather, same shape.
    pub(super) mixed: Vec<f32>,
    /// `[T, intermediate size]`.
    pub(super) inner: Vec<f32>,
    /// Input of a product with int8 weights.
    pub(super) quantized: Quantized,
    /// Of each kind of rotary `[T, 2, pairs]`, cosine and sine.
    pub(super) angles: Vec<Vec<f32>>,
    /// Work items of attention for each window that some layer has.
    pub(super) plans: Vec<(Option<usize>, Plan)>,
    /// Of the plan that has most of them.
    pub(super) partials: Vec<f32>,
    /// Of each thread.
    pub(super) scratch: Vec<Mutex<Scratch>>,
    /// Slots in order, to find those that are given twice.
    slots: Vec<i64>,
    pub(super) times: StepTimes,
}

impl Workspace {
    /// Makes room for a step.
    pub(super) fn prepare(&mut self, parts: &DecoderParts, args: &StepArgs<'_>, num_threads: usize) {
        let (shape, num_tokens) = (&parts.shape, args.token_ids.len());
        let heads = shape.num_heads * shape.head_dim;
        let kv_heads = shape.num_kv_heads * shape.head_dim;
        let inner = parts.layers.iter().map(|layer| layer.down.matrix.in_features()).max();
        let rows = num_tokens.max(args.logits_index.len());
        for (buffer, len) in [
            (&mut self.hidden, num_tokens * parts.hidden_size()),
            (&mut self.normed, rows * parts.hidden_size()),
            (&mut self.qkv, num_tokens * (heads + 2 * kv_heads)),
            (&mut self.query, num_tokens * heads),
            (&mut self.mixed, num_tokens * heads),
            (&mut self.inner, num_tokens * inner.unwrap_or(0)),
        ] {
            grow(buffer, len);
        }
        self.angles.resize_with(parts.rotaries.len(), Vec::new);
        for (angles, rotary) in self.angles.iter_mut().zip(&parts.rotaries) {
            grow(angles, num_tokens * 2 * rotary.inverse_frequencies.len());
        }
        while self.scratch.len() < num_threads {
            self.scratch.push(Mutex::default());
        }
        self.plan(parts, args, num_threads);
    }

    /// Plans attention once for each window that some layer has.
    fn plan(&mut self, parts: &DecoderParts, args: &StepArgs<'_>, num_threads: usize) {
        if self.plans.is_empty() {
            for layer in &parts.layers {
                if self.plans.iter().all(|(window, _)| *window != layer.sliding_window) {
                    self.plans.push((layer.sliding_window, Plan::default()));
                }
            }
        }
        let (layout, num_heads) = (args.layout, parts.shape.num_heads);
        for (sliding_window, plan) in &mut self.plans {
            let shape = HeadShape { layout, num_heads, sliding_window: *sliding_window };
            plan.make(&args.index, shape, num_threads);
            grow(&mut self.partials, plan.num_partials);
        }
    }

    /// Whether some slot is given to two tokens, so that the order of writing counts.
    pub(super) fn has_twins(&mut self, slot_mapping: &[i64]) -> bool {
        self.slots.clear();
        self.slots.extend(slot_mapping.iter().filter(|slot| **slot >= 0));
        self.slots.sort_unstable();
        self.slots.windows(2).any(|pair| pair[0] == pair[1])
    }
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

/// Cuts `len` tokens into `count` runs of about the same size and returns run `index`.
pub(super) fn run_of(len: usize, count: usize, index: usize) -> Range<usize> {
    len * index / count..len * (index + 1) / count
}

/// Adds up the time since the last call.
#[derive(Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn add_to(&mut self, total: &mut Duration) {
        let now = Instant::now();
        *total += now - self.0;
        self.0 = now;
    }
}
