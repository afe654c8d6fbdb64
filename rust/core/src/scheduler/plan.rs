//! Plan: fill the budget and write the batch.
//!
//! Order of service: interactive and standard decodes; their prompts, running ones and newcomers; batch decodes; their prompts. Before all of it
//! comes who is owed a start (`aging.rs`, `displace.rs`). Batch decodes come right after the others when these leave room anyway; as many as are due for none to pause
//! longer than `max_batch_pause_steps`, and a share for shielded prompts, are kept from what the others' prompts get.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::admit::Look;
use super::aging::Kept;
use super::budget::Budget;
use super::flows::Turn;
use super::sequence::Order;
use super::{Planned, PromptLogits, Scheduler};
use crate::policy::Class;

/// Pieces of a plan in the order of the batch: those of one token, then the longer ones, each as they were planned.
pub(super) fn in_batch_order(pieces: &[Planned]) -> impl Iterator<Item = Planned> + '_ {
    let [singles, chunks] = [true, false]
        .map(|is_single| pieces.iter().copied().filter(move |planned| (planned.num_tokens == 1) == is_single));
    singles.chain(chunks)
}

/// Rows of running prompts in the order in which they get their chunks.
enum Line {
    /// By arrival: this many of the class were served.
    ByArrival(usize),
    /// Least served flow first; within it by arrival.
    ByService(BinaryHeap<Reverse<(Turn, Order, u32)>>),
}

impl Scheduler {
    /// Plans the next batch. Each pass takes from the budget what the ones before have left.
    pub(super) fn plan(&mut self, now_ns: u64) {
        self.close_gaps();
        self.step_id += 1;
        // A call that waits plans several times: what it committed stays readable until it returns.
        if self.batch().num_seqs() > 0 || !self.output().is_empty() {
            self.current ^= 1;
        }
        let batch = &mut self.batches[self.current];
        batch.clear();
        batch.block_table_updates.append(&mut self.exchanged);
        self.planned_lanes.clear();
        self.pieces.clear();
        self.filling.clear();
        self.prompt_logits = PromptLogits::default();
        (self.num_misfits, self.num_short_flows) = (0, 0);
        self.flows.bring_back();
        self.lacked_memory = std::mem::take(&mut self.lacks_memory);
        let is_paused = self.shared.plan_pause();
        if self.is_static() {
            self.plan_group(is_paused);
        } else {
            self.plan_classes(is_paused, now_ns);
        }
        self.write_batch(now_ns);
    }

    fn plan_group(&mut self, is_paused: bool) {
        if self.num_running() == 0 {
            self.admit_group(is_paused);
        }
        let mut budget = Budget { tokens: self.config.max_num_batched_tokens, time_ns: f64::INFINITY, owed: 0 };
        self.plan_lanes(0..self.lanes.len(), &mut budget);
        self.close_prefilling_gaps();
        self.plan_prompts(Class::Standard, &mut budget, &mut None, false, is_paused);
    }

    fn plan_classes(&mut self, is_paused: bool, now_ns: u64) {
        let mut budget = self.begin_budget();
        let blocked_from = self.make_way(&budget, is_paused, now_ns);
        let num_preemptions = self.stats.num_preemptions;
        let num_lanes = self.lanes.len();
        let num_urgent = self.num_urgent_lanes();
        let num_batch = num_lanes - num_urgent;
        let num_batch_due = self.num_batch_due(num_urgent..num_lanes);
        let is_short = num_lanes > budget.tokens;
        let is_contended =
            is_short || budget.is_timed() || self.has_prompts(Class::Interactive) || self.has_prompts(Class::Standard);
        let num_first = if is_contended { num_urgent } else { num_lanes };
        let num_batch_due = num_batch_due.min(num_lanes - num_first);
        // Not even the urgent ones have room: those that are due take turns with them.
        let kept_before = (num_urgent + num_batch_due > budget.tokens).then(|| {
            let num_in_turn = self.num_batch_turns(num_batch, num_lanes, budget.tokens);
            self.keep_for_batch(num_batch_due.min(num_in_turn), &mut budget)
        });
        self.plan_lanes(0..num_first, &mut budget);
        self.close_prefilling_gaps();
        let num_timely = self.chunk_limit(&budget, 0, budget.tokens);
        self.pace.token_budget = (self.planned_lanes.len() + num_timely) as u64;
        let kept_for_batch = kept_before.unwrap_or_else(|| self.keep_for_batch(num_batch_due, &mut budget));
        let mut kept_for_aged = self.keep_for_aged(&mut budget, now_ns);
        // After a preemption memory is short: whoever is admitted now would be displaced next.
        let may_admit = |this: &Self, class: Class| {
            (class as usize) < blocked_from && this.stats.num_preemptions == num_preemptions
        };
        for class in [Class::Interactive, Class::Standard] {
            let may_admit = may_admit(self, class);
            self.plan_prompts(class, &mut budget, &mut kept_for_aged, may_admit, is_paused);
        }
        if num_first < num_lanes {
            self.plan_batch_lanes(num_first, &mut budget, kept_for_batch);
            self.close_prefilling_gaps();
        }
        let num_pieces = self.pieces.len();
        self.plan_shielded(&mut budget, kept_for_aged);
        let shielded_pieces = num_pieces..self.pieces.len();
        let may_admit_batch = may_admit(self, Class::Batch);
        self.plan_prompts(Class::Batch, &mut budget, &mut None, may_admit_batch, is_paused);
        if budget.is_timed() && self.planned_lanes.len() == 0 && self.pieces.is_empty() {
            // Those for whom the time was kept have lost their blocks: a step without anything helps nobody.
            budget.time_ns = f64::INFINITY;
            for class in Class::ALL {
                let may_admit = may_admit(self, class);
                self.plan_prompts(class, &mut budget, &mut None, may_admit, is_paused);
            }
        }
        self.end_admission();
        self.note_left_out(shielded_pieces);
    }

    /// Tokens of this step that belong to batch decodes if all lanes take turns: their part, as evenly as whole tokens can be.
    fn num_batch_turns(&self, num_batch: usize, num_lanes: usize, num_tokens: usize) -> usize {
        let up_to = |step_id: u64| step_id * (num_tokens * num_batch) as u64 / num_lanes as u64;
        (up_to(self.step_id + 1) - up_to(self.step_id)) as usize
    }

    /// Lanes of the classes whose decodes advance in every step.
    pub(super) fn num_urgent_lanes(&self) -> usize {
        let has_batch = self.lanes.orders.last().is_some_and(|order| order.class() == Class::Batch);
        if has_batch { self.lanes.first_from(Order::first_of(Class::Batch)) } else { self.lanes.len() }
    }

    /// Whether prompts of a class run or may be waiting.
    fn has_prompts(&self, class: Class) -> bool {
        !self.prefilling[class as usize].is_empty() || self.flows.may_wait(class)
    }

    /// Keeps count of those who had to wait. What shielded prompts got of what was kept for them is nobody else's.
    fn note_left_out(&mut self, shielded_pieces: Range<usize>) {
        let denied = self.pace.take_denied();
        let is_served = |class: Class| {
            let mut pieces = self.pieces.iter().enumerate().filter(|(index, _)| !shielded_pieces.contains(index));
            pieces.any(|(_, piece)| self.order(piece.row).class() <= class)
        };
        let is_denied = denied.is_some_and(|class| !is_served(class));
        self.pace.num_without_prefill = if is_denied { self.pace.num_without_prefill + 1 } else { 0 };
    }

    /// Schedules prompts (or recomputed tokens) of a class that are under way, and admits newcomers, while the budget lasts.
    pub(super) fn plan_prompts(
        &mut self,
        class: Class,
        budget: &mut Budget,
        kept: &mut Option<Kept>,
        may_admit: bool,
        is_paused: bool,
    ) {
        let mut line = self.line_of(class);
        let mut parked = std::mem::take(&mut self.parked);
        loop {
            if budget.tokens == 0 {
                break;
            }
            let row_turn = self.next_in_line(class, &mut line);
            let flow_turn = if may_admit { self.next_flow(class, budget, is_paused) } else { None };
            match (row_turn, flow_turn) {
                (None, None) => break,
                (Some((row, turn)), flow_turn)
                    if flow_turn.is_none_or(|other| turn <= other || !self.flows.is_fair) =>
                {
                    line.advance();
                    self.plan_chunk_in_turn(row, budget, kept);
                }
                (_, Some(turn)) => match self.admit_next(turn.flow, budget, is_paused) {
                    Look::Admitted | Look::Passed => {}
                    Look::Short => self.flows.set_aside(class),
                    Look::Closed => {
                        self.flows.note_look(turn.flow);
                        self.flows.park(class, &mut parked);
                    }
                },
                (Some(_), None) => unreachable!("without a waiting flow the row is next"),
            }
        }
        self.flows.unpark(class, &mut parked);
        self.parked = parked;
    }

    /// The waiting flow that is next, if anybody could start.
    fn next_flow(&mut self, class: Class, budget: &Budget, is_paused: bool) -> Option<Turn> {
        if self.rows.num_free() == 0 || self.is_at_cap(class) || self.is_short_for(class, is_paused) {
            return None;
        }
        if self.is_spent(budget) {
            if self.flows.may_wait(class) {
                self.pace.deny(class);
            }
            return None;
        }
        self.flows.peek(class)
    }

    fn line_of(&self, class: Class) -> Line {
        let rows = &self.prefilling[class as usize];
        if !self.flows.is_fair || rows.len() < 2 && !self.flows.may_wait(class) {
            return Line::ByArrival(0);
        }
        let place = |&row: &u32| Reverse((self.flows.turn(self.flow_of(row)), self.order(row), row));
        Line::ByService(rows.iter().map(place).collect())
    }

    fn next_in_line(&self, class: Class, line: &mut Line) -> Option<(u32, Turn)> {
        match line {
            Line::ByArrival(index) => {
                let rows = &self.prefilling[class as usize];
                // Some may have been served before their turn.
                while rows.get(*index).is_some_and(|&row| self.rows.get(row).is_planned) {
                    *index += 1;
                }
                let &row = rows.get(*index)?;
                Some((row, self.flows.turn(self.flow_of(row))))
            }
            Line::ByService(heap) => loop {
                let &Reverse((turn, order, row)) = heap.peek()?;
                let now = self.flows.turn(self.flow_of(row));
                if self.rows.get(row).is_planned {
                    heap.pop();
                } else if now.service > turn.service {
                    // The flow was served meanwhile.
                    heap.pop();
                    heap.push(Reverse((now, order, row)));
                } else {
                    return Some((row, now));
                }
            },
        }
    }

    /// Schedules the next tokens of a row within `budget`; returns how many, 0 if no time is left, or no logits for a prompt that wants them.
    pub(super) fn plan_chunk(&mut self, row: u32, budget: &mut Budget) -> usize {
        let num_remaining = self.num_remaining_tokens(row);
        let start = self.rows.get(row).num_computed_tokens as usize;
        let wanted = self.config.max_chunk_tokens().min(num_remaining);
        let num_tokens = self.chunk_limit(budget, start, wanted);
        if num_tokens == 0 {
            let class = self.order(row).class();
            self.pace.deny(class);
            return 0;
        }
        let (num_tokens, num_prompt_logits) = self.plan_prompt_logits(row, num_tokens);
        if num_tokens == 0 {
            return 0;
        }
        self.spend_chunk(budget, start, num_tokens);
        let state = self.rows.get_mut(row);
        state.is_planned = true;
        let is_sampled = num_tokens == num_remaining;
        let sequence = state.sequence;
        self.flows.stamp(self.sequences[sequence].slot, self.now_ns);
        let num_logprobs = self.num_logprobs(row, sequence);
        let planned = Planned { row, num_tokens: num_tokens as u32, num_prompt_logits, num_logprobs, is_sampled };
        self.note_filling(planned);
        self.pieces.push(planned);
        if self.rules.counts_service {
            let num_new = self.rows.charge_up_to(row, (start + num_tokens) as u32);
            self.flows.charge(self.flow_of(row), u64::from(num_new));
        }
        num_tokens
    }

    /// Most likely ids that a sequence's request wants with each sample; -1 = nothing. Few rows have more to look up than one number.
    fn num_logprobs(&self, row: u32, sequence: u32) -> i8 {
        if self.rows.sampling.extras_below[row as usize] < u32::MAX {
            return -1;
        }
        self.request(self.sequences[sequence].slot).extras().num_logprobs
    }
}

impl Line {
    /// The first one has had its turn.
    fn advance(&mut self) {
        match self {
            Self::ByArrival(index) => *index += 1,
            Self::ByService(heap) => drop(heap.pop()),
        }
    }
}
