//! `AdmissionGate`: how much may wait. The only mutable state that submitting threads share besides queue and slots.
//!
//! ```text
//! queued  u64   requests << 39 | prompt tokens
//! ```
//!
//! Both counts share one word, so a reservation is one compare-exchange: it takes a request and its tokens, or nothing.
//! There is no moment at which one bound holds and the other does not, no half reservation to take back, and no refusal
//! because of another reservation that fails later.
//!
//! Invariants: neither count exceeds its bound at any moment; the counts are what was reserved and not yet released.
//!
//! A reservation also guarantees room in a `RequestQueue` of `max_requests` slots, if reservations are released by the
//! consumer after the pop: at most `max_requests - 1` others are ahead, so the slot that comes next was freed by the pop
//! of a request whose release (or that of a later one) this reservation has seen.

use crossbeam_utils::CachePadded;

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// Low bits of the word that count prompt tokens; half a tera-token is 2 TiB of prompts.
const TOKEN_BITS: u32 = 39;
/// Most prompt tokens that the word can count: the bound when none was asked for.
const MAX_TOKENS: u64 = (1 << TOKEN_BITS) - 1;
/// Most requests that the word can count.
const MAX_REQUESTS: u64 = (1 << (u64::BITS - TOKEN_BITS)) - 1;

/// Seconds after which to try again, when nothing is known about how fast the queue drains.
pub const UNKNOWN_RETRY_S: f64 = 1.0;

/// Bounds on waiting requests and their prompt tokens.
///
/// ```
/// let gate = cbrs_core::admission::AdmissionGate::new(2, Some(100));
/// assert!(gate.reserve(80).is_ok());
/// assert!(gate.reserve(21).is_err());
/// gate.release(80);
/// assert_eq!((gate.queued_requests(), gate.queued_tokens()), (0, 0));
/// ```
#[derive(Debug)]
pub struct AdmissionGate {
    queued: CachePadded<AtomicU64>,
    max_requests: usize,
    max_tokens: u64,
}

impl AdmissionGate {
    /// A gate with nothing reserved. Without `max_tokens`, only the word's own limit of 2^39 - 1 tokens holds.
    ///
    /// # Panics
    /// If `max_requests` is above 2^25 - 1.
    pub fn new(max_requests: usize, max_tokens: Option<u64>) -> Self {
        let limit = MAX_REQUESTS as usize;
        assert!(
            max_requests <= limit,
            "a bound of {max_requests} waiting requests, but at most {limit} can be counted"
        );
        let max_tokens = max_tokens.unwrap_or(MAX_TOKENS).min(MAX_TOKENS);
        Self { queued: CachePadded::new(AtomicU64::new(0)), max_requests, max_tokens }
    }

    /// Reserves room for one request of `num_tokens` prompt tokens, or nothing.
    ///
    /// # Errors
    /// `QueueFull`, `QueuedTokensFull`.
    pub fn reserve(&self, num_tokens: u64) -> Result<()> {
        self.reserve_within(num_tokens, self.max_requests, self.max_tokens)
    }

    /// The same for a request that may fill only a part of the bounds: `max_requests` and `max_tokens`, if those are lower.
    ///
    /// # Errors
    /// `QueueFull`, `QueuedTokensFull`, with `UNKNOWN_RETRY_S`.
    pub fn reserve_within(&self, num_tokens: u64, max_requests: usize, max_tokens: u64) -> Result<()> {
        self.reserve_all_within(1, num_tokens, max_requests, max_tokens)
    }

    /// The same for `num_requests` requests of `num_tokens` prompt tokens together, all or none; each is released on its own.
    ///
    /// # Errors
    /// `QueueFull`, `QueuedTokensFull`, with `UNKNOWN_RETRY_S`.
    pub fn reserve_all_within(
        &self,
        num_requests: usize,
        num_tokens: u64,
        max_requests: usize,
        max_tokens: u64,
    ) -> Result<()> {
        let (max_requests, max_tokens) = (max_requests.min(self.max_requests), max_tokens.min(self.max_tokens));
        // Relaxed: the exchange checks the value again, and a refusal needs no more than a value that was there.
        let mut queued = self.queued.load(Ordering::Relaxed);
        loop {
            if num_requests > max_requests.saturating_sub(requests(queued)) {
                return Err(Error::QueueFull {
                    queued: requests(queued),
                    limit: max_requests,
                    retry_after_s: UNKNOWN_RETRY_S,
                });
            }
            let queued_tokens = tokens(queued);
            if num_tokens > max_tokens.saturating_sub(queued_tokens) {
                return Err(Error::QueuedTokensFull {
                    queued: queued_tokens,
                    requested: num_tokens,
                    limit: max_tokens,
                    retry_after_s: UNKNOWN_RETRY_S,
                });
            }
            // Acquire: pairs with the Release of every `release` before it (the word is changed by exchanges only, which
            // continue each one's release sequence), so that the room which those made in the queue is seen.
            match self.queued.compare_exchange_weak(
                queued,
                queued + share(num_requests as u64, num_tokens),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(()),
                Err(current) => queued = current,
            }
        }
    }

    /// Gives back the reservation of one request of `num_tokens` prompt tokens.
    ///
    /// # Panics
    /// If no such reservation can exist: more is given back than is reserved.
    pub fn release(&self, num_tokens: u64) {
        // Release: what the caller did with the queue before is seen by the next `reserve` that gets this room.
        let queued = self.queued.fetch_sub(share(1, num_tokens), Ordering::Release);
        assert!(
            requests(queued) >= 1 && tokens(queued) >= num_tokens,
            "1 request of {num_tokens} tokens was given back, but {} requests of {} tokens were reserved",
            requests(queued),
            tokens(queued),
        );
    }

    /// Most requests that may be reserved.
    pub fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Most prompt tokens that may be reserved.
    pub fn max_tokens(&self) -> u64 {
        self.max_tokens
    }

    /// Requests reserved now.
    pub fn queued_requests(&self) -> usize {
        requests(self.queued.load(Ordering::Relaxed))
    }

    /// Prompt tokens reserved now.
    pub fn queued_tokens(&self) -> u64 {
        tokens(self.queued.load(Ordering::Relaxed))
    }
}

/// What requests of `num_tokens` tokens together add to the word.
fn share(num_requests: u64, num_tokens: u64) -> u64 {
    (num_requests << TOKEN_BITS) + num_tokens
}

fn requests(queued: u64) -> usize {
    (queued >> TOKEN_BITS) as usize
}

fn tokens(queued: u64) -> u64 {
    queued & MAX_TOKENS
}
