//! From submitted requests to the bytes of an event stream.

mod begin;
mod mailbox;
mod router;
mod sse;
mod ticket;

pub(crate) use begin::{Submission, begin};
pub(crate) use router::Router;
pub(crate) use sse::event_stream;
pub(crate) use ticket::{Submitted, Ticket};
