//! How many connections there may be.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use crate::config::Limits;

/// Connections beyond the limit that are kept long enough to see what they ask for.
const MAX_EXCESS: usize = 64;

/// Counts connections.
#[derive(Debug)]
pub(super) struct Admission {
    max_total: usize,
    max_per_address: Option<usize>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    /// Empty if addresses have no limit.
    by_address: HashMap<IpAddr, usize>,
}

/// A connection's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    admission: Arc<Admission>,
    address: IpAddr,
}

impl Admission {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        let (max_total, max_per_address) = (limits.max_connections, limits.max_connections_per_address);
        Arc::new(Self { max_total, max_per_address, open: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection in.
    ///
    /// # Errors
    /// Which limit it is above.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Permit, String> {
        let address = address.to_canonical();
        let mut open = self.lock();
        if open.total >= self.max_total {
            return Err(format!("the server has all of its {} connections in use", self.max_total));
        }
        if let Some(max) = self.max_per_address {
            let count = open.by_address.entry(address).or_default();
            if *count >= max {
                return Err(format!("all of the {max} connections that one address may have are in use"));
            }
            *count += 1;
        }
        open.total += 1;
        Ok(Permit { admission: Arc::clone(self), address })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.admission.lock();
        open.total -= 1;
        if let Some(count) = open.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

/// The latest connections beyond the limit: each new one ends the oldest, so that a probe always gets an answer.
#[derive(Debug, Default)]
pub(super) struct Excess {
    latest: VecDeque<AbortHandle>,
}

impl Excess {
    pub(super) fn add(&mut self, connection: AbortHandle) {
        if self.latest.len() == MAX_EXCESS
            && let Some(oldest) = self.latest.pop_front()
        {
            oldest.abort();
        }
        self.latest.push_back(connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: [u8; 4] = [10, 0, 0, 1];
    const TWO: [u8; 4] = [10, 0, 0, 2];

    fn admission(max_connections: usize, max_connections_per_address: Option<usize>) -> Arc<Admission> {
        Admission::new(&Limits { max_connections, max_connections_per_address, ..Limits::default() })
    }

    #[test]
    fn a_place_is_free_again_when_its_connection_ends() {
        let admission = admission(2, None);
        let first = admission.admit(ONE.into()).expect("one of two");
        let _second = admission.admit(ONE.into()).expect("two of two");
        let refused = admission.admit(TWO.into()).expect_err("three of two");
        assert!(refused.contains('2'), "{refused}");
        drop(first);
        assert!(admission.admit(TWO.into()).is_ok());
    }

    #[test]
    fn an_address_has_places_of_its_own() {
        let admission = admission(10, Some(1));
        let first = admission.admit(ONE.into()).expect("its first");
        let mapped = std::net::Ipv4Addr::from(ONE).to_ipv6_mapped();
        assert!(admission.admit(mapped.into()).is_err(), "the same address in other words");
        assert_eq!(admission.lock().total, 1, "a refused connection has no place");
        let second = admission.admit(TWO.into()).expect("another's first");
        drop((first, second));
        assert!(admission.lock().by_address.is_empty());
    }
}
