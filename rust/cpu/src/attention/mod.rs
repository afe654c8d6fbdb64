//! Paged attention of one layer: checks the batch, cuts it into work items and runs them.
//!
//! | module | owns |
//! | --- | --- |
//! | here | the arguments, and every check of them |
//! | `plan` | which work items a batch is cut into |
//! | `tile` | one work item, tile by tile of keys |
//! | `rows` | its inner loops: scores, and sums of values |
//! | `softmax` | the sums of rows, and what the softmax does to them |
//! | `element` | how the elements of a cache are loaded |
//!
//! Invariants:
//! 1. `AttentionArgs::check` runs before anything is read or written and covers every index used later.
//! 2. Work items write disjoint rows of the output.

pub(crate) mod element;
pub(crate) mod plan;
mod rows;
mod softmax;
pub(crate) mod tile;

use crate::dispatch::{Job, Kernels};
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, CacheRef, check_len};
use element::Element;
use plan::{HeadShape, Plan};
use tile::{Output, Problem, Scratch};

/// Below this many multiply-adds waking threads costs more than the work.
pub(crate) const PARALLEL_WORK: usize = 1 << 17;

/// Who is in the batch and where its context lies.
#[derive(Debug, Clone, Copy)]
pub struct BatchIndex<'a> {
    /// Block ids `[max_num_seqs, max_blocks]`.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// `[num_seqs]`: row of `block_tables` of each sequence.
    pub row_ids: &'a [i32],
    /// `[num_seqs + 1]`: prefix sums of the query tokens.
    pub query_start: &'a [i32],
    /// `[num_seqs]`: context length with the query tokens, which are its last ones.
    pub seq_lens: &'a [i32],
}

/// Arguments of [`Kernels::paged_attention`].
#[derive(Debug)]
pub struct AttentionArgs<'a> {
    /// Result `[num_tokens, num_heads, head_dim]`; written.
    pub out: &'a mut [f32],
    /// Queries, same shape.
    pub query: &'a [f32],
    /// Key cache of one layer.
    pub key_cache: CacheRef<'a>,
    /// Value cache of the same layer.
    pub value_cache: CacheRef<'a>,
    /// Shape of both caches.
    pub layout: CacheLayout,
    /// Query heads; each run of `num_heads / num_kv_heads` shares a KV head.
    pub num_heads: usize,
    /// Sequences and their blocks.
    pub index: BatchIndex<'a>,
    /// Factor on the scores.
    pub scale: f32,
    /// With a window `w` the query at position `i` sees the keys `j` with `i - w < j <= i`.
    pub sliding_window: Option<usize>,
}

impl AttentionArgs<'_> {
    /// Verifies every shape and every index.
    pub(crate) fn check(&self) -> Result<()> {
        let layout = &self.layout;
        let (num_heads, num_kv_heads) = (self.num_heads, layout.num_kv_heads());
        if num_heads == 0 {
            return Err(Error::ZeroDimension { dimension: "num_heads" });
        }
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(Error::Heads { num_heads, num_kv_heads });
        }
        if !self.scale.is_finite() {
            return Err(Error::Scale { scale: self.scale });
        }
        if self.sliding_window == Some(0) {
            return Err(Error::SlidingWindow);
        }
        if !self.key_cache.has_type_of(&self.value_cache) {
            return Err(Error::CacheTypes);
        }
        self.key_cache.check("key_cache", layout)?;
        self.value_cache.check("value_cache", layout)?;
        let num_tokens = self.num_tokens();
        let expected = num_tokens.saturating_mul(num_heads * layout.head_dim());
        check_len("query", self.query.len(), expected)?;
        check_len("out", self.out.len(), expected)?;
        self.index.check_queries(num_tokens)?;
        (0..self.index.seq_lens.len())
            .try_for_each(|sequence| self.index.check_blocks(layout, self.sliding_window, sequence))
    }

    fn num_tokens(&self) -> usize {
        self.query.len() / (self.num_heads * self.layout.head_dim())
    }
}

impl<'a> BatchIndex<'a> {
    /// Verifies the row and those blocks of one sequence that its queries can see.
    pub(crate) fn check_blocks(&self, layout: &CacheLayout, window: Option<usize>, sequence: usize) -> Result<()> {
        let seq_len = self.seq_lens[sequence] as usize;
        let needed = seq_len.div_ceil(layout.block_size());
        if needed > self.max_blocks {
            return Err(Error::BlockTableWidth { sequence, seq_len, needed, max_blocks: self.max_blocks });
        }
        let num_rows = self.num_rows();
        let row_id = usize::try_from(self.row_ids[sequence]).ok();
        let row_id = row_id.filter(|row| *row < num_rows).ok_or(Error::RowId {
            sequence,
            row_id: self.row_ids[sequence],
            num_rows,
        })?;
        let first_position = seq_len - self.num_queries(sequence);
        let first = lowest_visible(first_position, window) / layout.block_size();
        let valid = 0..layout.num_blocks().min(i32::MAX as usize + 1) as i64;
        let columns = &self.table(row_id)[first.min(needed)..needed];
        match columns.iter().position(|id| !valid.contains(&i64::from(*id))) {
            None => Ok(()),
            Some(at) => Err(Error::BlockId {
                row_id,
                column: first + at,
                block_id: columns[at],
                num_blocks: layout.num_blocks(),
            }),
        }
    }

    /// Verifies the lengths of the arrays and that each context holds its queries.
    pub(crate) fn check_queries(&self, num_tokens: usize) -> Result<()> {
        let num_seqs = self.seq_lens.len();
        check_len("row_ids", self.row_ids.len(), num_seqs)?;
        check_len("query_start", self.query_start.len(), num_seqs + 1)?;
        let table_len = self.num_rows() * self.max_blocks;
        check_len("block_tables", self.block_tables.len(), table_len)?;
        let mut previous = 0;
        for (index, &value) in self.query_start.iter().enumerate() {
            let in_order = value >= previous && (index > 0 || value == 0);
            if !in_order || value as usize > num_tokens {
                return Err(Error::QueryStart { index, value, num_tokens });
            }
            previous = value;
        }
        for (sequence, &seq_len) in self.seq_lens.iter().enumerate() {
            let num_queries = self.num_queries(sequence);
            if usize::try_from(seq_len).is_ok_and(|len| len >= num_queries) {
                continue;
            }
            return Err(Error::SeqLen { sequence, seq_len, num_queries });
        }
        Ok(())
    }

    fn num_rows(&self) -> usize {
        self.block_tables.len().checked_div(self.max_blocks).unwrap_or(0)
    }

    pub(crate) fn num_queries(&self, sequence: usize) -> usize {
        (self.query_start[sequence + 1] - self.query_start[sequence]) as usize
    }

    /// Block ids of one row.
    pub(crate) fn table(&self, row_id: usize) -> &'a [i32] {
        &self.block_tables[row_id * self.max_blocks..][..self.max_blocks]
    }
}

/// Returns the first key that the query at `position` sees.
pub(crate) fn lowest_visible(position: usize, sliding_window: Option<usize>) -> usize {
    sliding_window.map_or(0, |window| (position + 1).saturating_sub(window))
}

impl Kernels {
    /// Computes causal attention of a whole batch over one layer's caches.
    ///
    /// Rows of `out` behind the last query token (padding) are set to zero.
    ///
    /// # Errors
    /// Any variant of [`Error`] that names an argument, or [`Error::Forked`]; `out` is unchanged then.
    pub fn paged_attention(&self, args: AttentionArgs<'_>) -> Result<()> {
        args.check()?;
        match (args.key_cache, args.value_cache) {
            (CacheRef::F32(key), CacheRef::F32(value)) => self.attend_batch(args, key, value),
            (CacheRef::Bf16(key), CacheRef::Bf16(value)) => self.attend_batch(args, key, value),
            (CacheRef::Int8(key), CacheRef::Int8(value)) => self.attend_batch(args, key, value),
            _ => Err(Error::CacheTypes),
        }
    }

    fn attend_batch<E: Element>(&self, args: AttentionArgs<'_>, key: &[E], value: &[E]) -> Result<()> {
        let AttentionArgs { out, query, layout, num_heads, index, scale, sliding_window, .. } = args;
        let mut plan = Plan::default();
        plan.make(&index, HeadShape { layout, num_heads, sliding_window }, self.num_threads());
        let parallel = plan.work >= PARALLEL_WORK;
        let written = index.query_start[index.seq_lens.len()] as usize;
        let padding = written * num_heads * layout.head_dim();
        let mut partials = vec![0.0; plan.num_partials];
        let problem = Problem {
            query,
            key,
            value,
            layout,
            num_heads,
            index,
            scale,
            sliding_window,
            output: Output::new(out),
            partials: Output::new(&mut partials),
        };
        for (items, job) in [(&plan.items, Job::Attend), (&plan.merges, Job::Finish)] {
            self.pool().for_each(items.len(), parallel, Scratch::default, |scratch, item| {
                // SAFETY: `check` verified every shape and index that the items are made of; items differ in KV head,
                // query tokens or chunks, so they write disjoint rows of `out` and partial sums, which are borrowed
                // until here; a merge comes after all items.
                unsafe { self.run_item(&problem, &items[item], job, scratch) };
            })?;
        }
        out[padding..].fill(0.0);
        Ok(())
    }
}
