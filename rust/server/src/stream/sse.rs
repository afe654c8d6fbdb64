//! A response as server-sent events: all that is pending leaves as one frame, each token as an event of its own.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use cbrs_text::Update;
use http_body::Frame;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use tokio::task::JoinHandle;

use super::ticket::Ticket;
use crate::error::ApiError;
use crate::reply::{Answer, MAX_INLINE_VALUES, Usage, num_values};

const DONE: &[u8] = b"data: [DONE]\n\n";
/// Estimate for events before the first.
const FIRST_EVENT_LEN: usize = 288;
/// Asks nginx not to hold events back.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The events of one request. Dropping it before its end cancels the request.
struct EventStream<A> {
    /// Absent while it writes, and after the last frame.
    writer: Option<Box<EventWriter<A>>>,
    /// A frame that the pool writes, since it has too much to tell to be written where connections are served.
    writing: Option<JoinHandle<Written<A>>>,
}

/// A frame, and the writer unless it was the last.
type Written<A> = (Vec<u8>, Option<Box<EventWriter<A>>>);

/// Writes the frames.
struct EventWriter<A> {
    ticket: Ticket,
    answer: A,
    usage: Usage,
    has_usage: bool,
    updates: Vec<Update>,
    /// Bytes of an event, as an estimate of the next.
    event_len: usize,
}

/// A response whose body is the events of a request.
pub(crate) fn event_stream<A: Answer>(ticket: Ticket, answer: A, has_usage: bool) -> Response {
    let (usage, updates, event_len) = (Usage::default(), Vec::new(), FIRST_EVENT_LEN);
    let writer = Box::new(EventWriter { ticket, answer, usage, has_usage, updates, event_len });
    let stream = EventStream { writer: Some(writer), writing: None };
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    response
}

impl<A: Answer> EventWriter<A> {
    /// Writes what has come as one frame.
    fn frame(mut self: Box<Self>) -> Written<A> {
        let num_events = self.updates.len();
        // The first and the last frame have more than tokens.
        let mut out = Vec::with_capacity(num_events * self.event_len + 2 * FIRST_EVENT_LEN);
        let is_over = self.write(&mut out);
        self.event_len = out.len().div_ceil(num_events);
        (out, (!is_over).then_some(self))
    }

    /// Writes what has come; returns whether it was the last.
    fn write(&mut self, out: &mut Vec<u8>) -> bool {
        let Self { ticket, answer, usage, has_usage, updates, .. } = self;
        let mut news = updates.drain(..);
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
            usage.add(&update);
            let choice = answer.add(ticket.prompt(&update), update);
            answer.write_chunk(choice, out);
            if is_over {
                if *has_usage {
                    answer.write_usage_chunk(usage, out);
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
        if let Some(mut writer) = this.writer.take() {
            if writer.ticket.poll_take(cx, &mut writer.updates).is_pending() {
                this.writer = Some(writer);
                return Poll::Pending;
            }
            if writer.updates.iter().map(num_values).sum::<usize>() <= MAX_INLINE_VALUES {
                let (out, writer) = writer.frame();
                this.writer = writer;
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))));
            }
            this.writing = Some(tokio::task::spawn_blocking(move || writer.frame()));
        }
        let Some(writing) = &mut this.writing else { return Poll::Ready(None) };
        let written = ready!(Pin::new(writing).poll(cx));
        this.writing = None;
        // A panic was reported where it happened; the ticket is gone, and with it the request.
        let Ok((out, writer)) = written else { return Poll::Ready(None) };
        this.writer = writer;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }

    fn is_end_stream(&self) -> bool {
        self.writer.is_none() && self.writing.is_none()
    }
}
