//! Figures for Prometheus: what only the server counts, and the page with everything.
//!
//! The figures about requests and tokens come from where they pass anyway: the core's snapshot (`Submitter::stats`, once a step) and
//! `cbrs_text::Timings`. No figure has a label that clients choose, so that the page has a fixed number of lines.

mod page;
mod text;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::StatusCode;

pub(crate) use page::write_page;

/// Statuses that have a count of their own; the others share one.
const STATUSES: [u16; 16] = [200, 400, 401, 403, 404, 405, 408, 413, 414, 421, 429, 431, 499, 500, 503, 504];

/// What the server counts itself.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    responses: [AtomicU64; STATUSES.len() + 1],
    num_connections: AtomicU64,
}

/// An open connection; dropped when it closes.
#[derive(Debug)]
pub(crate) struct OpenConnection(Arc<Metrics>);

impl Metrics {
    /// Counts a response by its status.
    pub(crate) fn count_response(&self, status: StatusCode) {
        let index = STATUSES.iter().position(|&known| known == status.as_u16()).unwrap_or(STATUSES.len());
        self.responses[index].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection until its guard is dropped.
    pub(crate) fn open_connection(self: &Arc<Self>) -> OpenConnection {
        self.num_connections.fetch_add(1, Ordering::Relaxed);
        OpenConnection(Arc::clone(self))
    }

    fn num_connections(&self) -> u64 {
        self.num_connections.load(Ordering::Relaxed)
    }

    /// Responses by status, all there are, in a fixed order.
    fn responses(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let names = STATUSES.iter().map(u16::to_string).chain(["other".to_owned()]);
        names.zip(self.responses.iter().map(|number| number.load(Ordering::Relaxed)))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.num_connections.fetch_sub(1, Ordering::Relaxed);
    }
}
