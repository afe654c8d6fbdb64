//! Which bytes of a connection hyper may see: whole heads that are beyond doubt, and bodies.
//!
//! Hyper reads more than it should: lines that end in a bare line feed, a length beside an encoding, a length twice. Whoever stands
//! in front of the server may read such a request differently, and take for a second one what hyper takes for a body. So each head
//! is held back until it is complete and was checked, with the parser that hyper has; the limits on heads are checked on the way.
//!
//! 1. No byte behind a refused head, or behind a chunked body, is ever read as a request.
//! 2. Hyper sees one request at a time: what follows it waits for the end of its answer. With more at hand hyper would not look at the
//!    socket, and not see that the client has gone.

use std::mem::MaybeUninit;

use httparse::{Error, Header, ParserConfig, Request, Status};
use hyper::{StatusCode, Uri};

use super::chunks::Chunks;
use crate::config::Limits;
use crate::error::ApiError;

/// Stands in for a head that is refused, so that the refusal is sent when its turn comes.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n";
/// Fields of a head that need no memory of their own.
const MAX_FIELDS_ON_STACK: usize = 128;
const LINE_END: &[u8] = b"\r\n";
const HEAD_END: &[u8] = b"\r\n\r\n";

/// The bytes of one connection, on their way from the socket to hyper.
#[derive(Debug)]
pub(super) struct Framing {
    max_head_bytes: usize,
    max_line_bytes: usize,
    max_fields: usize,
    /// Received and not handed on.
    held: Vec<u8>,
    /// So many of them may be.
    num_free: usize,
    state: State,
    /// The answer to the last good head has not ended.
    is_answering: bool,
}

/// What comes behind the bytes that may be handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A head, of which so many bytes were looked at.
    Head { num_seen: usize },
    /// So many bytes of a body.
    Body { num_left: u64 },
    /// A body in chunks. What is in it is hyper's affair, and the connection ends with it.
    Chunked(Chunks),
    /// Nothing, as after a body in chunks.
    Nothing,
    /// Nothing, behind a head that is refused.
    Refused,
}

impl State {
    /// Counts the first of these bytes as part of a body, as far as they are; returns how many are.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        match self {
            Self::Body { num_left } => {
                let num_passed = usize::try_from(*num_left).unwrap_or(usize::MAX).min(bytes.len());
                *num_left -= num_passed as u64;
                if *num_left == 0 {
                    *self = Self::Head { num_seen: 0 };
                }
                num_passed
            }
            Self::Chunked(chunks) => {
                let num_passed = chunks.pass(bytes);
                if *chunks == Chunks::Done {
                    *self = Self::Nothing;
                }
                num_passed
            }
            Self::Head { .. } | Self::Nothing | Self::Refused => 0,
        }
    }
}

impl Framing {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            max_head_bytes: limits.max_head_bytes,
            max_line_bytes: limits.max_request_line_bytes,
            max_fields: limits.max_header_fields,
            held: Vec::new(),
            num_free: 0,
            state: State::Head { num_seen: 0 },
            is_answering: false,
        }
    }

    /// Whether a head has begun and is not complete.
    pub(super) fn is_in_head(&self) -> bool {
        matches!(self.state, State::Head { num_seen } if num_seen > 0)
    }

    pub(super) fn is_refused(&self) -> bool {
        self.state == State::Refused
    }

    /// Whether nothing of a request has come since the last answer.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Head { num_seen: 0 } && !self.is_answering && self.num_free == 0
    }

    /// Whether so much waits for the end of an answer that nothing more is taken.
    pub(super) fn is_full(&self) -> bool {
        let is_waiting = match self.state {
            State::Head { .. } => self.is_answering,
            State::Nothing => true,
            State::Body { .. } | State::Chunked(_) | State::Refused => false,
        };
        is_waiting && self.held.len() - self.num_free >= self.max_head_bytes
    }

    /// Whether the client may still send, or has sent, what nobody will read.
    pub(super) fn has_more(&self) -> bool {
        !matches!(self.state, State::Head { num_seen: 0 } | State::Nothing) || !self.held.is_empty()
    }

    /// Counts the first of these bytes from the socket as part of a body, as far as they are; they may go to hyper at once.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> usize {
        self.state.pass(bytes)
    }

    /// Takes the other bytes from the socket.
    ///
    /// # Errors
    /// Why the head that they are part of is refused.
    pub(super) fn hold(&mut self, bytes: &[u8]) -> Result<(), ApiError> {
        self.held.extend_from_slice(bytes);
        self.advance()
    }

    /// The answer to the last good head has ended: it is the next one's turn.
    ///
    /// # Errors
    /// Why that one is refused.
    pub(super) fn answered(&mut self) -> Result<(), ApiError> {
        self.is_answering = false;
        self.advance()
    }

    /// Frees what may be handed on.
    fn advance(&mut self) -> Result<(), ApiError> {
        while self.num_free < self.held.len() {
            match self.state {
                State::Head { num_seen } => {
                    if self.is_answering || self.skip_empty_lines() {
                        return Ok(());
                    }
                    let rest = &self.held[self.num_free..];
                    let Some(len) = self.find_end(rest, num_seen.min(rest.len()))? else {
                        self.state = State::Head { num_seen: rest.len() };
                        return Ok(());
                    };
                    self.state = check_head(&rest[..len], self.max_fields)?;
                    self.num_free += len;
                    self.is_answering = true;
                }
                State::Body { .. } | State::Chunked(_) => {
                    self.num_free += self.state.pass(&self.held[self.num_free..]);
                }
                State::Nothing | State::Refused => return Ok(()),
            }
        }
        Ok(())
    }

    /// Drops the empty lines in front of a head, which some clients send behind a body; returns whether no head has begun.
    fn skip_empty_lines(&mut self) -> bool {
        let rest = &self.held[self.num_free..];
        let num_empty = rest.chunks_exact(LINE_END.len()).take_while(|&line| line == LINE_END).count() * LINE_END.len();
        if num_empty > 0 {
            self.state = State::Head { num_seen: 0 };
            self.held.drain(self.num_free..self.num_free + num_empty);
        }
        // A carriage return alone may begin another.
        matches!(&self.held[self.num_free..], [] | b"\r")
    }

    /// The bytes that may be handed on.
    pub(super) fn free(&self) -> &[u8] {
        &self.held[..self.num_free]
    }

    /// Drops bytes that were handed on.
    pub(super) fn handed_on(&mut self, count: usize) {
        self.num_free -= count;
        if count == self.held.len() {
            // An idle connection keeps no buffer.
            self.held = Vec::new();
        } else {
            self.held.drain(..count);
        }
    }

    /// Lets hyper see a harmless head in place of the one that is refused, and nothing behind it.
    pub(super) fn refuse(&mut self) {
        self.held.truncate(self.num_free);
        self.held.extend_from_slice(STAND_IN);
        self.num_free = self.held.len();
        self.state = State::Refused;
    }

    /// Length of the head that `rest` begins with, if it is complete.
    fn find_end(&self, rest: &[u8], num_seen: usize) -> Result<Option<usize>, ApiError> {
        let line_end = self.max_line_bytes + LINE_END.len();
        if rest.len() >= line_end && !rest[..line_end].contains(&b'\n') {
            let message = format!("the request line has more than {} bytes", self.max_line_bytes);
            return Err(ApiError::with_status(StatusCode::URI_TOO_LONG, message));
        }
        for (offset, _) in rest[num_seen..].iter().enumerate().filter(|&(_, &byte)| byte == b'\n') {
            let seen = &rest[..=num_seen + offset];
            if !seen.ends_with(LINE_END) {
                return Err(ApiError::bad_request("a line of the head ends in a bare line feed"));
            }
            if seen.ends_with(HEAD_END) && seen.len() <= self.max_head_bytes {
                return Ok(Some(seen.len()));
            }
        }
        if rest.len() > self.max_head_bytes {
            let message = format!("the head of the request has more than {} bytes", self.max_head_bytes);
            return Err(ApiError::with_status(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
        }
        Ok(None)
    }
}

/// What follows a complete head.
///
/// # Errors
/// Why nobody can be sure of that, or 431.
fn check_head(head: &[u8], max_fields: usize) -> Result<State, ApiError> {
    // Not written before they are needed: clearing room for a hundred fields takes as long as reading a usual head.
    let mut on_stack = [const { MaybeUninit::uninit() }; MAX_FIELDS_ON_STACK];
    let mut on_heap = Vec::new();
    let fields = if max_fields <= MAX_FIELDS_ON_STACK {
        &mut on_stack[..max_fields]
    } else {
        on_heap.resize_with(max_fields, MaybeUninit::uninit);
        &mut on_heap[..]
    };
    let mut request = Request::new(&mut []);
    match ParserConfig::default().parse_request_with_uninit_headers(&mut request, head, fields) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) => return Err(ApiError::bad_request("the head of the request is empty")),
        Err(Error::TooManyHeaders) => {
            let message = format!("the request has more than {max_fields} header fields");
            return Err(ApiError::with_status(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
        }
        Err(error) => {
            return Err(ApiError::bad_request(format!("the head of the request is not HTTP/1.1: {error}")));
        }
    }
    if request.path.is_none_or(|path| path.parse::<Uri>().is_err()) {
        return Err(ApiError::bad_request("the request line has no valid target"));
    }
    body_of(request.headers, request.version == Some(1))
}

/// What the fields say about the body.
fn body_of(fields: &[Header<'_>], is_http_11: bool) -> Result<State, ApiError> {
    let all = |name: &'static str| fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    let mut lengths = all("content-length");
    let mut encodings = all("transfer-encoding");
    match (lengths.next(), encodings.next()) {
        (None, None) => Ok(State::Head { num_seen: 0 }),
        (Some(_), Some(_)) => {
            Err(ApiError::bad_request("content-length and transfer-encoding exclude each other; send one of them"))
        }
        (Some(length), None) if lengths.next().is_none() => match content_length(length.value) {
            Some(0) => Ok(State::Head { num_seen: 0 }),
            Some(num_left) => Ok(State::Body { num_left }),
            None => Err(ApiError::bad_request("content-length is not a number of bytes")),
        },
        (Some(_), None) => Err(ApiError::bad_request("there is more than one content-length")),
        (None, Some(encoding)) => {
            let is_known = encodings.next().is_none() && encoding.value.eq_ignore_ascii_case(b"chunked");
            if is_known && is_http_11 {
                Ok(State::Chunked(Chunks::default()))
            } else {
                Err(ApiError::bad_request("transfer-encoding must be chunked, once, in a request of HTTP/1.1"))
            }
        }
    }
}

/// Digits and nothing else.
fn content_length(value: &[u8]) -> Option<u64> {
    let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    is_number.then(|| std::str::from_utf8(value).ok()?.parse().ok())?
}
