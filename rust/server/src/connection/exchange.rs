//! A request and its answer, one at a time on a connection: from the head that is handed on to the last byte that is with the system.
//!
//! Hyper drops the body of an answer once it has buffered all of it, and flushes afterwards. So an answer is written when the socket is
//! flushed after its body was dropped; on a connection that ends before, it never is.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};

use crate::access_log::Entry;
use crate::error::ApiError;

/// Whose turn it is on one connection.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Why the head whose turn it is is refused, if it is.
    refused: Option<ApiError>,
    /// The answer whose body has ended.
    ended: Option<Arc<Entry>>,
    is_closed: bool,
}

impl Exchange {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses the head whose turn it is.
    pub(super) fn refuse(&self, error: ApiError) {
        self.lock().refused = Some(error);
    }

    /// Why the head whose turn it is is refused, if it is.
    pub(super) fn take_refusal(&self) -> Option<ApiError> {
        self.lock().refused.take()
    }

    /// Hyper has all of the answer, or wants no more of it.
    fn end(&self, entry: Option<Arc<Entry>>) {
        let mut state = self.lock();
        if !state.is_closed {
            state.ended = entry;
        }
    }

    /// All that hyper had is with the system; returns whether an answer is written with it.
    pub(super) fn flushed(&self) -> bool {
        let ended = self.lock().ended.take();
        if let Some(entry) = &ended {
            entry.set_written();
        }
        ended.is_some()
    }

    /// Nothing more is written.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let ended = state.ended.take();
        drop(state);
        drop(ended);
    }
}

/// The body of an answer, which tells the exchange when it ends.
pub(super) struct AnswerBody {
    body: Body,
    /// Present until it is dropped.
    entry: Option<Arc<Entry>>,
    exchange: Arc<Exchange>,
}

impl AnswerBody {
    pub(super) fn new(body: Body, entry: Arc<Entry>, exchange: Arc<Exchange>) -> Self {
        Self { body, entry: Some(entry), exchange }
    }
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.exchange.end(self.entry.take());
    }
}
