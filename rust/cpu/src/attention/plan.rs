//! Cuts a batch into work items.
//!
//! A work item is one KV head and a tile of query tokens of one sequence: one token in a decode, up to
//! [`MAX_TILE_ROWS`] query rows in a prefill chunk, so that each key and value that is loaded serves the whole tile.
//!
//! Invariants:
//! 1. An item's keys are whole chunks of its sequence, counted from position 0. How many of them one item has follows
//!    from the batch and the threads, but each chunk is summed by itself and merged in order, whoever does it: the cut
//!    changes no bit.

use std::cmp::Reverse;
use std::ops::Range;

use super::{BatchIndex, lowest_visible};
use crate::layout::CacheLayout;

/// Query rows (tokens x heads of a group) that share one pass over the keys.
const MAX_TILE_ROWS: usize = 96;
/// Key positions whose sum stands by itself: what one item has at least. A merge costs about a hundredth of it.
pub(crate) const KEY_CHUNK: usize = 256;
/// Items that a batch is cut into for each thread, if its sequences are long enough: the last one to end is waited for.
const ITEMS_PER_THREAD: usize = 6;

/// Numbers of partial sums that a batch may have, 16 MiB: a long prompt cut for many threads would have gigabytes. Tiles
/// beyond are not cut, and there are many of them then.
const MAX_PARTIALS: usize = 4 << 20;

/// One KV head and some query tokens of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct WorkItem {
    /// Row of the block tables.
    pub(crate) row_id: usize,
    pub(crate) kv_head: usize,
    /// Index of the first query token in the batch.
    pub(crate) first_token: usize,
    pub(crate) num_tokens: usize,
    /// Position of the first query token in its context.
    pub(crate) position: usize,
    /// First key that some of the tokens see.
    pub(crate) first_key: usize,
    /// Chunks of keys that it sums.
    pub(crate) chunks: Range<usize>,
    /// Where among the partial sums those of its first chunk go; none if the item has all chunks that its tokens see.
    pub(crate) partial: Option<usize>,
}

impl WorkItem {
    /// Behind the last key that some of the tokens see.
    pub(crate) fn end(&self) -> usize {
        self.position + self.num_tokens
    }

    fn num_pairs(&self) -> usize {
        let keys = self.end().min(self.chunks.end * KEY_CHUNK) - self.first_key.max(self.chunks.start * KEY_CHUNK);
        self.num_tokens * keys
    }
}

/// The work items of a batch for one window.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The longest first.
    pub(crate) items: Vec<WorkItem>,
    /// What is merged after them: the items that were cut, whole.
    pub(crate) merges: Vec<WorkItem>,
    /// Numbers of all partial sums.
    pub(crate) num_partials: usize,
    /// Multiply-adds of all items.
    pub(crate) work: usize,
}

/// What the plan needs to know of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadShape {
    pub(crate) layout: CacheLayout,
    pub(crate) num_heads: usize,
    pub(crate) sliding_window: Option<usize>,
}

impl HeadShape {
    /// Numbers of the sums of one chunk and token: the heads' weighted values, greatest scores and totals.
    fn partial_len(&self) -> usize {
        self.num_heads / self.layout.num_kv_heads() * (self.layout.head_dim() + 2)
    }
}

impl Plan {
    /// Plans anew; allocates nothing if a plan of that size was made before.
    pub(crate) fn make(&mut self, index: &BatchIndex<'_>, heads: HeadShape, num_threads: usize) {
        self.items.clear();
        self.merges.clear();
        self.num_partials = 0;
        let num_pairs = self.cut_by_tokens(index, heads);
        self.work =
            num_pairs.saturating_mul(2 * heads.num_heads / heads.layout.num_kv_heads() * heads.layout.head_dim());
        if num_threads > 1 {
            self.cut_by_keys(heads, (num_pairs / (ITEMS_PER_THREAD * num_threads)).max(KEY_CHUNK));
        }
        // So that no thread starts a long one when the others are done. Unstable: the stable sort allocates.
        self.items.sort_unstable_by_key(|item| {
            (Reverse(item.num_pairs()), item.first_token, item.kv_head, item.chunks.start)
        });
    }

    /// Makes an item of each tile of tokens and KV head; returns the pairs of tokens and keys of all items.
    fn cut_by_tokens(&mut self, index: &BatchIndex<'_>, heads: HeadShape) -> usize {
        let num_kv_heads = heads.layout.num_kv_heads();
        let tile_tokens = (MAX_TILE_ROWS / (heads.num_heads / num_kv_heads)).max(1);
        let mut num_pairs = 0;
        for (sequence, &seq_len) in index.seq_lens.iter().enumerate() {
            let num_queries = index.num_queries(sequence);
            for start in (0..num_queries).step_by(tile_tokens) {
                let num_tokens = tile_tokens.min(num_queries - start);
                let position = seq_len as usize - num_queries + start;
                let first_key = lowest_visible(position, heads.sliding_window);
                let item = WorkItem {
                    row_id: index.row_ids[sequence] as usize,
                    kv_head: 0,
                    first_token: index.query_start[sequence] as usize + start,
                    num_tokens,
                    position,
                    first_key,
                    chunks: first_key / KEY_CHUNK..(position + num_tokens).div_ceil(KEY_CHUNK),
                    partial: None,
                };
                num_pairs += num_kv_heads * item.num_pairs();
                self.items.extend((0..num_kv_heads).map(|kv_head| WorkItem { kv_head, ..item.clone() }));
            }
        }
        num_pairs
    }

    /// Cuts items of more than `most` pairs into runs of chunks.
    fn cut_by_keys(&mut self, heads: HeadShape, most: usize) {
        for at in 0..self.items.len() {
            let whole = self.items[at].clone();
            let (first, count) = (whole.chunks.start, whole.chunks.len());
            let num_parts = whole.num_pairs().div_ceil(most).min(count);
            let chunk_len = whole.num_tokens * heads.partial_len();
            if num_parts < 2 || self.num_partials + count * chunk_len > MAX_PARTIALS {
                continue;
            }
            let start = self.num_partials;
            self.num_partials += count * chunk_len;
            for part in 0..num_parts {
                let (from, to) = (count * part / num_parts, count * (part + 1) / num_parts);
                let item = WorkItem {
                    chunks: first + from..first + to,
                    partial: Some(start + from * chunk_len),
                    ..whole.clone()
                };
                if part == 0 {
                    self.items[at] = item;
                } else {
                    self.items.push(item);
                }
            }
            self.merges.push(WorkItem { partial: Some(start), ..whole });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(seq_lens: &[i32], num_queries: i32, window: Option<usize>, num_threads: usize) -> Plan {
        let layout = CacheLayout::new(1, 3, 16, 8).expect("small");
        let row_ids: Vec<i32> = (0..seq_lens.len() as i32).collect();
        let query_start: Vec<i32> = (0..=seq_lens.len() as i32).map(|s| s * num_queries).collect();
        let index =
            BatchIndex { block_tables: &[], max_blocks: 0, row_ids: &row_ids, query_start: &query_start, seq_lens };
        let mut plan = Plan::default();
        plan.make(&index, HeadShape { layout, num_heads: 9, sliding_window: window }, num_threads);
        plan
    }

    #[test]
    fn one_long_context_is_cut_so_that_each_thread_has_several_items() {
        let plan = plan(&[8192], 1, None, 2);
        let longest = plan.items.iter().map(WorkItem::num_pairs).max();
        let total: usize = plan.items.iter().map(WorkItem::num_pairs).sum();
        assert_eq!(total, 3 * 8192);
        assert!(longest.is_some_and(|longest| longest * 8 <= total), "{longest:?} of {total}");
        assert_eq!(plan.merges.len(), 3);
        assert_eq!(plan.num_partials, 3 * (8192 / KEY_CHUNK) * 3 * 10);
    }

    #[test]
    fn partial_sums_have_a_bound() {
        let is_cut = |plan: &Plan| plan.num_partials > 0 && plan.num_partials <= MAX_PARTIALS;
        let long = plan(&[131_072], 512, None, 64);
        assert!(is_cut(&long), "{}", long.num_partials);
        assert!(is_cut(&plan(&[131_072; 8], 1, None, 64)));
        let chunks_of =
            |items: &[WorkItem]| items.iter().map(|item| item.num_tokens * item.chunks.len()).sum::<usize>();
        assert_eq!(chunks_of(&long.items), chunks_of(&plan(&[131_072], 512, None, 1).items), "none is left out");
    }

    #[test]
    fn items_of_a_cut_tile_have_each_chunk_once_and_places_of_their_own() {
        for (seq_lens, num_queries, window) in
            [(vec![5000, 300, 1], 1, None), (vec![3000], 100, Some(700)), (vec![100_000, 100_000], 1, Some(70_000))]
        {
            let plan = plan(&seq_lens, num_queries, window, 5);
            assert!(!plan.merges.is_empty());
            let mut places = Vec::new();
            for merge in &plan.merges {
                let same = |item: &&WorkItem| {
                    (item.first_token, item.kv_head, item.partial.is_some()) == (merge.first_token, merge.kv_head, true)
                };
                let mut chunks: Vec<_> = plan.items.iter().filter(same).flat_map(|item| item.chunks.clone()).collect();
                chunks.sort_unstable();
                assert_eq!(chunks, merge.chunks.clone().collect::<Vec<_>>());
                let chunk_len = merge.num_tokens * 30;
                for item in plan.items.iter().filter(same) {
                    let start = item.partial.expect("filtered");
                    places.extend((start..start + item.chunks.len() * chunk_len).step_by(chunk_len));
                }
            }
            places.sort_unstable();
            assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 30));
            assert!(places.last().is_some_and(|last| *last < plan.num_partials));
        }
    }

    #[test]
    fn short_contexts_and_one_thread_leave_items_whole() {
        assert!(plan(&[200; 64], 1, None, 2).merges.is_empty());
        assert!(plan(&[8192], 1, None, 1).merges.is_empty());
        assert!(plan(&[2048; 64], 1, None, 2).merges.is_empty());
    }
}
