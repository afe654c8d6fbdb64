//! The access log: one line for each request, written when the last byte of its response is with the system or nobody wants it any more.
//!
//! A line has names, counts and times, never what a request or an answer says.

mod entry;
mod line;
mod tally;

use std::fmt;
use std::sync::Arc;

use crate::engine::Clock;
use crate::log_writer::LogWriter;
pub(crate) use entry::{CLIENT_CLOSED, Entry, UNKNOWN};
pub(crate) use tally::Tally;

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
    writer: Arc<LogWriter>,
}

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessLog").field("format", &self.format).finish_non_exhaustive()
    }
}

impl AccessLog {
    pub(crate) fn new(format: LogFormat, clock: Clock, writer: Arc<LogWriter>) -> Self {
        Self { format, clock, writer }
    }

    fn now_ns(&self) -> u64 {
        (self.clock)()
    }

    /// Appends what `write` appends.
    fn push(&self, write: impl FnOnce(&mut Vec<u8>)) {
        self.writer.push(write);
    }
}
