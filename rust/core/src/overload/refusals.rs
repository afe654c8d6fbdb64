//! Refusals at the door, counted by class and reason.

use crate::error::Error;
use crate::policy::Class;
use crate::sync::{AtomicU64, Ordering};

/// Why the door refused a request that could otherwise run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// Too many requests wait.
    QueueRequests = 0,
    /// Too many prompt tokens wait.
    QueueTokens = 1,
    /// The predicted wait is too long.
    QueueSeconds = 2,
    /// The tenant fills its part of the queue.
    TenantQueue = 3,
    /// The tenant has used up its rate.
    TenantRate = 4,
    /// Its use cannot be counted against its rate.
    TooManyTenants = 5,
    /// A deadline would be missed.
    Deadline = 6,
}

impl RefusalReason {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::QueueRequests,
        Self::QueueTokens,
        Self::QueueSeconds,
        Self::TenantQueue,
        Self::TenantRate,
        Self::TooManyTenants,
        Self::Deadline,
    ];

    /// The reason behind an error; `None` for one that waiting does not help against.
    pub fn of(error: &Error) -> Option<Self> {
        match error {
            Error::QueueFull { .. } => Some(Self::QueueRequests),
            Error::QueuedTokensFull { .. } => Some(Self::QueueTokens),
            Error::QueueTooLong { .. } => Some(Self::QueueSeconds),
            Error::TenantQueueFull { .. } => Some(Self::TenantQueue),
            Error::TenantOverRate { .. } => Some(Self::TenantRate),
            Error::TooManyTenants { .. } => Some(Self::TooManyTenants),
            Error::DeadlineUnattainable { .. } => Some(Self::Deadline),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        [
            "queue_requests",
            "queue_tokens",
            "queue_seconds",
            "tenant_queue",
            "tenant_rate",
            "too_many_tenants",
            "deadline",
        ][self as usize]
    }
}

/// Counts by class and reason.
#[derive(Debug)]
pub(crate) struct RefusalCounts([[AtomicU64; RefusalReason::ALL.len()]; 3]);

impl Default for RefusalCounts {
    fn default() -> Self {
        Self(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))))
    }
}

impl RefusalCounts {
    /// Counts so many requests as refused; other errors are no refusals.
    pub(crate) fn count(&self, class: Class, num_requests: u64, error: &Error) {
        if let Some(reason) = RefusalReason::of(error) {
            self.0[class as usize][reason as usize].fetch_add(num_requests, Ordering::Relaxed);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Class, RefusalReason, u64)> + '_ {
        let number =
            |class: Class, reason: RefusalReason| self.0[class as usize][reason as usize].load(Ordering::Relaxed);
        Class::ALL.into_iter().flat_map(move |class| {
            RefusalReason::ALL.into_iter().map(move |reason| (class, reason, number(class, reason)))
        })
    }

    pub(crate) fn total(&self) -> u64 {
        self.iter().map(|(_, _, number)| number).sum()
    }
}
