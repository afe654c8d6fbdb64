//! Admission: which waiting sequences get a row and blocks.
//!
//! 1. A sequence is admitted with all blocks of its known tokens or not at all; a refusal changes nothing.
//! 2. Order: preempted sequences; then choices of started requests; then requests that have not started; each in order of arrival.
//! 3. Nothing passes a sequence that lacks memory. Only a request that has not started and waits for a block which another one is filling
//!    right now may be passed, for at most `MAX_DEFERRALS` steps and by at most `MAX_OVERTAKES` requests. Choices that wait for the
//!    prompt which one of them is computing are not in line yet.
//! 4. While paused, no request starts; choices of started ones do.

use super::Scheduler;
use super::choices::Fork;
use super::rows::Row;
use super::sequence::{Known, Sequences};
use crate::block::Parent;

/// Steps that a request waits for a block in flight instead of computing it a second time.
const MAX_DEFERRALS: u8 = 2;
/// Later arrivals that may be admitted before a request that waits so.
const MAX_OVERTAKES: u8 = 16;

/// Who may be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiter {
    /// A preempted sequence.
    Preempted { sequence: u32 },
    /// The next choice of the request in this slot.
    Choice { slot: u32 },
}

impl Waiter {
    /// Slot of its request.
    fn slot(self, sequences: &Sequences) -> u32 {
        match self {
            Self::Preempted { sequence } => sequences[sequence].request.slot(),
            Self::Choice { slot } => slot,
        }
    }
}

/// Why a sequence was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// Too few blocks are available.
    NoMemory,
    /// The next block it needs is being filled by a sequence in this plan.
    BlockInFlight,
}

impl Scheduler {
    /// Admits waiting sequences while rows, blocks and `budget` tokens last, and schedules their first tokens.
    pub(super) fn admit(&mut self, mut budget: usize, is_paused: bool) {
        let mut deferred: Vec<u32> = Vec::new();
        let mut cursor = self.first_waiter();
        while let Some(waiter) = cursor {
            let slot = waiter.slot(&self.sequences);
            let is_held_back = self.lacks_prompt_logits(slot) || is_paused && !self.request(slot).is_started();
            if budget == 0 || self.rows.num_free() == 0 || is_held_back {
                break;
            }
            let next = self.waiter_after(waiter);
            // Running sequences that may still need a block: an admission leaves one for each, so that a newcomer does not displace (or get
            // displaced) at once.
            let reserve = self.rows.num_growing();
            match self.try_admit(waiter, reserve) {
                Ok(row) => {
                    budget -= self.plan_chunk(row, budget);
                    if self.overtake(&deferred) {
                        break;
                    }
                    cursor = if self.has_more(waiter) { cursor } else { next };
                }
                Err(Refusal::BlockInFlight) => {
                    let Waiter::Choice { slot } = waiter else { unreachable!("a preempted sequence never waits so") };
                    deferred.push(slot);
                    if deferred.len() > usize::from(MAX_OVERTAKES) {
                        break;
                    }
                    cursor = next;
                }
                Err(Refusal::NoMemory) => break,
            }
        }
        for slot in deferred {
            self.request_mut(slot).num_deferrals += 1;
        }
    }

    /// Fills the rows, all of them free, with a fixed group of sequences, whose tokens are then scheduled like those of any running one.
    pub(super) fn admit_group(&mut self, is_paused: bool) {
        while let Some(waiter) = self.first_waiter().filter(|_| self.rows.num_free() > 0) {
            if is_paused && !self.request(waiter.slot(&self.sequences)).is_started() {
                break;
            }
            let Ok(row) = self.try_admit(waiter, self.rows.num_growing()) else {
                break;
            };
            if self.num_remaining_tokens(row) == 1 {
                self.enter_lane(row, None);
            }
        }
    }

    fn first_waiter(&self) -> Option<Waiter> {
        let preempted = self.preempted.first().map(|sequence| Waiter::Preempted { sequence });
        preempted.or_else(|| self.waiting.first().map(|slot| Waiter::Choice { slot }))
    }

    fn waiter_after(&self, waiter: Waiter) -> Option<Waiter> {
        let after = match waiter {
            Waiter::Preempted { sequence } => {
                if let Some(sequence) = self.preempted.after(sequence) {
                    return Some(Waiter::Preempted { sequence });
                }
                self.waiting.first()
            }
            Waiter::Choice { slot } => self.waiting.after(slot),
        };
        after.map(|slot| Waiter::Choice { slot })
    }

    /// Whether the request that was just served has another choice that could start.
    fn has_more(&self, waiter: Waiter) -> bool {
        matches!(waiter, Waiter::Choice { slot } if self.request(slot).is_waiting())
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

    /// Gives a waiting sequence a row and the blocks of its known tokens; cached and pinned ones count as computed.
    fn try_admit(&mut self, waiter: Waiter, reserve: usize) -> Result<u32, Refusal> {
        let num_new = loop {
            self.find_hits(waiter);
            if let Some(num_new) = self.num_new_blocks(waiter, reserve) {
                break num_new;
            }
            // Nobody who runs will give back a block, so what is pinned for others has to go.
            if self.num_running() > 0 || !self.drop_newest_pins(false) {
                return Err(Refusal::NoMemory);
            }
        };
        if self.waits_for_block_in_flight(waiter) {
            return Err(Refusal::BlockInFlight);
        }
        Ok(self.start(waiter, num_new))
    }

    /// Blocks that the sequence needs besides its `hits`; `None` if there is no room for them.
    fn num_new_blocks(&self, waiter: Waiter, reserve: usize) -> Option<usize> {
        let block_size = self.config.block_size;
        let (num_tokens, request) = match waiter {
            Waiter::Preempted { sequence } => {
                let sequence = &self.sequences[sequence];
                (sequence.known().tokens.len(), self.request(sequence.request.slot()))
            }
            Waiter::Choice { slot } => (self.request(slot).prompt().tokens.len(), self.request(slot)),
        };
        let num_blocks = num_tokens.div_ceil(block_size);
        let num_new = num_blocks - self.hits.blocks.len();
        let max_blocks = request.max_blocks(block_size);
        // An empty engine admits its first sequence without reserve: it fits alone, or `submit` would have refused it.
        let reserve = if self.num_running() == 0 { 0 } else { reserve + usize::from(max_blocks > num_blocks) };
        let num_unheld_hits = self.hits.blocks.iter().filter(|&&block| self.pool.ref_count(block) == 0).count();
        (self.pool.num_available() - num_unheld_hits >= num_new + reserve).then_some(num_new)
    }

    /// Finds computed blocks of a sequence's known tokens, in the cache or pinned by its request; at least one token is left to compute.
    fn find_hits(&mut self, waiter: Waiter) {
        let block_size = self.config.block_size;
        self.hits.blocks.clear();
        self.hits.are_published = self.config.enable_prefix_caching;
        if self.request(waiter.slot(&self.sequences)).num_untold_prompt_logprobs() > 0 {
            // What is found is not computed, and has no logits.
            return;
        }
        let (slot, root, known) = match waiter {
            Waiter::Choice { slot } => {
                let request = self.requests[slot as usize].as_ref().expect("a listed slot has a request");
                (slot, request.root, request.prompt())
            }
            Waiter::Preempted { sequence } => {
                let sequence = &mut self.sequences[sequence];
                let slot = sequence.request.slot();
                let request = self.requests[slot as usize].as_ref().expect("a sequence has a request");
                let known = sequence.known_mut();
                if self.config.enable_prefix_caching {
                    let num_blocks = (known.tokens.len() - 1) / block_size;
                    known.hash_blocks(self.pool.root_hash(request.root), num_blocks, &self.shared.hasher, block_size);
                }
                (slot, request.root, &*known)
            }
        };
        let Known { tokens, hashes } = known;
        // Without a cache nothing is hashed, so nothing is found.
        let mut parent = Parent::Root(root);
        let blocks = hashes.iter().zip(tokens.chunks_exact(block_size));
        for (&hash, tokens) in blocks.take((tokens.len() - 1) / block_size) {
            let Some(block) = self.pool.find(parent, hash, tokens) else {
                break;
            };
            self.hits.blocks.push(block);
            parent = Parent::Block(block);
        }
        // Then, and after a reset of the cache, pins are all there is.
        let pins = &self.requests[slot as usize].as_ref().expect("a listed slot has a request").pins();
        if pins.len() > self.hits.blocks.len() {
            self.hits.blocks.clear();
            self.hits.blocks.extend_from_slice(pins);
            self.hits.are_published = false;
        }
    }

    /// Whether the first block that the request (with its `hits`) would compute is being filled in this plan by a sequence with the
    /// same prefix, and the request has not waited for that too often.
    fn waits_for_block_in_flight(&mut self, waiter: Waiter) -> bool {
        let Waiter::Choice { slot } = waiter else { return false };
        let block_size = self.config.block_size;
        let request = self.request(slot);
        let index = self.hits.blocks.len();
        let may_find = self.config.enable_prefix_caching && request.num_untold_prompt_logprobs() == 0;
        let is_candidate = may_find && !self.is_static() && !request.is_started();
        let prompt = request.prompt();
        let is_block_cacheable = index < (prompt.tokens.len() - 1) / block_size && index < prompt.hashes.len();
        let is_patient = request.num_deferrals < MAX_DEFERRALS && request.num_overtaken < MAX_OVERTAKES;
        if !is_candidate || !is_block_cacheable || !is_patient {
            return false;
        }
        let hash = prompt.hashes[index];
        if !self.may_be_filling(hash) {
            return false;
        }
        let (root, prompt) = (self.request(slot).root, self.request(slot).prompt());
        let block = index * block_size..(index + 1) * block_size;
        let fills = |row: u32, num_computed: usize, num_tokens: usize| {
            let row = self.rows.get(row);
            let other = &self.sequences[row.sequence];
            row.may_publish
                && num_computed < block.end
                && num_computed + num_tokens > block.start
                && self.request(other.request.slot()).root == root
                && other.known().hashes.get(index) == prompt.hashes.get(index)
                // Equal hashes are no proof: the whole prefix has to be the same, or the block could not be shared.
                && other.known().tokens.get(..block.end) == prompt.tokens.get(..block.end)
        };
        self.pieces.iter().any(|planned| {
            let num_computed = self.rows.get(planned.row).num_computed_tokens as usize;
            fills(planned.row, num_computed, planned.num_tokens as usize)
        }) || self
            .unsampled_lanes()
            .into_iter()
            .any(|lane| fills(self.lanes.rows[lane] as u32, self.lanes.num_tokens[lane] as usize - 1, 1))
    }

    /// Moves a sequence that fits to a row.
    fn start(&mut self, waiter: Waiter, num_new: usize) -> u32 {
        let sequence = match waiter {
            Waiter::Preempted { sequence } => {
                self.preempted.remove(sequence);
                sequence
            }
            Waiter::Choice { slot } => {
                self.count_start(slot);
                self.start_choice(slot)
            }
        };
        let row = self.occupy_row(sequence);
        self.take_blocks(row, num_new);
        self.enter_prefilling(row);
        self.introduce_row(sequence, row);
        self.count_recomputed(sequence);
        let slot = self.sequences[sequence].request.slot();
        if self.request(slot).num_unstarted_choices() == 0 {
            self.unpin(slot);
        }
        row
    }

    fn occupy_row(&mut self, index: u32) -> u32 {
        let num_hits = self.hits.blocks.len() as u32;
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[index];
        let request = self.requests[sequence.request.slot() as usize].as_ref().expect("a sequence has a request");
        let row = self.rows.acquire(Row {
            sequence: index,
            num_computed_tokens: num_hits * block_size as u32,
            num_blocks: 0,
            max_blocks: request.max_blocks(block_size) as u32,
            last_hash: 0,
            is_decoding: false,
            may_publish: self.hits.are_published,
            is_planned: false,
            is_forked_from: request.fork == (Fork::UnderWay { sequence: index }),
            wants_prompt_logits: request.num_untold_prompt_logprobs() > 0,
        });
        sequence.row = Some(row);
        self.rows.sampling.set(row, request);
        row
    }

    /// Tells the sampler what it has to know of the sequence in a new row.
    fn introduce_row(&mut self, sequence: u32, row: u32) {
        let sequence = &self.sequences[sequence];
        let request = self.requests[sequence.request.slot() as usize].as_ref().expect("a sequence has a request");
        let batch = &mut self.batches[self.current];
        batch.new_rows.push(row as i32);
        batch.new_row_tables.push(request.new_row(&sequence.known().tokens, &self.config.eos_token_ids));
    }

    fn take_blocks(&mut self, row: u32, num_new: usize) {
        for index in 0..self.hits.blocks.len() {
            let block = self.hits.blocks[index];
            self.pool.acquire(block);
            self.rows.push_block(row, block);
        }
        for _ in 0..num_new {
            let block = self.pool.allocate().expect("the blocks of an admission were counted");
            self.rows.push_block(row, block);
        }
        self.batches[self.current].block_table_updates.push(row, 0, self.rows.blocks(row));
    }

    /// Keeps `prefilling`, in which every row has a sequence now, in order of arrival; nearly always the newcomer is the newest.
    fn enter_prefilling(&mut self, row: u32) {
        let order = self.order(row);
        let is_older = |&other: &u32| self.order(other) < order;
        let at = self.prefilling.iter().rposition(is_older).map_or(0, |index| index + 1);
        self.prefilling.insert(at, row);
    }

    fn count_recomputed(&mut self, sequence: u32) {
        let num_hit_tokens = (self.hits.blocks.len() * self.config.block_size) as u32;
        let num_lost_tokens = std::mem::take(&mut self.sequences[sequence].num_lost_tokens);
        self.stats.num_recomputed_tokens += u64::from(num_lost_tokens.saturating_sub(num_hit_tokens));
    }

    /// Counts and tells that a request starts, with its first choice.
    fn count_start(&mut self, slot: u32) {
        let request = self.request(slot);
        if request.is_started() {
            return;
        }
        let (id, num_prompt_tokens) = (request.id.as_u64(), u64::from(request.num_prompt_tokens));
        let num_hit_tokens = self.hits.blocks.len() * self.config.block_size;
        self.shared.gate.release(&request.reservation());
        self.stats.num_prompt_tokens += num_prompt_tokens;
        self.stats.num_cached_prompt_tokens += num_hit_tokens as u64;
        self.pending.started_request_ids.push(id);
        self.pending.started_num_cached_tokens.push(num_hit_tokens as i32);
    }
}
