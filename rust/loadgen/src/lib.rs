//! A load generator for OpenAI-compatible servers that costs less than the server it measures.
//!
//! # A load in files
//! 1. `config`: what load to send where; checked once.
//! 2. `trace`, `prompts`, `workload`: the bodies, written as bytes before the clock starts.
//! 3. `arrivals`: closed loop, Poisson process, or the times of a trace.
//! 4. `run`: one thread by default, with its own runtime, connections and figures; a thread that keeps
//!    the times of an open loop.
//! 5. `connection`, `request`: HTTP/1.1 that is kept alive, retries, one request timed.
//! 6. `sse`, `event`: events out of bytes, and what they say, mostly without parsing JSON.
//! 7. `recorder`, `histogram`, `report`: figures in memory that does not grow with the load.
//!
//! # Memory
//! Bodies written beforehand: 256 MiB at most, the rest are written when they are due. Figures: five
//! histograms of 37 KiB and 32 error messages a thread. Requests in flight: 8 bytes a token, for gaps
//! that count only if the request succeeds.
//!
//! ```no_run
//! use cbrs_loadgen::{Config, run};
//!
//! let config = Config::from_json(r#"{"url": "http://127.0.0.1:8000", "model": "m", "concurrency": 64}"#)?;
//! let report = run(&config, |_| true)?;
//! assert_eq!(report.num_failed, 0);
//! # Ok::<(), cbrs_loadgen::Error>(())
//! ```

mod arrivals;
mod config;
mod connection;
mod error;
mod event;
mod histogram;
mod limits;
mod prompts;
mod random;
mod recorder;
mod report;
mod request;
mod run;
mod sse;
mod trace;
mod workload;

pub use config::{Config, Endpoint, Secret};
pub use error::{Error, Result};
pub use histogram::{Histogram, Summary};
pub use report::{ClientShare, Report};
pub use run::{Progress, run};
pub use sse::{EventTooLong, MAX_EVENT_BYTES, SseParser};
