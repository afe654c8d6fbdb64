//! `Bucket`: a rate limit in one word (the generic cell rate algorithm, ITU-T I.371): the time until which what was used is paid for.
//!
//! A unit takes `1 / rate`. What is used moves the word that far on from now, or from where it stands if that is later; a request
//! conforms if the word then stands at most one minute ahead of now: a tenant that was idle may use a minute's worth at once.
//!
//! Invariants: over any time t, conforming requests use at most `rate * (t + 1 min)`; a refused request moves nothing; the time that a
//! refusal names is the first at which the same request conforms, if nothing else is used meanwhile.

use crate::sync::{AtomicU64, Ordering};

/// Nanoseconds of a minute: the burst that a rate allows.
const BURST_NS: u64 = 60_000_000_000;

/// How long a unit of a rate takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    ns_per_unit: f64,
}

impl RateLimit {
    /// `units` per minute; positive.
    pub fn per_min(units: f64) -> Self {
        Self { ns_per_unit: BURST_NS as f64 / units }
    }

    /// As a word; 0 is none.
    pub(crate) fn to_bits(limit: Option<Self>) -> u64 {
        limit.map_or(0, |limit| limit.ns_per_unit.to_bits())
    }

    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        (bits != 0).then(|| Self { ns_per_unit: f64::from_bits(bits) })
    }

    fn cost_ns(self, units: u64) -> u64 {
        (units as f64 * self.ns_per_unit).ceil() as u64
    }
}

/// What was used of one rate.
///
/// ```
/// use cbrs_core::overload::{Bucket, RateLimit};
/// let (bucket, limit) = (Bucket::new(), RateLimit::per_min(2.0));
/// assert_eq!(bucket.charge(limit, 2, 0), Ok(()));
/// assert_eq!(bucket.charge(limit, 1, 0), Err(30_000_000_000), "half a minute until there is one again");
/// assert_eq!(bucket.charge(limit, 1, 30_000_000_000), Ok(()));
/// ```
#[derive(Debug)]
pub struct Bucket {
    /// Time until which what was used is paid for; the past is the same as now.
    paid_until_ns: AtomicU64,
}

impl Default for Bucket {
    fn default() -> Self {
        Self::new()
    }
}

impl Bucket {
    /// Nothing used.
    pub fn new() -> Self {
        Self { paid_until_ns: AtomicU64::new(0) }
    }

    /// Uses `units` if that conforms to the rate; more than a minute's worth conforms when nothing is left to pay.
    ///
    /// # Errors
    /// The nanoseconds after which it conforms; nothing is used.
    pub fn charge(&self, limit: RateLimit, units: u64, now_ns: u64) -> Result<(), u64> {
        // Relaxed, here and below: the word stands for itself; who takes over a tenant's cell synchronises by the cell's owner.
        let mut paid_until = self.paid_until_ns.load(Ordering::Relaxed);
        loop {
            let next = conforming(paid_until, limit, units, now_ns)?;
            match self.paid_until_ns.compare_exchange_weak(paid_until, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(current) => paid_until = current,
            }
        }
    }

    /// Whether `units` would conform now; nothing is used.
    ///
    /// # Errors
    /// As `charge`.
    pub fn check(&self, limit: RateLimit, units: u64, now_ns: u64) -> Result<(), u64> {
        conforming(self.paid_until_ns.load(Ordering::Relaxed), limit, units, now_ns).map(drop)
    }

    /// Uses `units` whether or not that conforms: what is above the rate delays what comes after.
    pub fn charge_anyway(&self, limit: RateLimit, units: u64, now_ns: u64) {
        let cost = limit.cost_ns(units);
        let mut paid_until = self.paid_until_ns.load(Ordering::Relaxed);
        loop {
            let next = paid_until.max(now_ns).saturating_add(cost);
            match self.paid_until_ns.compare_exchange_weak(paid_until, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(current) => paid_until = current,
            }
        }
    }

    /// Takes back a charge of `units`.
    pub fn refund(&self, limit: RateLimit, units: u64) {
        // Not below zero: the charge has added as much, and others only add.
        self.paid_until_ns.fetch_sub(limit.cost_ns(units), Ordering::Relaxed);
    }

    /// Whether nothing is left to pay: a new bucket would do as well.
    pub fn is_full(&self, now_ns: u64) -> bool {
        self.paid_until_ns.load(Ordering::Relaxed) <= now_ns
    }
}

/// Where the word moves when `units` are used, if that conforms; otherwise the nanoseconds after which it does.
fn conforming(paid_until: u64, limit: RateLimit, units: u64, now_ns: u64) -> Result<u64, u64> {
    let cost = limit.cost_ns(units);
    let next = paid_until.max(now_ns).saturating_add(cost);
    let (ahead, allowed) = (next - now_ns, BURST_NS.max(cost));
    if ahead > allowed { Err(ahead - allowed) } else { Ok(next) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_minutes_worth_may_come_at_once_and_then_one_each_interval() {
        let (bucket, limit) = (Bucket::new(), RateLimit::per_min(60.0));
        for _ in 0..60 {
            assert_eq!(bucket.charge(limit, 1, 5 * S), Ok(()));
        }
        assert_eq!(bucket.charge(limit, 1, 5 * S), Err(S));
        assert_eq!((bucket.check(limit, 1, 5 * S), bucket.check(limit, 1, 6 * S)), (Err(S), Ok(())), "nothing is used");
        assert_eq!(bucket.charge(limit, 3, 5 * S), Err(3 * S), "more units take longer");
        assert_eq!(bucket.charge(limit, 1, 6 * S - 1), Err(1), "the time named is exact");
        assert_eq!(bucket.charge(limit, 1, 6 * S), Ok(()));
        assert_eq!(bucket.charge(limit, 1, 6 * S), Err(S));
        assert_eq!(bucket.charge(limit, 60, 66 * S), Ok(()), "a minute later all is paid");
    }

    #[test]
    fn more_than_a_minutes_worth_conforms_when_all_is_paid() {
        let (bucket, limit) = (Bucket::new(), RateLimit::per_min(100.0));
        assert_eq!(bucket.charge(limit, 1, 0), Ok(()));
        assert_eq!(bucket.charge(limit, 200, 0), Err(600_000_000), "the one before is paid after 0.6 s");
        assert_eq!(bucket.charge(limit, 200, 600_000_000), Ok(()));
        assert!(!bucket.is_full(120 * S) && bucket.is_full(120 * S + 600_000_000));
    }

    #[test]
    fn debt_makes_later_refusals_longer_and_a_refund_shorter() {
        let (bucket, limit) = (Bucket::new(), RateLimit::per_min(60.0));
        bucket.charge_anyway(limit, 100, 0);
        assert_eq!(bucket.charge(limit, 1, 0), Err(41 * S));
        bucket.refund(limit, 30);
        assert_eq!(bucket.charge(limit, 1, 0), Err(11 * S));
        assert_eq!(bucket.charge(limit, 1, 11 * S), Ok(()));
    }

    #[test]
    fn extreme_rates_and_times_do_not_overflow() {
        let (bucket, limit) = (Bucket::new(), RateLimit::per_min(0.001));
        assert_eq!(bucket.charge(limit, u64::MAX, 1), Ok(()), "nothing was to pay");
        assert!(!bucket.is_full(u64::MAX - 1), "it is paid for at the end of time");
        // The sum stops at the end of time: one unit conforms from where it alone would reach that.
        let end = u64::MAX - limit.cost_ns(1);
        assert_eq!(bucket.charge(limit, 1, end - 1), Err(1));
        assert_eq!(bucket.charge(limit, 1, end), Ok(()));
        assert!(!bucket.is_full(u64::MAX - 1) && bucket.is_full(u64::MAX));
        assert_eq!(RateLimit::from_bits(RateLimit::to_bits(None)), None);
        assert_eq!(RateLimit::from_bits(RateLimit::to_bits(Some(limit))), Some(limit));
    }
}
