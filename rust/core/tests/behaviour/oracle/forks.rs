//! Requests and their choices: who computes the prompt for the others, which blocks are pinned for them, and who is in line.

use std::ops::Range;

use cbrs_core::{RequestId, Scheduler};

use super::model::Model;
use super::plan::Plan;

/// A request that `submit` accepted.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// Its choices among all.
    pub(crate) choices: Range<usize>,
    pub(crate) is_started: bool,
    /// The choice that computes the prompt, for which the others wait.
    pub(crate) leader: Option<usize>,
    /// The prompt is computed, and its blocks are pinned.
    pub(crate) is_forked: bool,
    pub(crate) pins: Vec<i32>,
    /// Prompt tokens, the first one aside, whose log-probabilities were told.
    pub(crate) num_told: usize,
}

impl Request {
    pub(crate) fn new(id: RequestId, choices: Range<usize>) -> Self {
        Self { id, choices, is_started: false, leader: None, is_forked: false, pins: Vec::new(), num_told: 0 }
    }
}

impl Model {
    /// The request of a choice.
    pub(crate) fn request_of(&self, index: usize) -> &Request {
        &self.requests[self.choices[index].request]
    }

    fn request_of_mut(&mut self, index: usize) -> &mut Request {
        &mut self.requests[self.choices[index].request]
    }

    /// Requests of which some choice lives, in order of arrival.
    pub(crate) fn live_requests(&self) -> Vec<usize> {
        let mut requests: Vec<usize> = self.live.iter().map(|&index| self.choices[index].request).collect();
        requests.dedup();
        requests
    }

    /// Choices of a request that have not started, and may yet.
    pub(crate) fn unstarted(&self, request: usize) -> Vec<usize> {
        let is_unstarted = |&index: &usize| !self.choices[index].is_started && self.choices[index].end.is_none();
        self.requests[request].choices.clone().filter(is_unstarted).collect()
    }

    /// Choices without a row in the order in which they may be admitted: preempted ones first, then those of started requests, then
    /// requests that have not started, unless these are paused; each by arrival. Who waits for a prompt under way is not in line.
    pub(crate) fn waiting(&self) -> Vec<usize> {
        let is_preempted = |&index: &usize| self.choices[index].is_started && self.choices[index].row.is_none();
        let mut waiting: Vec<usize> = self.live.iter().copied().filter(is_preempted).collect();
        let requests = self.live_requests();
        let may_start: &[bool] = if self.is_paused { &[true] } else { &[true, false] };
        for &is_started in may_start {
            for &request in requests.iter().filter(|&&request| self.requests[request].is_started == is_started) {
                let Request { leader, is_forked, .. } = self.requests[request];
                let num_in_line = match leader {
                    Some(_) => 0,
                    None if is_forked => usize::MAX,
                    None => 1,
                };
                waiting.extend(self.unstarted(request).into_iter().take(num_in_line));
            }
        }
        waiting
    }

    /// Requests and prompt tokens that count against the queue's bounds.
    pub(crate) fn queued(&self) -> (usize, u64) {
        let requests = self.live_requests().into_iter().filter(|&request| !self.requests[request].is_started);
        requests.fold((0, 0), |(num_requests, num_tokens), request| {
            let first = self.requests[request].choices.start;
            (num_requests + 1, num_tokens + self.choices[first].num_prompt() as u64)
        })
    }

    /// A choice starts for the first time.
    pub(crate) fn start_choice(&mut self, index: usize) {
        let request = self.choices[index].request;
        self.choices[index].is_started = true;
        let others = self.unstarted(request);
        let request = &mut self.requests[request];
        request.is_started = true;
        if others.is_empty() {
            request.pins.clear();
        } else if !request.is_forked {
            request.leader = Some(index);
            self.seen.later_leaders += u64::from(index > request.choices.start);
        }
    }

    /// A choice has computed all that it knows: if others wait for the prompt, its full blocks are pinned and they are in line.
    pub(crate) fn fork(&mut self, index: usize, row: usize) {
        if self.request_of(index).leader == Some(index) {
            let num_pins = (self.choices[index].num_prompt() - 1) / self.config.block_size;
            let pins = self.tables.row(row)[..num_pins].to_vec();
            let request = self.request_of_mut(index);
            (request.leader, request.is_forked, request.pins) = (None, true, pins);
        }
    }

    /// Cleans up after the end of a choice.
    pub(crate) fn leave_request(&mut self, index: usize) {
        let others = self.unstarted(self.choices[index].request);
        let request = self.request_of_mut(index);
        request.leader = request.leader.filter(|&leader| leader != index);
        if others.is_empty() {
            request.pins.clear();
        }
    }

    /// Blocks of a choice that are computed before it is admitted, and whether they are published: cached ones, or pinned if these are more.
    pub(crate) fn found_blocks(&self, index: usize) -> (Vec<i32>, bool) {
        let (choice, block_size) = (&self.choices[index], self.config.block_size);
        if self.num_untold(index) > 0 {
            // What is found has no logits.
            return (Vec::new(), self.caches());
        }
        let num_hits = if self.caches() { self.cache.hits(choice, block_size) } else { 0 };
        let pins = &self.request_of(index).pins;
        if pins.len() > num_hits {
            return (pins.clone(), false);
        }
        let block = |column| self.cache.block(choice.block_prefix(column, block_size)).expect("it was hit");
        ((0..num_hits).map(block).collect(), self.caches())
    }

    /// Finds out whose pins the plan gave up, and whether it had to.
    pub(crate) fn take_dropped_pins(&mut self, scheduler: &Scheduler, plan: &mut Plan) {
        let pinned: Vec<usize> =
            self.live_requests().into_iter().filter(|&request| !self.requests[request].pins.is_empty()).collect();
        let (dropped, kept): (Vec<usize>, Vec<usize>) =
            pinned.into_iter().partition(|&request| self.has_dropped_pins(scheduler, plan, request));
        let is_sole = |model: &Self, request: usize| {
            let deepest = *model.requests[request].pins.last().expect("it pins something");
            plan.holders[deepest as usize] == 1
        };
        let num_available = plan.holders.iter().filter(|&&holders| holders == 0).count();
        let is_decode_starved = num_available < plan.starved.len();
        for &request in &dropped {
            assert!(
                is_decode_starved || plan.is_first_stuck,
                "the pins of request {request} were dropped without need"
            );
            let kept_newer = kept.iter().find(|&&other| other > request && is_sole(self, other));
            assert_eq!(kept_newer, None, "the pins of request {request} were dropped before newer ones");
        }
        if !plan.victims.is_empty() {
            let kept = kept.iter().find(|&&other| is_sole(self, other));
            assert_eq!(kept, None, "a sequence was preempted before pins that hold blocks alone were given up");
        }
        if plan.running.is_empty() || !is_decode_starved || dropped.iter().any(|&request| !is_sole(self, request)) {
            // How many are dropped depends on who shares what.
        } else {
            let num_needed = plan.starved.len() - num_available;
            assert!(dropped.len() <= num_needed, "{} gave up their pins for {num_needed} blocks", dropped.len());
        }
        let sole: Vec<bool> = dropped.iter().map(|&request| is_sole(self, request)).collect();
        for (&request, is_sole) in dropped.iter().zip(sole) {
            let request = &mut self.requests[request];
            for block in request.pins.drain(..) {
                // Those that free nothing by themselves go last, when nobody is left to be preempted.
                if is_sole {
                    plan.holders[block as usize] -= 1;
                }
            }
            request.is_forked = false;
            *(if plan.is_first_stuck { &mut self.seen.stuck_drops } else { &mut self.seen.starved_drops }) += 1;
        }
        plan.waiting = self.waiting();
    }

    /// Whether the pins of a request are gone although the plan did not start its last choice with them.
    fn has_dropped_pins(&self, scheduler: &Scheduler, plan: &Plan, request: usize) -> bool {
        if self.is_static() && plan.running.is_empty() && !plan.is_first_stuck {
            // The group that starts now may be larger than the batch, so that the batch does not tell who has started.
            return false;
        }
        let (batch, Request { id, pins, .. }) = (scheduler.batch(), &self.requests[request]);
        let unstarted = self.unstarted(request);
        let mut num_started = 0;
        let mut has_recomputed = false;
        for (index, _) in batch.request_ids.iter().enumerate().filter(|&(_, &other)| other == id.as_u64()) {
            let choice = self.requests[request].choices.start + batch.choice_ids[index] as usize;
            if unstarted.contains(&choice) {
                let first_position = batch.positions[batch.query_start[index] as usize] as usize;
                num_started += 1;
                has_recomputed |= first_position < pins.len() * self.config.block_size;
            }
        }
        if num_started == unstarted.len() {
            return has_recomputed;
        }
        let told: Vec<i32> = scheduler.pinned_blocks(*id).iter().map(|block| block.as_i32()).collect();
        assert!(told.is_empty() || told == *pins, "request {request} pins {told:?} instead of {pins:?}");
        told.is_empty()
    }
}
