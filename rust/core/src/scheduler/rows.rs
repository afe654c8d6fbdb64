//! Persistent rows: the place of a running sequence from admission to its end or preemption.
//!
//! 1. A row belongs to at most one sequence; the lowest free row is given out first.
//! 2. While a sequence runs, its row is the only owner of its block table. As long as it lacks more than one token, the row also owns
//!    `num_computed_tokens`; then its lane does (`lanes.rs`), and the row its tail.
//! 3. The leading full blocks of a row that may publish are published, and no others.

use super::request::Request;
use crate::block::{BlockId, NONE};
use crate::memory::{prefetch, table_of, zeroed_table};

/// State of a running sequence, besides what its sequence and its request say.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Row {
    /// Hash of the last full block while it decodes and may publish (that of its root without any).
    pub(crate) last_hash: u64,
    /// Its number among the sequences; `NONE` = the row is free.
    pub(crate) sequence: u32,
    /// Tokens whose keys and values are in the cache; stale while it decodes.
    pub(crate) num_computed_tokens: u32,
    /// Length of the block table.
    pub(crate) num_blocks: u32,
    /// Blocks that the sequence may need at most.
    pub(crate) max_blocks: u32,
    /// It has a lane.
    pub(crate) is_decoding: bool,
    /// Whether further blocks may be published: not after the prefix cache was reset under the sequence.
    pub(crate) may_publish: bool,
    /// Scheduled in the plan being made, or without a lane in the batch in flight.
    pub(crate) is_planned: bool,
    /// Other choices wait for it to compute the prompt.
    pub(crate) is_forked_from: bool,
    /// Logits of prompt tokens are still wanted.
    pub(crate) wants_prompt_logits: bool,
}

const _: () = assert!(size_of::<Row>() == 32, "two rows are a cache line, and none lies across two");

impl Row {
    const FREE: Self = Self {
        last_hash: 0,
        sequence: NONE,
        num_computed_tokens: 0,
        num_blocks: 0,
        max_blocks: 0,
        is_decoding: false,
        may_publish: false,
        is_planned: false,
        is_forked_from: false,
        wants_prompt_logits: false,
    };

    /// Whether a sequence has the row and no lane.
    pub(crate) fn is_prefilling(&self) -> bool {
        self.sequence != NONE && !self.is_decoding
    }

    /// Whether the sequence may need a block beyond its table.
    pub(super) fn may_grow(&self) -> bool {
        self.max_blocks > self.num_blocks
    }
}

/// What the policy counts of a running sequence.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    flow: u32,
    /// Leading tokens that were charged.
    num_charged: u32,
    /// Blocks found that others held when it was admitted.
    num_shared: u32,
}

/// All rows with their block tables and sampling parameters, as the runner sees them.
#[derive(Debug)]
pub(crate) struct Rows {
    states: Vec<Row>,
    free: FreeRows,
    /// Rows whose sequence may need further blocks.
    num_growing: usize,
    pub(crate) tables: BlockTables,
    /// `[max_num_seqs, block_size]`: tokens of the last, partly filled block of each decoding sequence.
    tails: Vec<i32>,
    block_size: usize,
    /// Blocks that the sequences in rows may need besides those they hold.
    num_growth: usize,
    /// Empty if the policy needs none of it.
    accounts: Vec<Account>,
    pub(crate) sampling: SamplingRows,
    freed: Vec<i32>,
}

impl Rows {
    pub(crate) fn new(max_num_seqs: usize, max_blocks: usize, block_size: usize, has_accounts: bool) -> Self {
        let num_counted = if has_accounts { max_num_seqs } else { 0 };
        Self {
            states: table_of(Row::FREE, max_num_seqs),
            free: FreeRows::new(max_num_seqs),
            num_growing: 0,
            tails: zeroed_table(max_num_seqs * block_size),
            block_size,
            num_growth: 0,
            accounts: table_of(Account::default(), num_counted),
            tables: BlockTables { ids: zeroed_table(max_num_seqs * max_blocks), max_blocks },
            sampling: SamplingRows::new(max_num_seqs),
            freed: Vec::with_capacity(max_num_seqs),
        }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len
    }

    pub(crate) fn get(&self, row: u32) -> &Row {
        &self.states[row as usize]
    }

    pub(crate) fn get_mut(&mut self, row: u32) -> &mut Row {
        &mut self.states[row as usize]
    }

    /// Running sequences that may need a further block.
    pub(crate) fn num_growing(&self) -> usize {
        self.num_growing
    }

    /// Blocks that running sequences may need at most besides those they hold.
    pub(crate) fn num_growth(&self) -> usize {
        self.num_growth
    }

    /// Notes whose the sequence in a row is, and that its first `num_charged` tokens need not be charged.
    pub(crate) fn enter_flow(&mut self, row: u32, flow: u32, num_charged: u32, num_shared: u32) {
        if let Some(account) = self.accounts.get_mut(row as usize) {
            *account = Account { flow, num_charged, num_shared };
        }
    }

    /// Flow of the row's sequence, if the policy counts service.
    pub(crate) fn flow(&self, row: u32) -> Option<u32> {
        self.accounts.get(row as usize).map(|account| account.flow)
    }

    /// Leading tokens of the row's last sequence that were charged.
    pub(crate) fn num_charged_tokens(&self, row: u32) -> u32 {
        self.accounts.get(row as usize).map_or(0, |account| account.num_charged)
    }

    /// Charges the tokens below `end`; returns how many of them were not yet.
    pub(crate) fn charge_up_to(&mut self, row: u32, end: u32) -> u32 {
        let num_charged = &mut self.accounts[row as usize].num_charged;
        let num_new = end.saturating_sub(*num_charged);
        *num_charged += num_new;
        num_new
    }

    /// Blocks that a row's sequence gives back when it ends, as far as it can be told: those it did not find with others.
    pub(crate) fn num_own_blocks(&self, row: u32) -> u32 {
        self.states[row as usize].num_blocks.saturating_sub(self.accounts[row as usize].num_shared)
    }

    /// Gives the lowest free row to a sequence.
    pub(crate) fn acquire(&mut self, state: Row) -> u32 {
        let row = self.free.take_lowest().expect("the caller has seen a free row");
        self.num_growing += usize::from(state.may_grow());
        self.num_growth += (state.max_blocks - state.num_blocks) as usize;
        self.states[row as usize] = state;
        row
    }

    /// Takes the row from its sequence. Its blocks must have been released.
    pub(crate) fn release(&mut self, row: u32) {
        debug_assert_eq!(self.states[row as usize].num_blocks, 0, "blocks are released before their row");
        self.num_growing -= usize::from(self.states[row as usize].may_grow());
        self.num_growth -= self.states[row as usize].max_blocks as usize;
        self.states[row as usize] = Row::FREE;
        self.free.put(row);
        self.freed.push(row as i32);
    }

    /// What the sequences in rows compute from now on is not published.
    pub(crate) fn forbid_publishing(&mut self) {
        self.states.iter_mut().for_each(|state| state.may_publish = false);
    }

    /// Rows released since the last call go to `freed_rows`.
    pub(crate) fn report_freed(&mut self, freed_rows: &mut Vec<i32>) {
        freed_rows.append(&mut self.freed);
    }

    /// A row and this column of its block table are read soon.
    pub(crate) fn prefetch(&self, row: u32, column: u32) {
        prefetch(&self.states, row as usize);
        prefetch(&self.tables.ids, row as usize * self.tables.max_blocks + column as usize);
        if !self.accounts.is_empty() {
            prefetch(&self.accounts, row as usize);
        }
    }

    /// Blocks of a row's sequence, first to last.
    pub(crate) fn blocks(&self, row: u32) -> &[i32] {
        &self.tables.row(row)[..self.states[row as usize].num_blocks as usize]
    }

    /// Appends a block to a row's table.
    pub(crate) fn push_block(&mut self, row: u32, block: BlockId) {
        let state = &mut self.states[row as usize];
        let column = state.num_blocks;
        let could_grow = state.may_grow();
        state.num_blocks = column + 1;
        self.num_growth -= 1;
        self.num_growing -= usize::from(could_grow && !state.may_grow());
        self.tables.set(row, column, block);
    }

    /// Removes the deepest block of a row's table.
    pub(crate) fn pop_block(&mut self, row: u32) -> Option<BlockId> {
        let state = &mut self.states[row as usize];
        let could_grow = state.may_grow();
        state.num_blocks = state.num_blocks.checked_sub(1)?;
        self.num_growing += usize::from(!could_grow && state.may_grow());
        self.num_growth += 1;
        let column = state.num_blocks;
        Some(self.tables.get(row, column))
    }

    /// `[block_size]`: tokens of the last block of a decoding sequence; those that are not known yet are stale.
    pub(crate) fn tail(&self, row: u32) -> &[i32] {
        &self.tails[self.tail_start(row) as usize..][..self.block_size]
    }

    /// Where a row's tail begins among those of all rows.
    pub(crate) fn tail_start(&self, row: u32) -> u32 {
        row * self.block_size as u32
    }

    /// Sets the leading tokens of a row's last block.
    pub(crate) fn set_tail(&mut self, row: u32, tokens: &[i32]) {
        let start = self.tail_start(row) as usize;
        self.tails[start..start + tokens.len()].copy_from_slice(tokens);
    }

    /// Notes the tokens that come next, each in its place.
    pub(crate) fn set_tail_tokens(&mut self, places: &[u32], tokens: &[i32]) {
        for (&place, &token) in places.iter().zip(tokens) {
            self.tails[place as usize] = token;
        }
    }
}

/// `[max_num_seqs, max_blocks]` block ids by row; columns past a sequence's table hold stale ids.
#[derive(Debug)]
pub(crate) struct BlockTables {
    ids: Vec<i32>,
    max_blocks: usize,
}

impl BlockTables {
    pub(crate) fn ids(&self) -> &[i32] {
        &self.ids
    }

    pub(crate) fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    pub(crate) fn row(&self, row: u32) -> &[i32] {
        &self.ids[row as usize * self.max_blocks..][..self.max_blocks]
    }

    pub(crate) fn get(&self, row: u32, column: u32) -> BlockId {
        BlockId::from_table(self.ids[row as usize * self.max_blocks + column as usize])
    }

    pub(crate) fn set(&mut self, row: u32, column: u32, block: BlockId) {
        self.ids[row as usize * self.max_blocks + column as usize] = block.as_i32();
    }
}

/// `[max_num_seqs]` sampling parameters by row, for the sampler; rows without a sequence hold stale values.
#[derive(Debug)]
pub struct SamplingRows {
    /// 0 = greedy.
    pub temperature: Vec<f32>,
    /// 0 or -1 = all.
    pub top_k: Vec<i32>,
    /// In (0, 1].
    pub top_p: Vec<f32>,
    /// In `[0, 1]`.
    pub min_p: Vec<f32>,
    /// Key of the random numbers.
    pub seeds: Vec<u64>,
    /// In `[-2, 2]`, 0 = none.
    pub presence_penalty: Vec<f32>,
    /// In `[-2, 2]`, 0 = none.
    pub frequency_penalty: Vec<f32>,
    /// Above 0, 1 = none.
    pub repetition_penalty: Vec<f32>,
    /// Output tokens before which `NewRowTables::banned_ids` must not come.
    pub min_tokens: Vec<i32>,
    /// Most likely ids to report with each output token; -1 = nothing at all.
    pub num_logprobs: Vec<i32>,
    /// Output tokens below which the row has more than temperature, `top_k`, `top_p` and `min_p`; most often 0 or `u32::MAX`.
    pub(crate) extras_below: Vec<u32>,
}

impl SamplingRows {
    fn new(max_num_seqs: usize) -> Self {
        Self {
            temperature: vec![0.0; max_num_seqs],
            top_k: vec![0; max_num_seqs],
            top_p: vec![1.0; max_num_seqs],
            min_p: vec![0.0; max_num_seqs],
            seeds: vec![0; max_num_seqs],
            presence_penalty: vec![0.0; max_num_seqs],
            frequency_penalty: vec![0.0; max_num_seqs],
            repetition_penalty: vec![1.0; max_num_seqs],
            min_tokens: vec![0; max_num_seqs],
            num_logprobs: vec![-1; max_num_seqs],
            extras_below: vec![0; max_num_seqs],
        }
    }

    /// Whether a row has more than temperature, `top_k`, `top_p` and `min_p` after so many output tokens.
    pub(super) fn has_extras(&self, row: u32, num_output_tokens: u32) -> bool {
        num_output_tokens < self.extras_below[row as usize]
    }

    pub(super) fn set(&mut self, row: u32, request: &Request) {
        let row = row as usize;
        set(&mut self.temperature, row, request.temperature);
        set(&mut self.top_k, row, request.top_k);
        set(&mut self.top_p, row, request.top_p);
        set(&mut self.min_p, row, request.min_p);
        self.seeds[row] = request.seed;
        if request.extras.is_none() && self.extras_below[row] == 0 {
            // As it was: nobody has asked for more.
            return;
        }
        let extras = request.extras();
        self.presence_penalty[row] = extras.presence_penalty;
        self.frequency_penalty[row] = extras.frequency_penalty;
        self.repetition_penalty[row] = extras.repetition_penalty;
        self.min_tokens[row] = extras.min_tokens as i32;
        self.num_logprobs[row] = i32::from(extras.num_logprobs);
        let is_always = request.has_tables() || extras.has_penalty || extras.num_logprobs >= 0;
        self.extras_below[row] = if is_always { u32::MAX } else { extras.min_tokens };
    }
}

/// Sets a value that most often is the one that stands there: what is not written stays out of memory.
fn set<T: PartialEq>(values: &mut [T], row: usize, value: T) {
    if values[row] != value {
        values[row] = value;
    }
}

/// Free rows as a bit set; finding the lowest starts at the first word that may have one.
#[derive(Debug)]
struct FreeRows {
    words: Vec<u64>,
    first: usize,
    len: usize,
}

impl FreeRows {
    fn new(num_rows: usize) -> Self {
        let mut words = vec![u64::MAX; num_rows.div_ceil(64)];
        if !num_rows.is_multiple_of(64) {
            *words.last_mut().expect("there is at least one row") = (1 << (num_rows % 64)) - 1;
        }
        Self { words, first: 0, len: num_rows }
    }

    fn take_lowest(&mut self) -> Option<u32> {
        while *self.words.get(self.first)? == 0 {
            self.first += 1;
        }
        let word = &mut self.words[self.first];
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        self.len -= 1;
        Some(self.first as u32 * 64 + bit)
    }

    fn put(&mut self, row: u32) {
        let word = row as usize / 64;
        debug_assert_eq!(self.words[word] >> (row % 64) & 1, 0, "a row is freed once");
        self.words[word] |= 1 << (row % 64);
        self.first = self.first.min(word);
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_row_is_given_out_first() {
        let mut free = FreeRows::new(130);
        let taken: Vec<u32> = std::iter::from_fn(|| free.take_lowest()).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        for row in [129, 3, 64] {
            free.put(row);
        }
        assert_eq!((free.take_lowest(), free.take_lowest(), free.take_lowest()), (Some(3), Some(64), Some(129)));
        assert_eq!((free.take_lowest(), free.len), (None, 0));
    }
}
