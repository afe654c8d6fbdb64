//! The door: what is refused, on the submitting thread, before it costs anything.
//!
//! A request passes, in this order, the rates of its tenant (`bucket.rs`, `tenants.rs`), its deadline, its tenant's part of the queue, the bound in
//! seconds (`service.rs`) and those in requests and tokens (`admission.rs`). What it reserves on the way is given back if it is
//! refused later on the way. How long a request would take is what the engine says (`model.rs`); when a refused one may come back is
//! promised (`promises.rs`); how much arrives is counted (`rates.rs`).
//!
//! *A tenant's part*: with weighted fairness a tenant may add to the queue only while what it has there is below four times what is
//! free of it (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). Alone it fills 4/5, two of them 8/9;
//! what is left is for those who have nothing waiting.
//!
//! Atomics only: nobody waits for anybody, and nothing is allocated. With neither tenants nor a model a request pays the one
//! compare-exchange of `AdmissionGate`.
//!
//! Hysteresis (`refusing.rs`): whoever has refused because of a full queue, a class or the part of a tenant, in requests, tokens or seconds,
//! refuses until 9/10 of it are left; a tenant with less than half of its part is let in meanwhile.

mod bucket;
mod list;
mod model;
mod promises;
mod rates;
mod refusals;
mod refusing;
mod rules;
mod service;
mod tenants;
pub(crate) mod terms;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use crossbeam_utils::CachePadded;

pub use bucket::{Bucket, RateLimit};
pub use list::ListError;
pub use model::{ServiceFigures, ServiceModel};
pub use promises::{Outlook, Promises};
pub use rates::{LoadFigures, Rates, Refused};
pub use refusals::RefusalReason;
pub use service::QueuedService;
pub use tenants::{TenantCell, TenantQueue, TenantTable};

use crate::admission::{AdmissionGate, UNKNOWN_RETRY_S};
use crate::config::SchedulerConfig;
use crate::error::{Error, Result};
use crate::hash::PrefixHasher;
use crate::policy::{Class, Fairness, PolicyConfig, TenantLimits};
use crate::submit::max_live_requests;
use crate::sync::{AtomicU64, Ordering};
use refusals::RefusalCounts;
use refusing::{Refusing, Shortage};
pub(crate) use rules::DoorRules;
use tenants::Measure;

/// What a tenant may have in the queue, relative to what is free of it.
const TENANT_FACTOR: u64 = 4;
/// Most of the capacity that more urgent classes are thought to take from a class.
const MAX_URGENT_LOAD: f64 = 0.95;
/// Tenants for which there is room at least if some have rates: what they have used is kept for a minute after they have left.
const MIN_RATED_TENANTS: usize = 32_768;
/// Least time that a refusal names.
const MIN_RETRY_S: f64 = 0.001;

/// What the door has to know of a request, or of several that come together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival<'a> {
    /// Requests that are let in together or not at all; tokens are counted for all of them.
    pub(crate) num_requests: u64,
    /// Name of its tenant, if it has one.
    pub(crate) tenant: Option<&'a Arc<str>>,
    pub(crate) limits: &'a TenantLimits,
    pub(crate) class: Class,
    pub(crate) num_prompt_tokens: u64,
    /// Of these, leading ones that may turn out to be cached.
    pub(crate) num_cacheable_tokens: u64,
    pub(crate) max_tokens: u32,
    pub(crate) num_choices: u32,
    /// Until its first token, from now.
    pub(crate) deadline_ns: Option<u64>,
    /// Until its last token, from now.
    pub(crate) end_deadline_ns: Option<u64>,
    pub(crate) now_ns: u64,
}

impl Arrival<'_> {
    fn tenant_name(&self) -> Arc<str> {
        self.tenant.map_or_else(|| Arc::from(""), Arc::clone)
    }

    pub(crate) fn rate_limits(&self) -> [Option<RateLimit>; 2] {
        rate_limits(self.limits)
    }

    /// What is charged to its rates.
    fn usage(&self) -> (u64, u64) {
        (self.num_requests, self.num_prompt_tokens)
    }
}

/// Rates of requests and of tokens.
fn rate_limits(limits: &TenantLimits) -> [Option<RateLimit>; 2] {
    [limits.requests_per_min, limits.tokens_per_min].map(|rate| rate.map(RateLimit::per_min))
}

/// What is reserved of the queue for an arrival.
#[derive(Debug, Clone, Copy)]
struct Demand {
    tenant: TenantCell,
    /// Predicted service of all, in microseconds; 0 = unknown.
    service_us: u64,
    /// Of that, what is before the last request.
    earlier_us: u64,
}

/// What comes before a request of those that it comes with.
#[derive(Debug, Clone, Copy, Default)]
struct Earlier {
    num_requests: u64,
    service_us: u64,
}

/// What an accepted request holds: its place in the queue until `release`, its tenant's cell until `leave`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reservation {
    /// Predicted service, in microseconds; 0 = unknown.
    pub(crate) service_us: u32,
    pub(crate) num_prompt_tokens: u32,
    pub(crate) tenant: TenantCell,
    pub(crate) class: Class,
}

/// Decides at the door; shared by submitting threads and the engine.
#[derive(Debug)]
pub(crate) struct AdmissionControl {
    bounds: AdmissionGate,
    rules: ArcSwap<DoorRules>,
    /// Rows. As many requests may wait under a bound in seconds while nobody knows how long they take.
    max_num_seqs: usize,
    full: CachePadded<Full>,
    service: QueuedService,
    model: ServiceModel,
    promises: Promises,
    /// From the first policy on that needs it. Requests from before hold no cell.
    tenants: OnceLock<TenantTable>,
    /// Live requests for whose tenants it has room.
    max_live_requests: usize,
    is_weighted: bool,
    hasher: PrefixHasher,
    /// Time of the last step.
    now_ns: CachePadded<AtomicU64>,
    refusals: CachePadded<Refusals>,
    load: CachePadded<PublishedLoad>,
}

/// By class: its part of the bounds is full, or was and is not yet empty enough. Read by every submit, seldom written.
#[derive(Debug)]
struct Full {
    requests: [Refusing; 3],
    tokens: [Refusing; 3],
}

#[derive(Debug)]
struct Refusals {
    by_reason: RefusalCounts,
    /// Because of load, and their service.
    num_by_load: AtomicU64,
    by_load_us: AtomicU64,
}

/// `LoadFigures` as bits.
#[derive(Debug)]
struct PublishedLoad {
    arrival_rate: AtomicU64,
    service_rate: AtomicU64,
    load: AtomicU64,
    /// Load of the classes before each.
    urgent_loads: [AtomicU64; 3],
    base_load: AtomicU64,
    is_refusing: AtomicU64,
}

impl AdmissionControl {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let bounds = AdmissionGate::new(config.queue_capacity, config.max_queued_tokens);
        let rules = DoorRules::new(config.rules().clone(), &bounds);
        let zero = || AtomicU64::new(0);
        let this = Self {
            max_num_seqs: config.max_num_seqs,
            full: CachePadded::new(Full {
                requests: std::array::from_fn(|_| Refusing::new()),
                tokens: std::array::from_fn(|_| Refusing::new()),
            }),
            service: QueuedService::new(),
            model: ServiceModel::new(),
            promises: Promises::new(),
            tenants: OnceLock::new(),
            max_live_requests: max_live_requests(config),
            is_weighted: rules.policy.fairness == Fairness::Weighted,
            rules: ArcSwap::from_pointee(rules),
            hasher: PrefixHasher::new(config.hash_seed, config.block_size, false),
            now_ns: CachePadded::new(zero()),
            refusals: CachePadded::new(Refusals {
                by_reason: RefusalCounts::default(),
                num_by_load: zero(),
                by_load_us: zero(),
            }),
            load: CachePadded::new(PublishedLoad {
                arrival_rate: zero(),
                service_rate: zero(),
                load: zero(),
                urgent_loads: [zero(), zero(), zero()],
                base_load: zero(),
                is_refusing: zero(),
            }),
            bounds,
        };
        this.make_tenants(&this.rules.load());
        this
    }

    /// The rules in force.
    pub(crate) fn rules(&self) -> arc_swap::Guard<Arc<DoorRules>> {
        self.rules.load()
    }

    /// Puts a policy with the same fairness in force for requests that come from now on.
    pub(crate) fn set_policy(&self, policy: PolicyConfig) {
        let rules = DoorRules::new(policy, &self.bounds);
        self.make_tenants(&rules);
        self.rules.store(Arc::new(rules));
    }

    /// Makes the table of tenants as soon as a policy needs it.
    fn make_tenants(&self, rules: &DoorRules) {
        let has_rates = rules.has_rates();
        if self.is_weighted || has_rates {
            let min_tenants = if has_rates { MIN_RATED_TENANTS } else { 0 };
            self.tenants.get_or_init(|| TenantTable::new(self.max_live_requests.max(min_tenants)));
        }
    }

    /// Refuses a prompt for which an empty queue has too little room: no waiting helps.
    ///
    /// # Errors
    /// `InvalidLength`.
    pub(crate) fn check_size(&self, class: Class, num_prompt_tokens: u64) -> Result<()> {
        if num_prompt_tokens <= self.rules().max_tokens[class as usize] {
            return Ok(());
        }
        let (name, expected) = ("prompt_token_ids", "within max_queued_tokens, of which a class fills its queue_share");
        Err(Error::InvalidLength { name, len: num_prompt_tokens as usize, unit: "tokens", expected })
    }

    /// Reserves what a request needs, or nothing.
    ///
    /// # Errors
    /// `TenantOverRate`, `TooManyTenants`, `DeadlineUnattainable`, `TenantQueueFull`, `QueueTooLong`, `QueueFull`, `QueuedTokensFull`.
    pub(crate) fn reserve(&self, arrival: &Arrival<'_>) -> Result<Reservation> {
        let class = arrival.class;
        let known_us = self.service_us(class, arrival.num_prompt_tokens, arrival.max_tokens, arrival.num_choices);
        let service_us = known_us.unwrap_or(0);
        let tenant = self.reserve_demand(arrival, (u64::from(service_us), 0), |demand| {
            if known_us.is_some() { self.check_deadlines(arrival, demand, Earlier::default()) } else { Ok(()) }
        })?;
        Ok(Reservation { service_us, num_prompt_tokens: arrival.num_prompt_tokens as u32, tenant, class })
    }

    /// Reserves for all of an arrival, or nothing: predicted service of all, and of those before the last. Gives the cell that holds its tenant,
    /// once.
    fn reserve_demand(
        &self,
        arrival: &Arrival<'_>,
        (service_us, earlier_us): (u64, u64),
        check_deadlines: impl FnOnce(&Demand) -> Result<()>,
    ) -> Result<TenantCell> {
        let tenant = self.hold_tenant(arrival.tenant, arrival.now_ns);
        let demand = Demand { tenant, service_us, earlier_us };
        let result = self.charge_rates(arrival, tenant).and_then(|()| {
            let reserved = check_deadlines(&demand).and_then(|()| self.reserve_queue(arrival, &demand));
            if reserved.is_err()
                && let Some(tenants) = self.tenants.get()
            {
                tenants.refund_all(tenant, arrival.rate_limits(), arrival.usage());
            }
            reserved
        });
        if let Err(error) = &result {
            self.refusals.by_reason.count(arrival.class, arrival.num_requests, error);
            self.leave(tenant);
        }
        result.map(|()| tenant)
    }

    fn hold_tenant(&self, name: Option<&Arc<str>>, now_ns: u64) -> TenantCell {
        let key = || self.hasher.tenant(name.map_or("", |name| name));
        self.tenants.get().map_or(TenantCell::NONE, |tenants| tenants.acquire(key(), now_ns))
    }

    fn charge_rates(&self, arrival: &Arrival<'_>, tenant: TenantCell) -> Result<()> {
        let Some(tenants) = self.tenants.get() else {
            return Ok(());
        };
        if tenant == TenantCell::NONE && arrival.rate_limits() != [None; 2] {
            return Err(Error::TooManyTenants { tenant: arrival.tenant_name(), retry_after_s: UNKNOWN_RETRY_S });
        }
        let charged = tenants.charge_all(tenant, arrival.rate_limits(), arrival.usage(), arrival.now_ns);
        charged.map_err(|over| over_rate(arrival.tenant, arrival.limits, over))
    }

    /// Everything behind the rates and the deadlines.
    fn reserve_queue(&self, arrival: &Arrival<'_>, demand: &Demand) -> Result<()> {
        let dequeue = || {
            self.tenants
                .get()
                .into_iter()
                .for_each(|tenants| (0..arrival.num_requests).for_each(|_| tenants.dequeue(demand.tenant)));
        };
        self.queue_for_tenant(arrival, demand)?;
        self.queue_service(arrival, demand).inspect_err(|_| dequeue())?;
        self.queue_request(arrival, demand).inspect_err(|_| {
            self.release_service(arrival.class, demand.tenant, demand.service_us);
            dequeue();
        })
    }

    /// Reserves the service of a request that came before it could be predicted, whatever the bounds: it is in the queue.
    pub(crate) fn price(&self, reservation: Reservation, max_tokens: u32, num_choices: u32) -> Reservation {
        let Reservation { num_prompt_tokens, tenant, class, .. } = reservation;
        let service_us = self.service_us(class, u64::from(num_prompt_tokens), max_tokens, num_choices);
        let Some(service_us) = service_us else { return reservation };
        let _ = self.service.reserve(class, u64::from(service_us), u64::MAX);
        let _ = self.tenants.get().map(|tenants| tenants.queue_service(tenant, u64::from(service_us), u64::MAX));
        Reservation { service_us, ..reservation }
    }

    /// Microseconds of service; `None` = nobody knows yet.
    fn service_us(&self, class: Class, num_prompt_tokens: u64, max_tokens: u32, num_choices: u32) -> Option<u32> {
        let service_ns = self.model.service_ns(class, num_prompt_tokens, max_tokens, num_choices)?;
        Some(u32::try_from(service_ns.div_ceil(1000)).unwrap_or(u32::MAX))
    }

    /// Refuses what cannot have its first token, or its last one, in time. Nobody knows here what of the prompt is cached, so a deadline that
    /// could be met with all of it cached is not refused; and an output is thought to be as short as few of its class are.
    fn check_deadlines(&self, arrival: &Arrival<'_>, demand: &Demand, earlier: Earlier) -> Result<()> {
        if arrival.deadline_ns.is_none() && arrival.end_deadline_ns.is_none() {
            return Ok(());
        }
        let prompt_ns = self.model.prompt_ns(arrival.num_prompt_tokens - arrival.num_cacheable_tokens);
        let whole_ns = prompt_ns + self.model.output_ns(arrival.class, arrival.max_tokens);
        let wait_us = self.predicted_wait_us(arrival, demand.tenant, earlier);
        // Rows are free in the end, so of those that it comes with it waits for what is more.
        let num_waiting = earlier.num_requests.saturating_sub(self.max_num_seqs as u64);
        let least_wait_us = earlier.service_us as f64 * num_waiting as f64 / earlier.num_requests.max(1) as f64;
        let deadlines = [("first", arrival.deadline_ns, prompt_ns), ("last", arrival.end_deadline_ns, whole_ns)];
        for (token, deadline_ns, own_ns) in deadlines {
            let Some(deadline_ns) = deadline_ns else { continue };
            let [own_us, deadline_us] = [own_ns, deadline_ns].map(|ns| ns as f64 / 1e3);
            if wait_us + own_us > deadline_us {
                let retry_after_s = (least_wait_us + own_us < deadline_us).then(|| {
                    // To a tenth below, so that there is room for more than one when they come back.
                    let room_us = (deadline_us - own_us) * 0.9;
                    let excess_us = (wait_us - room_us) * (1.0 - self.urgent_load(arrival.class));
                    self.promise(arrival, demand, excess_us, false)
                });
                let (predicted_ms, deadline_ms) = ((wait_us + own_us) / 1e3, deadline_us / 1e3);
                return Err(Error::DeadlineUnattainable { token, predicted_ms, deadline_ms, retry_after_s });
            }
        }
        Ok(())
    }

    /// Microseconds that a request would wait for a row.
    fn predicted_wait_us(&self, arrival: &Arrival<'_>, tenant: TenantCell, earlier: Earlier) -> f64 {
        let num_queued = self.bounds.queued_requests() as u64 + earlier.num_requests;
        let num_startable = self.model.num_startable();
        if num_queued < num_startable {
            return 0.0;
        }
        let share_left = 1.0 - self.urgent_load(arrival.class);
        let mut ahead_us = (self.service.ahead_of(arrival.class) + earlier.service_us) as f64;
        if let Some(tenants) = self.tenants.get().filter(|_| self.is_weighted && tenant != TenantCell::NONE) {
            let own_us = (tenants.queued(tenant).service_us + earlier.service_us) as f64;
            let fair_us = own_us * tenants.fair_slowdown(tenant, arrival.limits.weight);
            ahead_us = ahead_us.min(self.service.more_urgent_than(arrival.class) as f64 + fair_us);
        }
        // The first of those that wait start in the next step.
        let num_waiting = num_queued.max(1);
        ahead_us * (num_waiting.saturating_sub(num_startable) as f64 / num_waiting as f64) / share_left
    }

    /// Counts the request for its tenant, within the tenant's part of the queue.
    fn queue_for_tenant(&self, arrival: &Arrival<'_>, demand: &Demand) -> Result<()> {
        let Some(tenants) = self.tenants.get() else {
            return Ok(());
        };
        let num_queued = self.bounds.queued_requests() as u64;
        let max_requests = self.rules().max_requests[arrival.class as usize] as u64;
        let num_earlier = arrival.num_requests - 1;
        let num_free = max_requests.saturating_sub(num_queued + num_earlier);
        let limit = self.part_of_tenant(num_free);
        let refuse = |own: u64, limit: u64| {
            let Shortage { excess, is_closed } = tenants.note_refusal(demand.tenant, Measure::Requests, own);
            // With each of its requests that starts, its part grows by four.
            let excess = excess.max((own + num_earlier).saturating_sub(limit) / (TENANT_FACTOR + 1) + 1);
            let excess_us = self.service.total() as f64 * excess as f64 / num_queued.max(1) as f64;
            let (what, [queued, limit]) = ("requests", [own, limit].map(|count| count as f64));
            self.tenant_queue_full(arrival, demand, (what, queued, limit), excess_us, is_closed)
        };
        if let Some(low) = self.keeps_refusing_tenant(demand.tenant, Measure::Requests, limit) {
            return Err(refuse(tenants.queued(demand.tenant).requests, low));
        }
        let queued = tenants.queue_all(demand.tenant, arrival.limits.weight, arrival.num_requests, limit);
        queued.map_err(|own| refuse(own, limit))
    }

    /// What a tenant may have of a queue in which so much is free. A queue that is full is refused for what it is.
    fn part_of_tenant(&self, free: u64) -> u64 {
        if self.is_weighted && free > 0 { TENANT_FACTOR * free } else { u64::MAX }
    }

    /// Whether a tenant has filled its part and has to wait until it has less; then: how much.
    fn keeps_refusing_tenant(&self, tenant: TenantCell, measure: Measure, part: u64) -> Option<u64> {
        let tenants = self.tenants.get().filter(|_| self.is_weighted)?;
        let low = tenants.keeps_refusing(tenant, measure)?;
        (!self.is_modest(tenant, measure, part)).then_some(low)
    }

    /// A tenant that is far from filling its part need not wait until the queue, of others or its own, has become shorter.
    fn is_modest(&self, tenant: TenantCell, measure: Measure, part: u64) -> bool {
        let own = self.tenants.get().map_or(0, |tenants| tenants.queued(tenant).get(measure));
        self.is_weighted && tenant != TenantCell::NONE && own < part / 2
    }

    /// The refusal of a tenant that has so much of what is counted, and may have so much, until so much service of its own is done.
    fn tenant_queue_full(
        &self,
        arrival: &Arrival<'_>,
        demand: &Demand,
        (what, queued, limit): (&'static str, f64, f64),
        own_excess_us: f64,
        is_closed: bool,
    ) -> Error {
        let weight = arrival.limits.weight;
        let slowdown = self.tenants.get().map_or(1.0, |tenants| tenants.fair_slowdown(demand.tenant, weight));
        let excess_us = (own_excess_us * slowdown).min(self.service.total() as f64);
        let retry_after_s = self.promise(arrival, demand, excess_us, is_closed);
        Error::TenantQueueFull { tenant: arrival.tenant_name(), what, queued, limit, retry_after_s }
    }

    /// Reserves the predicted service, within the bound in seconds and the tenant's part of it.
    fn queue_service(&self, arrival: &Arrival<'_>, demand: &Demand) -> Result<()> {
        let (Demand { tenant, service_us, earlier_us }, class) = (*demand, arrival.class);
        if service_us == 0 {
            return Ok(());
        }
        let Some(max_queue_us) = self.rules().max_queue_us[class as usize] else {
            // Without a bound neither refuses.
            let _ = self.service.reserve(class, service_us, u64::MAX);
            let _ = self.tenants.get().map(|tenants| tenants.queue_service(tenant, service_us, u64::MAX));
            return Ok(());
        };
        let share_left = 1.0 - self.urgent_load(class);
        let limit_us = (max_queue_us * share_left) as u64;
        let too_long = |ahead_us: u64, most_us: u64| {
            let Shortage { excess, is_closed } = self.service.refusing(class).note(ahead_us, service_us, limit_us);
            let retry_after_s = self.promise(arrival, demand, excess as f64 / share_left, is_closed);
            let [predicted_s, limit_s] = [ahead_us, most_us].map(|us| us as f64 / 1e6 / share_left);
            Error::QueueTooLong { predicted_s, limit_s, retry_after_s }
        };
        let part_us = self.part_of_tenant(limit_us.saturating_sub(self.service.ahead_of(class) + earlier_us));
        if !self.is_modest(tenant, Measure::Service, part_us)
            && let Some(low_us) = self.service.keeps_refusing(class)
        {
            return Err(too_long(self.service.ahead_of(class), low_us));
        }
        if let Some(tenants) = self.tenants.get() {
            let refuse = |own_us: u64, limit_us: u64| {
                let Shortage { excess, is_closed } = tenants.note_refusal(tenant, Measure::Service, own_us);
                let excess_us = excess.max((own_us + earlier_us).saturating_sub(limit_us) / (TENANT_FACTOR + 1) + 1);
                let (what, [queued, limit]) = ("seconds of work", [own_us, limit_us].map(|us| us as f64 / 1e6));
                let excess_us = excess_us as f64 / share_left;
                self.tenant_queue_full(arrival, demand, (what, queued, limit), excess_us, is_closed)
            };
            if let Some(low_us) = self.keeps_refusing_tenant(tenant, Measure::Service, part_us) {
                return Err(refuse(tenants.queued(tenant).service_us, low_us));
            }
            let most_us = part_us.saturating_sub(earlier_us);
            tenants.queue_service(tenant, service_us, most_us).map_err(|own_us| refuse(own_us, part_us))?;
        }
        self.service.reserve(class, service_us, limit_us).map_err(|ahead_us| {
            self.tenants.get().into_iter().for_each(|tenants| tenants.dequeue_service(tenant, service_us));
            too_long(ahead_us, limit_us)
        })
    }

    /// Reserves a place in the queue, within the bounds in requests and tokens.
    fn queue_request(&self, arrival: &Arrival<'_>, demand: &Demand) -> Result<()> {
        let (class, requested) = (arrival.class as usize, arrival.num_prompt_tokens);
        let rules = self.rules();
        let (mut max_requests, max_tokens) = (rules.max_requests[class], rules.max_tokens[class]);
        if demand.service_us == 0 && rules.max_queue_us[class].is_some() {
            max_requests = max_requests.min(self.max_num_seqs);
        }
        let refuse = |shortage: Shortage, queued: u64| {
            // Its own service is reserved already.
            let waiting_us = self.service.total().saturating_sub(demand.service_us);
            let excess_us = waiting_us as f64 * shortage.excess as f64 / queued.max(1) as f64;
            self.promise(arrival, demand, excess_us, shortage.is_closed)
        };
        let refused_requests = |queued: usize, limit: usize| {
            let shortage = self.full.requests[class].note(queued as u64, arrival.num_requests, max_requests as u64);
            Error::QueueFull { queued, limit, retry_after_s: refuse(shortage, queued as u64) }
        };
        let refused_tokens = |queued: u64, limit: u64| {
            let shortage = self.full.tokens[class].note(queued, requested, max_tokens);
            Error::QueuedTokensFull { queued, requested, limit, retry_after_s: refuse(shortage, queued) }
        };
        let free = || max_requests.saturating_sub(self.bounds.queued_requests()) as u64;
        let is_modest = || self.is_modest(demand.tenant, Measure::Requests, self.part_of_tenant(free()));
        if let Some(low) = self.full.requests[class].keeps_on(|| self.queued_requests() as u64)
            && !is_modest()
        {
            return Err(refused_requests(self.queued_requests(), low as usize));
        }
        if let Some(low) = self.full.tokens[class].keeps_on(|| self.queued_tokens())
            && !is_modest()
        {
            return Err(refused_tokens(self.queued_tokens(), low));
        }
        let num_requests = arrival.num_requests as usize;
        let reserved = self.bounds.reserve_all_within(num_requests, requested, max_requests, max_tokens);
        reserved.map_err(|error| match error {
            Error::QueuedTokensFull { queued, limit, .. } => refused_tokens(queued, limit),
            Error::QueueFull { queued, limit, .. } => refused_requests(queued, limit),
            other => other,
        })
    }

    /// Counts a refusal because of load, and promises when the request may come back: seconds from now.
    fn promise(&self, arrival: &Arrival<'_>, demand: &Demand, excess_us: f64, is_closed: bool) -> f64 {
        let service_us = demand.service_us;
        self.refusals.num_by_load.fetch_add(arrival.num_requests, Ordering::Relaxed);
        self.refusals.by_load_us.fetch_add(service_us, Ordering::Relaxed);
        if service_us == 0 {
            return UNKNOWN_RETRY_S;
        }
        let excess_ns = (excess_us.max(0.0) * 1e3) as u64;
        let outlook = Outlook { excess_ns, is_closed, base_load: read(&self.load.base_load) };
        let promised = self.promises.book(arrival.now_ns, service_us * 1000, outlook);
        (promised.saturating_sub(arrival.now_ns) as f64 / 1e9).max(MIN_RETRY_S)
    }

    fn urgent_load(&self, class: Class) -> f64 {
        read(&self.load.urgent_loads[class as usize]).min(MAX_URGENT_LOAD)
    }

    /// Gives back the place in the queue: the request starts, or ends without having started.
    ///
    /// # Panics
    /// If it was given back before, as far as that can be seen.
    pub(crate) fn release(&self, reservation: &Reservation) {
        let Reservation { service_us, tenant, class, num_prompt_tokens } = *reservation;
        self.release_service(class, tenant, u64::from(service_us));
        self.tenants.get().into_iter().for_each(|tenants| tenants.dequeue(tenant));
        self.bounds.release(u64::from(num_prompt_tokens));
    }

    fn release_service(&self, class: Class, tenant: TenantCell, service_us: u64) {
        if service_us > 0 {
            self.service.release(class, service_us);
        }
        self.tenants.get().into_iter().for_each(|tenants| tenants.dequeue_service(tenant, service_us));
    }

    /// Gives up the hold on the tenant's cell: the request has ended.
    pub(crate) fn leave(&self, tenant: TenantCell) {
        if let Some(tenants) = self.tenants.get() {
            tenants.release(tenant);
        }
    }

    /// Gives everything back, as if requests that came together had never come: they cannot be queued after all. `limits` are the rates that
    /// they were charged to.
    pub(crate) fn give_back<'a>(
        &self,
        limits: [Option<RateLimit>; 2],
        reservations: impl Iterator<Item = &'a Reservation> + Clone,
    ) {
        let (mut num_requests, mut num_tokens) = (0, 0);
        for reservation in reservations.clone() {
            self.release(reservation);
            num_requests += 1;
            num_tokens += u64::from(reservation.num_prompt_tokens);
        }
        if let (Some(tenants), Some(Reservation { tenant, .. })) = (self.tenants.get(), reservations.clone().next()) {
            tenants.refund_all(*tenant, limits, (num_requests, num_tokens));
        }
        reservations.for_each(|reservation| self.leave(reservation.tenant));
    }

    /// Charges output tokens to the rate of the tenant of a live request.
    pub(crate) fn charge_output(&self, tenant: TenantCell, num_tokens: u64, now_ns: u64) {
        if let Some(tenants) = self.tenants.get() {
            tenants.charge_output(tenant, num_tokens, now_ns);
        }
    }

    /// What the engine knows of its speed and its work.
    pub(crate) fn publish(&self, figures: &ServiceFigures) {
        self.model.publish(figures);
    }

    pub(crate) fn publish_load(&self, figures: &LoadFigures) {
        let load = &*self.load;
        let [interactive, standard, _] = figures.class_loads;
        let urgent_loads = [0.0, interactive, interactive + standard];
        for (published, value) in load.urgent_loads.iter().zip(urgent_loads) {
            published.store(value.to_bits(), Ordering::Relaxed);
        }
        load.arrival_rate.store(figures.arrival_rate.to_bits(), Ordering::Relaxed);
        load.service_rate.store(figures.service_rate.to_bits(), Ordering::Relaxed);
        load.load.store(figures.load.to_bits(), Ordering::Relaxed);
        load.base_load.store(figures.base_load.to_bits(), Ordering::Relaxed);
        load.is_refusing.store(u64::from(figures.is_refusing), Ordering::Relaxed);
    }

    /// The last published figures of load, without those by class; `is_refusing` also while a class waits for its queue to become shorter.
    pub(crate) fn load(&self) -> LoadFigures {
        let load = &*self.load;
        LoadFigures {
            arrival_rate: read(&load.arrival_rate),
            service_rate: read(&load.service_rate),
            load: read(&load.load),
            class_loads: [0.0; 3],
            base_load: read(&load.base_load),
            is_refusing: load.is_refusing.load(Ordering::Relaxed) > 0
                || Class::ALL.into_iter().any(|class| self.service.is_refusing(class))
                || self.full.requests.iter().any(|full| full.is_on(|| self.queued_requests() as u64))
                || self.full.tokens.iter().any(|full| full.is_on(|| self.queued_tokens())),
        }
    }

    /// Refused because of load.
    pub(crate) fn refused(&self) -> Refused {
        Refused {
            num_requests: self.refusals.num_by_load.load(Ordering::Relaxed),
            service_us: self.refusals.by_load_us.load(Ordering::Relaxed),
        }
    }

    /// Counts a refusal for whatever reason; those of `reserve` are counted.
    pub(crate) fn count_refusal(&self, class: Class, error: &Error) {
        self.refusals.by_reason.count(class, 1, error);
    }

    /// Refused, by class and reason.
    pub(crate) fn refusals(&self) -> &RefusalCounts {
        &self.refusals.by_reason
    }

    /// Time of the last step.
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn set_now_ns(&self, now_ns: u64) {
        self.now_ns.store(now_ns, Ordering::Relaxed);
    }

    pub(crate) fn queued_requests(&self) -> usize {
        self.bounds.queued_requests()
    }

    pub(crate) fn queued_tokens(&self) -> u64 {
        self.bounds.queued_tokens()
    }

    /// Predicted seconds of service in the queue.
    pub(crate) fn queued_service_s(&self) -> f64 {
        self.service.total() as f64 / 1e6
    }

    /// Panics unless nobody holds anything.
    pub(crate) fn check_drained(&self) {
        assert_eq!((self.queued_requests(), self.queued_tokens()), (0, 0), "a reservation leaked");
        assert_eq!(self.service.total(), 0, "reserved service leaked");
        if let Some(tenants) = self.tenants.get() {
            assert_eq!((tenants.num_references(), tenants.waiting_weight()), (0, 0), "a hold on a tenant leaked");
        }
    }
}

/// The refusal of a tenant that is above a rate, for so many nanoseconds.
fn over_rate(tenant: Option<&Arc<str>>, limits: &TenantLimits, (what, retry_ns): (&'static str, u64)) -> Error {
    let limit = if what == "requests_per_min" { limits.requests_per_min } else { limits.tokens_per_min };
    Error::TenantOverRate {
        tenant: tenant.map_or_else(|| Arc::from(""), Arc::clone),
        what,
        limit: limit.unwrap_or(0.0),
        retry_after_s: (retry_ns as f64 / 1e9).max(MIN_RETRY_S),
    }
}

fn read(number: &AtomicU64) -> f64 {
    f64::from_bits(number.load(Ordering::Relaxed))
}
