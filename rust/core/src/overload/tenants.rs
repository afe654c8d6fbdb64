//! `TenantTable`: what the door knows of each tenant: what it has waiting, and what it has used of its rates.
//!
//! ```text
//! cell.owner   u64   tag << 32 | life << 25 | references     0 = never used
//! cell.queued  u64   weight << 32 | waiting requests
//! ```
//!
//! A tenant is known by a keyed hash of its name: the low half says where its cell is looked for (a window of neighbouring cells), the
//! high half is the tag that it is known by there. Tag and references share one word, so finding a cell and holding it is one
//! compare-exchange, and so is taking over one that nobody holds. There is no moment at which a cell is half somebody's: a cell without
//! references has nothing waiting, and one may be taken over only when its buckets are full, which is what new ones are.
//! Each life of a cell has another number than the one before, so that a take-over fails if the tenant came and went in the
//! meantime (and has something to pay now).
//!
//! Cells are never given back to "never used", so a search ends at the first such cell; two first requests of a tenant thus meet in the same
//! cell. (Only if a cell before is left by its tenant between two such searches may they end in two cells: each then counts
//! for itself until it is left.) Two tenants of the same window with the same tag would share a cell: one in 2^32 pairs of neighbours.
//!
//! Invariants: references = live requests of the tenant; what waits is what was queued and not yet dequeued; nothing is lost when tenants
//! come and go.

use crossbeam_utils::CachePadded;

use super::bucket::{Bucket, RateLimit};
use super::refusing::{Refusing, Shortage};
use crate::sync::{AtomicU64, Ordering};

const REFERENCE_BITS: u32 = 25;
const LIFE_BITS: u32 = 7;
const MAX_REFERENCES: u64 = (1 << REFERENCE_BITS) - 1;
const MAX_LIFE: u64 = (1 << LIFE_BITS) - 1;
const NEVER_USED: u64 = 0;
/// Cells in which a tenant is looked for. At most half of all cells are held, so runs of as many held ones do not occur by chance.
const WINDOW: usize = 128;
/// A weight of 1 in the words that count weights.
const WEIGHT_UNIT: f64 = 1000.0;

/// The cell of a tenant with a live request, or none: the tenant is not accounted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantCell(u32);

impl TenantCell {
    /// No cell: nothing is counted.
    pub const NONE: Self = Self(u32::MAX);
}

#[derive(Debug)]
struct Cell {
    owner: AtomicU64,
    queued: AtomicU64,
    queued_us: AtomicU64,
    /// Rate of tokens, for the charges of outputs (`RateLimit::to_bits`).
    token_limit: AtomicU64,
    requests: Bucket,
    tokens: Bucket,
    /// Its part of the queue was full, in requests or in service.
    refusing: [Refusing; 2],
}

/// What is counted of what a tenant has waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Measure {
    Requests = 0,
    Service = 1,
}

/// What a tenant has waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantQueue {
    /// Requests that have not started.
    pub requests: u64,
    /// Their predicted service, in microseconds.
    pub service_us: u64,
}

impl TenantQueue {
    pub(crate) fn get(self, measure: Measure) -> u64 {
        match measure {
            Measure::Requests => self.requests,
            Measure::Service => self.service_us,
        }
    }
}

/// Fixed table of tenants with live requests; all methods may be called from any thread.
///
/// ```
/// use cbrs_core::overload::TenantTable;
/// let table = TenantTable::new(8);
/// let cell = table.acquire(42, 0);
/// assert_eq!(table.acquire(42, 0), cell);
/// table.release(cell);
/// table.release(cell);
/// ```
#[derive(Debug)]
pub struct TenantTable {
    cells: Box<[Cell]>,
    /// Sum of the weights of tenants with something waiting.
    waiting_weight: CachePadded<AtomicU64>,
}

impl TenantTable {
    /// A table for as many live requests, each of another tenant.
    pub fn new(max_requests: usize) -> Self {
        let cell = || Cell {
            owner: AtomicU64::new(NEVER_USED),
            queued: AtomicU64::new(0),
            queued_us: AtomicU64::new(0),
            token_limit: AtomicU64::new(0),
            requests: Bucket::new(),
            tokens: Bucket::new(),
            refusing: [Refusing::new(), Refusing::new()],
        };
        Self {
            cells: std::iter::repeat_with(cell).take(2 * max_requests).collect(),
            waiting_weight: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Finds or makes the cell of the tenant with this key, and holds it for one request.
    ///
    /// `NONE` if every cell of its window is held or has something to pay: its tenant is new then, and as good as unknown.
    pub fn acquire(&self, key: u64, now_ns: u64) -> TenantCell {
        let tag = key >> 32;
        let home = (((key & u64::from(u32::MAX)) * self.cells.len() as u64) >> 32) as usize;
        loop {
            let mut vacant = None;
            for step in 0..WINDOW.min(self.cells.len()) {
                let index = (home + step) % self.cells.len();
                let cell = &self.cells[index];
                // Acquire, here and on failure: pairs with the Release of every `release`, so that what is to pay (and
                // that nothing waits) is seen with the count that says that nobody holds the cell.
                let mut owner = cell.owner.load(Ordering::Acquire);
                while owner != NEVER_USED && owner >> 32 == tag {
                    let held = if references(owner) == 0 { first_reference(tag, owner) } else { owner + 1 };
                    match cell.owner.compare_exchange_weak(owner, held, Ordering::Acquire, Ordering::Acquire) {
                        Ok(_) => return TenantCell(index as u32),
                        Err(current) => owner = current,
                    }
                }
                let is_vacant = references(owner) == 0 && cell.requests.is_full(now_ns) && cell.tokens.is_full(now_ns);
                if vacant.is_none() && is_vacant {
                    vacant = Some((index, owner));
                }
                if owner == NEVER_USED {
                    break;
                }
            }
            let Some((index, owner)) = vacant else {
                return TenantCell::NONE;
            };
            let held = first_reference(tag, owner);
            let exchange = &self.cells[index].owner;
            // A failure means that another thread took this cell (perhaps for the same tenant) or came back to it.
            if exchange.compare_exchange(owner, held, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return TenantCell(index as u32);
            }
        }
    }

    /// Gives up the hold of one request.
    ///
    /// # Panics
    /// If nobody holds the cell.
    pub fn release(&self, cell: TenantCell) {
        if let Some(cell) = self.get(cell) {
            // Release: whoever takes the cell over sees what this request has used.
            let owner = cell.owner.fetch_sub(1, Ordering::Release);
            assert!(references(owner) > 0, "a tenant's cell was released, but nobody held it");
        }
    }

    /// Holds a cell that is held already for `count` requests more.
    pub(crate) fn hold_more(&self, cell: TenantCell, count: u64) {
        if let Some(cell) = self.get(cell).filter(|_| count > 0) {
            // Relaxed: it is held, so nobody takes it over, and what it has to pay was seen with the first hold.
            cell.owner.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Charges a request with `num_tokens` prompt tokens to the rates of its tenant, both or none.
    ///
    /// # Errors
    /// Which rate it does not conform to, and the nanoseconds after which it does.
    pub fn charge(
        &self,
        cell: TenantCell,
        limits: [Option<RateLimit>; 2],
        num_tokens: u64,
        now_ns: u64,
    ) -> Result<(), (&'static str, u64)> {
        self.charge_all(cell, limits, (1, num_tokens), now_ns)
    }

    /// The same for requests and their prompt tokens together, all or none.
    ///
    /// # Errors
    /// As `charge`.
    pub(crate) fn charge_all(
        &self,
        cell: TenantCell,
        [request_limit, token_limit]: [Option<RateLimit>; 2],
        (num_requests, num_tokens): (u64, u64),
        now_ns: u64,
    ) -> Result<(), (&'static str, u64)> {
        let Some(cell) = self.get(cell) else {
            return Ok(());
        };
        if let Some(limit) = request_limit {
            cell.requests.charge(limit, num_requests, now_ns).map_err(|retry_ns| ("requests_per_min", retry_ns))?;
        }
        if let Some(limit) = token_limit {
            // Relaxed: each request of a tenant writes the same; who charges outputs got its request from this thread.
            cell.token_limit.store(RateLimit::to_bits(token_limit), Ordering::Relaxed);
            if let Err(retry_ns) = cell.tokens.charge(limit, num_tokens, now_ns) {
                if let Some(limit) = request_limit {
                    cell.requests.refund(limit, num_requests);
                }
                return Err(("tokens_per_min", retry_ns));
            }
        } else {
            cell.token_limit.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether requests with at least a token each would conform to the rates of their tenant; nothing is charged.
    ///
    /// # Errors
    /// As `charge`.
    pub(crate) fn check(
        &self,
        cell: TenantCell,
        [request_limit, token_limit]: [Option<RateLimit>; 2],
        num_requests: u64,
        now_ns: u64,
    ) -> Result<(), (&'static str, u64)> {
        let Some(cell) = self.get(cell) else {
            return Ok(());
        };
        let check = |bucket: &Bucket, limit: Option<RateLimit>, name: &'static str| {
            limit.map_or(Ok(()), |limit| bucket.check(limit, num_requests, now_ns).map_err(|retry_ns| (name, retry_ns)))
        };
        check(&cell.requests, request_limit, "requests_per_min")?;
        check(&cell.tokens, token_limit, "tokens_per_min")
    }

    /// Charges one request to the rate of requests alone.
    ///
    /// # Errors
    /// As `charge`.
    pub(crate) fn charge_request(
        &self,
        cell: TenantCell,
        limit: Option<RateLimit>,
        now_ns: u64,
    ) -> Result<(), (&'static str, u64)> {
        let (Some(cell), Some(limit)) = (self.get(cell), limit) else {
            return Ok(());
        };
        cell.requests.charge(limit, 1, now_ns).map_err(|retry_ns| ("requests_per_min", retry_ns))
    }

    /// Takes back a charge: the request was refused for another reason.
    pub fn refund(&self, cell: TenantCell, limits: [Option<RateLimit>; 2], num_tokens: u64) {
        self.refund_all(cell, limits, (1, num_tokens));
    }

    /// Takes back what `charge_all` has charged.
    pub(crate) fn refund_all(
        &self,
        cell: TenantCell,
        [request_limit, token_limit]: [Option<RateLimit>; 2],
        (num_requests, num_tokens): (u64, u64),
    ) {
        if let Some(cell) = self.get(cell) {
            if let Some(limit) = request_limit {
                cell.requests.refund(limit, num_requests);
            }
            if let Some(limit) = token_limit {
                cell.tokens.refund(limit, num_tokens);
            }
        }
    }

    /// Charges output tokens to the rate of the tenant that holds the cell, whether or not that conforms.
    pub fn charge_output(&self, cell: TenantCell, num_tokens: u64, now_ns: u64) {
        if let Some(cell) = self.get(cell)
            && let Some(limit) = RateLimit::from_bits(cell.token_limit.load(Ordering::Relaxed))
        {
            cell.tokens.charge_anyway(limit, num_tokens, now_ns);
        }
    }

    /// Counts a waiting request of the tenant, if it has fewer than `max_requests`.
    ///
    /// # Errors
    /// How many it has.
    pub fn queue(&self, cell: TenantCell, weight: f64, max_requests: u64) -> Result<(), u64> {
        self.queue_all(cell, weight, 1, max_requests)
    }

    /// The same for several requests, all or none.
    ///
    /// # Errors
    /// How many it has.
    pub(crate) fn queue_all(
        &self,
        cell: TenantCell,
        weight: f64,
        num_requests: u64,
        max_requests: u64,
    ) -> Result<(), u64> {
        let Some(cell) = self.get(cell) else {
            return Ok(());
        };
        let weight = (weight * WEIGHT_UNIT) as u64;
        let mut queued = cell.queued.load(Ordering::Relaxed);
        loop {
            let requests = queued & u64::from(u32::MAX);
            if num_requests > max_requests.saturating_sub(requests) {
                return Err(requests);
            }
            let next = if requests == 0 { weight << 32 | num_requests } else { queued + num_requests };
            match cell.queued.compare_exchange_weak(queued, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if requests == 0 => {
                    self.waiting_weight.fetch_add(weight, Ordering::Relaxed);
                    return Ok(());
                }
                Ok(_) => return Ok(()),
                Err(current) => queued = current,
            }
        }
    }

    /// Counts that a request of the tenant waits no more.
    ///
    /// # Panics
    /// If none did.
    pub fn dequeue(&self, cell: TenantCell) {
        if let Some(cell) = self.get(cell) {
            let queued = cell.queued.fetch_sub(1, Ordering::Relaxed);
            assert!(queued & u64::from(u32::MAX) > 0, "a tenant's request left the queue, but none was in it");
            if queued & u64::from(u32::MAX) == 1 {
                // The weight that its first request has added: the word has kept it.
                self.waiting_weight.fetch_sub(queued >> 32, Ordering::Relaxed);
            }
        }
    }

    /// Adds to the service that the tenant has waiting, if that is below `limit_us`.
    ///
    /// # Errors
    /// How much it has.
    pub fn queue_service(&self, cell: TenantCell, service_us: u64, limit_us: u64) -> Result<(), u64> {
        let Some(cell) = self.get(cell) else {
            return Ok(());
        };
        let mut queued = cell.queued_us.load(Ordering::Relaxed);
        loop {
            if queued >= limit_us {
                return Err(queued);
            }
            let next = queued + service_us;
            match cell.queued_us.compare_exchange_weak(queued, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(current) => queued = current,
            }
        }
    }

    /// Takes off what `queue_service` has added.
    pub fn dequeue_service(&self, cell: TenantCell, service_us: u64) {
        if let Some(cell) = self.get(cell) {
            cell.queued_us.fetch_sub(service_us, Ordering::Relaxed);
        }
    }

    /// Whether the tenant's part of the queue was full, and what it has there has not become less since; then: until so much is left.
    pub(crate) fn keeps_refusing(&self, cell: TenantCell, measure: Measure) -> Option<u64> {
        // A tenant that takes over a cell has nothing waiting, which ends what was.
        self.get(cell)?.refusing[measure as usize].keeps_on(|| self.queued(cell).get(measure))
    }

    /// A request of a tenant that has `own` waiting was refused: its part is full, however large that is just now.
    pub(crate) fn note_refusal(&self, cell: TenantCell, measure: Measure, own: u64) -> Shortage {
        let none = Shortage { excess: 0, is_closed: false };
        self.get(cell).map_or(none, |cell| cell.refusing[measure as usize].note(own, 0, own))
    }

    /// What the tenant has waiting.
    pub fn queued(&self, cell: TenantCell) -> TenantQueue {
        self.get(cell).map_or_else(TenantQueue::default, |cell| TenantQueue {
            requests: cell.queued.load(Ordering::Relaxed) & u64::from(u32::MAX),
            service_us: cell.queued_us.load(Ordering::Relaxed),
        })
    }

    /// How many times its own service a tenant waits under fair sharing: the weights of all that have something waiting, over its own.
    pub fn fair_slowdown(&self, cell: TenantCell, weight: f64) -> f64 {
        let own = (weight * WEIGHT_UNIT) as u64;
        let others = self.waiting_weight.load(Ordering::Relaxed);
        let all = if self.queued(cell).requests == 0 { others + own } else { others.max(own) };
        all as f64 / own as f64
    }

    /// Requests that hold a cell. For tests: reads every cell.
    pub fn num_references(&self) -> u64 {
        self.cells.iter().map(|cell| references(cell.owner.load(Ordering::Relaxed))).sum()
    }

    /// Sum of the weights of tenants with something waiting, in thousandths.
    pub fn waiting_weight(&self) -> u64 {
        self.waiting_weight.load(Ordering::Relaxed)
    }

    fn get(&self, cell: TenantCell) -> Option<&Cell> {
        self.cells.get(cell.0 as usize)
    }
}

fn references(owner: u64) -> u64 {
    owner & MAX_REFERENCES
}

/// The word of a cell that begins another life, held once.
fn first_reference(tag: u64, owner: u64) -> u64 {
    let life = owner >> REFERENCE_BITS & MAX_LIFE;
    tag << 32 | (life % MAX_LIFE + 1) << REFERENCE_BITS | 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn key(tag: u32, home: u32) -> u64 {
        u64::from(tag) << 32 | u64::from(home)
    }

    #[test]
    fn tenants_of_one_home_have_cells_of_their_own() {
        let table = TenantTable::new(4);
        let cells: Vec<TenantCell> = (0..8).map(|tag| table.acquire(key(tag, 7), 0)).collect();
        for (tag, &cell) in cells.iter().enumerate() {
            assert_eq!(table.acquire(key(tag as u32, 7), 0), cell, "tag {tag}");
            assert_eq!(cells.iter().filter(|&&other| other == cell).count(), 1);
        }
        assert_eq!(table.acquire(key(99, 7), 0), TenantCell::NONE, "all are held");
        table.release(cells[5]);
        table.release(cells[5]);
        assert_eq!(table.acquire(key(99, 7), 0), cells[5], "the one that nobody holds is taken over");
        assert_eq!(table.num_references(), 15);
    }

    #[test]
    fn a_cell_with_something_to_pay_is_kept_for_its_tenant() {
        let table = TenantTable::new(1);
        let limits = [Some(RateLimit::per_min(60.0)), Some(RateLimit::per_min(6000.0))];
        let cell = table.acquire(key(1, 0), 0);
        assert_eq!(table.charge(cell, limits, 1000, 0), Ok(()));
        table.release(cell);
        let other = table.acquire(key(2, 0), 0);
        assert_ne!(other, cell);
        assert_eq!(table.acquire(key(3, 0), 0), TenantCell::NONE);
        assert_eq!(table.acquire(key(3, 0), 10 * S - 1), TenantCell::NONE, "1000 tokens take 10 s");
        assert_eq!(table.acquire(key(1, 0), 0), cell, "the tenant itself comes back to it");
        table.release(cell);
        assert_eq!(table.acquire(key(3, 0), 10 * S), cell);
        assert_eq!(table.charge(cell, limits, 6000, 10 * S), Ok(()), "it is as good as new");
    }

    #[test]
    fn both_rates_are_charged_or_none() {
        let table = TenantTable::new(1);
        let cell = table.acquire(1, 0);
        let limits = [Some(RateLimit::per_min(2.0)), Some(RateLimit::per_min(60.0))];
        assert_eq!(table.charge(cell, limits, 60, 0), Ok(()));
        assert_eq!(table.charge(cell, limits, 1, 0), Err(("tokens_per_min", S)));
        assert_eq!(table.charge(cell, limits, 1, S), Ok(()), "the refusal has used up no request");
        assert_eq!(table.charge(cell, limits, 0, S), Err(("requests_per_min", 29 * S)));
        table.refund(cell, limits, 60);
        assert_eq!(table.charge(cell, limits, 59, S), Ok(()));
        table.charge_output(cell, 120, S);
        assert_eq!(table.charge(cell, [None, limits[1]], 1, S), Err(("tokens_per_min", 120 * S)));
        assert_eq!(table.charge(cell, [None, None], 1, S), Ok(()));
        table.charge_output(cell, 1000, S);
        assert_eq!(table.charge(cell, [None, limits[1]], 1, S), Err(("tokens_per_min", 120 * S)), "no rate, no charge");
    }

    #[test]
    fn weights_count_while_something_waits() {
        let table = TenantTable::new(2);
        let [light, heavy] = [1, 2].map(|tag| table.acquire(key(tag, 0), 0));
        assert!((table.fair_slowdown(light, 1.0) - 1.0).abs() < 1e-9, "it would be alone");
        assert_eq!(table.queue(light, 1.0, 2), Ok(()));
        assert_eq!(table.queue(light, 1.0, 2), Ok(()));
        assert_eq!(table.queue(light, 1.0, 2), Err(2));
        assert_eq!(table.queue(heavy, 3.0, 9), Ok(()));
        assert_eq!(table.waiting_weight(), 4000);
        assert!((table.fair_slowdown(light, 1.0) - 4.0).abs() < 1e-9);
        assert!((table.fair_slowdown(heavy, 3.0) - 4.0 / 3.0).abs() < 1e-9);
        table.dequeue(light);
        assert_eq!(table.waiting_weight(), 4000);
        table.dequeue(light);
        assert_eq!(table.waiting_weight(), 3000);
        assert!((table.fair_slowdown(light, 1.0) - 4.0).abs() < 1e-9, "with what it would add");
    }

    #[test]
    fn service_of_a_tenant_is_bounded_by_what_it_has() {
        let table = TenantTable::new(1);
        let cell = table.acquire(1, 0);
        assert_eq!(table.queue_service(cell, 70, 100), Ok(()));
        assert_eq!(table.queue_service(cell, 70, 100), Ok(()));
        assert_eq!(table.queue_service(cell, 1, 100), Err(140));
        table.dequeue_service(cell, 70);
        assert_eq!(table.queued(cell), TenantQueue { requests: 0, service_us: 70 });
        assert_eq!(table.queue_service(TenantCell::NONE, 1, 0), Ok(()), "nothing is counted without a cell");
    }

    #[test]
    #[should_panic(expected = "nobody held it")]
    fn releasing_twice_panics() {
        let table = TenantTable::new(1);
        let cell = table.acquire(1, 0);
        table.release(cell);
        table.release(cell);
    }
}
