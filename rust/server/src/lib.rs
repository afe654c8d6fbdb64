//! cbrs-server: the OpenAI-compatible HTTP server. It talks to the engine through `cbrs_text::OutputProcessor` and
//! `cbrs_core::Submitter`, and never to Python.
//!
//! # One request's way
//!
//! 1. [`Server`] accepts a connection and holds its heads to the limits (`connection/`), the request is let in, with its key (`access/`), and
//!    axum finds the route (`app.rs`, `routes/`).
//! 2. The body is read up to the limit (`body.rs`), parsed and held to OpenAI's limits (`wire/`); the core checks the rest.
//! 3. Prompts are rendered and tokenized, long ones on a thread of the pool, and submitted (`engine.rs`, `stream/begin.rs`).
//! 4. The text thread sends updates to one channel; `stream/router.rs` hands them to the mailbox of each request in one pass.
//! 5. A stream writes what is in its mailbox as one frame, an event for each token (`stream/sse.rs`); other requests collect
//!    their choices (`reply/`).
//! 6. What operators want to know is counted on the way (`observe.rs`, `metrics/`, `events/`, `access_log/`).
//! 7. The request is under way until the last byte of its answer is with the system (`connection/exchange.rs`, `lifecycle.rs`).
//!
//! # Invariants
//!
//! 1. A `Ticket` (`stream/ticket.rs`) lives as long as its response is wanted. Dropping it unfinished cancels what it submitted.
//! 2. Nothing here waits for a reader: what a reader does not take costs the memory of its own tokens.
//! 3. An error is OpenAI's error object (`error.rs`), in a stream an event before `[DONE]`.

mod access;
mod access_log;
mod app;
mod body;
mod config;
mod connection;
mod engine;
mod error;
mod events;
mod health;
mod lifecycle;
mod limits;
mod log_writer;
mod metrics;
mod names;
mod observe;
mod reply;
mod routes;
mod server;
mod stream;
mod wire;

pub use access::{ApiKey, Keyring};
pub use access_log::LogFormat;
pub use config::{Limits, ServerConfig, Settings};
pub use engine::{Clock, EngineHandle};
pub use log_writer::LogWriter;
pub use server::Server;
