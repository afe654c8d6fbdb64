//! A response as server-sent events: all that is pending leaves as one frame, each token as an event of its own.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use cbrs_text::Update;
use http_body::Frame;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};

use super::ticket::Ticket;
use crate::error::ApiError;
use crate::reply::{Answer, Usage};

const DONE: &[u8] = b"data: [DONE]\n\n";
/// Estimate for events before the first.
const FIRST_EVENT_LEN: usize = 288;
/// Asks nginx not to hold events back.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The events of one request. Dropping it before its end cancels the request.
struct EventStream<A> {
    /// Absent after the last frame.
    ticket: Option<Ticket>,
    answer: A,
    usage: Usage,
    has_usage: bool,
    updates: Vec<Update>,
    /// Bytes of an event, as an estimate of the next.
    event_len: usize,
}

/// A response whose body is the events of a request.
pub(crate) fn event_stream<A: Answer>(ticket: Ticket, answer: A, has_usage: bool) -> Response {
    let usage = Usage::default();
    let stream =
        EventStream { ticket: Some(ticket), answer, usage, has_usage, updates: Vec::new(), event_len: FIRST_EVENT_LEN };
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    response
}

impl<A: Answer> EventStream<A> {
    /// Writes what has come; returns whether it was the last.
    fn write(&mut self, ticket: &mut Ticket, out: &mut Vec<u8>) -> bool {
        let mut news = self.updates.drain(..);
        while let Some(update) = news.next() {
            let error = update.end.as_ref().and_then(|end| ticket.end_error(end));
            let is_over = ticket.note(&update);
            if let Some(error) = error {
                ticket.note_error(&error);
                // They have come, whether anybody wants them or not.
                news.for_each(|update| {
                    ticket.note(&update);
                });
                write_error(&error, out);
                return true;
            }
            self.usage.add(&update);
            let choice = self.answer.add(ticket.prompt(&update), update);
            self.answer.write_chunk(choice, out);
            if is_over {
                if self.has_usage {
                    self.answer.write_usage_chunk(&self.usage, out);
                }
                out.extend_from_slice(DONE);
                return true;
            }
        }
        false
    }
}

/// An error in mid-stream, and the end of the stream.
fn write_error(error: &ApiError, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    error.write_json(out);
    out.extend_from_slice(b"\n\n");
    out.extend_from_slice(DONE);
}

impl<A: Answer> http_body::Body for EventStream<A> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let Some(mut ticket) = this.ticket.take() else { return Poll::Ready(None) };
        if ticket.poll_take(cx, &mut this.updates).is_pending() {
            this.ticket = Some(ticket);
            return Poll::Pending;
        }
        let num_events = this.updates.len();
        // The first and the last frame have more than tokens.
        let mut out = Vec::with_capacity(num_events * this.event_len + 2 * FIRST_EVENT_LEN);
        if !this.write(&mut ticket, &mut out) {
            this.ticket = Some(ticket);
        }
        this.event_len = out.len().div_ceil(num_events);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }

    fn is_end_stream(&self) -> bool {
        self.ticket.is_none()
    }
}
