//! Admission: which waiting sequences get a row and blocks.
//!
//! 1. A sequence is admitted with all blocks of its known tokens or not at all; a refusal changes nothing.
//! 2. Order within a flow: as `flows.rs` says. Nobody passes a preempted sequence that lacks memory.
//! 3. A request that has not started may be passed by later ones of its flow: for at most `MAX_DEFERRALS` steps if it waits for a block
//!    which another sequence is filling right now, and while it lacks memory, if the policy says so; by `MAX_OVERTAKES` or K of them in all.
//!    Choices that wait for the prompt which one of them is computing are not in line yet.
//! 4. While a request of a class that is not at its cap lacks memory, nothing of a lower class starts.
//! 5. While paused, no request starts; choices of started ones do.

use super::budget::Budget;
use super::choices::Fork;
use super::flows::{MAX_RETURNED, Scan, Waiter};
use super::rows::Row;
use super::sequence::{Known, Sequence, Sequences};
use super::{Scheduler, estimate};
use crate::block::Parent;
use crate::policy::Class;
use crate::trace::TraceKind;

/// Steps that a request waits for a block in flight instead of computing it a second time.
const MAX_DEFERRALS: u8 = 2;
/// Later arrivals that may be admitted before a request that waits so.
const MAX_OVERTAKES: u8 = 16;
/// Flows for which a plan looks for memory in vain, at most: planning is bounded. More than may have come back from aside, so that it gets
/// to flows that were not looked at before.
const MAX_SHORT_FLOWS: usize = MAX_RETURNED + 16;
/// Requests behind the first of their flow that lacks memory for which a plan does so.
const MAX_MISFITS: usize = 15;

impl Waiter {
    /// Slot of its request.
    pub(super) fn slot(self, sequences: &Sequences) -> u32 {
        match self {
            Self::Preempted { sequence } => sequences[sequence].slot,
            Self::Choice { slot } => slot,
        }
    }
}

/// Why a sequence was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Too few blocks are available.
    NoMemory,
    /// The next block it needs is being filled by a sequence in this plan.
    BlockInFlight,
}

/// What came of looking at the next waiter of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// It runs.
    Admitted,
    /// It is passed in this plan.
    Passed,
    /// Nothing more of the flow starts in this plan.
    Closed,
    /// Nor does it here, since memory was looked for in vain.
    Short,
}

impl Scan {
    /// Nothing more of the flow starts in this plan.
    fn closed(self) -> Look {
        if self.lacks_memory { Look::Short } else { Look::Closed }
    }
}

/// A request that others of its flow pass in this plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassedBy {
    slot: u32,
    flow: u32,
    lacks_memory: bool,
}

impl Scheduler {
    /// Looks at the next waiter of a flow, admits it if it can start, and schedules its first tokens.
    pub(super) fn admit_next(&mut self, flow: u32, budget: &mut Budget, is_paused: bool) -> Look {
        let mut scan = self.flows.get(flow).scan;
        if scan.step_id != self.step_id {
            scan = Scan { step_id: self.step_id, next: self.first_waiter(flow), ..Scan::default() };
        }
        let Some(waiter) = scan.next.filter(|&waiter| self.may_start(flow, waiter, is_paused)) else {
            return scan.closed();
        };
        let after = self.waiter_after(flow, waiter);
        let look = match self.try_admit(waiter) {
            Ok(row) => {
                self.plan_chunk(row, budget);
                let may_go_on = !self.note_overtaking(flow);
                let next = if self.has_more(waiter) { Some(waiter) } else { after };
                scan.next = next.filter(|_| may_go_on);
                Look::Admitted
            }
            Err(refusal) => {
                let may_go_on = self.pass(flow, waiter, refusal, scan.lacks_memory);
                scan.lacks_memory |= refusal == Refusal::NoMemory;
                if may_go_on && scan.num_passed < u32::from(MAX_OVERTAKES) {
                    scan.next = after;
                    scan.num_passed += 1;
                    Look::Passed
                } else {
                    scan.next = None;
                    scan.closed()
                }
            }
        };
        self.flows.get_mut(flow).scan = scan;
        look
    }

    /// Whether nothing but room keeps a waiter from starting.
    pub(super) fn may_start(&self, flow: u32, waiter: Waiter, is_paused: bool) -> bool {
        let entry = self.flows.get(flow);
        let slot = waiter.slot(&self.sequences);
        let is_new = matches!(waiter, Waiter::Choice { .. });
        let is_held_back = self.lacks_prompt_logits(slot) || is_paused && !self.request(slot).is_started();
        !is_held_back && entry.num_running < entry.max_running && !(is_new && self.sequences.is_full())
    }

    /// Notes that a waiter does not start in this plan; returns whether others of its flow may.
    fn pass(&mut self, flow: u32, waiter: Waiter, refusal: Refusal, is_flow_short: bool) -> bool {
        let slot = waiter.slot(&self.sequences);
        let lacks_memory = refusal == Refusal::NoMemory;
        if lacks_memory {
            *(if is_flow_short { &mut self.num_misfits } else { &mut self.num_short_flows }) += 1;
            self.lacks_memory[self.flows.get(flow).class as usize] = true;
            let request = self.request(slot);
            let is_new = matches!(waiter, Waiter::Choice { .. }) && !request.is_started();
            if !is_new || request.num_overtaken >= self.rules.max_overtakes || self.num_misfits >= MAX_MISFITS {
                return false;
            }
        }
        self.passed.push(PassedBy { slot, flow, lacks_memory });
        true
    }

    /// Counts that everybody of the flow who is passed in this plan was passed once more; returns whether one of them must not be passed again.
    fn note_overtaking(&mut self, flow: u32) -> bool {
        let mut is_limit_reached = false;
        for index in 0..self.passed.len() {
            let passed = self.passed[index];
            if passed.flow == flow {
                let limit = if passed.lacks_memory { self.rules.max_overtakes } else { MAX_OVERTAKES };
                let request = self.request_mut(passed.slot);
                request.num_overtaken += 1;
                is_limit_reached |= request.num_overtaken >= limit;
            }
        }
        is_limit_reached
    }

    /// Counts the steps of those that wait for a block in flight.
    pub(super) fn end_admission(&mut self) {
        while let Some(passed) = self.passed.pop() {
            self.request_mut(passed.slot).num_deferrals += u8::from(!passed.lacks_memory);
        }
    }

    /// Whether memory was looked for in vain so often that the plan stops looking, or somebody of a higher class lacks it.
    pub(super) fn is_short_for(&self, class: Class, is_paused: bool) -> bool {
        // Those aside were not looked at in this plan. If a pause or a cap keeps them, it is not memory.
        let is_aside = |class| !is_paused && !self.is_at_cap(class) && self.flows.has_aside(class);
        let mut higher = Class::ALL[..class as usize].iter();
        self.num_short_flows >= MAX_SHORT_FLOWS
            || higher.any(|&class| self.lacks_memory[class as usize] || is_aside(class))
    }

    /// Whether as many sequences of a class run as may.
    pub(super) fn is_at_cap(&self, class: Class) -> bool {
        self.num_running_of[class as usize] >= self.rules.class_caps[class as usize]
    }

    /// Fills the rows, all of them free, with a fixed group of sequences, whose tokens are then scheduled like those of any running one.
    pub(super) fn admit_group(&mut self, is_paused: bool) {
        let Some(turn) = self.flows.peek(Class::Standard) else { return };
        while let Some(waiter) = self.first_waiter(turn.flow).filter(|_| self.rows.num_free() > 0) {
            if is_paused && !self.request(waiter.slot(&self.sequences)).is_started() {
                break;
            }
            let Ok(row) = self.try_admit(waiter) else {
                break;
            };
            if self.num_remaining_tokens(row) == 1 {
                self.enter_lane(row, None);
            }
        }
    }

    pub(super) fn first_waiter(&self, flow: u32) -> Option<Waiter> {
        let preempted = self.flows.preempted_after(flow, None).map(|sequence| Waiter::Preempted { sequence });
        preempted.or_else(|| self.first_choice(flow))
    }

    /// Started requests, then those with a deadline, then the others.
    fn first_choice(&self, flow: u32) -> Option<Waiter> {
        let first = self.flows.get(flow).waiting.first();
        let started = first.filter(|&slot| self.request(slot).is_started());
        let slot = started.or_else(|| self.flows.after_deadline(flow, None)).or(first);
        slot.map(|slot| Waiter::Choice { slot })
    }

    fn waiter_after(&self, flow: u32, waiter: Waiter) -> Option<Waiter> {
        let slot = match waiter {
            Waiter::Preempted { sequence } => {
                let after = self.flows.preempted_after(flow, Some((self.sequences[sequence].order, sequence)));
                return after.map(|sequence| Waiter::Preempted { sequence }).or_else(|| self.first_choice(flow));
            }
            Waiter::Choice { slot } => slot,
        };
        let request = self.request(slot);
        let after = if let Some(deadline) = self.deadline_key(slot) {
            let key = (deadline, request.arrival, slot);
            self.flows.after_deadline(flow, Some(key)).or_else(|| {
                let line = self.flows.slot_links.iter(&self.flows.get(flow).waiting);
                line.into_iter().find(|&slot| !self.request(slot).is_started())
            })
        } else {
            let after = self.flows.slot_links.after(slot);
            let is_last_started = request.is_started() && after.is_none_or(|slot| !self.request(slot).is_started());
            if is_last_started { self.flows.after_deadline(flow, None).or(after) } else { after }
        };
        after.map(|slot| Waiter::Choice { slot })
    }

    /// Place in time of a request in the line of those that have a deadline; absent = it stands among the others.
    pub(super) fn deadline_key(&self, slot: u32) -> Option<u64> {
        let request = self.request(slot);
        if !self.rules.orders_by_deadline || request.is_started() { None } else { request.next_deadline_ns() }
    }

    /// Whether the request that was just served has another choice that could start.
    fn has_more(&self, waiter: Waiter) -> bool {
        matches!(waiter, Waiter::Choice { slot } if self.request(slot).is_waiting())
    }

    /// Gives a waiting sequence a row and the blocks of its known tokens; cached and pinned ones count as computed.
    pub(super) fn try_admit(&mut self, waiter: Waiter) -> Result<u32, Refusal> {
        let num_new = loop {
            self.find_hits(waiter);
            let needs = self.needs(waiter);
            if self.shortage(needs) == 0 {
                break needs.num_new;
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

    /// What a sequence needs besides its `hits`.
    pub(super) fn needs(&self, waiter: Waiter) -> estimate::Needs {
        let block_size = self.config.block_size;
        let (num_tokens, request) = match waiter {
            Waiter::Preempted { sequence } => {
                let sequence = &self.sequences[sequence];
                (sequence.known().tokens.len(), self.request(sequence.slot))
            }
            Waiter::Choice { slot } => (self.request(slot).prompt().tokens.len(), self.request(slot)),
        };
        let num_blocks = num_tokens.div_ceil(block_size);
        estimate::Needs {
            num_new: num_blocks - self.hits.blocks.len(),
            num_unheld_hits: self.hits.blocks.iter().filter(|&&block| self.pool.ref_count(block) == 0).count(),
            num_growth: request.max_blocks(block_size) - num_blocks,
            num_generated: num_tokens as u32 - request.num_prompt_tokens,
            num_left: request.max_num_tokens - num_tokens as u32,
            class: self.flows.get(self.flows.of(request.id.slot())).class,
        }
    }

    /// Finds computed blocks of a sequence's known tokens, in the cache or pinned by its request; at least one token is left to compute.
    pub(super) fn find_hits(&mut self, waiter: Waiter) {
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
                let slot = sequence.slot;
                let request = self.requests[slot as usize].as_ref().expect("a sequence has a request");
                let known = sequence.known_mut();
                if self.config.enable_prefix_caching {
                    let num_blocks = (known.tokens.len() - 1) / block_size;
                    known.hash_blocks(self.pool.root_hash(request.root), num_blocks, &self.shared.hasher, block_size);
                }
                (slot, request.root, &*known)
            }
        };
        let Known { tokens, hashes, .. } = known;
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
                && self.request(other.slot).root == root
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
                let Sequence { slot, order, .. } = self.sequences[sequence];
                self.flows.remove_preempted(self.flows.of(slot), order, sequence);
                sequence
            }
            Waiter::Choice { slot } => {
                self.count_start(slot);
                self.start_choice(slot)
            }
        };
        let row = self.occupy_row(sequence);
        let is_new = matches!(waiter, Waiter::Choice { .. });
        let kind = if is_new { TraceKind::Admitted } else { TraceKind::Resumed };
        self.trace(kind, sequence, self.rows.get(row).num_computed_tokens);
        self.take_blocks(row, num_new);
        self.enter_prefilling(row);
        self.introduce_row(sequence, row);
        self.count_recomputed(sequence);
        self.note_growth(row);
        let slot = self.sequences[sequence].slot;
        self.note_start(slot);
        self.flows.stamp(slot, self.now_ns);
        self.note_wait(slot, true);
        if self.request(slot).num_unstarted_choices() == 0 {
            self.unpin(slot);
        }
        row
    }

    fn occupy_row(&mut self, index: u32) -> u32 {
        let num_hits = self.hits.blocks.len() as u32;
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[index];
        let request = self.requests[sequence.slot as usize].as_ref().expect("a sequence has a request");
        let row = self.rows.acquire(Row {
            sequence: index,
            num_computed_tokens: num_hits * block_size as u32,
            num_blocks: 0,
            max_blocks: request.max_blocks(block_size) as u32,
            last_hash: 0,
            is_decoding: false,
            may_publish: self.hits.are_published,
            is_planned: false,
            is_forked_from: request.fork() == (Fork::UnderWay { sequence: index }),
            wants_prompt_logits: request.num_untold_prompt_logprobs() > 0,
        });
        sequence.row = row;
        self.rows.sampling.set(row, request);
        let num_cached_tokens = num_hits * block_size as u32;
        let flow = self.flows.of(request.id.slot());
        let num_charged = sequence.known().num_charged_tokens.max(num_cached_tokens);
        let num_shared = self.hits.blocks.iter().filter(|&&block| self.pool.ref_count(block) > 0).count() as u32;
        self.rows.enter_flow(row, flow, num_charged, num_shared);
        self.num_running_of[self.flows.count_start(flow) as usize] += 1;
        row
    }

    /// Tells the sampler what it has to know of the sequence in a new row.
    fn introduce_row(&mut self, sequence: u32, row: u32) {
        let sequence = &self.sequences[sequence];
        let request = self.requests[sequence.slot as usize].as_ref().expect("a sequence has a request");
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
        let class = order.class() as usize;
        let is_older = |&other: &u32| self.order(other) < order;
        let at = self.prefilling[class].iter().rposition(is_older).map_or(0, |index| index + 1);
        self.prefilling[class].insert(at, row);
    }

    fn count_recomputed(&mut self, sequence: u32) {
        let num_hit_tokens = (self.hits.blocks.len() * self.config.block_size) as u32;
        let num_lost_tokens = std::mem::take(&mut self.sequences[sequence].known_mut().num_lost_tokens);
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
