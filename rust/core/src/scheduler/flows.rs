//! Flows: who waits, by class and tenant, and how much service each tenant has had.
//!
//! 1. A flow is a tenant within a class (without fairness: the class). Every live request belongs to one, from its arrival to its end.
//! 2. Within a flow: preempted sequences; then choices of started requests; then requests that have not started, earliest deadline first
//!    if the policy says so, and by arrival.
//! 3. Among the flows of a class the one with the least weighted service is next. Service counts a prompt token once and an output token
//!    twice, when it is scheduled or sampled for the first time: never what is cached, and never what is computed again.
//! 4. A flow that comes back from idleness is lifted to the service of the least served one that waits: it does not save up.
//!
//! Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); the lift is start-time fair queueing's.

mod turns;

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use foldhash::fast::FixedState;

use super::lists::{Links, List};
use super::sequence::Order;
use crate::memory::{prefetch, table_of};
use crate::policy::{Class, Fairness, PolicyConfig};
pub(super) use turns::{MAX_RETURNED, Turn};
use turns::{Place, Turns};

/// Virtual service of one token at weight 1.
const SCALE: f64 = 65_536.0;
/// Nanoseconds of a millisecond.
const NS_PER_MS: u64 = 1_000_000;
/// Cost of an output token; one of the prompt costs 1.
pub(super) const OUTPUT_COST: u64 = 2;
/// Idle tenants of a class above its virtual time that are remembered at most.
const MAX_IDLE: usize = 65_536;

/// Place in the line of those that have a deadline: deadline, arrival, slot.
pub(super) type DeadlineKey = (u64, u64, u32);

/// A tenant within a class.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) class: Class,
    tenant: Option<Arc<str>>,
    /// Where the look-through of this plan goes on.
    pub(super) scan: Scan,
    /// Preempted sequences, in order of arrival.
    pub(super) preempted: BTreeSet<(Order, u32)>,
    /// Requests with choices that could start, by slot: those of which some have started first, then the others, each in order of arrival.
    pub(super) waiting: List,
    /// Requests with a deadline that have not started.
    pub(super) by_deadline: BTreeSet<DeadlineKey>,
    /// Its sequences that have a row; changed by `count_start` and `count_stop`.
    pub(super) num_running: u32,
    /// Bound on that.
    pub(super) max_running: u32,
    /// Live requests.
    num_requests: u32,
    /// Nobody's: its number may be given to another tenant.
    is_free: bool,
    pub(super) weight: f64,
    /// Virtual service of one prompt token.
    token_service: u64,
    /// Weighted service so far.
    pub(super) service: u64,
    /// Number of its turn: ties go to the flow that waits longest.
    activation: u64,
    /// Where its turn is.
    place: Place,
}

impl Flow {
    /// Whether a sequence or request of it could start, if there were room.
    pub(super) fn is_waiting(&self) -> bool {
        !self.preempted.is_empty() || !self.waiting.is_empty() || !self.by_deadline.is_empty()
    }

    /// A weight is at least one thousandth; shares take no notice of finer digits.
    fn weight_thousandths(&self) -> u64 {
        (self.weight * 1000.0).round() as u64
    }

    fn num_waiting(&self) -> usize {
        self.preempted.len() + self.waiting.len() + self.by_deadline.len()
    }
}

/// Who may be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A preempted sequence.
    Preempted { sequence: u32 },
    /// The next choice of the request in this slot.
    Choice { slot: u32 },
}

/// How far a plan has looked through a flow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scan {
    pub(super) step_id: u64,
    pub(super) next: Option<Waiter>,
    /// Waiters that were passed.
    pub(super) num_passed: u32,
    /// Whether one of them, or the last one that was looked at, lacks memory.
    pub(super) lacks_memory: bool,
}

/// What the scheduler knows of the request in a slot besides the request itself, mostly while it waits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ticket {
    /// Since when it waits, in milliseconds; it may wrap around, what is asked is how long ago it was.
    pub(super) since_ms: u32,
    pub(super) flow: u32,
}

impl Ticket {
    /// For how long it has waited; 0 if that began later than now.
    pub(super) fn age_ms(self, now_ns: u64) -> u32 {
        ((now_ns / NS_PER_MS) as u32).wrapping_sub(self.since_ms).cast_signed().max(0).cast_unsigned()
    }
}

/// All flows.
#[derive(Debug)]
pub(super) struct Flows {
    entries: Vec<Flow>,
    free: Vec<u32>,
    by_key: HashMap<(Option<Arc<str>>, Class), u32, FixedState>,
    /// Who is next in each class.
    turns: [Turns; 3],
    /// Service up to which everybody who waits has come.
    virtual_times: [u64; 3],
    /// Flows without requests that are ahead of that, by service.
    idle: [BTreeSet<(u64, u32)>; 3],
    /// Weights of the flows of each class that have live requests, in thousandths: a sum of fractions would drift as they come and go.
    active_weights: [u64; 3],
    next_activation: u64,
    /// Sequences of any flow that got a row or lost it so far.
    pub(super) num_running_changes: u64,
    pub(super) is_fair: bool,
    pub(super) tickets: Vec<Ticket>,
    pub(super) slot_links: Links,
    /// Requests of which something waits, whatever their flow, longest first.
    age_links: Links,
    by_age: List,
    /// Entries of all lists.
    pub(super) num_preempted: usize,
    pub(super) num_listed: usize,
}

impl Flows {
    pub(super) fn new(policy: &PolicyConfig, num_slots: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::default(),
            turns: Default::default(),
            virtual_times: [0; 3],
            idle: Default::default(),
            active_weights: [0; 3],
            next_activation: 0,
            num_running_changes: 0,
            is_fair: policy.fairness == Fairness::Weighted,
            tickets: table_of(Ticket::default(), num_slots),
            slot_links: Links::new(num_slots),
            age_links: Links::new(num_slots),
            by_age: List::EMPTY,
            num_preempted: 0,
            num_listed: 0,
        }
    }

    pub(super) fn get(&self, flow: u32) -> &Flow {
        &self.entries[flow as usize]
    }

    pub(super) fn get_mut(&mut self, flow: u32) -> &mut Flow {
        &mut self.entries[flow as usize]
    }

    /// Makes room for more requests, who are there besides those that wait and run: displaced ones.
    pub(super) fn grow(&mut self, num_slots: usize) {
        self.tickets.resize(num_slots, Ticket::default());
        self.slot_links.grow(num_slots);
        self.age_links.grow(num_slots);
    }

    /// Flow of the request in a slot.
    pub(super) fn of(&self, slot: u32) -> u32 {
        self.tickets[slot as usize].flow
    }

    /// The flow of a new request, which it joins. Without fairness tenants are not told apart.
    pub(super) fn join(&mut self, policy: &PolicyConfig, class: Class, tenant: Option<&Arc<str>>) -> u32 {
        let tenant = tenant.filter(|_| self.is_fair);
        let key = (tenant.cloned(), class);
        let flow = match self.by_key.get(&key) {
            Some(&flow) => flow,
            None => self.add(policy, key),
        };
        let entry = &mut self.entries[flow as usize];
        entry.num_requests += 1;
        if entry.num_requests == 1 {
            self.active_weights[class as usize] += entry.weight_thousandths();
            self.idle[class as usize].remove(&(entry.service, flow));
        }
        flow
    }

    fn add(&mut self, policy: &PolicyConfig, (tenant, class): (Option<Arc<str>>, Class)) -> u32 {
        let (weight, max_running) = terms(policy, tenant.as_deref(), self.is_fair);
        let entry = Flow {
            class,
            tenant: tenant.clone(),
            scan: Scan::default(),
            preempted: BTreeSet::new(),
            waiting: List::EMPTY,
            by_deadline: BTreeSet::new(),
            num_running: 0,
            max_running,
            num_requests: 0,
            is_free: false,
            weight,
            token_service: token_service(weight),
            service: 0,
            activation: 0,
            place: Place::Nowhere,
        };
        let flow = self.free.pop().unwrap_or(self.entries.len() as u32);
        if flow as usize == self.entries.len() {
            self.entries.push(entry);
        } else {
            self.entries[flow as usize] = entry;
        }
        self.by_key.insert((tenant, class), flow);
        flow
    }

    /// Weights and bounds as a new policy has them, for all flows there are.
    pub(super) fn set_policy(&mut self, policy: &PolicyConfig) {
        // Who holds how much for its weight is looked at anew.
        self.num_running_changes += 1;
        for entry in self.entries.iter_mut().filter(|entry| !entry.is_free) {
            let (weight, max_running) = terms(policy, entry.tenant.as_deref(), self.is_fair);
            let before = entry.weight_thousandths();
            (entry.weight, entry.token_service) = (weight, token_service(weight));
            entry.max_running = max_running;
            if entry.num_requests > 0 {
                let sum = &mut self.active_weights[entry.class as usize];
                *sum = *sum - before + entry.weight_thousandths();
            }
        }
    }

    /// A request of the flow has ended. What an idle flow has had counts as long as it is ahead of the others.
    ///
    /// Returns whether it was the last one: the number of the flow may be another's from now on.
    pub(super) fn leave(&mut self, flow: u32) -> bool {
        let entry = &mut self.entries[flow as usize];
        entry.num_requests -= 1;
        if entry.num_requests > 0 {
            return false;
        }
        let class = entry.class as usize;
        self.active_weights[class] -= entry.weight_thousandths();
        if !self.is_fair {
            return true;
        }
        self.idle[class].insert((entry.service, flow));
        // At most two for each that comes: so the work is bounded, and the number of those behind does not grow.
        for _ in 0..2 {
            let Some(&(service, flow)) = self.idle[class].first() else { break };
            if service > self.virtual_times[class] && self.idle[class].len() <= MAX_IDLE {
                break;
            }
            self.idle[class].pop_first();
            self.turns[class].forget(&mut self.entries, flow);
            let entry = &mut self.entries[flow as usize];
            entry.is_free = true;
            self.by_key.remove(&(entry.tenant.take(), entry.class));
            self.free.push(flow);
        }
        true
    }

    /// A sequence of the flow has got a row; returns the class.
    pub(super) fn count_start(&mut self, flow: u32) -> Class {
        self.num_running_changes += 1;
        let entry = &mut self.entries[flow as usize];
        entry.num_running += 1;
        entry.class
    }

    /// A sequence of the flow has lost its row; returns the class.
    pub(super) fn count_stop(&mut self, flow: u32) -> Class {
        self.num_running_changes += 1;
        let entry = &mut self.entries[flow as usize];
        entry.num_running -= 1;
        entry.class
    }

    /// Something has just been added to what waits of the flow: it has a place among those of its class.
    fn queue(&mut self, flow: u32) {
        let entry = &mut self.entries[flow as usize];
        if entry.num_waiting() == 1 {
            // Just before those who have had as much and more: it has nothing yet.
            let virtual_time = self.virtual_times[entry.class as usize];
            entry.service = entry.service.max(virtual_time.saturating_sub(1));
        }
        if entry.place != Place::Nowhere {
            return;
        }
        let turn = Turn { service: entry.service, activation: self.next_activation, flow };
        self.next_activation += 1;
        self.turns[entry.class as usize].push(entry, turn);
    }

    /// The waiting flow of a class that is next.
    pub(super) fn peek(&mut self, class: Class) -> Option<Turn> {
        let turn = self.turns[class as usize].peek(&mut self.entries)?;
        let virtual_time = &mut self.virtual_times[class as usize];
        *virtual_time = (*virtual_time).max(turn.service);
        Some(turn)
    }

    /// A plan begins: flows that lacked memory are in line again, some of them.
    pub(super) fn bring_back(&mut self) {
        for turns in &mut self.turns {
            turns.bring_back(&mut self.entries);
        }
    }

    /// Sets the flow that `peek` has just found aside, because it lacks memory, until a later plan brings it back.
    pub(super) fn set_aside(&mut self, class: Class) {
        self.turns[class as usize].set_aside(&mut self.entries);
    }

    /// Whether flows of a class are aside: they wait, and lacked memory when they were last looked at.
    pub(super) fn has_aside(&self, class: Class) -> bool {
        self.turns[class as usize].has_aside()
    }

    /// A flow was looked at, and it is not memory that it lacks.
    pub(super) fn note_look(&mut self, flow: u32) {
        let entry = &mut self.entries[flow as usize];
        self.turns[entry.class as usize].note_look(entry);
    }

    /// Something of a flow waits no more.
    fn note_removal(&mut self, flow: u32) {
        let entry = &mut self.entries[flow as usize];
        let turns = &mut self.turns[entry.class as usize];
        if entry.place == Place::Aside && !entry.is_waiting() {
            turns.forget(&mut self.entries, flow);
        } else {
            turns.note_look(entry);
        }
    }

    /// Takes the flow that `peek` has just found out of the line for a while; `unpark` brings it back.
    pub(super) fn park(&mut self, class: Class, parked: &mut Vec<Turn>) {
        parked.extend(self.turns[class as usize].pop());
    }

    pub(super) fn unpark(&mut self, class: Class, parked: &mut Vec<Turn>) {
        self.turns[class as usize].extend(parked.drain(..));
    }

    /// Whether something of the class may be waiting; a flow that waits no more may still be counted.
    pub(super) fn may_wait(&self, class: Class) -> bool {
        !self.turns[class as usize].is_empty()
    }

    /// Service of a flow is counted soon.
    pub(super) fn prefetch(&self, flow: u32) {
        prefetch(std::slice::from_ref(&self.entries[flow as usize].service), 0);
    }

    /// Counts service.
    pub(super) fn charge(&mut self, flow: u32, cost: u64) {
        let entry = &mut self.entries[flow as usize];
        entry.service = entry.service.saturating_add(cost * entry.token_service);
    }

    /// Part of its class that belongs to a flow with live requests.
    pub(super) fn share(&self, flow: u32) -> f64 {
        let entry = self.get(flow);
        entry.weight_thousandths() as f64 / self.active_weights[entry.class as usize] as f64
    }

    /// The place of a flow as it is now.
    pub(super) fn turn(&self, flow: u32) -> Turn {
        let entry = self.get(flow);
        Turn { service: entry.service, activation: entry.activation, flow }
    }

    pub(super) fn push_preempted(&mut self, flow: u32, order: Order, sequence: u32) {
        self.entries[flow as usize].preempted.insert((order, sequence));
        self.num_preempted += 1;
        self.queue(flow);
    }

    pub(super) fn remove_preempted(&mut self, flow: u32, order: Order, sequence: u32) {
        self.entries[flow as usize].preempted.remove(&(order, sequence));
        self.num_preempted -= 1;
        self.note_removal(flow);
    }

    /// The first preempted sequence of a flow after a place in its line.
    pub(super) fn preempted_after(&self, flow: u32, place: Option<(Order, u32)>) -> Option<u32> {
        let line = &self.get(flow).preempted;
        let next = match place {
            Some(place) => line.range((Bound::Excluded(place), Bound::Unbounded)).next(),
            None => line.first(),
        };
        next.map(|&(_, sequence)| sequence)
    }

    /// A request has arrived. `deadline_ns` = its place among those with a deadline, if that counts.
    pub(super) fn enter(&mut self, slot: u32, arrival: u64, deadline_ns: Option<u64>) {
        let flow = self.of(slot);
        let entry = &mut self.entries[flow as usize];
        match deadline_ns {
            Some(deadline) => {
                entry.by_deadline.insert((deadline, arrival, slot));
            }
            None => self.slot_links.push_back(&mut entry.waiting, slot),
        }
        self.num_listed += 1;
        self.queue(flow);
    }

    /// A request of which no choice has started leaves its line, or moves to that of the started ones.
    pub(super) fn remove_unstarted(&mut self, slot: u32, arrival: u64, deadline_ns: Option<u64>) {
        let entry = &mut self.entries[self.tickets[slot as usize].flow as usize];
        match deadline_ns {
            Some(deadline) => {
                entry.by_deadline.remove(&(deadline, arrival, slot));
            }
            None => self.slot_links.remove(&mut entry.waiting, slot),
        }
        self.num_listed -= 1;
        self.note_removal(self.of(slot));
    }

    /// Puts a started request in its place: before the first that `stands_after` accepts.
    pub(super) fn push_started(&mut self, slot: u32, stands_after: impl Fn(u32) -> bool) {
        let flow = self.of(slot);
        self.slot_links.insert_before_first(&mut self.entries[flow as usize].waiting, slot, stands_after);
        self.num_listed += 1;
        self.queue(flow);
    }

    pub(super) fn remove_started(&mut self, slot: u32) {
        let flow = self.of(slot);
        self.slot_links.remove(&mut self.entries[flow as usize].waiting, slot);
        self.num_listed -= 1;
        self.note_removal(flow);
    }

    /// Something of the request in a slot waits, from now on if nothing did before.
    pub(super) fn begin_wait(&mut self, slot: u32, now_ns: u64) {
        if !self.age_links.contains(&self.by_age, slot) {
            self.stamp(slot, now_ns);
            self.age_links.push_back(&mut self.by_age, slot);
        }
    }

    /// Nothing of the request in a slot waits.
    pub(super) fn end_wait(&mut self, slot: u32) {
        if self.age_links.contains(&self.by_age, slot) {
            self.age_links.remove(&mut self.by_age, slot);
        }
    }

    /// The request in a slot gets something now.
    pub(super) fn stamp(&mut self, slot: u32, now_ns: u64) {
        self.tickets[slot as usize].since_ms = (now_ns / NS_PER_MS) as u32;
    }

    /// Slot of the request that has waited longest.
    pub(super) fn longest_waiting(&self) -> Option<u32> {
        self.by_age.first()
    }

    /// Whether something of the request in a slot is known to wait.
    pub(super) fn is_in_wait(&self, slot: u32) -> bool {
        self.age_links.contains(&self.by_age, slot)
    }

    /// Everything that waits, flow by flow.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Flow)> {
        (0..).zip(&self.entries).filter(|(_, entry)| !entry.is_free)
    }

    /// The line of those with a deadline, after a place in it.
    pub(super) fn after_deadline(&self, flow: u32, key: Option<DeadlineKey>) -> Option<u32> {
        let line = &self.get(flow).by_deadline;
        let next = match key {
            Some(key) => line.range((Bound::Excluded(key), Bound::Unbounded)).next(),
            None => line.first(),
        };
        next.map(|&(.., slot)| slot)
    }

    /// Panics if the flows contradict each other or themselves.
    pub(super) fn check_invariants(&self) {
        let (mut num_preempted, mut num_listed) = (0, 0);
        let mut active_weights = [0; 3];
        for (flow, entry) in self.iter() {
            num_preempted += entry.preempted.len();
            num_listed += self.slot_links.iter(&entry.waiting).count() + entry.by_deadline.len();
            assert!(entry.num_requests > 0 || (!entry.is_waiting() && entry.num_running == 0), "flow {flow} is idle");
            if entry.num_requests > 0 {
                active_weights[entry.class as usize] += entry.weight_thousandths();
            }
            let is_idle = self.idle[entry.class as usize].contains(&(entry.service, flow));
            assert_eq!(
                is_idle,
                self.is_fair && entry.num_requests == 0,
                "flow {flow} does not know whether it is idle"
            );
        }
        assert_eq!((self.num_preempted, self.num_listed), (num_preempted, num_listed), "waiting is miscounted");
        assert_eq!(self.active_weights, active_weights, "weights are miscounted");
        for (class, turns) in Class::ALL.into_iter().zip(&self.turns) {
            turns.check_invariants(&self.entries, class);
        }
        let num_known = self.entries.len() - self.free.len();
        assert_eq!((self.iter().count(), self.by_key.len()), (num_known, num_known), "a flow leaked");
    }
}

/// Weight of a tenant's flows, and bound on what each of them may run.
fn terms(policy: &PolicyConfig, tenant: Option<&str>, is_fair: bool) -> (f64, u32) {
    let limits = policy.tenant(tenant);
    let (weight, cap) = if is_fair { (limits.weight, limits.max_num_seqs) } else { (1.0, None) };
    (weight, cap.map_or(u32::MAX, |cap| cap as u32))
}

fn token_service(weight: f64) -> u64 {
    (SCALE / weight).round() as u64
}

#[cfg(test)]
mod tests {
    use super::super::Scheduler;
    use super::*;
    use crate::policy::TenantLimits;
    use crate::{RequestSpec, SchedulerConfig, StepResult};

    #[test]
    fn weights_of_tenants_that_come_and_go_leave_nothing_behind() {
        let mut policy = PolicyConfig::fair();
        let tenants: Vec<Arc<str>> = (0..9).map(|index| Arc::from(format!("tenant {index}"))).collect();
        for (tenant, weight) in tenants.iter().zip([0.1, 0.2, 0.3, 0.7, 1.1, 3.3, 0.001, 999.9, 1000.0]) {
            policy.tenants.insert(Arc::clone(tenant), TenantLimits { weight, ..TenantLimits::default() });
        }
        let mut flows = Flows::new(&policy, 16);
        let joined: Vec<u32> =
            tenants.iter().map(|tenant| flows.join(&policy, Class::Standard, Some(tenant))).collect();
        for &flow in &joined[1..] {
            flows.leave(flow);
        }
        assert_eq!(flows.share(joined[0]).to_bits(), 1.0_f64.to_bits(), "the only one has all");
    }

    /// Requests of ever new tenants that are cancelled before a class that is at its cap can look at them.
    #[test]
    fn tenants_that_come_and_go_behind_a_cap_do_not_pile_up() {
        let mut rules = PolicyConfig::fair();
        rules.classes[Class::Batch as usize].max_num_seqs = Some(1);
        let config = SchedulerConfig { rules: Some(rules), ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config).expect("the configuration is valid");
        let submitter = scheduler.submitter();
        let submit = |tenant: &str| {
            let (tenant, priority) = (Some(Arc::from(tenant)), Some(Class::Batch));
            submitter.submit(RequestSpec { tenant, priority, ..RequestSpec::new(vec![5; 20]) }).expect("it fits")
        };
        let first = submit("first");
        scheduler.step(None, 0).expect("no result is due");
        let result = StepResult { token_ids: &[8], ..StepResult::default() };
        for index in 0..1000 {
            let waiting = [submit(&format!("a{index}")), submit(&format!("b{index}"))];
            scheduler.step(Some(&result), 1).expect("the result fits");
            for id in waiting {
                submitter.cancel(id);
            }
            scheduler.step(Some(&result), 1).expect("the result fits");
            scheduler.check_invariants();
        }
        let flows = &scheduler.flows;
        assert!(flows.entries.len() <= 6, "{} flows for three tenants", flows.entries.len());
        let num_turns = flows.turns[Class::Batch as usize].len();
        assert!(num_turns <= 12, "{num_turns} turns");
        submitter.cancel(first);
        scheduler.step(Some(&result), 1).expect("the result fits");
        scheduler.check_drained();
    }

    /// One class whose idle tenants are remembered does not keep those of another from being forgotten.
    #[test]
    fn idle_tenants_of_one_class_do_not_keep_those_of_another() {
        let policy = PolicyConfig::fair();
        let mut flows = Flows::new(&policy, 4);
        for index in 0..100_u64 {
            let tenant: Arc<str> = Arc::from(format!("tenant {index}"));
            let flow = flows.join(&policy, Class::Interactive, Some(&tenant));
            // Above the virtual time of its class: it is remembered.
            flows.charge(flow, 10 + index);
            flows.leave(flow);
            let flow = flows.join(&policy, Class::Batch, Some(&tenant));
            flows.leave(flow);
        }
        assert_eq!([Class::Interactive, Class::Batch].map(|class| flows.idle[class as usize].len()), [100, 0]);
    }
}
