//! One request: sent, perhaps sent again, read to its end, and timed.
//!
//! Times start when the request is to be sent, so that a new connection and waits for `Retry-After`
//! count. Tokens are timed by the read of the socket that brought them.

use std::error::Error as _;
use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, RETRY_AFTER};

use crate::config::Config;
use crate::connection::{Clock, Connection, Pool, Target};
use crate::event::{Event, EventReader, Usage, error_message, read_body};
use crate::sse::SseParser;

const MAX_RETRY_AFTER_S: f64 = 60.0;
const FIRST_BACKOFF_S: f64 = 0.5;
const RETRIED: [u16; 2] = [429, 503];
/// A response that is no stream may be this long.
const MAX_BODY_BYTES: usize = 256 << 20;

/// Counts that all clients of a load add to, for its progress and its report.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) started: AtomicU64,
    pub(crate) succeeded: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Of requests in flight, too: events with text.
    pub(crate) tokens: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) reconnects: AtomicU64,
    pub(crate) retries: AtomicU64,
}

/// What one request came to. Its memory is used for the next.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    /// The status of each response, of retries too; 0 where none came.
    pub(crate) statuses: Vec<u16>,
    /// Why it failed.
    pub(crate) error: Option<String>,
    pub(crate) sent_ns: u64,
    pub(crate) first_ns: Option<u64>,
    pub(crate) last_ns: u64,
    pub(crate) end_ns: u64,
    /// From one event with text to the next, in nanoseconds.
    pub(crate) gaps_ns: Vec<u64>,
    pub(crate) usage: Option<Usage>,
    pub(crate) num_events: u64,
    pub(crate) num_token_events: u64,
    /// Reads of the socket that completed an event.
    pub(crate) num_reads: u64,
    is_done: bool,
    parser: SseParser,
}

impl Exchange {
    fn start(&mut self, now_ns: u64) {
        self.statuses.clear();
        self.sent_ns = now_ns;
        self.start_attempt();
    }

    fn start_attempt(&mut self) {
        self.error = None;
        self.first_ns = None;
        self.last_ns = 0;
        self.gaps_ns.clear();
        self.usage = None;
        self.num_events = 0;
        self.num_token_events = 0;
        self.num_reads = 0;
        self.is_done = false;
        self.parser.reset();
    }

    /// Output tokens: as the server counts them, else the events that had text.
    pub(crate) fn num_output_tokens(&self) -> u64 {
        self.usage.map_or(self.num_token_events, |usage| usage.completion_tokens)
    }
}

/// What ended an attempt.
enum Failure {
    /// The server answered with an error status.
    Status { status: u16, message: String, retry_after_s: Option<f64> },
    /// No usable response.
    Other(String),
}

/// Sends requests to one server.
#[derive(Debug)]
pub(crate) struct Client {
    target: Arc<Target>,
    events: EventReader,
    pool: Pool,
    clock: Clock,
    is_stream: bool,
    max_retries: u32,
    timeout: Duration,
}

impl Client {
    pub(crate) fn new(config: &Config, target: Arc<Target>, clock: Clock) -> Self {
        Self {
            target,
            events: EventReader::new(config.endpoint),
            pool: Pool::default(),
            clock,
            is_stream: config.stream,
            max_retries: config.retries,
            timeout: Duration::from_secs_f64(config.timeout_s),
        }
    }

    /// Sends a request and reads its response; what happened is in `exchange`.
    pub(crate) async fn send(&self, body: Bytes, exchange: &mut Exchange, counters: &Counters) {
        exchange.start(self.clock.now_ns());
        counters.started.fetch_add(1, Relaxed);
        let mut num_retries = 0;
        loop {
            exchange.start_attempt();
            let attempt = self.attempt(body.clone(), exchange, counters);
            let failure = match tokio::time::timeout(self.timeout, attempt).await {
                Ok(Ok(())) => break,
                Ok(Err(failure)) => failure,
                Err(_) => Failure::Other(format!("no end after {} s", self.timeout.as_secs_f64())),
            };
            match failure {
                Failure::Status { status, retry_after_s, .. }
                    if RETRIED.contains(&status) && num_retries < self.max_retries =>
                {
                    let backoff_s = FIRST_BACKOFF_S * f64::from(1 << num_retries.min(10));
                    let wait_s = retry_after_s.unwrap_or(backoff_s).min(MAX_RETRY_AFTER_S);
                    num_retries += 1;
                    counters.retries.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_secs_f64(wait_s)).await;
                }
                Failure::Status { status, message, .. } => {
                    exchange.error = Some(format!("{status}: {message}"));
                    break;
                }
                Failure::Other(message) => {
                    exchange.error = Some(message);
                    break;
                }
            }
        }
        exchange.end_ns = self.clock.now_ns();
        let outcome = if exchange.error.is_none() { &counters.succeeded } else { &counters.failed };
        outcome.fetch_add(1, Relaxed);
    }

    async fn attempt(&self, body: Bytes, exchange: &mut Exchange, counters: &Counters) -> Result<(), Failure> {
        exchange.statuses.push(0);
        let (response, connection) = self.respond(body, counters).await?;
        let status = response.status().as_u16();
        if let Some(last) = exchange.statuses.last_mut() {
            *last = status;
        }
        if status != 200 {
            let retry_after_s = retry_after_s(response.headers());
            let body = read_to_end(response.into_body()).await?;
            self.pool.give_back(connection);
            return Err(Failure::Status { status, message: error_message(&body), retry_after_s });
        }
        if self.is_stream {
            self.read_stream(response.into_body(), &connection, exchange, counters).await?;
        } else {
            let body = read_to_end(response.into_body()).await?;
            exchange.usage = read_body(&body).map_err(Failure::Other)?;
            counters.tokens.fetch_add(exchange.num_output_tokens(), Relaxed);
        }
        self.pool.give_back(connection);
        Ok(())
    }

    /// Sends over a connection that is kept alive or a new one. A kept one may have been closed by the
    /// server meanwhile: the request is then sent again over a new one, as all HTTP clients do.
    async fn respond(&self, body: Bytes, counters: &Counters) -> Result<(Response<Incoming>, Connection), Failure> {
        let broken =
            |error: &hyper::Error| Failure::Other(with_causes("the connection broke before the response", error));
        if let Some(mut connection) = self.pool.take() {
            match exchange_heads(&mut connection, &self.target, body.clone()).await {
                Ok(response) => return Ok((response, connection)),
                Err(error) if is_stale(&error) => counters.reconnects.fetch_add(1, Relaxed),
                Err(error) => return Err(broken(&error)),
            };
        }
        counters.connections.fetch_add(1, Relaxed);
        let connecting = Connection::open(&self.target, self.clock).await;
        let mut connection = connecting.map_err(|error| Failure::Other(format!("cannot connect: {error}")))?;
        let response = exchange_heads(&mut connection, &self.target, body).await.map_err(|error| broken(&error))?;
        Ok((response, connection))
    }

    async fn read_stream(
        &self,
        mut body: Incoming,
        connection: &Connection,
        exchange: &mut Exchange,
        counters: &Counters,
    ) -> Result<(), Failure> {
        let mut error = None;
        let mut last_read = None;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::Other(with_causes("the stream was cut", &error)))?;
            let Some(bytes) = frame.data_ref() else { continue };
            let read = connection.reads.count();
            let mut parser = std::mem::take(&mut exchange.parser);
            let num_events = exchange.num_events;
            let parsed = parser.feed(bytes, |data| {
                exchange.num_events += 1;
                match self.events.read(data) {
                    Event::Token => take_token(exchange, connection.reads.last_ns(), counters),
                    Event::Done => exchange.is_done = true,
                    Event::Other(usage) => exchange.usage = usage.or(exchange.usage),
                    Event::Error(message) => error = Some(message),
                }
            });
            exchange.parser = parser;
            parsed.map_err(|error| Failure::Other(error.to_string()))?;
            if exchange.num_events > num_events && last_read.replace(read) != Some(read) {
                exchange.num_reads += 1;
            }
        }
        match error {
            Some(message) => Err(Failure::Other(format!("error in the stream: {message}"))),
            None if !exchange.is_done => Err(Failure::Other("the stream ended without [DONE]".to_owned())),
            None => Ok(()),
        }
    }
}

fn take_token(exchange: &mut Exchange, now_ns: u64, counters: &Counters) {
    if exchange.first_ns.is_none() {
        exchange.first_ns = Some(now_ns);
    } else {
        exchange.gaps_ns.push(now_ns.saturating_sub(exchange.last_ns));
    }
    exchange.last_ns = now_ns;
    exchange.num_token_events += 1;
    counters.tokens.fetch_add(1, Relaxed);
}

async fn exchange_heads(
    connection: &mut Connection,
    target: &Target,
    body: Bytes,
) -> hyper::Result<Response<Incoming>> {
    connection.sender.ready().await?;
    connection.sender.send_request(target.request(body)).await
}

/// Whether the connection had ended before the server answered anything.
fn is_stale(error: &hyper::Error) -> bool {
    let is_reset = error.source().and_then(|cause| cause.downcast_ref::<io::Error>()).is_some_and(|cause| {
        matches!(cause.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected)
    });
    is_reset || error.is_closed() || error.is_canceled() || error.is_incomplete_message()
}

async fn read_to_end(mut body: Incoming) -> Result<Bytes, Failure> {
    let mut first: Option<Bytes> = None;
    let mut joined: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Failure::Other(with_causes("the response was cut", &error)))?;
        let Ok(data) = frame.into_data() else { continue };
        // Most come in one piece, which need not be copied.
        if first.is_none() {
            first = Some(data);
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(first.as_deref().unwrap_or_default());
        }
        if joined.len() + data.len() > MAX_BODY_BYTES {
            return Err(Failure::Other(format!("the response is longer than {MAX_BODY_BYTES} bytes")));
        }
        joined.extend_from_slice(&data);
    }
    Ok(if joined.is_empty() { first.unwrap_or_default() } else { Bytes::from(joined) })
}

/// Seconds of a `Retry-After`; a date counts as none.
fn retry_after_s(headers: &HeaderMap) -> Option<f64> {
    let seconds: f64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    (seconds >= 0.0).then_some(seconds)
}

/// A message with all causes of the error.
fn with_causes(what: &str, error: &hyper::Error) -> String {
    let mut message = format!("{what}: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(message, ": {error}");
        cause = error.source();
    }
    message
}
