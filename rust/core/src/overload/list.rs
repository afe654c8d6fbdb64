//! Several requests that are let in together or not at all, and what is asked of a tenant's rates before there is a request.
//!
//! A list passes the door as one arrival: its requests, tokens and service are counted at once, so no part of it is ever let in or charged alone,
//! and what a refusal promises holds for all of it. What can never be let in at once is refused for good: no waiting helps.

use std::sync::Arc;

use super::tenants::TenantCell;
use super::{AdmissionControl, Arrival, Demand, Earlier, Reservation, TENANT_FACTOR, over_rate, rate_limits};
use crate::admission::UNKNOWN_RETRY_S;
use crate::error::{Error, Result};
use crate::policy::{Class, TenantLimits};

/// Why a list was refused.
#[derive(Debug, Clone, PartialEq)]
pub struct ListError {
    /// Which of its requests it is about; absent = all of them.
    pub index: Option<usize>,
    /// What is wrong.
    pub error: Error,
}

impl ListError {
    /// It is about all of them.
    pub(crate) fn about_all(error: Error) -> Self {
        Self { index: None, error }
    }

    /// It is about one of them.
    pub(crate) fn about(index: usize) -> impl Fn(Error) -> Self {
        move |error| Self { index: Some(index), error }
    }
}

/// A bound, and how much of what it counts a list is.
type Bound = (&'static str, &'static str, f64, f64);

impl AdmissionControl {
    /// Reserves what several requests of one tenant and class need that come together, or nothing; in their order.
    ///
    /// # Errors
    /// `ListTooLong`, and what `reserve` refuses.
    pub(crate) fn reserve_list(&self, arrivals: &[Arrival<'_>]) -> Result<Vec<Reservation>, ListError> {
        let [.., last] = arrivals else { return Ok(Vec::new()) };
        let services: Option<Vec<u32>> = arrivals.iter().map(|arrival| self.service_of(arrival)).collect();
        let is_known = services.is_some();
        let services = services.unwrap_or_else(|| vec![0; arrivals.len()]);
        let service_us = services.iter().copied().map(u64::from).sum();
        let last_us = services.last().copied().map_or(0, u64::from);
        let all = Arrival {
            num_requests: arrivals.len() as u64,
            num_prompt_tokens: arrivals.iter().map(|arrival| arrival.num_prompt_tokens).sum(),
            ..*last
        };
        self.check_list(&all, service_us, service_us - last_us).map_err(ListError::about_all)?;
        let mut late = None;
        let check = |demand: &Demand| {
            if !is_known {
                return Ok(());
            }
            let mut earlier = Earlier { num_requests: all.num_requests, service_us };
            // From the last one on, which waits longest: what is told of it holds for the list.
            for (index, (arrival, &own_us)) in arrivals.iter().zip(&services).enumerate().rev() {
                earlier.num_requests -= 1;
                earlier.service_us -= u64::from(own_us);
                let arrival = Arrival { num_requests: all.num_requests, ..*arrival };
                self.check_deadlines(&arrival, demand, earlier).inspect_err(|_| late = Some(index))?;
            }
            Ok(())
        };
        let reserved = self.reserve_demand(&all, (service_us, service_us - last_us), check);
        let tenant = reserved.map_err(|error| ListError { index: late, error })?;
        self.tenants.get().into_iter().for_each(|tenants| tenants.hold_more(tenant, all.num_requests - 1));
        let reservation = |(arrival, &service_us): (&Arrival<'_>, &u32)| Reservation {
            service_us,
            num_prompt_tokens: arrival.num_prompt_tokens as u32,
            tenant,
            class: arrival.class,
        };
        Ok(arrivals.iter().zip(&services).map(reservation).collect())
    }

    fn service_of(&self, arrival: &Arrival<'_>) -> Option<u32> {
        self.service_us(arrival.class, arrival.num_prompt_tokens, arrival.max_tokens, arrival.num_choices)
    }

    /// Refuses a list that an empty queue and an unused rate would not let in. One request alone always gets in some day.
    fn check_list(&self, all: &Arrival<'_>, service_us: u64, earlier_us: u64) -> Result<()> {
        if all.num_requests < 2 {
            return Ok(());
        }
        let rules = self.rules();
        let class = all.class as usize;
        let (num_requests, num_tokens) = (all.num_requests as f64, all.num_prompt_tokens as f64);
        let [requests, tokens] = ["requests", "prompt tokens"];
        let seconds = |us: f64| (us / 1e3).round() / 1e3;
        let bounds: [Option<Bound>; 5] = [
            all.limits.requests_per_min.map(|limit| (requests, "the tenant's requests_per_min", num_requests, limit)),
            all.limits.tokens_per_min.map(|limit| (tokens, "the tenant's tokens_per_min", num_tokens, limit)),
            Some((requests, "queue_capacity", num_requests, rules.max_requests[class] as f64)),
            Some((tokens, "max_queued_tokens", num_tokens, rules.max_tokens[class] as f64)),
            rules.max_queue_us[class].map(|us| {
                ("seconds of work", "max_queue_s, as far as can be predicted", seconds(service_us as f64), seconds(us))
            }),
        ];
        // A tenant adds to an empty queue until it has four times what is free.
        let part = |bound: f64| bound * TENANT_FACTOR as f64 / (TENANT_FACTOR + 1) as f64;
        let is_beyond = |before: f64, bound: f64| self.is_weighted && before >= part(bound);
        let max_requests = rules.max_requests[class] as f64;
        let of_tenant = [
            is_beyond(num_requests - 1.0, max_requests).then(|| {
                let limit = part(max_requests).ceil();
                (requests, "a tenant's part of queue_capacity", num_requests, limit)
            }),
            rules.max_queue_us[class].filter(|&us| is_beyond(earlier_us as f64, us)).map(|us| {
                let name = "a tenant's part of max_queue_s, as far as can be predicted";
                ("seconds of work", name, seconds(service_us as f64), seconds(part(us)))
            }),
        ];
        let beyond = bounds.into_iter().flatten().find(|(_, _, value, limit)| value > limit);
        match beyond.or(of_tenant.into_iter().flatten().next()) {
            None => Ok(()),
            Some((what, name, value, limit)) => {
                Err(Error::ListTooLong { num_prompts: all.num_requests as usize, what, value, name, limit })
            }
        }
    }

    /// Whether a tenant's rates would let so many requests in now, whatever their length; nothing is charged.
    ///
    /// # Errors
    /// `TenantOverRate`, `TooManyTenants`; `ListTooLong` if they never would.
    pub(crate) fn check_rates(&self, tenant: Option<&Arc<str>>, class: Class, num: u64, now_ns: u64) -> Result<()> {
        self.with_rated(tenant, class, num, now_ns, |limits, cell| {
            let checked =
                self.tenants.get().map_or(Ok(()), |tenants| tenants.check(cell, rate_limits(limits), num, now_ns));
            checked.map_err(|over| over_rate(tenant, limits, over))
        })
    }

    /// Charges something that is no request of the engine to a tenant's rate of requests, as one.
    ///
    /// # Errors
    /// `TenantOverRate`, `TooManyTenants`.
    pub(crate) fn charge_request(&self, tenant: Option<&Arc<str>>, class: Class, now_ns: u64) -> Result<()> {
        self.with_rated(tenant, class, 1, now_ns, |limits, cell| {
            let [per_request, _] = rate_limits(limits);
            let charged =
                self.tenants.get().map_or(Ok(()), |tenants| tenants.charge_request(cell, per_request, now_ns));
            charged.map_err(|over| over_rate(tenant, limits, over))
        })
    }

    /// Does something with the cell of a tenant that has rates, and counts a refusal.
    fn with_rated(
        &self,
        tenant: Option<&Arc<str>>,
        class: Class,
        num_requests: u64,
        now_ns: u64,
        use_cell: impl FnOnce(&TenantLimits, TenantCell) -> Result<()>,
    ) -> Result<()> {
        let rules = self.rules();
        let limits = rules.policy.tenant(tenant.map(|name| &**name));
        let Some(tenants) = self.tenants.get().filter(|_| rate_limits(limits) != [None; 2]) else {
            return Ok(());
        };
        if let Some(limit) = limits.requests_per_min.filter(|&limit| num_requests > 1 && num_requests as f64 > limit) {
            let (num_prompts, value) = (num_requests as usize, num_requests as f64);
            let (what, name) = ("requests", "the tenant's requests_per_min");
            return Err(Error::ListTooLong { num_prompts, what, value, name, limit });
        }
        let cell = self.hold_tenant(tenant, now_ns);
        let used = if cell == TenantCell::NONE {
            let tenant = tenant.map_or_else(|| Arc::from(""), Arc::clone);
            Err(Error::TooManyTenants { tenant, retry_after_s: UNKNOWN_RETRY_S })
        } else {
            use_cell(limits, cell)
        };
        tenants.release(cell);
        used.inspect_err(|error| self.refusals.by_reason.count(class, num_requests, error))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::{arrival, door, end, fair, fcfs, publish_plain};
    use super::*;
    use crate::policy::PolicyConfig;

    const S: u64 = 1_000_000_000;

    fn rated(requests_per_min: Option<f64>, tokens_per_min: Option<f64>) -> TenantLimits {
        TenantLimits { requests_per_min, tokens_per_min, ..TenantLimits::default() }
    }

    /// A door whose unnamed tenant has these limits.
    fn door_with(queue_capacity: usize, limits: &TenantLimits) -> AdmissionControl {
        door(queue_capacity, fcfs(|rules| rules.default_tenant = limits.clone()))
    }

    fn list<'a>(limits: &'a TenantLimits, lens: &[u64], now_ns: u64) -> Vec<Arrival<'a>> {
        let one = |&num_prompt_tokens: &u64| Arrival { num_prompt_tokens, now_ns, ..arrival(limits, Class::Standard) };
        lens.iter().map(one).collect()
    }

    #[test]
    fn a_list_is_let_in_if_each_of_its_requests_would_be_one_after_the_other() {
        let limits = TenantLimits::default();
        let rules: [fn() -> PolicyConfig; 3] =
            [|| fcfs(|_| ()), || fair(|_| ()), || fair(|rules| rules.max_queue_s = Some(0.35))];
        let mut num_refused = 0;
        for (make, is_priced) in rules.into_iter().zip([false, true, true]) {
            for (capacity, num_held, len) in
                (1..9).flat_map(|c| (0..c).flat_map(move |held| (1..9).map(move |len| (c, held, len))))
            {
                let doors = [(), ()].map(|()| door(capacity, make()));
                let [one_by_one, at_once] = &doors;
                for door in &doors {
                    is_priced.then(|| publish_plain(door));
                    (0..num_held).for_each(|_| drop(door.reserve(&arrival(&limits, Class::Standard))));
                }
                let arrivals = list(&limits, &vec![10; len], 0);
                let expected = arrivals.iter().all(|arrival| one_by_one.reserve(arrival).is_ok());
                let got = at_once.reserve_list(&arrivals);
                assert_eq!(got.is_ok(), expected, "{len} beside {num_held} of {capacity}: {got:?}");
                num_refused += usize::from(!expected);
            }
        }
        assert!(num_refused > 100);
    }

    #[test]
    fn a_list_that_is_refused_leaves_nothing_and_gets_in_at_the_time_that_it_was_told() {
        let limits = rated(Some(6.0), Some(600.0));
        for lens in [&[10, 10, 10, 10][..], &[300, 299]] {
            let door = door_with(100, &limits);
            let held = door.reserve_list(&list(&limits, &[10, 20, 30], 0)).expect("nothing was used");
            end(&door, held);
            let refused = door.reserve_list(&list(&limits, lens, 0)).expect_err("the rest of the minute is too little");
            assert_eq!((refused.index, door.queued_requests()), (None, 0));
            let wait_ns = (refused.error.retry_after_s().expect("it gets in") * 1e9).round() as u64;
            let early = door.reserve_list(&list(&limits, lens, wait_ns - 1_000));
            assert!(early.is_err(), "{early:?}");
            assert_eq!(door.refusals().total(), 2 * lens.len() as u64, "each request of a list counts");
            // Nothing but the first list was charged: three requests and 540 tokens are left.
            let rest = door.reserve_list(&list(&limits, &[180, 180, 180], 0)).expect("so much is left");
            door.give_back(rate_limits(&limits), rest.iter());
            let held = door.reserve_list(&list(&limits, lens, wait_ns + 1_000)).expect("it was told so");
            end(&door, held);
            door.check_drained();
        }
    }

    #[test]
    fn what_never_gets_in_at_once_is_refused_for_good() {
        let never = |door: &AdmissionControl, limits: &TenantLimits, lens: &[u64]| {
            let refused = door.reserve_list(&list(limits, lens, 0)).expect_err("it is too long");
            assert_eq!((refused.index, refused.error.retry_after_s()), (None, None));
            door.check_drained();
            let Error::ListTooLong { num_prompts, name, value, limit, .. } = refused.error else {
                panic!("{:?}", refused.error)
            };
            assert_eq!(num_prompts, lens.len());
            (name, value, limit)
        };
        let limits = rated(Some(3.0), Some(100.0));
        let rates = door_with(100, &limits);
        assert_eq!(never(&rates, &limits, &[1; 4]), ("the tenant's requests_per_min", 4.0, 3.0));
        assert_eq!(never(&rates, &limits, &[50, 51]), ("the tenant's tokens_per_min", 101.0, 100.0));
        assert!(rates.reserve_list(&list(&limits, &[101], 0)).is_ok(), "one alone gets in when nothing is to pay");
        let free = TenantLimits::default();
        assert_eq!(never(&door(5, fcfs(|_| ())), &free, &[1; 6]), ("queue_capacity", 6.0, 5.0));
        let shared = door(10, fair(|rules| rules.classes = PolicyConfig::fcfs().classes));
        assert_eq!(never(&shared, &free, &[1; 9]), ("a tenant's part of queue_capacity", 9.0, 8.0));
        let held = shared.reserve_list(&list(&free, &[1; 8], 0)).expect("alone it fills its part");
        end(&shared, held);
        let timed = door(100, fcfs(|rules| rules.max_queue_s = Some(0.25)));
        publish_plain(&timed);
        let told = never(&timed, &free, &[0; 3]);
        assert_eq!(told, ("max_queue_s, as far as can be predicted", 0.3, 0.25));
        assert_eq!(shared.refusals().total(), 0, "no waiting helps: they are no refusals because of load");
    }

    #[test]
    fn a_deadline_that_the_list_itself_makes_impossible_is_told_so() {
        let limits = TenantLimits::default();
        let door = door(100, fcfs(|_| ()));
        publish_plain(&door);
        let within = |deadline_ns: u64| {
            let mut arrivals = list(&limits, &[0; 9], 0);
            for arrival in &mut arrivals {
                arrival.deadline_ns = Some(deadline_ns);
            }
            arrivals
        };
        // 100 ms each, and four have rows in the end: the last one waits for 400 ms at least, and for 800 while no row is free.
        let refused = door.reserve_list(&within(S / 2)).expect_err("no row is free");
        assert!(matches!(refused.error, Error::DeadlineUnattainable { retry_after_s: Some(_), .. }), "{refused:?}");
        assert_eq!(refused.index, Some(8));
        let refused = door.reserve_list(&within(S * 2 / 5)).expect_err("the list itself is too long");
        assert!(matches!(refused.error, Error::DeadlineUnattainable { retry_after_s: None, .. }), "{refused:?}");
        let held = door.reserve_list(&within(S)).expect("800 ms are enough");
        end(&door, held);
        door.check_drained();
    }

    #[test]
    fn rates_can_be_asked_and_charged_without_a_request() {
        let limits = rated(Some(2.0), Some(60.0));
        let door = door_with(10, &limits);
        let check = |num, now_ns| door.check_rates(None, Class::Standard, num, now_ns);
        assert_eq!((check(1, 0), check(2, 0)), (Ok(()), Ok(())), "nothing is charged");
        assert!(matches!(check(3, 0), Err(Error::ListTooLong { .. })));
        assert_eq!(door.charge_request(None, Class::Standard, 0), Ok(()));
        assert!(matches!(check(2, 0), Err(Error::TenantOverRate { what: "requests_per_min", .. })));
        assert_eq!(door.charge_request(None, Class::Standard, 0), Ok(()));
        let refused = door.charge_request(None, Class::Standard, 0).expect_err("two are the minute's worth");
        assert_eq!(refused.retry_after_s(), Some(30.0));
        let held = door.reserve_list(&list(&limits, &[60], 60 * S)).expect("both are paid");
        assert!(matches!(check(1, 60 * S), Err(Error::TenantOverRate { what: "tokens_per_min", .. })));
        end(&door, held);
        door.check_drained();
        assert_eq!(door_with(10, &TenantLimits::default()).check_rates(None, Class::Batch, 999, 0), Ok(()));
    }
}
