//! The access log: one line for each request, written when the last byte of its response is handed over or nobody wants it any more.
//!
//! A line has names, counts and times, never what a request or an answer says.

mod line;
mod writer;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cbrs_core::FinishReason;
use cbrs_core::policy::Class;
use cbrs_core::request::MAX_LABEL_BYTES;
use cbrs_text::Update;
use hyper::StatusCode;

use crate::engine::Clock;
use line::Line;
use writer::Writer;

/// The `error` of a line whose client did not wait for the end.
pub(crate) const CLIENT_CLOSED: &str = "client_closed";

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// `key=value` pairs.
    Text,
    /// A JSON object.
    Json,
}

/// Where lines go.
pub(crate) struct AccessLog {
    format: LogFormat,
    clock: Clock,
    writer: Writer,
}

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessLog").field("format", &self.format).finish_non_exhaustive()
    }
}

impl AccessLog {
    /// A log to the standard error output.
    ///
    /// # Errors
    /// What the operating system says if it has no thread to give.
    pub(crate) fn to_stderr(format: LogFormat, clock: Clock) -> std::io::Result<Self> {
        let writer = Writer::start(Box::new(std::io::stderr()))?;
        Ok(Self { format, clock, writer })
    }

    /// Lines that were dropped because nobody read them fast enough.
    pub(crate) fn num_dropped(&self) -> u64 {
        self.writer.num_dropped()
    }

    /// Writes what is pending and ends the thread.
    pub(crate) fn close(&self) {
        self.writer.close();
    }

    /// A request has come.
    pub(crate) fn begin(self: &Arc<Self>, method: &'static str, route: &str) -> Arc<Entry> {
        Arc::new(Entry {
            log: Arc::clone(self),
            arrived_ns: (self.clock)(),
            method,
            route: route.to_owned(),
            details: Mutex::default(),
        })
    }
}

/// What is known of a request and its response; the line is written when nobody holds it any more.
#[derive(Debug)]
pub(crate) struct Entry {
    log: Arc<AccessLog>,
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
    id: Option<String>,
    client_id: Option<String>,
    tenant: Option<Arc<str>>,
    class: Option<Class>,
    tally: Option<Tally>,
}

impl Entry {
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

    /// Notes the head of the response.
    pub(crate) fn respond(&self, status: StatusCode, code: Option<&'static str>) {
        let mut details = self.lock();
        details.status = Some(status);
        details.code = code;
    }

    /// Notes an error after the head of the response, unless there was one.
    pub(crate) fn fail(&self, code: &'static str) {
        self.lock().code.get_or_insert(code);
    }

    /// Notes what came of it.
    pub(crate) fn finish(&self, tally: Tally) {
        self.lock().tally = Some(tally);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let now_ns = (self.log.clock)();
        self.log.writer.push(|out| {
            let details = self.details.get_mut().unwrap_or_else(PoisonError::into_inner);
            if details.status.is_none() {
                details.code.get_or_insert(CLIENT_CLOSED);
            }
            let mut line = Line::begin(self.log.format, out);
            line.text("method", self.method);
            line.text("route", &self.route);
            line.number("status", details.status.map_or(499, |status| status.as_u16()));
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

/// What came of a request, summed up from its updates.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    num_prompt_tokens: usize,
    num_cached_tokens: usize,
    num_output_tokens: usize,
    first_token_ns: Option<u64>,
    /// Bit by code of the finish reasons of its choices.
    reasons: u8,
}

impl Tally {
    pub(crate) fn add(&mut self, update: &Update) {
        self.num_output_tokens += update.token_ids.len();
        if let Some(prompt) = &update.prompt_token_ids {
            self.num_prompt_tokens += prompt.len();
            self.num_cached_tokens += update.num_cached_tokens;
        }
        if let Some(end) = &update.end {
            self.add_reason(end.finish_reason);
        }
        // Later ones cannot be earlier, but the first update that is read may be another choice's end.
        if update.end.is_some() || self.first_token_ns.is_none() {
            self.first_token_ns = [self.first_token_ns, update.first_token_ns].into_iter().flatten().min();
        }
    }

    pub(crate) fn add_reason(&mut self, reason: FinishReason) {
        self.reasons |= 1 << reason as u8;
    }

    fn write(&self, arrived_ns: u64, line: &mut Line<'_>) {
        line.number("prompt_tokens", self.num_prompt_tokens);
        line.number("cached_tokens", self.num_cached_tokens);
        line.number("output_tokens", self.num_output_tokens);
        if let Some(first_ns) = self.first_token_ns {
            line.seconds("ttft_s", first_ns.saturating_sub(arrived_ns));
        }
        let reasons = FinishReason::ALL.iter().filter(|&&reason| self.reasons >> reason as u8 & 1 == 1);
        let reasons: Vec<&str> = reasons.map(|reason| reason.as_str()).collect();
        if !reasons.is_empty() {
            line.text("finish_reason", &reasons.join(","));
        }
    }
}
