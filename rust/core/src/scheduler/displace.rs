//! Who starts at the cost of others, before anything else is planned: a request of a higher class that lower ones keep out, and a tenant
//! that another one above its share keeps out.
//!
//! 1. Nobody is displaced unless the one who waits fits without all who may be, their growth included; and for a higher class, no more
//!    than are needed. Nobody who is in the plan is: nothing is planned yet. And nobody whose first tokens would find no time in this step.
//! 2. For a tenant, a sequence of the same class is displaced whose tenant, even without it, holds no less for its weight than the one who
//!    waits will; at most one in a step, none if a class had to give way in it. What it frees is kept for the one who waits. So displacements
//!    even out, and end. Rows are scarce when all are taken, or all that the class may have.
//! 3. Nobody is displaced more than `max_preemptions` times, nor who is shielded, nor for a tenant the first of all that runs.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::Scheduler;
use super::budget::Budget;
use super::estimate::Needs;
use super::flows::Waiter;
use crate::block::BlockId;
use crate::policy::{Class, Victim};

/// What `Scheduler::most_held` has found, and when.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MostHeld {
    num_changes: u64,
    num_besides_one: f64,
}

/// Tenants of a class for which a plan looks for somebody to displace, at most: planning is bounded.
const MAX_LOOKS: usize = 8;
/// No class is kept from starting.
pub(super) const NONE_BLOCKED: usize = 3;

impl Scheduler {
    /// Starts who is owed it. Classes from the returned number on may not start anybody else in this plan.
    pub(super) fn make_way(&mut self, budget: &Budget, is_paused: bool, now_ns: u64) -> usize {
        if self.flows.num_preempted + self.flows.num_listed == 0 {
            return NONE_BLOCKED;
        }
        let blocked_from = self.start_aged(is_paused, now_ns);
        self.start_reserved(blocked_from, is_paused);
        let mut num_tokens = self.num_timely_tokens(budget);
        for class in &Class::ALL[..blocked_from] {
            if self.flows.may_wait(*class) {
                self.make_way_for(*class, &mut num_tokens, is_paused);
            }
        }
        self.close_gaps();
        // What lanes will fill is not known yet: it has to be looked at again.
        self.filling.clear();
        let reserved = self.reserved_flow.map_or(NONE_BLOCKED, |flow| self.flows.get(flow).class as usize);
        blocked_from.min(reserved)
    }

    /// Prompt tokens for which the plan will have room and time besides the decodes that come first.
    fn num_timely_tokens(&self, budget: &Budget) -> usize {
        let num_urgent = self.num_urgent_lanes();
        let mut left = *budget;
        let num_kv_tokens = if budget.is_timed() {
            self.lanes.num_tokens[..num_urgent].iter().map(|&count| count as u64).sum()
        } else {
            0
        };
        self.spend_decodes(&mut left, num_urgent.min(budget.tokens), num_kv_tokens);
        self.chunk_limit(&left, 0, left.tokens)
    }

    /// Whether a class may not have any more rows, or there are none.
    fn lacks_rows(&self, class: Class) -> bool {
        self.rows.num_free() == 0 || self.is_capped(class)
    }

    fn is_capped(&self, class: Class) -> bool {
        self.num_running_of[class as usize] >= self.rules.class_caps[class as usize]
    }

    /// Goes on making way for the flow for which a sequence was displaced before.
    fn start_reserved(&mut self, blocked_from: usize, is_paused: bool) {
        let Some(flow) = self.reserved_flow.take() else { return };
        let class = self.flows.get(flow).class;
        if class as usize >= blocked_from {
            return;
        }
        let waiter = self.first_waiter(flow).filter(|&waiter| self.may_start(flow, waiter, is_paused));
        let Some(waiter) = waiter else { return };
        if self.start_if_fits(class, waiter).is_some() {
            return;
        }
        self.displace_tenant(flow, waiter);
        self.start_or_reserve(flow, waiter);
    }

    fn start_if_fits(&mut self, class: Class, waiter: Waiter) -> Option<u32> {
        if self.lacks_rows(class) { None } else { self.try_admit(waiter).ok() }
    }

    /// Starts a waiter for which somebody was displaced. If it cannot start yet (those that run have grown meanwhile, or a block that it needs
    /// is being filled), what was freed is kept for it.
    fn start_or_reserve(&mut self, flow: u32, waiter: Waiter) -> Option<u32> {
        let row = self.start_if_fits(self.flows.get(flow).class, waiter);
        if row.is_none() {
            self.reserved_flow = Some(flow);
        }
        row
    }

    /// Starts waiters of a class that others keep out, as far as these can be displaced and this step has tokens for them.
    fn make_way_for(&mut self, class: Class, num_tokens: &mut usize, is_paused: bool) {
        let mut parked = std::mem::take(&mut self.parked);
        while parked.len() < MAX_LOOKS && (self.lacks_rows(class) || self.lacked_memory[class as usize]) {
            let Some(turn) = self.flows.peek(class) else { break };
            if !self.has_candidates(class) {
                break;
            }
            if *num_tokens == 0 {
                self.pace.deny(class);
                break;
            }
            let waiter = self.first_waiter(turn.flow).filter(|&waiter| self.may_start(turn.flow, waiter, is_paused));
            let row = waiter.and_then(|waiter| self.start_by_displacing(class, turn.flow, waiter));
            match row {
                Some(row) => *num_tokens = num_tokens.saturating_sub(self.num_remaining_tokens(row)),
                None => self.flows.park(class, &mut parked),
            }
        }
        self.flows.unpark(class, &mut parked);
        self.parked = parked;
    }

    /// Whether anybody who runs could give way to a waiter of a class: one of a lower class, or of a tenant that has several.
    fn has_candidates(&mut self, class: Class) -> bool {
        self.has_lower(class) || self.flows.is_fair && self.most_held(class) > 0.0
    }

    fn has_lower(&self, class: Class) -> bool {
        self.num_running_of[class as usize + 1..].iter().any(|&num_running| num_running > 0)
    }

    /// Most sequences that a tenant of a class has running besides one, for its weight. Looked for only when somebody came or went.
    fn most_held(&mut self, class: Class) -> f64 {
        let num_changes = self.flows.num_running_changes;
        let known = self.most_held[class as usize];
        if known.num_changes == num_changes {
            return known.num_besides_one;
        }
        let decoding = (0..self.lanes.len()).filter_map(|lane| self.lanes.row(lane));
        let prefilling = self.prefilling.iter().flatten().copied().filter(|&row| self.rows.get(row).is_prefilling());
        let flows = decoding.chain(prefilling).map(|row| self.flows.get(self.flow_of(row)));
        let of_class = flows.filter(|flow| flow.class == class);
        let num_besides_one =
            of_class.fold(0.0_f64, |most, flow| most.max((f64::from(flow.num_running) - 1.0) / flow.weight));
        self.most_held[class as usize] = MostHeld { num_changes, num_besides_one };
        num_besides_one
    }

    fn start_by_displacing(&mut self, class: Class, flow: u32, waiter: Waiter) -> Option<u32> {
        let num_displacements = self.stats.num_displacements;
        if self.is_capped(class) || !self.displace_lower(class, waiter) {
            self.displace_tenant(flow, waiter);
        }
        if self.stats.num_displacements == num_displacements { None } else { self.start_or_reserve(flow, waiter) }
    }

    /// Makes room for a waiter at the cost of lower classes, if that is what it takes; returns whether it did.
    fn displace_lower(&mut self, class: Class, waiter: Waiter) -> bool {
        let is_lower = |this: &Self, row| this.order(row).class() > class;
        if !self.has_lower(class) {
            return false;
        }
        self.find_hits(waiter);
        let needs = self.needs(waiter);
        if self.rows.num_free() > 0 && self.shortage(needs) == 0 {
            return false;
        }
        let lower = self.running_newest_first().take_while(|&row| is_lower(self, row));
        let victims: Vec<u32> = lower.filter(|&row| self.may_be_displaced(row)).collect();
        if victims.is_empty() || self.shortage_without(needs, victims) > 0 {
            return false;
        }
        while self.rows.num_free() == 0 || self.is_short(waiter) {
            let Some(victim) = self.pick_displaced(|this, row| is_lower(this, row)) else { return false };
            self.displace(victim);
        }
        true
    }

    fn is_short(&mut self, waiter: Waiter) -> bool {
        self.find_hits(waiter);
        let needs = self.needs(waiter);
        self.shortage(needs) > 0
    }

    /// Whom the policy displaces of those that run from the newest of the lowest class on, as long as `is_lower` holds.
    fn pick_displaced(&self, is_lower: impl Fn(&Self, u32) -> bool) -> Option<u32> {
        let mut candidates = self
            .running_newest_first()
            .take_while(|&row| is_lower(self, row))
            .filter(|&row| self.may_be_displaced(row));
        match self.rules.victim {
            Victim::Newest => candidates.next(),
            Victim::Cost => self.cheapest_of_lowest(candidates),
        }
    }

    /// The sequence with the fewest tokens to compute again per block gained; ties: the first. Who frees nothing comes last.
    pub(super) fn cheapest(&self, candidates: impl Iterator<Item = u32>) -> Option<u32> {
        let mut best: Option<(u64, u64, u32)> = None;
        for row in candidates {
            let num_gained = self.num_exclusive_blocks(row) as u64;
            let num_shared_tokens =
                (u64::from(self.rows.get(row).num_blocks) - num_gained) * self.config.block_size as u64;
            let redo = u64::from(self.num_computed_tokens(row)).saturating_sub(num_shared_tokens);
            // a / b < c / d, without dividing.
            let is_better = best.is_none_or(|(best_redo, best_gained, _)| {
                num_gained > 0 && (best_gained == 0 || redo * best_gained < best_redo * num_gained)
            });
            if is_better {
                best = Some((redo, num_gained, row));
            }
        }
        best.map(|(.., row)| row)
    }

    /// Blocks of a running sequence that nobody else holds. Whoever holds a block holds its parents: so they are the deepest ones.
    pub(super) fn num_exclusive_blocks(&self, row: u32) -> usize {
        let blocks = self.rows.blocks(row);
        blocks.len() - blocks.partition_point(|&block| self.pool.ref_count(BlockId::from_table(block)) > 1)
    }

    fn may_be_displaced(&self, row: u32) -> bool {
        let request = self.request(self.sequences[self.rows.get(row).sequence].slot);
        request.num_preemptions() < self.rules.max_preemptions
    }

    fn displace(&mut self, row: u32) {
        self.preempt(row);
        self.displaced_in_step = self.step_id;
        // The row may be given to somebody else at once.
        self.close_prefilling_gaps();
        self.stats.num_displacements += 1;
    }

    /// Displaces one sequence of a tenant above its share of the class for a waiter of one below it.
    fn displace_tenant(&mut self, flow: u32, waiter: Waiter) {
        let class = self.flows.get(flow).class;
        // Whoever holds one sequence keeps it.
        if !self.flows.is_fair || self.displaced_in_step == self.step_id || self.most_held(class) <= 0.0 {
            return;
        }
        self.find_hits(waiter);
        let needs = self.needs(waiter);
        if let Some(victim) = self.pick_of_tenants(flow, needs) {
            self.displace(victim);
        }
    }

    /// Who gives way first for a waiter of a flow, if it can start once all have who may, in rows if these are scarce and in blocks.
    fn pick_of_tenants(&mut self, flow: u32, needs: Needs) -> Option<u32> {
        let mut victims = Vec::new();
        if self.lacks_rows(self.flows.get(flow).class) {
            victims = self.victims_by_rows(flow);
            victims.first()?;
            if self.shortage_without(needs, victims.clone()) == 0 {
                return victims.first().copied();
            }
        }
        for row in self.victims_by_blocks(flow, needs) {
            if !victims.contains(&row) {
                victims.push(row);
            }
        }
        let first = *victims.first()?;
        (self.shortage_without(needs, victims) == 0).then_some(first)
    }

    /// The newest sequence of the class whose tenant has more rows for its weight.
    fn victims_by_rows(&mut self, flow: u32) -> Vec<u32> {
        let (class, weight, num_own) = {
            let entry = self.flows.get(flow);
            (entry.class, entry.weight, f64::from(entry.num_running))
        };
        if self.most_held(class) < (num_own + 1.0) / weight {
            return Vec::new();
        }
        let total = self.config.max_num_seqs.min(self.rules.class_caps[class as usize]) as f64;
        self.victims_of(flow, 1.0, total, 1, |_| 1.0, |other| f64::from(self.flows.get(other).num_running))
    }

    /// The sequences of the class, newest first, whose tenants hold more blocks for their weight, until these are even.
    fn victims_by_blocks(&self, flow: u32, needs: Needs) -> Vec<u32> {
        let held = self.blocks_by_flow(self.flows.get(flow).class);
        let (needed, total) = (needs.num_new as f64, self.config.num_blocks as f64);
        let gain = |row| self.num_exclusive_blocks(row) as f64;
        self.victims_of(flow, needed, total, usize::MAX, gain, |other| held.get(&other).copied().unwrap_or(0) as f64)
    }

    fn victims_of(
        &self,
        flow: u32,
        needed: f64,
        total: f64,
        most: usize,
        gain: impl Fn(u32) -> f64,
        held: impl Fn(u32) -> f64,
    ) -> Vec<u32> {
        let entry = self.flows.get(flow);
        let share = self.flows.share(flow);
        let wanted = held(flow) + needed;
        // A share is at least one sequence.
        if wanted > (share * total).ceil() && entry.num_running > 0 {
            return Vec::new();
        }
        let first = self.first_running();
        let mut taken: HashMap<u32, f64, FixedState> = HashMap::default();
        let mut victims = Vec::new();
        for row in self.running_newest_first().filter(|&row| self.order(row).class() == entry.class) {
            let other = self.flow_of(row);
            if victims.len() == most || other == flow || Some(row) == first || !self.may_be_displaced(row) {
                continue;
            }
            let (gained, before) = (gain(row), taken.get(&other).copied().unwrap_or(0.0));
            let left = held(other) - before - gained;
            if gained > 0.0 && left / self.flows.get(other).weight >= wanted / entry.weight {
                taken.insert(other, before + gained);
                victims.push(row);
            }
        }
        victims
    }

    fn blocks_by_flow(&self, class: Class) -> HashMap<u32, u64, FixedState> {
        let mut held: HashMap<u32, u64, FixedState> = HashMap::default();
        for row in self.running_newest_first().filter(|&row| self.order(row).class() == class) {
            *held.entry(self.flow_of(row)).or_default() += u64::from(self.rows.get(row).num_blocks);
        }
        held
    }

    /// The running sequence that stands before all others.
    fn first_running(&self) -> Option<u32> {
        let lane = (0..self.lanes.len()).find_map(|lane| self.lanes.row(lane));
        let prompts = self.prefilling.iter().flatten().copied().find(|&row| self.rows.get(row).is_prefilling());
        lane.into_iter().chain(prompts).min_by_key(|&row| self.order(row))
    }
}
