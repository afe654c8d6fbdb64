//! Why a load cannot be run. What goes wrong with single requests is counted in the report instead.

use std::io;
use std::path::PathBuf;

/// A configuration or a file that cannot be used, or a run that was ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is not an object with the known fields and types.
    #[error("configuration: {0}")]
    Config(#[from] serde_json::Error),
    /// The address of the server cannot be used.
    #[error("url {url:?}: {reason}; give http://HOST:PORT")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The host has no address.
    #[error("cannot find the host of {authority:?}: {source}")]
    Host {
        /// Host and port.
        authority: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// A number is out of its range.
    #[error("{name} is {value}; it must be {limit}")]
    OutOfRange {
        /// The field.
        name: &'static str,
        /// As given.
        value: f64,
        /// What is allowed.
        limit: &'static str,
    },
    /// A text cannot be sent as a header.
    #[error("{name} cannot be sent in a header: it has characters other than visible ASCII")]
    Header {
        /// The field.
        name: &'static str,
    },
    /// Two fields exclude each other.
    #[error("{first} and {second} exclude each other; leave one out")]
    Conflict {
        /// One field.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line of a file is not what it should be.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A file has no lines that count.
    #[error("{} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A trace without arrival times cannot be replayed.
    #[error("{} has lengths but no arrival times; give a rate or a concurrency too", path.display())]
    NoArrivalTimes {
        /// The trace.
        path: PathBuf,
    },
    /// The callback ended the run.
    #[error("interrupted")]
    Interrupted,
    /// The client itself could not go on.
    #[error("the load generator failed: {0}")]
    Client(io::Error),
}

/// What most functions of the crate return.
pub type Result<T> = std::result::Result<T, Error>;
