//! The submitting side: validate, hash, reserve, push — on the caller's thread, without a lock.
//!
//! 1. A request that `submit` accepts is in the queue exactly once and holds one slot and one reservation of the gate.
//! 2. A refusal gives everything back: nothing of it stays.
//! 3. Cancels and finishes never wait for room: they go to a stack that always takes them.
//! 4. Requests that come together are all checked before one of them is let in, and all are let in or none.
//!
//! Submitting has two parts, for those who have to hold a lock over the second: reserving, which checks and hashes, and queueing, which only
//! hands over (`reserved.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::admission::UNKNOWN_RETRY_S;
use crate::config::{Policy, SchedulerConfig};
use crate::control::ControlStack;
use crate::error::{Error, Result};
use crate::fault;
use crate::hash::PrefixHasher;
use crate::histogram::{Histogram, TIME_BOUNDS_NS};
use crate::overload::terms::{Terms, Times};
use crate::overload::{AdmissionControl, Arrival, ListError, RefusalReason, Reservation};
use crate::policy::{Class, PolicyConfig};
use crate::queue::RequestQueue;
use crate::request::{RequestId, RequestSpec};
use crate::reserved::Reserved;
use crate::scheduler::MAX_PER_ROW;
use crate::slots::SlotTable;
use crate::snapshot::Snapshot;
use crate::stats::{NUM_STATS, Stats};
use crate::trace::{Trace, TraceReader};
use crate::waker::Waker;

/// An accepted request on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) id: RequestId,
    pub(crate) spec: RequestSpec,
    pub(crate) max_tokens: u32,
    /// What it holds at the gate, with its class and its tenant.
    pub(crate) reservation: Reservation,
    pub(crate) times: Times,
    pub(crate) root_hash: u64,
    /// Chained hash of each full prompt block.
    pub(crate) hashes: Vec<u64>,
}

/// What other threads ask of a request that is already accepted.
#[derive(Debug)]
pub(crate) enum Control {
    Cancel(RequestId),
    Finish {
        id: RequestId,
        choice: i32,
        num_tokens: u32,
        stop_reason: Option<Arc<str>>,
    },
    /// The door has another policy.
    FollowPolicy,
}

impl Control {
    /// Whom it is about, if that is one request.
    pub(crate) fn request(&self) -> Option<RequestId> {
        match *self {
            Self::Cancel(id) | Self::Finish { id, .. } => Some(id),
            Self::FollowPolicy => None,
        }
    }
}

/// Requests that may live at once: waiting ones are bounded by the gate, started ones, displaced ones among them, by their sequences.
pub(crate) fn max_live_requests(config: &SchedulerConfig) -> usize {
    config.queue_capacity + MAX_PER_ROW * config.max_num_seqs
}

/// What submitting threads and the engine thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) queue: RequestQueue<Box<Submitted>>,
    pub(crate) controls: ControlStack<Control>,
    pub(crate) slots: SlotTable,
    pub(crate) gate: AdmissionControl,
    pub(crate) waker: Waker,
    pub(crate) hasher: PrefixHasher,
    /// The figures of the last step.
    pub(crate) stats: Snapshot<NUM_STATS>,
    /// How long steps took, in nanoseconds.
    pub(crate) step_times: Histogram,
    /// What happens to each request; absent until somebody wants to know.
    pub(crate) trace: OnceLock<Arc<Trace>>,
    /// Whether requests that have not started must wait, and whether the last plan knew that.
    is_paused: AtomicBool,
    is_pause_planned: AtomicBool,
    /// The policy is `static`, which has no rules.
    is_static: bool,
    /// Tokens of tenants were counted from the beginning.
    counts_service: bool,
    vocab_size: Option<u32>,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_model_len: usize,
    hash_prompts: bool,
    block_size: usize,
}

impl Shared {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            queue: RequestQueue::new(config.queue_capacity),
            controls: ControlStack::new(),
            slots: SlotTable::new(max_live_requests(config)),
            gate: AdmissionControl::new(config),
            waker: Waker::new(),
            hasher: PrefixHasher::new(config.hash_seed, config.block_size, config.collide_hashes),
            stats: Snapshot::new(Stats { num_free_blocks: config.num_blocks as u64, ..Stats::default() }.to_numbers()),
            step_times: Histogram::new(&TIME_BOUNDS_NS),
            trace: OnceLock::new(),
            is_paused: AtomicBool::new(false),
            is_pause_planned: AtomicBool::new(false),
            is_static: config.policy == Policy::Static,
            counts_service: config.rules().counts_service(),
            vocab_size: config.vocab_size,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_model_len: config.max_model_len,
            hash_prompts: config.enable_prefix_caching,
            block_size: config.block_size,
        }
    }

    /// Whether a step would find something that it did not know of before.
    pub(crate) fn has_news(&self) -> bool {
        !self.queue.is_empty() || !self.controls.is_empty() || self.queue.is_closed() || self.is_pause_news()
    }

    /// Checks what does not depend on load; what holds for the request, and its `max_tokens`.
    fn check<'a>(&self, policy: &'a PolicyConfig, spec: &mut RequestSpec) -> Result<(Terms<'a>, u32)> {
        spec.truncate_prompt(self.max_model_len)?;
        let terms = Terms::new(policy, spec);
        let max_tokens = spec.validate(self.vocab_size, self.max_model_len, terms.max_tokens_cap(policy))?;
        self.gate.check_size(terms.class, spec.prompt_token_ids.len() as u64)?;
        Ok((terms, max_tokens))
    }

    fn arrival<'a>(&self, terms: &Terms<'a>, spec: &'a RequestSpec, max_tokens: u32, now_ns: u64) -> Arrival<'a> {
        Arrival {
            num_requests: 1,
            tenant: spec.tenant.as_ref(),
            limits: terms.limits,
            class: terms.class,
            num_prompt_tokens: spec.prompt_token_ids.len() as u64,
            num_cacheable_tokens: self.num_cacheable_tokens(spec),
            max_tokens,
            num_choices: spec.n,
            deadline_ns: terms.first_token_deadline_ns(),
            end_deadline_ns: terms.last_token_deadline_ns(),
            now_ns,
        }
    }

    /// Root and chained hashes of the full blocks of a prompt.
    pub(crate) fn hash_prompt(&self, spec: &RequestSpec) -> (u64, Vec<u64>) {
        if !self.hash_prompts {
            return (0, Vec::new());
        }
        let root = self.hasher.root(spec.tenant.as_deref(), spec.cache_salt.as_deref());
        (root, self.hasher.chain(root, &spec.prompt_token_ids))
    }

    /// Leading tokens of a prompt that may turn out to be cached: whole blocks, and never the last token.
    fn num_cacheable_tokens(&self, spec: &RequestSpec) -> u64 {
        let may_hit = self.hash_prompts && spec.prompt_logprobs.is_none();
        let num_blocks = if may_hit { (spec.prompt_token_ids.len() - 1) / self.block_size } else { 0 };
        (num_blocks * self.block_size) as u64
    }

    /// What a reservation rules out, besides in a moment in which the engine is between giving back one thing and another.
    pub(crate) fn queue_full(&self, class: Class) -> Error {
        let (queued, limit) = (self.gate.queued_requests(), self.queue.capacity());
        let error = Error::QueueFull { queued, limit, retry_after_s: UNKNOWN_RETRY_S };
        self.gate.count_refusal(class, &error);
        error
    }

    /// Relaxed, here and below: the waker's fences order the flag with a sleeper's look at it, and it carries no data.
    fn is_pause_news(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed) != self.is_pause_planned.load(Ordering::Relaxed)
    }

    /// Whether the plan being made must start no request.
    pub(crate) fn plan_pause(&self) -> bool {
        let is_paused = self.is_paused.load(Ordering::Relaxed);
        self.is_pause_planned.store(is_paused, Ordering::Relaxed);
        is_paused
    }
}

/// The face of a scheduler towards other threads: submit, cancel, finish, pause, close, stats. Cheap to clone.
///
/// ```
/// use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig};
/// let scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
/// let submitter = scheduler.submitter();
/// let id = submitter.submit(RequestSpec::new(vec![1, 2, 3])).unwrap();
/// assert!(submitter.cancel(id));
/// assert!(!submitter.cancel(id), "only the first cancel counts");
/// ```
#[derive(Debug, Clone)]
pub struct Submitter {
    pub(crate) shared: Arc<Shared>,
}

impl Submitter {
    /// Checks a request and queues it; it arrives at the time of the last step. Any thread; never waits.
    ///
    /// # Errors
    /// As `submit_at`.
    pub fn submit(&self, spec: RequestSpec) -> Result<RequestId> {
        self.submit_at(spec, self.shared.gate.now_ns())
    }

    /// Checks a request and queues it; it arrives at `now_ns` on the clock that `step` gets its times from. Any thread; never waits.
    ///
    /// # Errors
    /// What `RequestSpec` can have wrong; `TenantOverRate`, `TooManyTenants`, `DeadlineUnattainable`, `TenantQueueFull`,
    /// `QueueTooLong`, `QueueFull`, `QueuedTokensFull`; `Closed`. Nothing stays behind.
    pub fn submit_at(&self, spec: RequestSpec, now_ns: u64) -> Result<RequestId> {
        self.reserve(spec, now_ns)?.submit_one()
    }

    /// The first part of `submit_at`: checks, reserves and hashes. `Reserved::submit` is the second.
    ///
    /// # Errors
    /// As `submit_at`.
    pub fn reserve(&self, mut spec: RequestSpec, now_ns: u64) -> Result<Reserved<'_>> {
        let shared = &*self.shared;
        if shared.queue.is_closed() {
            return Err(Error::Closed);
        }
        let rules = shared.gate.rules();
        let (terms, max_tokens) = shared.check(&rules.policy, &mut spec)?;
        let arrival = shared.arrival(&terms, &spec, max_tokens, now_ns);
        let (limits, reservation) = (arrival.rate_limits(), shared.gate.reserve(&arrival)?);
        let mut reserved = Reserved::new(shared, limits);
        let added = reserved.add(spec, max_tokens, reservation, terms.times(now_ns));
        added.inspect_err(|_| shared.gate.give_back(limits, std::iter::once(&reservation)))?;
        Ok(reserved)
    }

    /// The same for several prompts that come together, all or none, each with the parameters of `spec` (whose own prompt does not count).
    ///
    /// # Errors
    /// As `submit_at`, with the number of the prompt if it is about one; also `ListTooLong`, if they can never be let in at once.
    pub fn reserve_list(
        &self,
        spec: &RequestSpec,
        prompts: Vec<Vec<i32>>,
        now_ns: u64,
    ) -> Result<Reserved<'_>, ListError> {
        let shared = &*self.shared;
        if shared.queue.is_closed() {
            return Err(ListError::about_all(Error::Closed));
        }
        let rules = shared.gate.rules();
        let mut requests = Vec::with_capacity(prompts.len());
        for (index, prompt_token_ids) in prompts.into_iter().enumerate() {
            let mut spec = RequestSpec { prompt_token_ids, ..spec.clone() };
            let (terms, max_tokens) = shared.check(&rules.policy, &mut spec).map_err(ListError::about(index))?;
            requests.push((spec, terms, max_tokens));
        }
        let mut arrivals: Vec<Arrival<'_>> = Vec::with_capacity(requests.len());
        for (spec, terms, max_tokens) in &requests {
            arrivals.push(shared.arrival(terms, spec, *max_tokens, now_ns));
        }
        let limits = arrivals.first().map_or([None; 2], Arrival::rate_limits);
        let reservations = shared.gate.reserve_list(&arrivals)?;
        let mut reserved = Reserved::new(shared, limits);
        for (index, (spec, terms, max_tokens)) in requests.into_iter().enumerate() {
            let added = reserved.add(spec, max_tokens, reservations[index], terms.times(now_ns));
            if let Err(error) = added {
                shared.gate.give_back(limits, reservations[index..].iter());
                return Err(ListError::about_all(error));
            }
        }
        Ok(reserved)
    }

    /// Whether a request would be refused whatever the load is. For those who prepare several prompts: a bad one need not wait for the others.
    ///
    /// # Errors
    /// What `RequestSpec` can have wrong.
    pub fn check(&self, mut spec: RequestSpec) -> Result<()> {
        let rules = self.shared.gate.rules();
        self.shared.check(&rules.policy, &mut spec).map(drop)
    }

    /// Whether the rates of a tenant would let in so many requests now, whatever is in them; nothing is charged. For those who have work to do
    /// before there is a request.
    ///
    /// # Errors
    /// `TenantOverRate`, `TooManyTenants`; `ListTooLong` if so many never get in at once.
    pub fn check_rates(&self, tenant: Option<&Arc<str>>, class: Class, num_requests: usize, now_ns: u64) -> Result<()> {
        self.shared.gate.check_rates(tenant, class, num_requests as u64, now_ns)
    }

    /// Charges work that is no request of the engine to the tenant's rate of requests, as one request.
    ///
    /// # Errors
    /// `TenantOverRate`, `TooManyTenants`.
    pub fn charge_request(&self, tenant: Option<&Arc<str>>, class: Class, now_ns: u64) -> Result<()> {
        self.shared.gate.charge_request(tenant, class, now_ns)
    }

    /// Asks for the end of a request; the terminal event of each of its choices is `cancelled` unless it ends otherwise first. O(1), never waits.
    ///
    /// Returns whether this is the first cancel of a live request; any other id is a no-op.
    pub fn cancel(&self, id: RequestId) -> bool {
        fault::point("cancel");
        let first = self.shared.slots.request_cancel(id);
        if first {
            self.shared.controls.push(Control::Cancel(id));
            self.shared.waker.wake();
        }
        first
    }

    /// Ends a choice as `stop` after its first `num_tokens` output tokens, e.g. at a stop string; later tokens are dropped.
    ///
    /// Returns whether the request was live; any other id is a no-op, a choice that ended otherwise stays as it ended, and one that has not
    /// started goes on: it has no text in which a stop string could be found.
    pub fn finish(&self, id: RequestId, choice: i32, num_tokens: u32, stop_reason: Option<Arc<str>>) -> bool {
        fault::point("finish");
        let live = self.shared.slots.is_live(id);
        if live {
            self.shared.controls.push(Control::Finish { id, choice, num_tokens, stop_reason });
            self.shared.waker.wake();
        }
        live
    }

    /// Refuses further requests; the next step ends every live one as `cancelled`.
    pub fn close(&self) {
        fault::point("close");
        self.shared.queue.close();
        self.shared.waker.wake();
    }

    /// Starts no request from the next step on; what has started goes on, with all its choices. Requests are still accepted, and wait.
    pub fn pause(&self) {
        self.set_paused(true);
    }

    /// Lets requests start again after `pause`.
    pub fn resume(&self) {
        self.set_paused(false);
    }

    fn set_paused(&self, is_paused: bool) {
        fault::point("pause");
        self.shared.is_paused.store(is_paused, Ordering::Relaxed);
        self.shared.waker.wake();
    }

    /// The policy in force.
    pub fn policy(&self) -> PolicyConfig {
        self.shared.gate.rules().policy.clone()
    }

    /// Class of a tenant's requests that name none.
    pub fn default_class(&self, tenant: Option<&str>) -> Class {
        self.shared.gate.rules().policy.tenant(tenant).priority.unwrap_or_default()
    }

    /// Replaces the policy. What is asked of a request (class, deadlines, caps, rates, bounds of the queue) holds for those that come
    /// from now on; weights and bounds on what runs hold for all from the next step on.
    ///
    /// The parts that the scheduler is built of stay: fairness, order, admission. Where nothing counted tokens so far, neither weights nor
    /// rates of tokens, no tenant can be given a rate of tokens. There is room for the tenants that the first policy with weights or rates
    /// made room for.
    ///
    /// # Errors
    /// `InvalidNumber`, `InvalidConfig` or `UnusableParameter` names the field, `Closed`; everything stays as it was then.
    pub fn set_policy(&self, policy: PolicyConfig) -> Result<()> {
        let shared = &*self.shared;
        if shared.queue.is_closed() {
            return Err(Error::Closed);
        }
        policy.validate()?;
        if shared.is_static {
            let reason = "\"static\" has no rules that could change; start again with another one";
            return Err(Error::UnusableParameter { name: "policy", reason });
        }
        policy.check_change(&shared.gate.rules().policy, shared.counts_service)?;
        shared.gate.set_policy(policy);
        shared.controls.push(Control::FollowPolicy);
        shared.waker.wake();
        Ok(())
    }

    /// Whether `pause` was called, and `resume` not since.
    pub fn is_paused(&self) -> bool {
        self.shared.is_paused.load(Ordering::Relaxed)
    }

    /// Longest prompt plus output of one choice.
    pub fn max_model_len(&self) -> usize {
        self.shared.max_model_len
    }

    /// Rows: most sequences that run at once.
    pub fn max_num_seqs(&self) -> usize {
        self.shared.max_num_seqs
    }

    /// Most query tokens of a step.
    pub fn max_num_batched_tokens(&self) -> usize {
        self.shared.max_num_batched_tokens
    }

    /// The class that a request gets: its own, else its tenant's, else the default.
    pub fn class_of(&self, spec: &RequestSpec) -> Class {
        spec.priority.unwrap_or_else(|| self.default_class(spec.tenant.as_deref()))
    }

    /// Requests refused because of load, rates or deadlines, by class and reason: all there are, in a fixed order.
    pub fn refusals(&self) -> impl Iterator<Item = (Class, RefusalReason, u64)> + '_ {
        self.shared.gate.refusals().iter()
    }

    /// How long steps took, in nanoseconds.
    pub fn step_times(&self) -> &Histogram {
        &self.shared.step_times
    }

    /// What happens to requests from now on, to be read as often as one likes; the first call makes the scheduler write it down.
    pub fn trace(&self) -> TraceReader {
        TraceReader::new(Arc::clone(self.shared.trace.get_or_init(|| Arc::new(Trace::new()))))
    }

    /// Whether `close` was called.
    pub fn is_closed(&self) -> bool {
        self.shared.queue.is_closed()
    }

    /// Sleeps until a step could find news, or until the timeout. Spends nothing while it sleeps.
    pub fn wait_for_news(&self, timeout: Duration) {
        self.shared.waker.sleep_unless(timeout, || self.shared.has_news());
    }

    /// Gauges of the last step with what was submitted since. Never waits for a step.
    pub fn stats(&self) -> Stats {
        let shared = &*self.shared;
        fault::point("stats");
        let mut stats = Stats::from_numbers(shared.stats.read());
        // The snapshot counts choices of started requests; requests that never started are counted by the gate.
        stats.num_waiting += shared.gate.queued_requests() as u64;
        stats.num_queued_tokens = shared.gate.queued_tokens();
        stats.num_accepted_requests = shared.queue.num_pushed();
        stats.is_paused = u64::from(self.is_paused());
        let load = shared.gate.load();
        stats.num_refused_requests = shared.gate.refusals().total();
        stats.arrival_rate = load.arrival_rate;
        stats.service_rate = load.service_rate;
        stats.load = load.load;
        stats.queued_service_s = shared.gate.queued_service_s();
        stats.is_refusing = u64::from(load.is_refusing);
        stats
    }
}
