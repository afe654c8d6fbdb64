//! Growing a decoding sequence by a block, and whom it displaces when the pool is exhausted: pins of choices that have not started,
//! then sequences of lower classes and newer ones of its own.

use super::Scheduler;
use super::flows::OUTPUT_COST;
use super::lanes::NO_SLOT;
use super::sequence::Known;
use crate::block::{BlockId, NONE};
use crate::policy::Victim;
use crate::request::RequestId;
use crate::trace::TraceKind;

impl Scheduler {
    /// Makes sure that the next token of a lane has a slot, preempting newer sequences if it must.
    ///
    /// Returns false if the sequence cannot run in this step (it was preempted itself, or waits for a later step).
    pub(super) fn ensure_slot(&mut self, lane: usize) -> bool {
        if self.lanes.slots[lane] != NO_SLOT {
            return true;
        }
        loop {
            if self.grow(lane) {
                return true;
            }
            // What waits gives way first; as a last resort also where that frees nothing by itself, since only pins may be left.
            if self.drop_newest_pins(true) {
                continue;
            }
            let row = self.lanes.rows[lane] as u32;
            match self.pick_victim(row) {
                Some(victim) if victim != row => self.preempt(victim),
                _ if self.drop_newest_pins(false) => {}
                Some(_) => {
                    self.preempt(row);
                    return false;
                }
                None => return false,
            }
        }
    }

    /// Gives a lane whose blocks are full another one, if there is one.
    pub(super) fn grow(&mut self, lane: usize) -> bool {
        let Some(block) = self.pool.allocate() else { return false };
        let row = self.lanes.rows[lane] as u32;
        let column = self.rows.get(row).num_blocks as usize;
        self.rows.push_block(row, block);
        self.batches[self.current].block_table_updates.push(row, column, &[block.as_i32()]);
        self.lanes.slots[lane] = block.index() as i64 * self.config.block_size as i64;
        true
    }

    /// The sequence after `row`'s, in the order of service, that the policy displaces: one whose blocks would become free, and that is not in
    /// this plan already.
    ///
    /// A sequence all of whose blocks have other holders is chosen only if no other is left: displacing it gains nothing by itself.
    /// `None` if the only one left is `row` and a newer sequence is in the plan: then it waits for its turn instead.
    fn pick_victim(&self, row: u32) -> Option<u32> {
        if self.rules.victim == Victim::Cost {
            let beneficiary = self.order(row);
            let others = self.running_newest_first().take_while(|&other| self.order(other) > beneficiary);
            let others = others.filter(|&other| !self.rows.get(other).is_planned && self.frees_capacity(other));
            if let Some(victim) = self.cheapest_of_lowest(others) {
                return Some(victim);
            }
        }
        self.pick_newest(row)
    }

    /// The cheapest of the lowest class among candidates that come newest first: no price moves work of a higher class out of its way.
    pub(super) fn cheapest_of_lowest(&self, candidates: impl Iterator<Item = u32>) -> Option<u32> {
        let mut candidates = candidates.peekable();
        let lowest = self.order(*candidates.peek()?).class();
        self.cheapest(candidates.take_while(|&row| self.order(row).class() == lowest))
    }

    fn pick_newest(&self, row: u32) -> Option<u32> {
        let beneficiary = self.order(row);
        let mut newest = None;
        let mut newer_is_planned = false;
        for candidate in self.running_newest_first() {
            let state = self.rows.get(candidate);
            if self.order(candidate) < beneficiary {
                break;
            }
            if state.is_planned {
                newer_is_planned = true;
                continue;
            }
            if candidate == row && newer_is_planned {
                break;
            }
            if self.frees_capacity(candidate) {
                return Some(candidate);
            }
            newest = newest.or(Some(candidate));
        }
        newest
    }

    /// Rows of running sequences, last in the order of service first: lanes and prefilling rows, merged.
    pub(super) fn running_newest_first(&self) -> impl Iterator<Item = u32> + '_ {
        let mut decoding = (0..self.lanes.len()).rev().filter_map(|lane| self.lanes.row(lane)).peekable();
        let prefilling = self.prefilling.iter().rev().flat_map(|rows| rows.iter().rev().copied());
        let mut prefilling = prefilling.filter(|&row| self.rows.get(row).is_prefilling()).peekable();
        let order = |row: Option<&u32>| row.map(|&row| self.order(row));
        std::iter::from_fn(move || {
            if order(decoding.peek()) > order(prefilling.peek()) { decoding.next() } else { prefilling.next() }
        })
    }

    /// Whoever holds a block holds its parents too, so the deepest block of a table has the fewest holders.
    fn frees_capacity(&self, row: u32) -> bool {
        let deepest = self.rows.get(row).num_blocks - 1;
        self.pool.ref_count(self.rows.tables.get(row, deepest)) == 1
    }

    /// Takes row and blocks from a running sequence; it computes its tokens again when it is admitted next,
    /// before anything that has not started.
    pub(super) fn preempt(&mut self, row: u32) {
        let num_lost_tokens = self.num_computed_tokens(row);
        let known = self.recall(row);
        let state = *self.rows.get(row);
        self.trace(TraceKind::Preempted, state.sequence, num_lost_tokens);
        self.release_row(row);
        let sequence = &mut self.sequences[state.sequence];
        sequence.row = NONE;
        if let Some(known) = known {
            sequence.known = Some(Box::new(known));
        }
        let known = sequence.known_mut();
        known.num_lost_tokens = num_lost_tokens;
        known.num_charged_tokens = self.rows.num_charged_tokens(row);
        let slot = sequence.slot;
        let order = sequence.order;
        self.flows.push_preempted(self.flows.of(slot), order, state.sequence);
        self.request_mut(slot).count_preemption();
        self.note_wait(slot, false);
        self.stats.num_preemptions += 1;
    }

    /// Lists the tokens of a decoding sequence that has given up its own list; its blocks must still be held.
    fn recall(&self, row: u32) -> Option<Known> {
        let state = self.rows.get(row);
        let sequence = &self.sequences[state.sequence];
        if sequence.known.is_some() {
            return None;
        }
        let num_tokens = self.lanes.num_tokens[self.lanes.locate(sequence.order)] as usize;
        let num_full = (num_tokens - 1) / self.config.block_size;
        let (mut tokens, mut hashes) = (Vec::with_capacity(num_tokens), Vec::new());
        for &entry in &self.rows.blocks(row)[..num_full] {
            let block = BlockId::from_table(entry);
            tokens.extend_from_slice(self.pool.tokens(block));
            if state.may_publish {
                hashes.push(self.pool.hash(block));
            }
        }
        let num_left = num_tokens - tokens.len();
        tokens.extend_from_slice(&self.rows.tail(row)[..num_left]);
        Some(Known::new(tokens, hashes))
    }

    /// Gives back the row of a sequence, which still lives, and its blocks, deepest first so that eviction reaches children before their parents.
    pub(super) fn release_row(&mut self, row: u32) {
        while let Some(block) = self.rows.pop_block(row) {
            self.pool.give_back(block);
        }
        let flow = self.flow_of(row);
        if self.rows.get(row).is_decoding {
            let lane = self.lanes.locate(self.order(row));
            if self.rules.counts_service {
                self.charge_output(row, self.lanes.num_tokens[lane] as u32);
            }
            let slot = RequestId::from_u64(self.lanes.request_ids[lane]).slot();
            self.pace.remove_target(self.request(slot).extras().target_itl_us);
            self.lanes.vacate(lane);
        } else {
            self.prefilling_has_gaps = true;
        }
        self.num_running_of[self.flows.count_stop(flow) as usize] -= 1;
        self.growth.forget_plan();
        self.rows.release(row);
    }

    /// Counts the output tokens of a decoding sequence, which now knows `num_tokens`, that were not counted yet.
    pub(super) fn charge_output(&mut self, row: u32, num_tokens: u32) {
        let num_new = self.rows.charge_up_to(row, num_tokens);
        self.flows.charge(self.flow_of(row), OUTPUT_COST * u64::from(num_new));
        if self.rules.limits_token_rates {
            let request = self.request(self.sequences[self.rows.get(row).sequence].slot);
            self.shared.gate.charge_output(request.tenant, u64::from(num_new), self.now_ns);
        }
    }
}
