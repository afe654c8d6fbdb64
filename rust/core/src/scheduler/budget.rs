//! The budget of a step, in tokens and in time, and what a plan owes to those who wait.
//!
//! Precedence: memory safety > `max_num_batched_tokens` > every interactive and standard decode in every step (d) > a chunk of a prompt in
//! every m steps > the latency target.

use std::collections::BTreeMap;

use super::Scheduler;
use super::request::Request;
use super::sequence::Order;
use crate::overload::{Reservation, ServiceFigures};
use crate::policy::Class;
use crate::policy::cost::{CostModel, StepWork};

/// What a plan may still spend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    pub(super) tokens: usize,
    /// Nanoseconds until the latency target; infinite without one.
    pub(super) time_ns: f64,
    /// Tokens of the next chunk that are due whatever time is left.
    pub(super) owed: usize,
}

impl Budget {
    pub(super) fn is_timed(&self) -> bool {
        self.time_ns.is_finite()
    }
}

/// Rhythm of the steps: how long they take, how long they may, who was left out.
#[derive(Debug, Default)]
pub(super) struct Pace {
    pub(super) cost: CostModel,
    /// What steps with a target are planned by until `cost` has learned.
    guess: CostModel,
    /// Work of the batch in flight.
    work: StepWork,
    /// When it was planned.
    planned_ns: u64,
    pub(super) last_step_ns: u64,
    pub(super) predicted_step_ns: u64,
    /// Latency targets of decoding sequences, in microseconds, with how many have each.
    targets: BTreeMap<u32, u32>,
    /// The highest class of which a prompt got nothing in the plan being made for lack of time.
    denied: Option<Class>,
    /// Plans in a row in which there was such a one, and no chunk for its class or a higher one.
    pub(super) num_without_prefill: u32,
    /// Steps that batch decodes were owed and did not get, times `max_batch_pause_steps`.
    batch_credit: u64,
    /// Step in which all batch decodes last ran, and by row that in which one of them did.
    all_batch_ran: u64,
    batch_ran: Vec<u64>,
    /// The batch decode that is served first when not all are.
    pub(super) batch_rotation: Order,
    /// Tokens that the last plan might have scheduled.
    pub(super) token_budget: u64,
    /// Mean number of sequences that ran while others waited for a row or for memory; 0 = nobody has.
    crowd: f64,
    /// Whether the door knows what service costs.
    pub(super) is_published: bool,
}

impl Pace {
    /// What the plan being made goes by.
    fn model(&self) -> &CostModel {
        if self.cost.is_ready() { &self.cost } else { &self.guess }
    }

    /// Takes it that the last step's time was that of its tokens alone, and that twice as many are the most to dare: so steps grow until they
    /// take as long as they may. Only after a step that was much too long (before anything decoded) the next may be too long by the part that
    /// does not shrink with the tokens. A block counts as known.
    fn guess(&mut self, target_ns: f64, block_size: usize) {
        let num_tokens = self.work.new_tokens.max(block_size as u64) as f64;
        let time_ns = (self.last_step_ns as f64).max(target_ns / 2.0);
        self.guess = CostModel::per_token(time_ns / num_tokens);
    }

    /// A batch was planned.
    pub(super) fn begin_step(&mut self, work: StepWork, now_ns: u64) {
        self.work = work;
        self.planned_ns = now_ns;
        self.predicted_step_ns = self.cost.predict_ns(work).map_or(0, |time| time as u64);
    }

    /// Its result is here. Without a time of its own, it took from its plan until now. Returns how long, if that is known.
    pub(super) fn end_step(&mut self, time_ns: Option<u64>, now_ns: u64) -> Option<u64> {
        let time_ns = Some(time_ns.unwrap_or(now_ns.saturating_sub(self.planned_ns))).filter(|&time_ns| time_ns > 0)?;
        self.last_step_ns = time_ns;
        self.cost.observe(self.work, time_ns);
        Some(time_ns)
    }

    /// How many of the batch decodes are due in the plan being made, so that each runs at least once in `period` steps.
    pub(super) fn due_batch_decodes(&mut self, num_decodes: usize, period: u32) -> usize {
        let most = num_decodes as u64 * u64::from(period);
        self.batch_credit = (self.batch_credit + num_decodes as u64).min(most);
        (self.batch_credit / u64::from(period)) as usize
    }

    /// A batch decode runs.
    pub(super) fn count_batch_decode(&mut self, row: u32, step_id: u64, period: u32) {
        self.batch_credit = self.batch_credit.saturating_sub(u64::from(period));
        self.note_batch_decode(row, step_id);
    }

    /// A batch decode has run.
    pub(super) fn note_batch_decode(&mut self, row: u32, step_id: u64) {
        let row = row as usize;
        if row >= self.batch_ran.len() {
            self.batch_ran.resize(row + 1, 0);
        }
        self.batch_ran[row] = step_id;
    }

    /// All batch decodes run.
    pub(super) fn count_all_batch_decodes(&mut self, step_id: u64) {
        self.batch_credit = 0;
        self.all_batch_ran = step_id;
    }

    /// Step in which some batch decode may have run last.
    pub(super) fn all_batch_ran(&self) -> u64 {
        self.all_batch_ran
    }

    /// Step in which the batch decode in a row ran last.
    pub(super) fn batch_ran(&self, row: u32) -> u64 {
        self.batch_ran[row as usize].max(self.all_batch_ran)
    }

    /// A prompt of a class gets nothing in the plan being made, for lack of time.
    pub(super) fn deny(&mut self, class: Class) {
        self.denied = Some(self.denied.map_or(class, |denied| denied.min(class)));
    }

    /// A plan is made: the highest class that was denied a chunk in it, if any.
    pub(super) fn take_denied(&mut self) -> Option<Class> {
        self.denied.take()
    }

    pub(super) fn chunk_ns(&self, start: usize, num_tokens: usize) -> f64 {
        self.model().chunk_ns(start as u64, num_tokens as u64)
    }

    pub(super) fn decode_ns(&self, num_seqs: usize, num_kv_tokens: u64) -> f64 {
        self.model().decode_ns(num_seqs as u64, num_kv_tokens)
    }

    /// So many run, and there is no room for those that wait.
    fn note_crowd(&mut self, num_running: usize) {
        let crowd = self.crowd(num_running);
        self.crowd = crowd + (num_running as f64 - crowd) / CROWD_STEPS;
    }

    /// How many share a step when others wait, `unknown` as long as nobody has: memory may suffice for far fewer than there are rows.
    fn crowd(&self, unknown: usize) -> f64 {
        if self.crowd > 0.0 { self.crowd } else { unknown as f64 }
    }

    pub(super) fn add_target(&mut self, target_us: u32) {
        if target_us > 0 {
            *self.targets.entry(target_us).or_default() += 1;
        }
    }

    pub(super) fn remove_target(&mut self, target_us: u32) {
        if target_us > 0
            && let Some(count) = self.targets.get_mut(&target_us)
        {
            *count -= 1;
            if *count == 0 {
                self.targets.remove(&target_us);
            }
        }
    }

    /// The tightest latency target of what decodes, in nanoseconds.
    pub(super) fn target_ns(&self) -> Option<f64> {
        self.targets.first_key_value().map(|(&target, _)| f64::from(target) * 1e3)
    }
}

/// Steps between two publications of what service costs.
const PUBLISH_INTERVAL: u64 = 16;
/// Steps that the mean number of running sequences is taken from.
const CROWD_STEPS: f64 = 32.0;

impl Scheduler {
    /// Tells the door what service costs: as soon as it is known, then every few steps.
    pub(super) fn publish_service(&mut self) {
        let is_waiting = self.flows.num_preempted + self.flows.num_listed > 0;
        if is_waiting && self.is_full() {
            self.pace.note_crowd(self.num_running());
        }
        let is_due = self.step_id.is_multiple_of(PUBLISH_INTERVAL) || !self.pace.is_published;
        if !is_due || !self.pace.cost.is_ready() {
            return;
        }
        let [a, b, c, _] = self.pace.cost.coefficients();
        let (num_decoding, num_tokens) = (self.lanes.num_live().max(1) as f64, self.lanes.total_tokens() as f64);
        let mean_context = num_tokens / num_decoding;
        self.shared.gate.publish(&ServiceFigures {
            ns_per_prompt_token: b,
            ns_per_output_token: a / self.pace.crowd(self.config.max_num_seqs) + b + c * mean_context,
            expected_output_tokens: Class::ALL.map(|class| self.growth.mean_length(class)),
            likely_output_tokens: Class::ALL.map(|class| self.growth.likely_length(class)),
            ns_per_step: a + b * num_decoding + c * num_tokens,
            num_startable: if is_waiting { 0 } else { self.rows.num_free() },
        });
        if !std::mem::replace(&mut self.pace.is_published, true) {
            self.price_waiting();
        }
    }

    /// Whether the plan that was made lacks rows or memory for more: what waits does not wait for a cap, or because of a pause.
    fn is_full(&self) -> bool {
        self.num_running() > 0 && (self.rows.num_free() == 0 || self.lacks_memory.contains(&true))
    }

    /// Reserves the service of those that came when nobody knew it.
    fn price_waiting(&mut self) {
        for slot in 0..self.requests.len() {
            let unpriced = |request: &Request| !request.is_started() && request.reservation().service_us == 0;
            if let Some(request) = self.requests[slot].as_ref().filter(|request| unpriced(request)) {
                let max_tokens = request.max_num_tokens - request.num_prompt_tokens;
                let priced = self.priced(request.reservation(), max_tokens, u32::from(request.num_choices));
                self.request_mut(slot as u32).set_service_us(priced.service_us);
            }
        }
    }

    /// The reservation with its service, which is reserved now if it was unknown to the door and is known here.
    pub(super) fn priced(&self, reservation: Reservation, max_tokens: u32, num_choices: u32) -> Reservation {
        if reservation.service_us > 0 || !self.pace.is_published {
            return reservation;
        }
        self.shared.gate.price(reservation, max_tokens, num_choices)
    }

    /// What the next plan may spend before anything is planned. The steps aim below the target by as much as their predictions are off.
    pub(super) fn begin_budget(&mut self) -> Budget {
        let tokens = self.config.max_num_batched_tokens;
        let time_ns = match self.pace.target_ns() {
            Some(target) if self.pace.cost.is_ready() => {
                let base = self.pace.cost.coefficients()[0];
                target * (1.0 - self.pace.cost.relative_error().min(0.5)) - base
            }
            Some(target) => {
                self.pace.guess(target, self.config.block_size);
                target
            }
            None => f64::INFINITY,
        };
        let is_owed = self.pace.num_without_prefill + 1 >= self.rules.max_prefill_interval;
        Budget { tokens, time_ns, owed: if is_owed { self.config.block_size } else { 0 } }
    }

    /// Most tokens, up to `wanted`, of a chunk that begins after `start` tokens of context.
    pub(super) fn chunk_limit(&self, budget: &Budget, start: usize, wanted: usize) -> usize {
        let wanted = wanted.min(budget.tokens);
        if !budget.is_timed() {
            return wanted;
        }
        let timely = self.pace.model().max_chunk(budget.time_ns, start as u64, wanted as u64) as usize;
        timely.max(budget.owed.min(wanted))
    }

    /// Counts a planned chunk.
    pub(super) fn spend_chunk(&self, budget: &mut Budget, start: usize, num_tokens: usize) {
        budget.tokens -= num_tokens;
        budget.owed = 0;
        if budget.is_timed() {
            budget.time_ns -= self.pace.model().chunk_ns(start as u64, num_tokens as u64);
        }
    }

    /// Whether not even the first token of a prompt fits.
    pub(super) fn is_spent(&self, budget: &Budget) -> bool {
        self.chunk_limit(budget, 0, 1) == 0
    }

    /// Counts planned decodes.
    pub(super) fn spend_decodes(&self, budget: &mut Budget, num_seqs: usize, num_kv_tokens: u64) {
        budget.tokens -= num_seqs;
        if budget.is_timed() {
            budget.time_ns -= self.pace.model().decode_ns(num_seqs as u64, num_kv_tokens);
        }
    }
}
