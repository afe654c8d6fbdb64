//! Decoding: who has a lane, which lanes run in a step, and what their tokens bring.
//!
//! The usual step runs all lanes: it is planned and committed with passes over arrays, and only notable lanes (a block is full, an end)
//! are looked at one by one. If the budget or the memory does not reach all, they take turns.

use std::ops::Range;

use super::Scheduler;
use super::budget::Budget;
use super::commit::Sample;
use super::lanes::{HAS_EXTRAS, HAS_STOP_IDS, IGNORES_EOS, IS_UNSAMPLED, Lane, NO_SLOT};
use super::sequence::Order;
use crate::batch::StepResult;
use crate::block::{BlockId, Parent, Published};
use crate::policy::Class;
use crate::request::FinishReason;

/// Notable lanes whose reads of memory wait together.
const GROUP_LEN: usize = 64;

/// Lanes of the batch in flight, or being made.
#[derive(Debug, Default)]
pub(super) struct PlannedLanes {
    /// The first ones, and how many there were.
    num_leading: usize,
    num_lanes: usize,
    /// Besides them these.
    listed: Vec<u32>,
}

impl PlannedLanes {
    pub(super) fn clear(&mut self) {
        self.num_leading = 0;
        self.num_lanes = 0;
        self.listed.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.num_leading + self.listed.len()
    }

    pub(super) fn are_all(&self) -> bool {
        self.num_leading > 0 && self.num_leading == self.num_lanes
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_leading).chain(self.listed.iter().map(|&lane| lane as usize))
    }

    /// All lanes of a range are planned, of `num_lanes` in total.
    fn add(&mut self, range: Range<usize>, num_lanes: usize) {
        self.num_lanes = num_lanes;
        if self.listed.is_empty() && self.num_leading == range.start {
            self.num_leading = range.end;
        } else {
            self.listed.extend(range.map(|lane| lane as u32));
        }
    }
}

/// What a plan keeps for batch decodes until the others' prompts were served.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptForBatch {
    num_decodes: usize,
    time_ns: f64,
}

impl Scheduler {
    /// Gives a lane to a prefilling sequence that lacks exactly one token: the last it knew, or the one that was just sampled.
    ///
    /// Returns the number of the lane.
    pub(super) fn enter_lane(&mut self, row: u32, sampled: Option<i32>) -> usize {
        let state = *self.rows.get(row);
        let sequence = &self.sequences[state.sequence];
        let request = self.requests[sequence.slot as usize].as_ref().expect("a sequence has a request");
        let known = &sequence.known().tokens;
        let (num_computed, block_size) = (state.num_computed_tokens as usize, self.config.block_size);
        debug_assert_eq!(known.len() + usize::from(sampled.is_some()), num_computed + 1);
        let (last_block, offset) = (num_computed / block_size, num_computed % block_size);
        let slot = match self.rows.blocks(row).get(last_block) {
            Some(&block) => i64::from(block) * block_size as i64 + offset as i64,
            None => NO_SLOT,
        };
        let token = sampled.unwrap_or_else(|| known[num_computed]);
        let mut flags = if sampled.is_some() { 0 } else { IS_UNSAMPLED };
        flags |= if request.ignore_eos { IGNORES_EOS } else { 0 };
        flags |= if self.rows.sampling.extras_below[row as usize] == 0 { 0 } else { HAS_EXTRAS };
        flags |= if request.extras().stop_token_ids.is_empty() { 0 } else { HAS_STOP_IDS };
        let lane = Lane {
            rows: row as i32,
            orders: sequence.order,
            request_ids: request.id.as_u64(),
            choice_ids: sequence.order.choice() as u8,
            tokens: token,
            num_tokens: num_computed as i32 + 1,
            num_prompt_tokens: request.num_prompt_tokens as i32,
            max_num_tokens: request.max_num_tokens as i32,
            slots: slot,
            tail_ends: self.rows.tail_start(row) + offset as u32,
            quiet_steps: 0,
            num_logprobs: request.extras().num_logprobs,
            flags,
        };
        self.rows.set_tail(row, &known[last_block * block_size..num_computed]);
        self.rows.set_tail_tokens(&[lane.tail_ends], &[token]);
        let last_hash = match last_block {
            0 => self.pool.root_hash(request.root),
            _ if state.may_publish => self.pool.hash(self.rows.tables.get(row, last_block as u32 - 1)),
            _ => 0,
        };
        self.pace.add_target(request.extras().target_itl_us);
        if lane.orders.class() == Class::Batch {
            self.pace.note_batch_decode(row, self.step_id);
        }
        let at = self.lanes.insert(lane);
        self.lanes.quiet_steps[at] = self.quiet_steps(at);
        let state = self.rows.get_mut(row);
        state.is_decoding = true;
        state.last_hash = last_hash;
        let sequence = state.sequence;
        self.prefilling_has_gaps = true;
        if sampled.is_some() {
            self.sequences[sequence].known = None;
        }
        at
    }

    /// Steps until a lane is notable, from its next one on.
    fn quiet_steps(&self, lane: usize) -> i16 {
        if self.lanes.flags[lane] & (HAS_STOP_IDS | IS_UNSAMPLED) != 0 {
            return 0;
        }
        let offset = self.lanes.tail_ends[lane] - self.rows.tail_start(self.lanes.rows[lane] as u32);
        let room = self.config.block_size as i32 - offset as i32;
        // A block is shorter than i16 reaches.
        room.min(self.lanes.max_num_tokens[lane] - self.lanes.num_tokens[lane]) as i16
    }

    /// Schedules the lanes of a range, all of them if budget and memory reach that far.
    pub(super) fn plan_lanes(&mut self, range: Range<usize>, budget: &mut Budget) {
        let num_lanes = self.lanes.len();
        let num_full = self.lanes.find_full(&mut self.notable);
        let num_full = self.notable[..num_full].partition_point(|&lane| (lane as usize) < range.end);
        let first_full = self.notable[..num_full].partition_point(|&lane| (lane as usize) < range.start);
        let lacks_memory = num_full - first_full > self.pool.num_available();
        // There are gaps if an earlier range has preempted somebody.
        if range.len() > budget.tokens || lacks_memory || self.lanes.has_gaps() {
            let rotation = self.rotation;
            self.rotation = self.plan_lanes_in_turn(range, budget, usize::MAX, rotation);
            return;
        }
        for index in first_full..num_full {
            let has_grown = self.grow(self.notable[index] as usize);
            debug_assert!(has_grown, "the blocks were counted");
        }
        if budget.is_timed() {
            let num_kv_tokens = self.lanes.num_tokens[range.clone()].iter().map(|&count| count as u64).sum();
            self.spend_decodes(budget, range.len(), num_kv_tokens);
        } else {
            budget.tokens -= range.len();
        }
        if range.end == num_lanes {
            self.pace.count_all_batch_decodes(self.step_id);
        }
        self.planned_lanes.add(range, num_lanes);
    }

    /// How many batch decodes, those of this range, have to run in this plan. They run by turns that are spread over the steps; when others
    /// have ended or come back since, some would be late, and all up to the last of these are due.
    pub(super) fn num_batch_due(&mut self, range: Range<usize>) -> usize {
        let period = self.rules.batch_period;
        let num_in_turn = self.pace.due_batch_decodes(range.len(), period);
        let is_late = |ran: u64| ran + u64::from(period) < self.step_id;
        if !is_late(self.pace.all_batch_ran()) {
            return num_in_turn;
        }
        let first = Some(self.lanes.first_from(self.pace.batch_rotation)).filter(|lane| range.contains(lane));
        let lanes = (first.unwrap_or(range.start)..range.end).chain(range.start..first.unwrap_or(range.start));
        let is_lane_late =
            |(_, lane): &(usize, usize)| self.lanes.row(*lane).is_some_and(|row| is_late(self.pace.batch_ran(row)));
        let last_late = lanes.enumerate().filter(is_lane_late).last();
        last_late.map_or(num_in_turn, |(index, _)| num_in_turn.max(index + 1))
    }

    /// Takes from the budget what the batch decodes that are due need.
    pub(super) fn keep_for_batch(&self, num_due: usize, budget: &mut Budget) -> KeptForBatch {
        let num_decodes = num_due.min(budget.tokens);
        let mean_context = self.lanes.total_tokens() / self.lanes.num_live().max(1) as u64;
        let is_timed = budget.is_timed() && num_decodes > 0;
        let time_ns = if is_timed { self.pace.decode_ns(num_decodes, num_decodes as u64 * mean_context) } else { 0.0 };
        budget.tokens -= num_decodes;
        budget.time_ns -= time_ns;
        KeptForBatch { num_decodes, time_ns }
    }

    /// Schedules batch decodes with what was kept for them and what the others have left.
    pub(super) fn plan_batch_lanes(&mut self, first: usize, budget: &mut Budget, kept: KeptForBatch) {
        budget.tokens += kept.num_decodes;
        budget.time_ns += kept.time_ns;
        let range = first..self.lanes.len();
        // Those who are alone hold up nobody.
        let is_alone = self.planned_lanes.len() == 0 && self.pieces.is_empty();
        let is_limited = budget.is_timed() && !is_alone;
        let limit = if is_limited { self.num_timely_decodes(range.clone(), budget) } else { usize::MAX };
        let limit = limit.max(kept.num_decodes);
        if limit.min(budget.tokens) >= range.len() {
            self.plan_lanes(range, budget);
            return;
        }
        let rotation = self.pace.batch_rotation;
        self.pace.batch_rotation = self.plan_lanes_in_turn(range, budget, limit, rotation);
    }

    /// How many decodes of a range, whichever they are, fit the time that is left.
    fn num_timely_decodes(&self, range: Range<usize>, budget: &Budget) -> usize {
        let counts = self.lanes.num_tokens[range.clone()].iter().map(|&count| count as u64);
        let (longest, total) = counts.fold((0, 0), |(longest, total), count| (count.max(longest), total + count));
        if self.pace.decode_ns(range.len(), total) <= budget.time_ns {
            return usize::MAX;
        }
        let each = self.pace.decode_ns(1, longest).max(1.0);
        (budget.time_ns.max(0.0) / each) as usize
    }

    /// Schedules lanes of a range as far as budget, `limit` and memory last. If these do not reach all, they take turns, from `rotation` on,
    /// otherwise the oldest is first. Returns who is first next time.
    fn plan_lanes_in_turn(
        &mut self,
        range: Range<usize>,
        budget: &mut Budget,
        limit: usize,
        mut rotation: Order,
    ) -> Order {
        let mut left = budget.tokens.min(limit);
        let len = range.len();
        let take_turns = len > left;
        let is_inside = |lane: &usize| range.contains(lane);
        let first = Some(self.lanes.first_from(rotation)).filter(is_inside).unwrap_or(range.start);
        let start = if take_turns { first - range.start } else { 0 };
        let mut first_left_out = None;
        let first_listed = self.planned_lanes.listed.len();
        for offset in 0..len {
            let lane = range.start + (start + offset) % len;
            let Some(row) = self.lanes.row(lane) else { continue };
            if left > 0 && self.ensure_slot(lane) {
                left -= 1;
                self.rows.get_mut(row).is_planned = true;
                self.planned_lanes.listed.push(lane as u32);
                let num_kv_tokens = self.lanes.num_tokens[lane] as u64;
                self.spend_decodes(budget, 1, num_kv_tokens);
            } else if self.lanes.row(lane).is_some() {
                first_left_out = first_left_out.or(Some(self.lanes.orders[lane]));
            }
        }
        // Only the choice of victims asks for it.
        for index in first_listed..self.planned_lanes.listed.len() {
            let lane = self.planned_lanes.listed[index] as usize;
            let row = self.lanes.rows[lane] as u32;
            self.rows.get_mut(row).is_planned = false;
            if self.lanes.orders[lane].class() == Class::Batch {
                self.pace.count_batch_decode(row, self.step_id, self.rules.batch_period);
            }
        }
        if let (true, Some(order)) = (take_turns, first_left_out) {
            rotation = order;
        }
        rotation
    }

    /// Commits the lanes of the batch in flight with the leading samples of its (checked) result.
    pub(super) fn commit_decodes(&mut self, result: &StepResult<'_>) {
        let num_planned = self.planned_lanes.len();
        let has_errors =
            result.row_error.is_some_and(|row_error| row_error[..num_planned].iter().any(|&code| code != 0));
        if self.planned_lanes.are_all() && !has_errors && result.logprobs.is_none() {
            self.commit_all_lanes(&result.token_ids[..num_planned]);
            return;
        }
        let planned_lanes = std::mem::take(&mut self.planned_lanes);
        for (index, lane) in planned_lanes.iter().enumerate() {
            if self.lanes.row(lane).is_some() {
                self.commit_lane(lane, Sample::of(result, index), result);
            }
        }
        self.planned_lanes = planned_lanes;
    }

    fn commit_all_lanes(&mut self, tokens: &[i32]) {
        let mut kept = std::mem::take(&mut self.kept_tokens);
        let tokens = if self.lanes.has_gaps() {
            kept.clear();
            kept.extend_from_slice(tokens);
            self.lanes.compact_values(&mut kept);
            self.lanes.compact();
            &kept[..]
        } else {
            tokens
        };
        self.lanes.advance(tokens);
        let num_notable = self.lanes.find_notable(&self.config.eos_token_ids, &mut self.notable);
        let first_event = self.pending.len();
        let group_from = |start: usize| start..num_notable.min(start + GROUP_LEN);
        // What publishing the first of them reads arrives while the tokens are told.
        let mut hashes = self.hash_full_blocks(group_from(0));
        self.push_tokens(0..tokens.len(), tokens);
        for start in (0..num_notable).step_by(GROUP_LEN) {
            let group = group_from(start);
            if start > 0 {
                hashes = self.hash_full_blocks(group.clone());
            }
            // In order: what one publishes, the next may share; what one gives back, the next may get.
            for (index, hash) in group.zip(hashes) {
                let lane = self.notable[index] as usize;
                self.settle(lane, first_event + lane, hash);
            }
        }
        // Those that have just ended have no use for it, but a place.
        self.rows.set_tail_tokens(&self.lanes.tail_ends, tokens);
        self.kept_tokens = kept;
    }

    fn commit_lane(&mut self, lane: usize, sample: Sample, result: &StepResult<'_>) {
        let row = self.lanes.rows[lane] as u32;
        self.lanes.advance_one(lane, sample.token);
        if let Some(message) = sample.error_message() {
            let sequence = self.rows.get(row).sequence;
            self.fail_sequence(sequence, &message.into());
            return;
        }
        let num_logprobs = self.lanes.num_logprobs[lane];
        if let (0.., Some(matrix)) = (num_logprobs, &result.logprobs) {
            // The next event is that of this token.
            self.pending.logprob_events.push(self.pending.len() as i32);
            self.pending.logprobs.push_from(matrix, sample.index, num_logprobs as usize);
        }
        // The ends of a failed request may have taken the room that was made for all samples.
        self.make_room_for_events(1);
        let event = self.pending.len();
        self.push_tokens(lane..lane + 1, &[sample.token]);
        let block_hash = self.hash_of_full_block(lane);
        self.settle(lane, event, block_hash);
        self.rows.set_tail_tokens(&self.lanes.tail_ends[lane..=lane], &[sample.token]);
    }

    /// Tells of the new tokens of lanes.
    pub(super) fn push_tokens(&mut self, lanes: Range<usize>, tokens: &[i32]) {
        self.stats.num_output_tokens += tokens.len() as u64;
        self.pending.push_tokens(&self.lanes.request_ids[lanes.clone()], &self.lanes.choice_ids[lanes], tokens);
    }

    /// Hashes the blocks that a group of notable lanes has filled, and has fetched what publishing them will read: if the pool is large,
    /// each of these reads waits for memory, and so they wait together instead of one after the other.
    fn hash_full_blocks(&self, group: Range<usize>) -> [u64; GROUP_LEN] {
        let group = &self.notable[group];
        let block_size = self.config.block_size as u32;
        for &lane in group {
            let column = (self.lanes.num_tokens[lane as usize] as u32 - 1) / block_size;
            self.rows.prefetch(self.lanes.rows[lane as usize] as u32, column.saturating_sub(1));
        }
        let mut hashes = [0; GROUP_LEN];
        for (hash, &lane) in hashes.iter_mut().zip(group) {
            *hash = self.hash_of_full_block(lane as usize);
            self.pool.prefetch(*hash);
            if self.rules.counts_service {
                self.flows.prefetch(self.flow_of(self.lanes.rows[lane as usize] as u32));
            }
        }
        hashes[..group.len()].iter().for_each(|&hash| self.pool.prefetch_further(hash));
        hashes
    }

    /// Whether the last step of a lane has filled its last block.
    fn is_block_full(&self, lane: usize) -> bool {
        let tail_start = self.rows.tail_start(self.lanes.rows[lane] as u32);
        self.lanes.tail_ends[lane] - tail_start == self.config.block_size as u32
    }

    /// Hash of the last block of a lane; 0 if it is not full, or not published.
    fn hash_of_full_block(&self, lane: usize) -> u64 {
        let row = self.lanes.rows[lane] as u32;
        let state = self.rows.get(row);
        let is_published = state.may_publish && self.is_block_full(lane);
        if is_published { self.shared.hasher.extend(state.last_hash, self.rows.tail(row)) } else { 0 }
    }

    /// Does what a lane's new token brings besides the token: a full block, a computed prompt, an end.
    fn settle(&mut self, lane: usize, event: usize, block_hash: u64) {
        let row = self.lanes.rows[lane] as u32;
        if self.is_block_full(lane) {
            if self.rules.counts_service {
                self.charge_output(row, self.lanes.num_tokens[lane] as u32);
            }
            self.publish_last_block(row, block_hash);
            self.lanes.tail_ends[lane] = self.rows.tail_start(row);
            self.lanes.slots[lane] = NO_SLOT;
        }
        if self.lanes.flags[lane] & IS_UNSAMPLED != 0 {
            self.lanes.flags[lane] &= !IS_UNSAMPLED;
            if self.rows.get(row).is_forked_from {
                self.fork(row);
            }
            self.sequences[self.rows.get(row).sequence].known = None;
        }
        if !self.end_if_due(lane, event) {
            self.lanes.quiet_steps[lane] = self.quiet_steps(lane);
        }
    }

    /// Ends the sequence of a lane if its last token, told by `event`, was the last of all.
    pub(super) fn end_if_due(&mut self, lane: usize, event: usize) -> bool {
        let Some((reason, stop_id)) = self.end_of(lane) else { return false };
        self.pending.finish_reasons[event] = reason as u8;
        self.pending.stop_ids[event] = stop_id;
        let row = self.lanes.rows[lane] as u32;
        let num_output_tokens = self.lanes.num_tokens[lane] - self.lanes.num_prompt_tokens[lane];
        self.growth.observe(self.lanes.orders[lane].class(), num_output_tokens as u32);
        self.forget_sequence(self.rows.get(row).sequence, reason);
        true
    }

    /// How the last token of a lane ends its sequence, if it does, and the stop id (or -1).
    fn end_of(&self, lane: usize) -> Option<(FinishReason, i32)> {
        let (token, flags) = (self.lanes.tokens[lane], self.lanes.flags[lane]);
        if flags & IGNORES_EOS == 0 && self.config.eos_token_ids.contains(&token) {
            return Some((FinishReason::Stop, -1));
        }
        if flags & HAS_STOP_IDS != 0 {
            let sequence = self.rows.get(self.lanes.rows[lane] as u32).sequence;
            let request = self.request(self.sequences[sequence].slot);
            if request.extras().stop_token_ids.contains(&token) {
                return Some((FinishReason::Stop, token));
            }
        }
        (self.lanes.num_tokens[lane] >= self.lanes.max_num_tokens[lane]).then_some((FinishReason::Length, -1))
    }

    /// Publishes the last block of a row, which its tail has just filled, under its hash, or keeps its tokens.
    fn publish_last_block(&mut self, row: u32, hash: u64) {
        let state = *self.rows.get(row);
        let column = state.num_blocks - 1;
        let block = self.rows.tables.get(row, column);
        if !state.may_publish {
            self.pool.store(block, self.rows.tail(row));
            return;
        }
        let parent = match column {
            0 => Parent::Root(self.request(self.sequences[state.sequence].slot).root),
            _ => Parent::Block(self.rows.tables.get(row, column - 1)),
        };
        self.rows.get_mut(row).last_hash = hash;
        let tokens = self.rows.tail(row);
        if let Published::Duplicate(other) = self.pool.publish(block, parent, hash, tokens) {
            self.exchange(row, column, other);
        }
    }

    /// Puts a published block in the place of an equal one, because what is published below it must have a published parent.
    pub(super) fn exchange(&mut self, row: u32, column: u32, other: BlockId) {
        let block = self.rows.tables.get(row, column);
        self.pool.acquire(other);
        self.pool.give_back(block);
        self.rows.tables.set(row, column, other);
        self.exchanged.push(row, column as usize, &[other.as_i32()]);
    }
}
