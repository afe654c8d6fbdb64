//! Who is owed a start before anything else is planned: the oldest aged request, a request of a higher class that lower ones keep out, and
//! a tenant that another one above its share keeps out.
//!
//! 1. For a higher class nobody is displaced unless the one who waits can start then. Nobody who is in the plan is: nothing is planned yet.
//! 2. For a tenant, a sequence of the same class is displaced whose tenant, even without it, holds no less for its weight than the one who
//!    waits will; at most one in a step, none if a class had to give way in it. What it frees is kept for the one who waits. So displacements
//!    even out, and end.
//! 3. Nobody is displaced more than `max_preemptions` times, nor who started because it was aged, nor the first of all that runs.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::Scheduler;
use super::flows::Waiter;
use crate::block::BlockId;
use crate::policy::{Class, Victim};
use crate::request::RequestId;

/// The request that has waited longest, if it is aged.
#[derive(Debug, Default)]
pub(super) struct Aging {
    request: Option<RequestId>,
    /// Others that started since it was found to be.
    num_overtakes: u32,
    /// Since when it is owed a start.
    owed_since_ns: Option<u64>,
}

/// What `Scheduler::most_held` has found, and when.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MostHeld {
    num_changes: u64,
    num_besides_one: f64,
}

/// Tenants of a class for which a plan looks for somebody to displace, at most: planning is bounded.
const MAX_LOOKS: usize = 8;
/// No class is kept from starting.
const NONE_BLOCKED: usize = 3;

impl Scheduler {
    /// Starts who is owed it. Classes from the returned number on may not start anybody else in this plan.
    pub(super) fn make_way(&mut self, is_paused: bool, now_ns: u64) -> usize {
        if self.flows.num_preempted + self.flows.num_listed == 0 {
            return NONE_BLOCKED;
        }
        let blocked_from = self.start_aged(is_paused, now_ns).min(self.start_reserved(is_paused));
        let mut num_tokens = self.config.max_num_batched_tokens;
        for class in &Class::ALL[..blocked_from] {
            if self.flows.may_wait(*class) {
                self.make_way_for(*class, &mut num_tokens, is_paused);
            }
        }
        self.close_gaps();
        let reserved = self.reserved_flow.map_or(NONE_BLOCKED, |flow| self.flows.get(flow).class as usize);
        blocked_from.min(reserved)
    }

    /// Starts the oldest aged request if it is owed a start: nobody else starts before it then, until it fits.
    fn start_aged(&mut self, is_paused: bool, now_ns: u64) -> usize {
        let Some(slot) = self.oldest_aged(now_ns).filter(|_| !is_paused) else { return NONE_BLOCKED };
        let flow = self.flows.of(slot);
        // A preempted one of its tenant comes first in any case.
        let preempted = self.flows.preempted_after(flow, None).map(|sequence| Waiter::Preempted { sequence });
        let waiter = preempted.unwrap_or(Waiter::Choice { slot });
        let class = self.flows.get(flow).class as usize;
        let is_capped = self.num_running_of[class] >= self.rules.class_caps[class];
        if self.aging.num_overtakes + 1 < self.rules.aged_interval
            || is_capped
            || !self.may_start(flow, waiter, is_paused)
        {
            return NONE_BLOCKED;
        }
        let owed_since_ns = *self.aging.owed_since_ns.get_or_insert(now_ns);
        if self.rows.num_free() == 0 {
            // The next row that somebody gives up is its own. Until then others can start only by displacing, which takes nothing from it.
            return NONE_BLOCKED;
        }
        if self.try_admit(waiter).is_ok() {
            if preempted.is_none() {
                self.request_mut(slot).shield();
                self.num_shielded += 1;
            }
            return NONE_BLOCKED;
        }
        // Memory: first the lower classes give way, then everybody.
        if now_ns.saturating_sub(owed_since_ns) >= self.rules.aging_ns { 0 } else { class }
    }

    fn oldest_aged(&mut self, now_ns: u64) -> Option<u32> {
        let slot = self.flows.oldest_unstarted()?;
        if u64::from(self.flows.tickets[slot as usize].age_ms(now_ns)) * 1_000_000 < self.rules.aging_ns {
            return None;
        }
        let id = self.request(slot).id;
        if self.aging.request != Some(id) {
            self.aging = Aging { request: Some(id), ..Aging::default() };
        }
        Some(slot)
    }

    /// A request starts: if it is not the oldest aged one, that was overtaken.
    pub(super) fn note_start(&mut self, slot: u32) {
        let id = self.request(slot).id;
        match self.aging.request {
            Some(oldest) if oldest == id => self.aging = Aging::default(),
            Some(_) => self.aging.num_overtakes += 1,
            None => {}
        }
    }

    /// Goes on making way for the tenant for which a sequence was displaced before.
    fn start_reserved(&mut self, is_paused: bool) -> usize {
        let Some(flow) = self.reserved_flow.take() else { return NONE_BLOCKED };
        let waiter = self.first_waiter(flow).filter(|&waiter| self.may_start(flow, waiter, is_paused));
        if let Some(waiter) = waiter
            && (self.rows.num_free() == 0 || self.try_admit(waiter).is_err())
        {
            self.displace_tenant(flow, waiter);
        }
        NONE_BLOCKED
    }

    /// Starts waiters of a class that others keep out, as far as these can be displaced and this step has tokens for them.
    fn make_way_for(&mut self, class: Class, num_tokens: &mut usize, is_paused: bool) {
        let mut parked = std::mem::take(&mut self.parked);
        while *num_tokens > 0 && self.num_running_of[class as usize] < self.rules.class_caps[class as usize] {
            if self.rows.num_free() > 0 && !self.lacked_memory[class as usize] || parked.len() >= MAX_LOOKS {
                break;
            }
            let Some(turn) = self.flows.peek(class) else { break };
            if !self.has_candidates(class) {
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
        let has_displaced = self.displace_lower(class, waiter) || self.displace_tenant(flow, waiter);
        if has_displaced && self.rows.num_free() > 0 { self.try_admit(waiter).ok() } else { None }
    }

    /// Makes room for a waiter at the cost of lower classes, if that is what it takes; returns whether it did.
    fn displace_lower(&mut self, class: Class, waiter: Waiter) -> bool {
        let is_lower = |this: &Self, row| this.order(row).class() > class;
        if !self.has_lower(class) {
            return false;
        }
        self.find_hits(waiter);
        let needs = self.needs(waiter);
        let shortage = self.shortage(needs);
        let needs_row = self.rows.num_free() == 0;
        if !needs_row && shortage == 0 {
            return false;
        }
        let mut gain = 0;
        let mut num_victims = 0;
        for row in self.running_newest_first().take_while(|&row| is_lower(self, row)) {
            if gain >= shortage && num_victims > 0 {
                break;
            }
            if self.may_be_displaced(row) {
                num_victims += 1;
                gain += self.num_exclusive_blocks(row);
            }
        }
        if gain < shortage || num_victims == 0 {
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
            Victim::Cost => self.cheapest(candidates),
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

    /// Displaces one sequence of a tenant above its share of the class for a waiter of one below it; returns whether it did.
    ///
    /// If it cannot start at once, what was freed is kept for it.
    fn displace_tenant(&mut self, flow: u32, waiter: Waiter) -> bool {
        if !self.flows.is_fair || self.displaced_in_step == self.step_id {
            return false;
        }
        // Whoever holds one sequence keeps it.
        if self.most_held(self.flows.get(flow).class) <= 0.0 {
            return false;
        }
        let Some(victim) = self.pick_of_tenant(flow, waiter) else { return false };
        self.displace(victim);
        self.reserved_flow = if self.rows.num_free() == 0 || self.is_short(waiter) { Some(flow) } else { None };
        true
    }

    /// The newest sequence of the class whose tenant holds enough: in rows if these are scarce, otherwise in blocks.
    fn pick_of_tenant(&mut self, flow: u32, waiter: Waiter) -> Option<u32> {
        let (class, weight) = (self.flows.get(flow).class, self.flows.get(flow).weight);
        let share = self.flows.share(flow);
        let is_row_scarce = self.rows.num_free() == 0;
        let held = if is_row_scarce { HashMap::default() } else { self.blocks_by_flow(class) };
        let holdings = |this: &Self, flow: u32| {
            let num_blocks = held.get(&flow).copied().unwrap_or(0) as f64;
            if is_row_scarce { f64::from(this.flows.get(flow).num_running) } else { num_blocks }
        };
        let (needed, total) = if is_row_scarce {
            (1.0, self.config.max_num_seqs as f64)
        } else {
            self.find_hits(waiter);
            (self.needs(waiter).num_new as f64, self.config.num_blocks as f64)
        };
        let wanted = holdings(self, flow) + needed;
        // A share is at least one sequence.
        if wanted > (share * total).ceil() && self.flows.get(flow).num_running > 0 {
            return None;
        }
        if is_row_scarce && self.most_held(class) < wanted / weight {
            return None;
        }
        let first = self.first_running()?;
        let candidates = self.running_newest_first().take_while(|&row| self.order(row).class() >= class);
        candidates.filter(|&row| self.order(row).class() == class && row != first && self.may_be_displaced(row)).find(
            |&row| {
                let other = self.flow_of(row);
                let gain = if is_row_scarce { 1.0 } else { self.num_exclusive_blocks(row) as f64 };
                let left = holdings(self, other) - gain;
                other != flow && gain > 0.0 && left / self.flows.get(other).weight >= wanted / weight
            },
        )
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
