//! Who runs, who waits, who is displaced: budgets, order and bounds.
//!
//! - Decodes first: if the budget reaches all of them, each advances; else the budget goes to decodes alone and they take turns, each
//!   within ceil(decodes / budget) steps.
//! - Then prompts under way, oldest first, then newcomers, each as much as budget and chunk limit allow: nothing that could run is left out.
//! - Preempted choices resume in order before anything starts, then choices of started requests start, then other requests; but one of
//!   these whose next block is being computed by another may be passed, in at most 2 steps and by at most 16.
//! - Nothing is preempted unless memory is short, never the oldest, never someone older than a survivor whose blocks would have helped.

use cbrs_core::Scheduler;

use super::model::Model;
use super::plan::Plan;

const MAX_STEPS_PASSED: usize = 2;
const MAX_OVERTAKEN: usize = 16;

impl Model {
    pub(crate) fn check_order(&mut self, scheduler: &Scheduler, plan: &Plan) {
        let budget = self.config.max_num_batched_tokens;
        let num_tokens = plan.scheduled.iter().sum::<usize>();
        assert!(num_tokens <= budget, "{num_tokens} tokens are scheduled on a budget of {budget}");
        self.check_victims(plan);
        let left = self.check_decodes(plan);
        let left = self.check_chunks(plan, left);
        self.check_admissions(scheduler, plan);
        if plan.victims.is_empty() && left > 0 {
            self.check_nobody_is_left_out(scheduler, plan);
        }
    }

    fn check_victims(&self, plan: &Plan) {
        let Some(&oldest) = plan.running.first().filter(|_| !plan.victims.is_empty()) else { return };
        assert!(!plan.victims.contains(&oldest), "the oldest, request {oldest}, was preempted");
        let num_available = plan.holders.iter().filter(|&&holders| holders == 0).count();
        let num_needed = plan.starved.len();
        assert!(num_available < num_needed, "preempted with {num_available} blocks at hand and {num_needed} needed");
        assert!(plan.started.is_empty(), "something starts in a plan that preempts: {:?}", plan.started);
        if !self.caches() {
            let num_gained = num_needed - num_available;
            assert!(plan.victims.len() <= num_gained, "{} preempted for {num_gained} blocks", plan.victims.len());
        }
        for &victim in &plan.victims {
            assert!(plan.starved.iter().any(|&other| other <= victim), "{victim} was preempted for someone newer");
            for (&other, &deepest) in plan.running.iter().zip(&plan.deepest) {
                if other > victim && !plan.victims.contains(&other) {
                    let would_have_helped = plan.holders[deepest as usize] == 1 && !self.takes_turns(plan);
                    assert!(!would_have_helped, "{victim} was preempted instead of {other}, which is newer");
                }
            }
        }
    }

    fn takes_turns(&self, plan: &Plan) -> bool {
        plan.decodes.len() > self.config.max_num_batched_tokens
    }

    /// Returns the budget that decodes leave.
    fn check_decodes(&mut self, plan: &Plan) -> usize {
        let budget = self.config.max_num_batched_tokens;
        let (mut decodes, mut starved) = (plan.decodes.clone(), plan.starved.clone());
        decodes.retain(|index| !plan.victims.contains(index));
        if self.is_static() {
            // A group's one-token prompts are decodes of the same plan.
            decodes.extend(plan.started.iter().filter(|&&index| self.choices[index].remaining() == 1));
        }
        starved.retain(|index| !plan.victims.contains(index));
        let takes_turns = self.takes_turns(plan) || decodes.len() > budget;
        let turns = decodes.len().div_ceil(budget);
        let mut num_scheduled = 0;
        for &index in &decodes {
            let request = &mut self.choices[index];
            if plan.scheduled[request.row.expect("it runs")] == 1 {
                num_scheduled += 1;
                request.turns_waited = 0;
                request.turns_limit = 0;
                continue;
            }
            assert!(takes_turns, "request {index} was left out although the budget reaches all decodes");
            self.left_out = index;
            request.turns_waited += 1;
            request.turns_limit = request.turns_limit.max(turns);
            // Whoever waits for a block that newer ones in the plan hold is served first next time.
            let limit = request.turns_limit + plan.starved.len();
            assert!(request.turns_waited < limit, "request {index} waits {} steps for its turn", request.turns_waited);
        }
        if num_scheduled < decodes.len().min(budget) {
            let can_wait = |index: &usize| plan.scheduled[self.choices[*index].row.expect("it runs")] == 1;
            let waiting = decodes.iter().filter(|index| !can_wait(index));
            assert!(
                waiting.clone().all(|index| starved.contains(index)),
                "budget is left, and a decode with a slot waits"
            );
        }
        budget - num_scheduled
    }

    /// Prompts under way and newcomers take exactly what budget and chunk limit leave them, in order.
    fn check_chunks(&mut self, plan: &Plan, mut left: usize) -> usize {
        let limit = self.config.max_prefill_chunk_tokens.unwrap_or(usize::MAX);
        let mut logits_left = self.config.max_prompt_logits;
        let mut chunks: Vec<usize> =
            plan.running.iter().copied().filter(|index| !plan.victims.contains(index)).collect();
        chunks.extend(&plan.started);
        let is_group = self.is_static();
        let is_chunk =
            |index: &usize| self.choices[*index].remaining() > 1 || plan.started.contains(index) && !is_group;
        chunks.retain(is_chunk);
        if is_group {
            chunks.sort_unstable();
        }
        for index in chunks {
            let request = &self.choices[index];
            let due = self.limit_by_logits(index, request.remaining().min(limit).min(left), logits_left);
            self.seen.short_of_logits += u64::from(due < request.remaining().min(limit).min(left));
            logits_left -= self.wanted_logits(index, request.computed, request.computed + due).len();
            let given = plan.scheduled[request.row.expect("it runs")];
            assert_eq!(given, due, "request {index} got {given} tokens of its prompt instead of {due}");
            left -= given;
        }
        left
    }

    fn check_admissions(&mut self, scheduler: &Scheduler, plan: &Plan) {
        if plan.started.is_empty() {
            return;
        }
        assert!(!self.is_static() || plan.running.is_empty(), "a static group is joined before it has ended");
        let mut passed = Vec::new();
        for (order, &started) in plan.started.iter().enumerate() {
            for &other in plan.waiting.iter().take_while(|&&other| other != started) {
                if !plan.started[..order].contains(&other) {
                    passed.push(other);
                }
            }
        }
        for &other in &passed {
            assert!(!plan.started.contains(&other), "request {other} starts after a later arrival in one plan");
            self.choices[other].overtaken += 1;
        }
        passed.sort_unstable();
        passed.dedup();
        for other in passed {
            assert!(self.may_be_passed(other, plan), "request {other} was passed without a reason");
            let request = &mut self.choices[other];
            request.steps_passed += 1;
            assert!(request.steps_passed <= MAX_STEPS_PASSED, "request {other} was passed in too many steps");
            assert!(request.overtaken <= MAX_OVERTAKEN, "request {other} was overtaken too often");
        }
        let is_first = plan.running.is_empty() && plan.started.len() == 1;
        if !is_first {
            let (available, growing) = (scheduler.pool().num_available(), self.num_growing());
            assert!(
                available >= growing,
                "after the last admission {available} blocks are left for {growing} that may grow"
            );
        }
    }

    fn num_growing(&self) -> usize {
        let block_size = self.config.block_size;
        let running = self.live.iter().filter(|&&index| self.choices[index].row.is_some());
        running.filter(|&&index| self.choices[index].may_grow(self.table(index).len(), block_size)).count()
    }

    /// Whether the next block that a waiting request would compute is being computed in this plan by another with the same prefix.
    fn may_be_passed(&self, index: usize, plan: &Plan) -> bool {
        let (block_size, request) = (self.config.block_size, &self.choices[index]);
        let column = self.cache.hits(request, block_size);
        let is_under_way = self.request_of(index).is_started;
        let may_find = self.caches() && self.num_untold(index) == 0;
        if !may_find || self.is_static() || is_under_way || column >= request.max_hits(block_size) {
            return false;
        }
        let (start, end) = (column * block_size, (column + 1) * block_size);
        plan.scheduled.iter().enumerate().any(|(row, &num_tokens)| {
            let other = match self.rows[row] {
                Some(other) if num_tokens > 0 => &self.choices[other],
                _ => return false,
            };
            let is_filling = other.computed < end && other.computed + num_tokens > start;
            let is_same = other.prefix.get(end - 1) == Some(&request.prefix[end - 1]);
            is_filling && is_same && other.epoch == self.epoch
        })
    }

    /// With budget and a row to spare, the first that waits must lack memory.
    fn check_nobody_is_left_out(&mut self, scheduler: &Scheduler, plan: &Plan) {
        let is_group_under_way = self.is_static() && !plan.running.is_empty();
        if is_group_under_way || self.rows.iter().all(Option::is_some) {
            return;
        }
        let waiting = self.waiting();
        if waiting.iter().any(|&index| self.choices[index].overtaken >= MAX_OVERTAKEN) {
            return;
        }
        for &index in waiting.iter().take(MAX_OVERTAKEN) {
            if self.lacks_memory(scheduler, index) || self.lacks_logits(scheduler, index) {
                return;
            }
            assert!(self.may_be_passed(index, plan), "request {index} fits and has no reason to wait");
            self.choices[index].deferrals += 1;
            assert!(
                self.choices[index].deferrals <= MAX_STEPS_PASSED,
                "request {index} waits too long for a block in flight"
            );
        }
    }

    /// Whether a waiting choice's blocks, and one for each sequence that may grow, are more than there are.
    fn lacks_memory(&self, scheduler: &Scheduler, index: usize) -> bool {
        scheduler.pool().num_available() < self.num_blocks_needed(index)
    }

    /// Whether a waiting choice needs logits for its first token, and others need all that there are.
    fn lacks_logits(&self, scheduler: &Scheduler, index: usize) -> bool {
        let num_left = self.config.max_prompt_logits - scheduler.batch().prompt_logits_index.len();
        num_left == 0 && !self.wanted_logits(index, 0, 1).is_empty()
    }

    /// Available blocks without which a waiting choice is not admitted.
    pub(crate) fn num_blocks_needed(&self, index: usize) -> usize {
        let (block_size, choice) = (self.config.block_size, &self.choices[index]);
        let num_blocks = choice.tokens.len().div_ceil(block_size);
        let holders = self.holders();
        let (found, _) = self.found_blocks(index);
        let num_unheld = found.iter().filter(|&&block| holders[block as usize] == 0).count();
        let is_first = self.rows.iter().all(Option::is_none);
        let reserve = self.num_growing() + usize::from(choice.may_grow(num_blocks, block_size));
        num_blocks - found.len() + num_unheld + if is_first { 0 } else { reserve }
    }
}
