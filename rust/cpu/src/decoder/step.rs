//! The rounds of a step, one after the other: each is a piece of work that all threads share.

use std::sync::{PoisonError, TryLockError};

use super::tokens::{Heads, norm, write_angles};
use super::workspace::{Clock, Workspace, run_of};
use super::{Decoder, DecoderParts, Layer, Linear, StepArgs};
use crate::attention::element::Element;
use crate::attention::tile::{Output, Problem};
use crate::attention::{BatchIndex, PARALLEL_WORK};
use crate::dispatch::{Job, Kernels};
use crate::error::{Error, Result};
use crate::kv_write::KvTarget;
use crate::layout::{CacheLayout, CacheMut};
use crate::linear::{LinearArgs, Quantized, Then};
use crate::pool::Team;

/// Below this many numbers handing a part of them to another thread costs more than it saves.
const PARALLEL_NUMBERS: usize = 1 << 15;
/// Runs of tokens per thread.
const RUNS_PER_THREAD: usize = 4;

impl Kernels {
    /// Runs `decoder` on a batch: writes keys and values of its tokens to their slots and the logits asked for.
    ///
    /// # Errors
    /// Any variant of [`Error`] that names an argument; [`Error::Busy`] if another step of this decoder runs,
    /// [`Error::PackedFor`], [`Error::Forked`]. Nothing is written then.
    pub fn decode(&self, decoder: &Decoder, mut args: StepArgs<'_>) -> Result<()> {
        args.check(decoder)?;
        let mut workspace = match decoder.workspace.try_lock() {
            Ok(workspace) => workspace,
            Err(TryLockError::WouldBlock) => return Err(Error::Busy),
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
        };
        let parts = &decoder.parts;
        if parts.embedding.isa() != self.isa() {
            return Err(Error::PackedFor { packed: parts.embedding.isa().name(), isa: self.isa().name() });
        }
        let team = self.team()?;
        workspace.prepare(parts, &args, team.num_threads());
        // A slot that two tokens have is written by one thread, the later token last.
        let has_twins = workspace.has_twins(args.slot_mapping);
        let step = Step { kernels: self, team: &team, parts, num_tokens: args.token_ids.len(), has_twins };
        step.run(&mut args, &mut workspace)
    }
}

/// One step: what its rounds share.
struct Step<'a> {
    kernels: &'a Kernels,
    team: &'a Team<'a>,
    parts: &'a DecoderParts,
    num_tokens: usize,
    has_twins: bool,
}

/// The indices of a batch, without the caches.
#[derive(Clone, Copy)]
struct Batch<'a> {
    layout: CacheLayout,
    slot_mapping: &'a [i64],
    index: BatchIndex<'a>,
}

/// Rows of a buffer, written by several threads at disjoint places.
#[derive(Clone, Copy)]
struct Rows(*mut f32);

// SAFETY: the pointer stands for a buffer borrowed exclusively for a round, whose items have rows of their own.
unsafe impl Sync for Rows {}

impl Rows {
    fn new(buffer: &mut [f32]) -> Self {
        Self(buffer.as_mut_ptr())
    }

    /// # Safety
    /// The range is inside the buffer, and no other item has any of it.
    #[allow(clippy::mut_from_ref, reason = "items have disjoint ranges of one buffer")]
    unsafe fn get(&self, start: usize, len: usize) -> &mut [f32] {
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

impl Step<'_> {
    fn run(&self, args: &mut StepArgs<'_>, workspace: &mut Workspace) -> Result<()> {
        let mut clock = Clock::start();
        let width = self.parts.hidden_size();
        self.embed(args.token_ids, args.positions, workspace);
        let batch = Batch { layout: args.layout, slot_mapping: args.slot_mapping, index: args.index };
        for (layer, caches) in self.parts.layers.iter().zip(&mut args.caches) {
            self.norm(&workspace.hidden, &layer.attention_norm, &mut workspace.normed, false);
            clock.add_to(&mut workspace.times.tokens);
            let Workspace { normed, qkv, quantized, .. } = &mut *workspace;
            self.linear(&layer.qkv, normed, qkv, Then::Store, quantized)?;
            clock.add_to(&mut workspace.times.linears);
            self.place(layer, batch, caches, workspace);
            clock.add_to(&mut workspace.times.tokens);
            self.attend(layer, batch, caches, workspace)?;
            clock.add_to(&mut workspace.times.attention);
            let Workspace { hidden, normed, mixed, quantized, .. } = &mut *workspace;
            self.add(&layer.out, mixed, layer.after_attention.as_deref(), hidden, normed, quantized)?;
            clock.add_to(&mut workspace.times.linears);
            let Workspace { hidden, normed, .. } = &mut *workspace;
            self.norm(hidden, &layer.mlp_norm, normed, false);
            clock.add_to(&mut workspace.times.tokens);
            let Workspace { hidden, normed, inner, quantized, .. } = &mut *workspace;
            self.linear(&layer.gate_up, normed, inner, Then::Gate(self.parts.shape.activation), quantized)?;
            self.add(&layer.down, inner, layer.after_mlp.as_deref(), hidden, normed, quantized)?;
            clock.add_to(&mut workspace.times.linears);
        }
        let num_rows = args.logits_index.len();
        for (token, row) in args.logits_index.iter().zip(workspace.normed.chunks_exact_mut(width)) {
            let hidden = &workspace.hidden[*token as usize * width..][..width];
            // SAFETY: `Kernels` holds only an instruction set that this CPU has; the lengths are the width.
            unsafe { norm(self.kernels.isa(), hidden, &self.parts.final_norm, self.parts.shape.norm_eps, row, false) };
        }
        clock.add_to(&mut workspace.times.tokens);
        let input = &workspace.normed[..num_rows * width];
        let (out, matrix) = (&mut *args.logits, &*self.parts.head);
        let args = LinearArgs { out, input, num_rows, matrix, bias: None, then: Then::Store };
        self.kernels.linear_on(self.team, args, &mut workspace.quantized)?;
        clock.add_to(&mut workspace.times.linears);
        workspace.times.steps += 1;
        Ok(())
    }

    /// Runs `work` on runs of tokens that all threads share, if there are enough numbers.
    fn for_tokens(&self, numbers_per_token: usize, work: impl Fn(std::ops::Range<usize>) + Sync) {
        let parallel = self.num_tokens * numbers_per_token >= PARALLEL_NUMBERS && self.num_tokens > 1;
        let count = if parallel { (RUNS_PER_THREAD * self.team.num_threads()).min(self.num_tokens) } else { 1 };
        self.team.run(count, parallel, |_, item| work(run_of(self.num_tokens, count, item)));
    }

    /// Reads the embeddings, and computes the angles of all kinds of rotary positions.
    fn embed(&self, token_ids: &[i32], positions: &[i32], workspace: &mut Workspace) {
        let (width, scale) = (self.parts.hidden_size(), self.parts.shape.embedding_scale);
        let hidden = Rows::new(&mut workspace.hidden);
        self.for_tokens(4 * width, |tokens| {
            for token in tokens {
                // SAFETY: the buffer has a row for each token, and runs have tokens of their own.
                let row = unsafe { hidden.get(token * width, width) };
                let read = self.parts.embedding.read_feature(token_ids[token] as usize, row);
                debug_assert!(read.is_ok(), "the tokens were checked");
                if scale.to_bits() != 1f32.to_bits() {
                    for number in row {
                        *number *= scale;
                    }
                }
            }
        });
        for (rotary, angles) in self.parts.rotaries.iter().zip(&mut workspace.angles) {
            let len = 2 * rotary.inverse_frequencies.len();
            let angles = Rows::new(angles);
            self.for_tokens(16 * len, |tokens| {
                for token in tokens {
                    // SAFETY: as above.
                    write_angles(rotary, positions[token], unsafe { angles.get(token * len, len) });
                }
            });
        }
    }

    /// Norms every token's row of `from`; `to` is written or added to.
    fn norm(&self, from: &[f32], weight: &[f32], to: &mut [f32], adds: bool) {
        let width = weight.len();
        let to = Rows::new(to);
        self.for_tokens(2 * width, |tokens| {
            for token in tokens {
                let from = &from[token * width..][..width];
                // SAFETY: the buffer has a row for each token, and runs have tokens of their own; `Kernels` holds only
                // an instruction set that this CPU has.
                unsafe {
                    let to = to.get(token * width, width);
                    norm(self.kernels.isa(), from, weight, self.parts.shape.norm_eps, to, adds);
                }
            }
        });
    }

    fn linear(
        &self,
        linear: &Linear,
        input: &[f32],
        out: &mut [f32],
        then: Then,
        quantized: &mut Quantized,
    ) -> Result<()> {
        let (matrix, num_rows) = (&*linear.matrix, self.num_tokens);
        let input = &input[..num_rows * matrix.in_features()];
        let width = matrix.out_features() / if matches!(then, Then::Gate(_)) { 2 } else { 1 };
        let out = &mut out[..num_rows * width];
        let bias = linear.bias.as_deref();
        self.kernels.linear_on(self.team, LinearArgs { out, input, num_rows, matrix, bias, then }, quantized)
    }

    /// Adds a product to the hidden state; if there is a norm for it, by way of `added`.
    fn add(
        &self,
        linear: &Linear,
        input: &[f32],
        after: Option<&[f32]>,
        hidden: &mut [f32],
        added: &mut [f32],
        quantized: &mut Quantized,
    ) -> Result<()> {
        let Some(weight) = after else { return self.linear(linear, input, hidden, Then::Add, quantized) };
        self.linear(linear, input, added, Then::Store, quantized)?;
        self.norm(added, weight, hidden, true);
        Ok(())
    }

    /// Norms and turns queries and keys, and writes keys and values to the cache.
    fn place(&self, layer: &Layer, batch: Batch<'_>, caches: &mut [CacheMut<'_>; 2], workspace: &mut Workspace) {
        let shape = &self.parts.shape;
        let [key, value] = caches;
        let Ok(cache) = KvTarget::new(key, value) else { unreachable!("the check compares the types") };
        let heads = Heads {
            isa: self.kernels.isa(),
            shape,
            norms: layer.head_norms.as_ref(),
            angles: layer.rotary.map(|kind| {
                let len = 2 * self.parts.rotaries[kind].inverse_frequencies.len();
                (&workspace.angles[kind][..], len)
            }),
            layout: batch.layout,
            slot_mapping: batch.slot_mapping,
            cache,
        };
        let query_len = shape.num_heads * shape.head_dim;
        let all_len = query_len + 2 * shape.num_kv_heads * shape.head_dim;
        let (qkv, query) = (Rows::new(&mut workspace.qkv), Rows::new(&mut workspace.query));
        let place = |tokens: std::ops::Range<usize>| {
            // SAFETY: the buffers have rows for each token, and runs have tokens of their own, which have slots of their
            // own or are all in one run; indices and layout were checked.
            unsafe {
                let qkv = qkv.get(tokens.start * all_len, tokens.len() * all_len);
                let query = query.get(tokens.start * query_len, tokens.len() * query_len);
                heads.place(tokens, qkv, query);
            }
        };
        if self.has_twins { place(0..self.num_tokens) } else { self.for_tokens(2 * all_len, place) }
    }

    fn attend(
        &self,
        layer: &Layer,
        batch: Batch<'_>,
        caches: &mut [CacheMut<'_>; 2],
        workspace: &mut Workspace,
    ) -> Result<()> {
        match caches {
            [CacheMut::F32(key), CacheMut::F32(value)] => self.attend_over(layer, batch, key, value, workspace),
            [CacheMut::Bf16(key), CacheMut::Bf16(value)] => self.attend_over(layer, batch, key, value, workspace),
            [CacheMut::Int8(key), CacheMut::Int8(value)] => self.attend_over(layer, batch, key, value, workspace),
            _ => return Err(Error::CacheTypes),
        }
        Ok(())
    }

    fn attend_over<E: Element>(
        &self,
        layer: &Layer,
        batch: Batch<'_>,
        key: &[E],
        value: &[E],
        workspace: &mut Workspace,
    ) {
        let shape = &self.parts.shape;
        let Workspace { query, mixed, plans, partials, scratch, .. } = workspace;
        let plan = plans.iter().find(|(window, _)| *window == layer.sliding_window);
        let Some((_, plan)) = plan else { unreachable!("each layer's window has a plan") };
        let len = shape.num_heads * shape.head_dim;
        let written = batch.index.query_start[batch.index.seq_lens.len()] as usize;
        let problem = Problem {
            query: &query[..self.num_tokens * len],
            key,
            value,
            layout: batch.layout,
            num_heads: shape.num_heads,
            index: batch.index,
            scale: shape.attention_scale,
            sliding_window: layer.sliding_window,
            output: Output::new(&mut mixed[..self.num_tokens * len]),
            partials: Output::new(partials),
        };
        for (items, job) in [(&plan.items, Job::Attend), (&plan.merges, Job::Finish)] {
            self.team.run(items.len(), plan.work >= PARALLEL_WORK, |thread, item| {
                // Locked by the one thread that has this number, so nobody ever waits.
                let mut scratch = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the step's check verified every shape and index that the items are made of; items differ in KV
                // head, query tokens or chunks, so they write disjoint rows of `mixed` and partial sums; a merge comes
                // after all items.
                unsafe { self.kernels.run_item(&problem, &items[item], job, &mut scratch) };
            });
        }
        // Padding behind the last query.
        mixed[written * len..self.num_tokens * len].fill(0.0);
    }
}
