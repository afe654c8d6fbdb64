//! What is known of a request and its answer. It lives until the last byte of the answer is with the system or nobody wants it any more;
//! then the line is written and the request is under way no longer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cbrs_core::policy::Class;
use cbrs_core::request::MAX_LABEL_BYTES;
use hyper::StatusCode;

use super::line::Line;
use super::{AccessLog, Tally};
use crate::lifecycle::{Active, Lifecycle};

/// Stands for what is not known of a request that the connection refused.
pub(crate) const UNKNOWN: &str = "-";
/// The answer was not written to its end.
const CLIENT_GONE: u16 = 499;
/// The `error` of a line whose client did not wait for the end.
pub(crate) const CLIENT_CLOSED: &str = "client_closed";

/// A request and its answer.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Absent if no line is wanted.
    log: Option<Arc<AccessLog>>,
    arrived_ns: u64,
    method: &'static str,
    route: String,
    details: Mutex<Details>,
}

#[derive(Debug, Default)]
struct Details {
    /// Absent if the client did not wait for a response.
    status: Option<StatusCode>,
    code: Option<&'static str>,
    /// The last byte of the answer is with the system.
    is_written: bool,
    id: Option<String>,
    client_id: Option<String>,
    tenant: Option<Arc<str>>,
    class: Option<Class>,
    tally: Option<Tally>,
    active: Option<Active>,
}

impl Entry {
    /// A request has come.
    pub(crate) fn begin(log: Option<&Arc<AccessLog>>, method: &'static str, route: &str) -> Arc<Self> {
        let (arrived_ns, route) = log.map(|log| (log.now_ns(), route.to_owned())).unwrap_or_default();
        Arc::new(Self { log: log.cloned(), arrived_ns, method, route, details: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Details> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the names of the request.
    pub(crate) fn name(&self, id: &str, client_id: Option<&str>) {
        let mut details = self.lock();
        details.id = Some(id.to_owned());
        details.client_id = client_id.map(str::to_owned);
    }

    /// Notes on whose account it runs. A name that is too long, which is refused, is left out.
    pub(crate) fn set_terms(&self, tenant: Option<&Arc<str>>, class: Class) {
        let mut details = self.lock();
        details.tenant = tenant.filter(|tenant| tenant.len() <= MAX_LABEL_BYTES).cloned();
        details.class = Some(class);
    }

    /// Counts the request as under way.
    pub(crate) fn count(&self, active: Active) {
        self.lock().active = Some(active);
    }

    /// Notes the head of the response, which is under way from now on if the request was not before; one of a server that ends is not.
    pub(crate) fn respond(&self, status: StatusCode, code: Option<&'static str>, lifecycle: &Arc<Lifecycle>) {
        let mut details = self.lock();
        details.status = Some(status);
        details.code = code;
        if details.active.is_none() {
            details.active = lifecycle.begin();
        }
    }

    /// Notes an error after the head of the response, unless there was one.
    pub(crate) fn fail(&self, code: &'static str) {
        self.lock().code.get_or_insert(code);
    }

    /// Notes what came of it.
    pub(crate) fn finish(&self, tally: Tally) {
        self.lock().tally = Some(tally);
    }

    /// Notes that the last byte of the answer is with the system.
    pub(crate) fn set_written(&self) {
        self.lock().is_written = true;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let Some(log) = &self.log else { return };
        let now_ns = log.now_ns();
        log.push(|out| {
            let details = self.details.get_mut().unwrap_or_else(PoisonError::into_inner);
            let status = details.status.filter(|_| details.is_written);
            if status.is_none() {
                details.code.get_or_insert(CLIENT_CLOSED);
            }
            let mut line = Line::begin(log.format, out);
            line.text("method", self.method);
            line.text("route", &self.route);
            line.number("status", status.map_or(CLIENT_GONE, |status| status.as_u16()));
            line.seconds("duration_s", now_ns.saturating_sub(self.arrived_ns));
            let texts = [
                ("error", details.code),
                ("id", details.id.as_deref()),
                ("client_id", details.client_id.as_deref()),
                ("tenant", details.tenant.as_deref()),
                ("class", details.class.map(Class::name)),
            ];
            for (key, value) in texts {
                if let Some(value) = value {
                    line.text(key, value);
                }
            }
            if let Some(tally) = &details.tally {
                tally.write(self.arrived_ns, &mut line);
            }
            line.end();
        });
    }
}
