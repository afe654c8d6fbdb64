//! Aging: whoever has waited long gets a small share of the starts and of the prompt tokens, whatever its class.
//!
//! 1. What waits: requests that have not started, choices that could start, and preempted sequences; and running prompts that get no tokens.
//!    A request is as old as its last start, its last chunk or its arrival. A request that only a bound of its own holds back waits anew.
//! 2. Of `aged_interval` starts one belongs to the request that has waited longest, if it is aged. Preempted sequences of its flow come first.
//! 3. What started in this way, or got nothing for so long, is shielded: it is a victim only for memory safety, and `aged_share` of the
//!    prompt tokens of each step is kept for it.

use super::Scheduler;
use super::budget::Budget;
use super::displace::NONE_BLOCKED;
use super::flows::Waiter;
use crate::block::NONE;
use crate::policy::Class;
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

/// Requests and prompts that a plan looks at, at most.
const MAX_LOOKS: usize = 8;
/// Classes that may have to wait for others.
const PATIENT: [Class; 2] = [Class::Standard, Class::Batch];

/// What a plan keeps for shielded prompts until everybody else was served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    num_tokens: usize,
    time_ns: f64,
    /// Tokens that are due whatever time is left.
    owed: usize,
}

impl Scheduler {
    /// Keeps account of whether anything of a request waits. `is_served` = something of it got what it waited for, so the rest waits anew.
    pub(super) fn note_wait(&mut self, slot: u32, is_served: bool) {
        let request = self.request(slot);
        let mut sequences = self.sequences.siblings(request.first_sequence);
        let waits = request.is_waiting() || sequences.any(|sequence| self.sequences[sequence].row == NONE);
        drop(sequences);
        if is_served || !waits {
            self.flows.end_wait(slot);
        }
        if waits {
            self.flows.begin_wait(slot, self.now_ns);
        }
    }

    /// Starts the oldest aged request if it is owed a start. Classes from the returned number on may not start anybody else before it.
    pub(super) fn start_aged(&mut self, is_paused: bool, now_ns: u64) -> usize {
        if is_paused {
            return NONE_BLOCKED;
        }
        let Some((slot, waiter)) = self.oldest_aged(now_ns) else { return NONE_BLOCKED };
        if self.aging.num_overtakes + 1 < self.rules.aged_interval {
            return NONE_BLOCKED;
        }
        let owed_since_ns = *self.aging.owed_since_ns.get_or_insert(now_ns);
        if self.rows.num_free() == 0 {
            // The next row that somebody gives up is its own. Until then others can start only by displacing, which takes nothing from it.
            return NONE_BLOCKED;
        }
        let class = self.flows.get(self.flows.of(slot)).class as usize;
        let started = waiter.slot(&self.sequences);
        if self.try_admit(waiter).is_ok() {
            self.shield(started);
            self.stats.num_aged_starts += 1;
            return NONE_BLOCKED;
        }
        // Memory: first the lower classes give way, then everybody.
        if now_ns.saturating_sub(owed_since_ns) >= self.rules.aging_ns { 0 } else { class }
    }

    /// The aged request that has waited longest, and what of its flow starts next on its behalf.
    fn oldest_aged(&mut self, now_ns: u64) -> Option<(u32, Waiter)> {
        for _ in 0..MAX_LOOKS {
            let slot = self.flows.longest_waiting()?;
            if !self.is_aged(slot, now_ns) {
                return None;
            }
            let flow = self.flows.of(slot);
            let class = self.flows.get(flow).class as usize;
            let preempted = self.flows.preempted_after(flow, None).map(|sequence| Waiter::Preempted { sequence });
            let waiter = preempted.unwrap_or(Waiter::Choice { slot });
            let is_capped = self.num_running_of[class] >= self.rules.class_caps[class];
            if !is_capped && self.may_start(flow, waiter, false) {
                let id = self.request(slot).id;
                if self.aging.request != Some(id) {
                    self.aging = Aging { request: Some(id), ..Aging::default() };
                }
                return Some((slot, waiter));
            }
            // Not others hold it back, but a bound of its own.
            self.flows.end_wait(slot);
            self.flows.begin_wait(slot, now_ns);
        }
        None
    }

    fn is_aged(&self, slot: u32, now_ns: u64) -> bool {
        u64::from(self.flows.tickets[slot as usize].age_ms(now_ns)) * 1_000_000 >= self.rules.aging_ns
    }

    /// Something starts: if it is not of the oldest aged request, that was overtaken.
    pub(super) fn note_start(&mut self, slot: u32) {
        let id = self.request(slot).id;
        match self.aging.request {
            Some(oldest) if oldest == id => self.aging = Aging::default(),
            Some(_) => self.aging.num_overtakes += 1,
            None => {}
        }
    }

    fn shield(&mut self, slot: u32) {
        let request = self.request_mut(slot);
        if !request.is_shielded() {
            request.shield();
            self.num_shielded += 1;
        }
    }

    fn slot_of_row(&self, row: u32) -> u32 {
        self.sequences[self.rows.get(row).sequence].slot
    }

    /// Shields running prompts that got nothing for so long as makes a request aged: the first ones of their class, who are next.
    fn shield_starved(&mut self, now_ns: u64) {
        for class in PATIENT {
            for index in 0..self.prefilling[class as usize].len().min(MAX_LOOKS) {
                let slot = self.slot_of_row(self.prefilling[class as usize][index]);
                if self.is_aged(slot, now_ns) {
                    self.shield(slot);
                }
            }
        }
    }

    /// Takes from the budget what is kept for shielded prompts: `aged_share` of the tokens that there is time for, at least a block.
    pub(super) fn keep_for_aged(&mut self, budget: &mut Budget, now_ns: u64) -> Option<Kept> {
        if PATIENT.iter().all(|&class| self.prefilling[class as usize].is_empty()) {
            return None;
        }
        self.shield_starved(now_ns);
        if self.num_shielded == 0 {
            return None;
        }
        let most = self.config.max_chunk_tokens();
        let wanted: usize = self.shielded_prompts().map(|row| self.num_remaining_tokens(row).min(most)).sum();
        let timely = self.chunk_limit(&Budget { owed: 0, ..*budget }, 0, budget.tokens);
        let share = ((timely as f64 * self.rules.aged_share) as usize).max(self.config.block_size);
        let num_tokens = share.min(timely).min(wanted);
        let owed = budget.owed.min(budget.tokens - num_tokens).min(wanted);
        let time_ns = if budget.is_timed() { self.pace.chunk_ns(0, num_tokens) } else { 0.0 };
        budget.tokens -= num_tokens;
        budget.time_ns -= time_ns;
        Some(Kept { num_tokens, time_ns, owed })
    }

    fn shielded_prompts(&self) -> impl Iterator<Item = u32> + '_ {
        let rows = PATIENT.iter().flat_map(|&class| self.prefilling[class as usize].iter().copied());
        rows.filter(|&row| !self.rows.get(row).is_planned && self.request(self.slot_of_row(row)).is_shielded())
    }

    /// Schedules the next tokens of a row in its turn; a shielded one gets what was kept for such prompts as well.
    pub(super) fn plan_chunk_in_turn(&mut self, row: u32, budget: &mut Budget, kept: &mut Option<Kept>) {
        let is_for_it = PATIENT.contains(&self.order(row).class()) && self.request(self.slot_of_row(row)).is_shielded();
        let Some(kept) = kept.as_mut().filter(|_| is_for_it) else {
            self.plan_chunk(row, budget);
            return;
        };
        budget.tokens += kept.num_tokens;
        budget.time_ns += kept.time_ns;
        let num_left = kept.num_tokens.saturating_sub(self.plan_chunk(row, budget));
        // What others of them are left with.
        *kept = Kept { num_tokens: num_left, time_ns: if num_left > 0 { kept.time_ns } else { 0.0 }, ..*kept };
        budget.tokens -= kept.num_tokens;
        budget.time_ns -= kept.time_ns;
    }

    /// Schedules shielded prompts that got nothing in their turn with what was kept for them, and with what everybody has left.
    pub(super) fn plan_shielded(&mut self, budget: &mut Budget, kept: Option<Kept>) {
        let Some(kept) = kept else { return };
        budget.tokens += kept.num_tokens;
        budget.time_ns += kept.time_ns;
        // What is due to the others was theirs; this is due besides.
        let mut part = Budget { owed: kept.owed, ..*budget };
        let rows: Vec<u32> = self.shielded_prompts().collect();
        for row in rows {
            if part.tokens == 0 {
                break;
            }
            self.plan_chunk(row, &mut part);
        }
        *budget = Budget { owed: budget.owed, ..part };
    }
}
