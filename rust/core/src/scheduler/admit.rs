//! Admission: which waiting requests get a row and blocks.
//!
//! 1. A request is admitted with all blocks of its known tokens or not at all; a refusal changes nothing.
//! 2. First come, first served: nothing passes a request that lacks memory. Only a request that waits for a block which another one is
//!    filling right now may be passed, for at most `MAX_DEFERRALS` steps and by at most `MAX_OVERTAKES` requests.
//! 3. A preempted request comes before all that have not started, and is never passed.

use super::rows::Row;
use super::{Request, Scheduler, State};
use crate::block::Parent;
use crate::row_tables::NewRow;

/// Steps that a request waits for a block in flight instead of computing it a second time.
const MAX_DEFERRALS: u8 = 2;
/// Later arrivals that may be admitted before a request that waits so.
const MAX_OVERTAKES: u8 = 16;

/// Why a request was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// Too few blocks are available.
    NoMemory,
    /// The next block it needs is being filled by a sequence in this plan.
    BlockInFlight,
}

impl Scheduler {
    /// Admits waiting requests while rows, blocks and `budget` tokens last, and schedules their first tokens.
    pub(super) fn admit(&mut self, mut budget: usize) {
        let mut growth = None;
        let mut deferred: Vec<u32> = Vec::new();
        let mut cursor = self.waiting.first();
        while let Some(slot) = cursor {
            if budget == 0 || self.rows.num_free() == 0 {
                break;
            }
            cursor = self.waiting.after(slot);
            let reserve = *growth.get_or_insert_with(|| self.num_growing());
            match self.try_admit(slot, reserve) {
                Ok(row) => {
                    growth = Some(reserve + usize::from(self.rows.get(row).may_grow(self.config.block_size)));
                    budget -= self.plan_chunk(row, budget);
                    if self.overtake(&deferred) {
                        break;
                    }
                }
                Err(Refusal::BlockInFlight) => {
                    deferred.push(slot);
                    if deferred.len() > usize::from(MAX_OVERTAKES) {
                        break;
                    }
                }
                Err(Refusal::NoMemory) => break,
            }
        }
        for slot in deferred {
            self.request_mut(slot).num_deferrals += 1;
        }
    }

    /// Fills the rows, all of them free, with a fixed group of requests, whose tokens are then scheduled like those of any running sequence.
    pub(super) fn admit_group(&mut self) {
        let mut reserve = 0;
        while let Some(slot) = self.waiting.first().filter(|_| self.rows.num_free() > 0) {
            let Ok(row) = self.try_admit(slot, reserve) else {
                break;
            };
            reserve += usize::from(self.rows.get(row).may_grow(self.config.block_size));
        }
    }

    /// Counts that each of `deferred` was passed once more; returns whether one of them must not be passed again.
    fn overtake(&mut self, deferred: &[u32]) -> bool {
        let mut is_limit_reached = false;
        for &slot in deferred {
            let request = self.request_mut(slot);
            request.num_overtaken += 1;
            is_limit_reached |= request.num_overtaken >= MAX_OVERTAKES;
        }
        is_limit_reached
    }

    /// Running sequences that may still need a block: an admission leaves one for each, so that a newcomer does not displace
    /// (or get displaced) at once.
    fn num_growing(&self) -> usize {
        let block_size = self.config.block_size;
        self.running.iter().filter(|&&row| self.rows.get(row).may_grow(block_size)).count()
    }

    /// Gives a waiting request a row and the blocks of its known tokens; cached ones count as computed.
    fn try_admit(&mut self, slot: u32, reserve: usize) -> Result<u32, Refusal> {
        let block_size = self.config.block_size;
        self.find_hits(slot);
        let request = self.request(slot);
        let num_blocks = request.tokens.len().div_ceil(block_size);
        let num_new = num_blocks - self.hits.len();
        let max_blocks = (request.max_num_tokens as usize - 1).div_ceil(block_size);
        // An empty engine admits its first request without reserve: it fits alone, or `submit` would have refused it.
        let reserve = if self.running.is_empty() { 0 } else { reserve + usize::from(max_blocks > num_blocks) };
        let num_unheld_hits = self.hits.iter().filter(|&&block| self.pool.ref_count(block) == 0).count();
        if self.pool.num_available() - num_unheld_hits < num_new + reserve {
            return Err(Refusal::NoMemory);
        }
        if self.waits_for_block_in_flight(slot) {
            return Err(Refusal::BlockInFlight);
        }
        Ok(self.start(slot, num_new))
    }

    /// Finds the cached blocks of a request's known tokens; at least one token is left to compute.
    fn find_hits(&mut self, slot: u32) {
        self.hits.clear();
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        let max_hits = (request.tokens.len() - 1) / block_size;
        // A preempted request has not hashed what it generated after the cache was reset under it.
        request.hash_blocks(max_hits, &self.shared.hasher, block_size);
        let mut parent = Parent::Root(request.root);
        for (&hash, tokens) in request.hashes.iter().zip(request.tokens.chunks_exact(block_size)).take(max_hits) {
            let Some(block) = self.pool.find(parent, hash, tokens) else {
                break;
            };
            self.hits.push(block);
            parent = Parent::Block(block);
        }
    }

    /// Whether the first block that the request (with its `hits`) would compute is being filled in this plan by a sequence with the
    /// same prefix, and the request has not waited for that too often.
    fn waits_for_block_in_flight(&mut self, slot: u32) -> bool {
        let block_size = self.config.block_size;
        let request = self.request(slot);
        let index = self.hits.len();
        let is_candidate = self.config.enable_prefix_caching && !self.is_static() && !request.is_started;
        let is_block_cacheable = index < (request.tokens.len() - 1) / block_size && index < request.hashes.len();
        let is_patient = request.num_deferrals < MAX_DEFERRALS && request.num_overtaken < MAX_OVERTAKES;
        if !is_candidate || !is_block_cacheable || !is_patient {
            return false;
        }
        let hash = request.hashes[index];
        if !self.may_be_filling(hash) {
            return false;
        }
        let request = self.request(slot);
        let block = index * block_size..(index + 1) * block_size;
        self.chunks.iter().chain(&self.decodes).any(|planned| {
            let row = self.rows.get(planned.row);
            let other = self.request(row.request.expect("a planned row has a sequence").slot());
            let computed_after = (row.num_computed_tokens + planned.num_tokens) as usize;
            row.may_publish
                && row.num_published_blocks as usize <= index
                && computed_after > block.start
                && other.root == request.root
                && other.hashes.get(index) == request.hashes.get(index)
                // Equal hashes are no proof: the whole prefix has to be the same, or the block could not be shared.
                && other.tokens.get(..block.end) == request.tokens.get(..block.end)
        })
    }

    /// Moves a request that fits from the waiting list to a row.
    fn start(&mut self, slot: u32, num_new: usize) -> u32 {
        let num_hits = self.hits.len() as u32;
        let num_hit_tokens = num_hits * self.config.block_size as u32;
        let may_publish = self.config.enable_prefix_caching;
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        let row = self.rows.acquire(Row {
            request: Some(request.id),
            arrival: request.arrival,
            num_tokens: request.tokens.len() as u32,
            num_computed_tokens: num_hit_tokens,
            num_prompt_tokens: request.num_prompt_tokens,
            max_num_tokens: request.max_num_tokens,
            last_token: *request.tokens.last().expect("a request has at least one token"),
            num_blocks: 0,
            num_published_blocks: num_hits,
            may_publish,
            is_planned: false,
        });
        let has_tables = !request.logit_bias.is_empty() || !request.bad_words.is_empty();
        self.rows.sampling.set(row, &request.sampling, request.seed, has_tables);
        request.state = State::Running { row };
        self.waiting.remove(slot);
        self.take_blocks(row, num_new);
        self.enter_running(row);
        self.introduce_row(slot, row);
        self.count_start(slot, num_hit_tokens);
        row
    }

    /// Tells the sampler what it has to know of the sequence in a new row.
    fn introduce_row(&mut self, slot: u32, row: u32) {
        let request = self.requests[slot as usize].as_ref().expect("a listed slot has a request");
        let batch = &mut self.buffers[self.current].batch;
        batch.new_rows.push(row as i32);
        batch.new_row_tables.push(request.new_row(&self.config.eos_token_ids));
    }

    fn take_blocks(&mut self, row: u32, num_new: usize) {
        for index in 0..self.hits.len() {
            let block = self.hits[index];
            self.pool.acquire(block);
            self.rows.push_block(row, block);
        }
        for _ in 0..num_new {
            let block = self.pool.allocate().expect("the blocks of an admission were counted");
            self.rows.push_block(row, block);
        }
        self.table_updates.push(row, 0, self.rows.blocks(row));
    }

    /// Keeps `running` in order of arrival; nearly always the newcomer is the newest.
    fn enter_running(&mut self, row: u32) {
        let arrival = self.rows.get(row).arrival;
        let is_older = |&other: &u32| self.rows.get(other).arrival < arrival;
        let at = self.running.iter().rposition(is_older).map_or(0, |index| index + 1);
        self.running.insert(at, row);
    }

    fn count_start(&mut self, slot: u32, num_hit_tokens: u32) {
        let request = self.requests[slot as usize].as_mut().expect("a listed slot has a request");
        if request.is_started {
            self.num_preempted_waiting -= 1;
            self.stats.num_recomputed_tokens += u64::from(request.num_lost_tokens.saturating_sub(num_hit_tokens));
            request.num_lost_tokens = 0;
            return;
        }
        request.is_started = true;
        self.shared.gate.release(u64::from(request.num_prompt_tokens));
        self.stats.num_prompt_tokens += u64::from(request.num_prompt_tokens);
        self.stats.num_cached_prompt_tokens += u64::from(num_hit_tokens);
        self.output.started_request_ids.push(request.id.as_u64());
        self.output.started_num_cached_tokens.push(num_hit_tokens as i32);
    }
}

impl Request {
    fn new_row<'a>(&'a self, eos_token_ids: &'a [i32]) -> NewRow<'a> {
        let needs_history = self.sampling.has_penalty() || !self.bad_words.is_empty();
        let eos: &[i32] = if self.ignore_eos { &[] } else { eos_token_ids };
        let banned = if self.sampling.min_tokens > 0 { [eos, &*self.stop_token_ids] } else { [&[] as &[i32]; 2] };
        NewRow {
            history: if needs_history { &self.tokens } else { &[] },
            num_prompt_tokens: if needs_history { self.num_prompt_tokens as usize } else { 0 },
            bias: &self.logit_bias,
            banned,
            bad_words: &self.bad_words,
        }
    }
}
