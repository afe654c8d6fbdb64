//! A socket that hands on only good heads, and that gives up on whoever is too slow.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::framing::Framing;
use super::refusal::Refusal;
use crate::config::Limits;
use crate::error::ApiError;

/// How long a client that is refused may go on sending: a socket closed on unread bytes loses the answer too.
const LINGER: Duration = Duration::from_secs(2);

/// A time-out that costs nothing until it begins.
#[derive(Debug)]
struct Timeout {
    limit: Duration,
    running: Option<Pin<Box<Sleep>>>,
}

impl Timeout {
    fn new(limit: Duration) -> Self {
        Self { limit, running: None }
    }

    /// Begins unless it has begun; ready when it has passed.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.running.get_or_insert_with(|| Box::pin(sleep(self.limit))).as_mut().poll(cx)
    }

    fn end(&mut self) {
        self.running = None;
    }
}

/// A client's socket.
#[derive(Debug)]
pub(super) struct Guarded {
    socket: TcpStream,
    framing: Framing,
    refusal: Arc<Refusal>,
    head: Timeout,
    write: Timeout,
    linger: Timeout,
    /// Nothing more is written.
    is_shut: bool,
}

impl Guarded {
    pub(super) fn new(socket: TcpStream, limits: &Limits, refusal: Arc<Refusal>) -> Self {
        Self {
            socket,
            framing: Framing::new(limits),
            refusal,
            head: Timeout::new(limits.head_timeout),
            write: Timeout::new(limits.write_timeout),
            linger: Timeout::new(LINGER),
            is_shut: false,
        }
    }

    fn refuse(&mut self, error: ApiError) {
        self.refusal.set(self.framing.num_heads(), error);
        self.framing.refuse();
    }

    /// Moves what may be handed on into `buf`; returns whether there was something.
    fn hand_on(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let count = self.framing.free().len().min(buf.remaining());
        buf.put_slice(&self.framing.free()[..count]);
        self.framing.handed_on(count);
        count > 0
    }

    /// Ready when a head takes too long.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.framing.is_in_head() {
            return Poll::Pending;
        }
        ready!(self.head.poll(cx));
        let message = format!("the head of the request took more than {} s", self.head.limit.as_secs_f64());
        self.refuse(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, message));
        Poll::Ready(())
    }

    /// Ends the time-out of writing if something was written, and the connection if it has passed.
    fn watch_write(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if done.is_ready() {
            self.write.end();
            return done;
        }
        ready!(self.write.poll(cx));
        // What the system holds for this reader is dropped too. If that cannot be, it gives up by itself some time.
        let _ = self.socket.set_zero_linger();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the reader takes nothing")))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.hand_on(buf) {
                return Poll::Ready(Ok(()));
            }
            if this.framing.is_refused() {
                // The connection ends after the answer.
                return Poll::Pending;
            }
            let start = buf.filled().len();
            let Poll::Ready(read) = Pin::new(&mut this.socket).poll_read(cx, buf) else {
                ready!(this.poll_late(cx));
                continue;
            };
            read?;
            let received = &buf.filled()[start..];
            if received.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let num_direct = this.framing.pass(received.len());
            if let Err(error) = this.framing.hold(&received[num_direct..]) {
                this.refuse(error);
            }
            buf.set_filled(start + num_direct);
            if !this.framing.is_in_head() {
                this.head.end();
            }
            if num_direct > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.watch_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.watch_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.is_shut {
            ready!(Pin::new(&mut this.socket).poll_shutdown(cx))?;
            this.is_shut = true;
        }
        let mut scratch = [0; 4096];
        while this.framing.has_more() && this.linger.poll(cx).is_pending() {
            let mut unread = ReadBuf::new(&mut scratch);
            ready!(Pin::new(&mut this.socket).poll_read(cx, &mut unread))?;
            if unread.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}
