//! One work item of attention: walks its keys tile by tile and hands the rows to the loops in `rows.rs`.
//!
//! Keys are taken in tiles of [`KEY_TILE`] positions, counted from position 0, with an online softmax between
//! tiles (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
//!
//! Invariants:
//! 1. Rows go together through a tile only if they see the same keys of it; nothing else is read.

use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::{BatchIndex, lowest_visible};
use crate::layout::CacheLayout;
use crate::rows::{ROW_BLOCK, Weights, attend_rows};
use crate::simd::{Element, Simd};

/// Key positions that share one softmax update.
pub(crate) const KEY_TILE: usize = 64;

/// One KV head and some query tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkItem {
    /// Row of the block tables.
    pub(crate) row_id: usize,
    pub(crate) kv_head: usize,
    /// Index of the first query token in the batch.
    pub(crate) first_token: usize,
    pub(crate) num_tokens: usize,
    /// Position of the first query token in its context.
    pub(crate) position: usize,
    /// Keys that some of the tokens see.
    pub(crate) num_keys: usize,
}

/// The output rows, written by several threads at disjoint places.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    start: *mut f32,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive slice borrowed for 'a; work items write disjoint rows of it.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(crate) fn new(out: &'a mut [f32]) -> Self {
        Self { start: out.as_mut_ptr(), lifetime: PhantomData }
    }
}

/// One layer of one batch, verified.
#[derive(Debug)]
pub(crate) struct Problem<'a, E> {
    pub(crate) query: &'a [f32],
    pub(crate) key: &'a [E],
    pub(crate) value: &'a [E],
    pub(crate) layout: CacheLayout,
    pub(crate) num_heads: usize,
    pub(crate) index: BatchIndex<'a>,
    pub(crate) scale: f32,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) output: Output<'a>,
}

impl<E> Problem<'_, E> {
    fn group(&self) -> usize {
        self.num_heads / self.layout.num_kv_heads()
    }

    /// Index of the first element of the heads of `item`'s group, for one of its tokens.
    fn group_start(&self, item: &WorkItem, token: usize) -> usize {
        let head = (item.first_token + token) * self.num_heads + item.kv_head * self.group();
        head * self.layout.head_dim()
    }

    /// Keys of the tile that a query row sees, counted from the tile's start; may be empty.
    fn visible(&self, item: &WorkItem, row: usize, tile_start: usize) -> Range<usize> {
        let position = item.position + row / self.group();
        let lowest = lowest_visible(position, self.sliding_window);
        let clip = |key: usize| key.clamp(tile_start, tile_start + KEY_TILE) - tile_start;
        clip(lowest)..clip(position + 1)
    }
}

/// Where the keys of a tile lie.
#[derive(Debug)]
pub(crate) struct KeyTile {
    /// Position of its first key.
    pub(crate) start: usize,
    /// Keys that some row of the work item sees, counted from `start`.
    pub(crate) keys: Range<usize>,
    /// First element of each of these keys, in both caches.
    pub(crate) offsets: [usize; KEY_TILE],
}

impl Default for KeyTile {
    fn default() -> Self {
        Self { start: 0, keys: 0..0, offsets: [0; KEY_TILE] }
    }
}

impl KeyTile {
    /// Looks the keys of the tile at `start` up in the block table; behind the context there are none.
    fn locate<E>(&mut self, problem: &Problem<'_, E>, item: &WorkItem, start: usize) {
        let (layout, table) = (&problem.layout, problem.index.table(item.row_id));
        let block_size = layout.block_size();
        let end = item.position + item.num_tokens;
        let clip = |key: usize| key.clamp(start, start + KEY_TILE) - start;
        self.start = start;
        self.keys = clip(end - item.num_keys)..clip(end);
        let mut key = self.keys.start;
        while key < self.keys.end {
            let (column, offset) = ((start + key) / block_size, (start + key) % block_size);
            let run = (block_size - offset).min(self.keys.end - key);
            let first = layout.row_offset(table[column] as usize, item.kv_head, offset);
            for step in 0..run {
                self.offsets[key + step] = first + step * layout.head_dim();
            }
            key += run;
        }
    }
}

/// State of the query rows of a work item; one for each thread.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Queries `[rows, head_dim]`.
    pub(crate) query: Vec<f32>,
    /// Weighted sums of values `[rows, head_dim]`, not yet divided by `total`.
    pub(crate) accumulator: Vec<f32>,
    /// Greatest score so far `[rows]`.
    pub(crate) greatest: Vec<f32>,
    /// Sum of weights relative to `greatest` `[rows]`.
    pub(crate) total: Vec<f32>,
    /// Scores, then weights `[ROW_BLOCK, KEY_TILE]`.
    pub(crate) weights: Weights,
    /// The tile at work, and the one after it.
    pub(crate) tile: KeyTile,
    pub(crate) ahead: KeyTile,
}

impl Scratch {
    pub(crate) fn new(max_rows: usize, head_dim: usize) -> Self {
        Self {
            query: Vec::with_capacity(max_rows * head_dim),
            accumulator: Vec::with_capacity(max_rows * head_dim),
            greatest: Vec::with_capacity(max_rows),
            total: Vec::with_capacity(max_rows),
            weights: [0.0; ROW_BLOCK * KEY_TILE],
            tile: KeyTile::default(),
            ahead: KeyTile::default(),
        }
    }

    fn load<E>(&mut self, problem: &Problem<'_, E>, item: &WorkItem) {
        let (group, head_dim) = (problem.group(), problem.layout.head_dim());
        let rows = item.num_tokens * group;
        self.query.clear();
        for token in 0..item.num_tokens {
            let start = problem.group_start(item, token);
            self.query.extend_from_slice(&problem.query[start..start + group * head_dim]);
        }
        for (vector, len, value) in [
            (&mut self.accumulator, rows * head_dim, 0.0),
            (&mut self.greatest, rows, f32::NEG_INFINITY),
            (&mut self.total, rows, 0.0),
        ] {
            vector.clear();
            vector.resize(len, value);
        }
    }
}

/// Computes the output rows of one work item.
///
/// # Safety
/// - The CPU has the instruction set of `S`, and `S::LANES` divides the head size.
/// - The problem passed `AttentionArgs::check` and the item was planned from it.
/// - No other thread touches the output rows of the item.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, scratch: &mut Scratch) {
    scratch.load(problem, item);
    let end = item.position + item.num_tokens;
    let first = end - item.num_keys;
    scratch.tile.locate(problem, item, first - first % KEY_TILE);
    while !scratch.tile.keys.is_empty() {
        scratch.ahead.locate(problem, item, scratch.tile.start + KEY_TILE);
        // SAFETY: passed on; `locate` set the offsets of every key that a row of the item sees in this tile.
        unsafe { attend_tile::<S, E>(problem, item, scratch) };
        std::mem::swap(&mut scratch.tile, &mut scratch.ahead);
    }
    // SAFETY: passed on.
    unsafe { store_rows(problem, item, scratch) };
}

/// Adds the keys of the tile at work to all rows, in blocks of rows that see the same keys.
///
/// # Safety
/// As for [`attend`]; the tile is located.
#[inline(always)]
unsafe fn attend_tile<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, scratch: &mut Scratch) {
    let rows = item.num_tokens * problem.group();
    let tile_start = scratch.tile.start;
    let mut row = 0;
    while row < rows {
        let keys = problem.visible(item, row, tile_start);
        let same = |other: &usize| problem.visible(item, *other, tile_start) == keys;
        let len = (row..rows.min(row + ROW_BLOCK)).take_while(same).count();
        if !keys.is_empty() {
            // SAFETY: passed on; rows row..row + len exist.
            unsafe {
                match len {
                    1 => attend_rows::<S, E, 1>(problem, row, keys, scratch),
                    2 => attend_rows::<S, E, 2>(problem, row, keys, scratch),
                    _ => attend_rows::<S, E, 3>(problem, row, keys, scratch),
                }
            }
        }
        row += len;
    }
}

/// Divides the rows by their sums of weights and writes them to the output.
///
/// # Safety
/// As for [`attend`].
unsafe fn store_rows<E>(problem: &Problem<'_, E>, item: &WorkItem, scratch: &mut Scratch) {
    let (group, head_dim) = (problem.group(), problem.layout.head_dim());
    for (row, total) in scratch.accumulator.chunks_exact_mut(head_dim).zip(&scratch.total) {
        for element in row {
            *element /= total;
        }
    }
    for token in 0..item.num_tokens {
        let rows = &scratch.accumulator[token * group * head_dim..][..group * head_dim];
        let start = problem.group_start(item, token);
        // SAFETY: the same range was in bounds of `query`, which is as long as the output; the caller promises
        // that only this thread touches it.
        unsafe {
            let place = problem.output.start.add(start);
            std::ptr::copy_nonoverlapping(rows.as_ptr(), place, rows.len());
        }
    }
}
