//! One work item of attention: walks its keys tile by tile and hands the rows to the loops in `rows.rs`.
//!
//! Keys are taken in tiles of [`KEY_TILE`] positions, counted from position 0, with an online softmax between
//! tiles (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Each chunk of [`KEY_CHUNK`]
//! positions has sums of its own, which are merged in ascending order.
//!
//! Invariants:
//! 1. A row's sums get the keys that it sees, in ascending order, whichever rows and keys it shares loops with; nothing
//!    else is read.

use std::marker::PhantomData;
use std::ops::Range;

use super::element::{Element, from_vector_order, in_twos, to_vector_order};
use super::plan::{KEY_CHUNK, WorkItem};
use super::rows::{Fetch, Source, add_rows, scale, score_rows};
use super::softmax::{Sums, merge_row, update_row};
use super::{BatchIndex, lowest_visible};
use crate::int8::SCALE_BYTES;
use crate::layout::CacheLayout;
use crate::simd::Simd;

/// Key positions that share one softmax update.
pub(crate) const KEY_TILE: usize = 64;
/// Up to so many rows read the cache as it is; more of them share a tile that is widened once.
const DIRECT_ROWS: usize = 8;
/// Rows that share the loads of keys and values: 4 x 2 sums and their operands fit 16 vector registers.
const ROW_BLOCK: usize = 4;

/// Numbers written by several threads at disjoint places.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    start: *mut f32,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive slice borrowed for 'a; work items write disjoint parts of it.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(crate) fn new(out: &'a mut [f32]) -> Self {
        Self { start: out.as_mut_ptr(), lifetime: PhantomData }
    }

    /// # Safety
    /// The range is inside the slice, and no other thread has any of it.
    #[allow(clippy::mut_from_ref, reason = "items have disjoint ranges of one slice")]
    unsafe fn get(&self, start: usize, len: usize) -> &mut [f32] {
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
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
    /// Sums of the chunks of items that were cut.
    pub(crate) partials: Output<'a>,
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

    /// Keys that a query row sees.
    fn visible(&self, item: &WorkItem, row: usize) -> Range<usize> {
        let position = item.position + row / self.group();
        lowest_visible(position, self.sliding_window)..position + 1
    }
}

/// Where the keys of a tile lie.
#[derive(Debug)]
pub(crate) struct KeyTile {
    /// Position of its first key.
    start: usize,
    /// Keys that some row of the work item sees, counted from `start`.
    keys: Range<usize>,
    /// First element of each of these keys, in both caches.
    offsets: [usize; KEY_TILE],
    /// Place of each one's factor, if the element type has factors.
    scale_offsets: [usize; KEY_TILE],
}

impl Default for KeyTile {
    fn default() -> Self {
        Self { start: 0, keys: 0..0, offsets: [0; KEY_TILE], scale_offsets: [0; KEY_TILE] }
    }
}

impl KeyTile {
    /// Looks the keys of the tile at `start` up in the block table; behind the item's chunks there are none.
    fn locate<E: Element>(&mut self, problem: &Problem<'_, E>, item: &WorkItem, start: usize) {
        let (layout, table) = (&problem.layout, problem.index.table(item.row_id));
        let block_size = layout.block_size();
        let end = item.end().min(item.chunks.end * KEY_CHUNK);
        self.start = start;
        self.keys = self.clip(&(item.first_key..end));
        let mut key = self.keys.start;
        while key < self.keys.end {
            let (column, offset) = ((start + key) / block_size, (start + key) % block_size);
            let run = (block_size - offset).min(self.keys.end - key);
            let [first, scale] = E::offsets(layout, table[column] as usize, item.kv_head, offset);
            for step in 0..run {
                self.offsets[key + step] = first + step * layout.head_dim();
                if E::HAS_SCALES {
                    self.scale_offsets[key + step] = scale + step * SCALE_BYTES;
                }
            }
            key += run;
        }
    }

    /// The part of some positions that is in the tile, counted from its start; may be empty.
    fn clip(&self, positions: &Range<usize>) -> Range<usize> {
        let clip = |key: usize| key.clamp(self.start, self.start + KEY_TILE) - self.start;
        clip(positions.start)..clip(positions.end)
    }
}

/// State of the query rows of a work item; one for each thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Scaled queries `[rows, head_dim]`, in vector order.
    query: Vec<f32>,
    /// Sums of the chunk at work.
    chunk: Vec<f32>,
    /// Sums of the chunks before it.
    whole: Vec<f32>,
    /// Scores, then weights `[rows, KEY_TILE]`.
    weights: Vec<f32>,
    /// A tile's keys, and its values, widened `[KEY_TILE, head_dim]`.
    wide: [Vec<f32>; 2],
    /// The tile at work, and the one after it.
    tile: KeyTile,
    ahead: KeyTile,
    /// Factors of the tile's keys, and of its values.
    scales: Scales,
}

/// Factors of a tile's keys, and of its values.
#[derive(Debug)]
struct Scales([[f32; KEY_TILE]; 2]);

impl Default for Scales {
    fn default() -> Self {
        Self([[1.0; KEY_TILE]; 2])
    }
}

impl Scratch {
    /// Makes room for an item, and takes its queries.
    #[inline(always)]
    fn load<S: Simd, E: Element>(&mut self, problem: &Problem<'_, E>, item: &WorkItem) {
        let (group, head_dim) = (problem.group(), problem.layout.head_dim());
        let rows = item.num_tokens * group;
        let wide = if rows > DIRECT_ROWS { KEY_TILE * head_dim } else { 0 };
        for (vector, len) in [
            (&mut self.query, rows * head_dim),
            (&mut self.chunk, Sums::len(rows, head_dim)),
            (&mut self.whole, Sums::len(rows, head_dim)),
            (&mut self.weights, rows * KEY_TILE),
        ] {
            vector.resize(len.max(vector.len()), 0.0);
        }
        for tile in &mut self.wide {
            tile.resize(wide.max(tile.len()), 0.0);
        }
        for (token, to) in self.query.chunks_exact_mut(group * head_dim).take(item.num_tokens).enumerate() {
            let from = &problem.query[problem.group_start(item, token)..][..group * head_dim];
            for (from, to) in from.chunks_exact(head_dim).zip(to.chunks_exact_mut(head_dim)) {
                to_vector_order::<S, E>(from, problem.scale, to);
            }
        }
    }
}

/// Computes the output rows of one work item, or its partial sums.
///
/// # Safety
/// - The CPU has the instruction set of `S`, and `S::LANES` divides the head size.
/// - The problem passed `AttentionArgs::check` and the item was planned from it.
/// - No other thread touches the output rows or partial sums of the item.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, scratch: &mut Scratch) {
    let (rows, head_dim) = (item.num_tokens * problem.group(), problem.layout.head_dim());
    let first = item.first_key.max(item.chunks.start * KEY_CHUNK);
    scratch.load::<S, E>(problem, item);
    scratch.tile.locate(problem, item, first - first % KEY_TILE);
    let sums_len = Sums::len(rows, head_dim);
    let mut chunk = item.chunks.start;
    Sums::new(&mut scratch.chunk[..sums_len], rows).clear();
    while !scratch.tile.keys.is_empty() {
        scratch.ahead.locate(problem, item, scratch.tile.start + KEY_TILE);
        // SAFETY: passed on; `locate` set the offsets of every key that a row of the item sees in this tile.
        unsafe { attend_tile::<S, E>(problem, item, rows, scratch) };
        std::mem::swap(&mut scratch.tile, &mut scratch.ahead);
        if !scratch.tile.keys.is_empty() && !scratch.tile.start.is_multiple_of(KEY_CHUNK) {
            continue;
        }
        let sums = &mut scratch.chunk[..sums_len];
        if let Some(start) = item.partial {
            // SAFETY: the plan gave this chunk of the item a place of its own.
            unsafe { problem.partials.get(start + (chunk - item.chunks.start) * sums_len, sums_len) }
                .copy_from_slice(sums);
        } else if item.chunks.len() > 1 {
            // SAFETY: passed on.
            unsafe { merge::<S, E>(problem, item, chunk, sums, &mut scratch.whole[..sums_len]) };
        }
        chunk += 1;
        if chunk < item.chunks.end {
            Sums::new(sums, rows).clear();
        }
    }
    if item.partial.is_none() {
        let sums = if item.chunks.len() > 1 { &mut scratch.whole } else { &mut scratch.chunk };
        // SAFETY: passed on.
        unsafe { store_rows::<S, E>(problem, item, &mut sums[..sums_len]) };
    }
}

/// Merges the partial sums of an item that was cut, and writes its output rows.
///
/// # Safety
/// As for [`attend`]; the sums are there.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, scratch: &mut Scratch) {
    let sums_len = Sums::len(item.num_tokens * problem.group(), problem.layout.head_dim());
    let start = item.partial.unwrap_or_default();
    scratch.whole.resize(sums_len.max(scratch.whole.len()), 0.0);
    let whole = &mut scratch.whole[..sums_len];
    // SAFETY: passed on; the plan gave each chunk a place, which nobody else touches after the items have ended.
    unsafe {
        for chunk in item.chunks.clone() {
            let sums = problem.partials.get(start + (chunk - item.chunks.start) * sums_len, sums_len);
            merge::<S, E>(problem, item, chunk, sums, whole);
        }
        store_rows::<S, E>(problem, item, whole);
    }
}

/// Adds the sums of a chunk to those of the chunks before it, for the rows that see keys of it.
///
/// # Safety
/// As for [`attend`]; both have the length of the item's sums.
#[inline(always)]
unsafe fn merge<S: Simd, E: Element>(
    problem: &Problem<'_, E>,
    item: &WorkItem,
    chunk: usize,
    sums: &mut [f32],
    whole: &mut [f32],
) {
    let rows = item.num_tokens * problem.group();
    let (mut sums, mut whole) = (Sums::new(sums, rows), Sums::new(whole, rows));
    for row in 0..rows {
        let seen = problem.visible(item, row);
        let (first, last) = (seen.start / KEY_CHUNK, (seen.end - 1) / KEY_CHUNK);
        if chunk == first {
            whole.copy_row(&sums, row);
        } else if chunk > first && chunk <= last {
            // SAFETY: passed on.
            unsafe { merge_row::<S>(&mut whole, &mut sums, row) };
        }
    }
}

/// Adds the keys of the tile at work to all rows.
///
/// # Safety
/// As for [`attend`]; the tile is located.
#[inline(always)]
unsafe fn attend_tile<S: Simd, E: Element>(
    problem: &Problem<'_, E>,
    item: &WorkItem,
    rows: usize,
    scratch: &mut Scratch,
) {
    let head_dim = problem.layout.head_dim();
    let caches = [problem.key.as_ptr(), problem.value.as_ptr()];
    if E::HAS_SCALES {
        for (cache, scales) in [problem.key, problem.value].into_iter().zip(&mut scratch.scales.0) {
            for key in scratch.tile.keys.clone() {
                scales[key] = E::scale(cache, scratch.tile.scale_offsets[key]);
            }
        }
    }
    // SAFETY: passed on. The offsets come from `Element::offsets` with verified ids, so `head_dim` elements
    // from each are inside both caches, which have the same length; widened keys lie one after the other.
    unsafe {
        if rows <= DIRECT_ROWS {
            attend_keys::<S, E, E, true>(problem, item, rows, scratch, caches);
        } else {
            for (data, to) in caches.into_iter().zip(&mut scratch.wide) {
                for key in scratch.tile.keys.clone() {
                    widen::<S, E>(data.add(scratch.tile.offsets[key]), &mut to[key * head_dim..][..head_dim]);
                }
            }
            let wide = [scratch.wide[0].as_ptr(), scratch.wide[1].as_ptr()];
            attend_keys::<S, E, f32, false>(problem, item, rows, scratch, wide);
        }
    }
}

/// Widens a row into `to`, in vector order.
///
/// # Safety
/// As for [`attend`]; `from` is the first element of a row as long as `to`.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(from: *const E, to: &mut [f32]) {
    let twos = in_twos::<S>(to.len());
    let place = to.as_mut_ptr();
    // SAFETY: the caller promises the instruction set and the row; LANES divides its length.
    unsafe {
        for start in (0..twos).step_by(2 * S::LANES) {
            let [first, second] = E::load_two::<S>(from.add(start));
            S::store(place.add(start), first);
            S::store(place.add(start + S::LANES), second);
        }
        if twos < to.len() {
            S::store(place.add(twos), E::load::<S>(from.add(twos)));
        }
    }
}

/// Scores all rows, turns the scores to weights, adds the weighted values.
///
/// # Safety
/// As for [`attend_tile`]; `data` are keys and values: the caches if `DIRECT`, else the tile widened.
#[inline(always)]
unsafe fn attend_keys<S: Simd, E: Element, T: Element, const DIRECT: bool>(
    problem: &Problem<'_, E>,
    item: &WorkItem,
    rows: usize,
    scratch: &mut Scratch,
    data: [*const T; 2],
) {
    let head_dim = problem.layout.head_dim();
    let Scratch { query, chunk, weights, tile, ahead, scales, .. } = scratch;
    let scales = E::HAS_SCALES.then(|| [scales.0[0].as_ptr(), scales.0[1].as_ptr()]);
    let sums = Sums::new(&mut chunk[..Sums::len(rows, head_dim)], rows);
    let seen = |row: usize| tile.clip(&problem.visible(item, row));
    let widened: [usize; KEY_TILE] = if DIRECT { [0; KEY_TILE] } else { std::array::from_fn(|key| key * head_dim) };
    let [keys_at, values_at] = data.map(|data| Source { data, offsets: if DIRECT { &tile.offsets } else { &widened } });
    // The first rows that need a key fetch it for the others too.
    let fetch_values = |row: usize| (DIRECT && row == 0).then(|| Fetch::new(values_at, &tile.keys));
    let next = Source { data: data[0], offsets: &ahead.offsets };
    let fetch_keys = |row: usize| (DIRECT && row == 0).then(|| Fetch::new(next, &ahead.keys));
    // SAFETY: passed on.
    unsafe {
        for (row, len) in blocks(rows) {
            // Rows are in ascending order of what they see: some of these scores may be of keys that a row does not see.
            let keys = seen(row).start..seen(row + len - 1).end;
            if !keys.is_empty() {
                let query = &query[row * head_dim..(row + len) * head_dim];
                let scores = &mut weights[row * KEY_TILE..(row + len) * KEY_TILE];
                score_rows::<S, T>(query, len, keys_at, keys, scores, fetch_values(row));
            }
        }
        for row in 0..rows {
            let (keys, scores) = (seen(row), &mut weights[row * KEY_TILE..(row + 1) * KEY_TILE]);
            if keys.is_empty() {
                continue;
            }
            let correction = update_row::<S>(scores, keys, &mut sums.greatest[row], &mut sums.total[row], scales);
            // The greatest score did not change, as for most tiles.
            if correction.to_bits() != 1f32.to_bits() {
                scale::<S>(&mut sums.values[row * head_dim..(row + 1) * head_dim], correction);
            }
        }
        for (first, len) in blocks(rows) {
            // What all of them see they add together; what only some see, one by one before it and after it.
            let shared = seen(first + len - 1).start.min(seen(first).end)..seen(first).end;
            let is_same = seen(first) == seen(first + len - 1);
            for turn in 0..if is_same { 1 } else { 2 * len + 1 } {
                let (row, rows, keys) = if is_same || turn == len {
                    (first, len, shared.clone())
                } else if turn < len {
                    let keys = seen(first + turn);
                    (first + turn, 1, keys.start..shared.start.min(keys.end))
                } else {
                    let row = first + turn - len - 1;
                    (row, 1, shared.end.max(seen(row).start)..seen(row).end)
                };
                if !keys.is_empty() {
                    let sums = &mut sums.values[row * head_dim..(row + rows) * head_dim];
                    let weights = &weights[row * KEY_TILE..(row + rows) * KEY_TILE];
                    add_rows::<S, T>(sums, rows, values_at, keys, weights, fetch_keys(row));
                }
            }
        }
    }
}

/// Cuts rows into blocks that share loads: first row and length of each.
#[inline(always)]
fn blocks(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    // As even as possible: a block costs its loads however few rows it has.
    let count = rows.div_ceil(ROW_BLOCK);
    (0..count).map(move |block| {
        let (from, to) = (rows * block / count, rows * (block + 1) / count);
        (from, to - from)
    })
}

/// Divides the rows by their sums of weights and writes them to the output.
///
/// # Safety
/// As for [`attend`]; `sums` are the item's.
#[inline(always)]
unsafe fn store_rows<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, sums: &mut [f32]) {
    let (group, head_dim) = (problem.group(), problem.layout.head_dim());
    let sums = Sums::new(sums, item.num_tokens * group);
    for (row, values) in sums.values.chunks_exact_mut(head_dim).enumerate() {
        let total = sums.total[row];
        for value in &mut *values {
            *value /= total;
        }
        let start = problem.group_start(item, row / group) + row % group * head_dim;
        // SAFETY: the same range was in bounds of `query`, which is as long as the output; the caller promises
        // that only this thread touches it.
        from_vector_order::<S, E>(values, unsafe { problem.output.get(start, head_dim) });
    }
}
