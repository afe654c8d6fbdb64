//! From submitted requests to the bytes of an event stream.

mod begin;
mod mailbox;
mod router;
mod sse;
mod submitted;
mod ticket;

pub(crate) use begin::{Submission, begin, open};
pub(crate) use router::Router;
pub(crate) use sse::event_stream;
pub(crate) use submitted::Submitted;
pub(crate) use ticket::Ticket;
