//! A socket that hands on only good heads, one request at a time, and that gives up on whoever is too slow.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use super::exchange::Exchange;
use super::framing::Framing;
use crate::config::Limits;
use crate::error::ApiError;

/// How long a client that is refused may go on sending: a socket closed on unread bytes loses the answer too.
const LINGER: Duration = Duration::from_secs(2);
/// How often it is looked whether a client is gone of whom nothing is read for now.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A time-out that costs nothing until it begins, and hardly anything when it begins again: a timer for each request
/// would be most of what the runtime's clock does. So the timer of an earlier beginning goes on, and is set anew only
/// when it has rung too early.
#[derive(Debug)]
struct Timeout {
    limit: Duration,
    /// When it passes, while it runs.
    end: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Timeout {
    fn new(limit: Duration) -> Self {
        Self { limit, end: None, timer: None }
    }

    /// Begins unless it has begun; ready when it has passed.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let end = *self.end.get_or_insert_with(|| Instant::now() + self.limit);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(end)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= end {
                return Poll::Ready(());
            }
            timer.as_mut().reset(end);
        }
    }

    fn end(&mut self) {
        self.end = None;
    }
}

/// A client's socket.
#[derive(Debug)]
pub(super) struct Guarded {
    socket: TcpStream,
    framing: Framing,
    exchange: Arc<Exchange>,
    idle: Timeout,
    head: Timeout,
    look: Timeout,
    write: Timeout,
    linger: Timeout,
    /// Nothing more is written.
    is_shut: bool,
}

impl Guarded {
    pub(super) fn new(socket: TcpStream, limits: &Limits, exchange: Arc<Exchange>) -> Self {
        Self {
            socket,
            framing: Framing::new(limits),
            exchange,
            idle: Timeout::new(limits.idle_timeout),
            head: Timeout::new(limits.head_timeout),
            look: Timeout::new(LOOK_INTERVAL),
            write: Timeout::new(limits.write_timeout),
            linger: Timeout::new(LINGER),
            is_shut: false,
        }
    }

    fn refuse(&mut self, error: ApiError) {
        self.exchange.refuse(error);
        self.framing.refuse();
    }

    /// Moves what may be handed on into `buf`; returns whether there was something.
    fn hand_on(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let count = self.framing.free().len().min(buf.remaining());
        buf.put_slice(&self.framing.free()[..count]);
        self.framing.handed_on(count);
        count > 0
    }

    /// Ready when nothing has come for too long: true if that was between two requests, false if a head is refused for it.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.framing.is_idle() {
            return self.idle.poll(cx).map(|()| true);
        }
        if !self.framing.is_in_head() {
            return Poll::Pending;
        }
        ready!(self.head.poll(cx));
        let message = format!("the head of the request took more than {} s", self.head.limit.as_secs_f64());
        self.refuse(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, message));
        Poll::Ready(false)
    }

    /// Ready when the client has gone, although not all that it sent was read.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.look.poll(cx));
            self.look.end();
            if let Poll::Ready(Ok(state)) = pin!(self.socket.ready(Interest::READABLE)).poll(cx)
                && state.is_read_closed()
            {
                return Poll::Ready(());
            }
        }
    }

    /// Takes what came from the socket into `buf` behind `start`, of which it leaves what may be handed on at once.
    fn take(&mut self, buf: &mut ReadBuf<'_>, start: usize) {
        let received = &buf.filled()[start..];
        let num_direct = self.framing.pass(received);
        if let Err(error) = self.framing.hold(&received[num_direct..]) {
            self.refuse(error);
        }
        buf.set_filled(start + num_direct);
        if !self.framing.is_in_head() {
            self.head.end();
        }
        if !self.framing.is_idle() {
            self.idle.end();
        }
    }

    /// It is the next request's turn.
    fn turn(&mut self, cx: &mut Context<'_>) {
        if let Err(error) = self.framing.answered() {
            self.refuse(error);
        }
        // Hyper waits for news of the socket, and this may be the only one.
        if !self.framing.is_idle() || self.idle.poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
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
            if this.framing.is_full() {
                return this.poll_gone(cx).map(Ok);
            }
            let start = buf.filled().len();
            let Poll::Ready(read) = Pin::new(&mut this.socket).poll_read(cx, buf) else {
                if ready!(this.poll_late(cx)) {
                    // For hyper it is as if the client had gone.
                    return Poll::Ready(Ok(()));
                }
                continue;
            };
            read?;
            if buf.filled().len() == start {
                return Poll::Ready(Ok(()));
            }
            this.take(buf, start);
            if buf.filled().len() > start {
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
        // Hyper flushes when all that it had is written.
        ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
        if self.exchange.flushed() {
            self.turn(cx);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.is_shut {
            ready!(Pin::new(&mut this.socket).poll_shutdown(cx))?;
            this.is_shut = true;
        }
        // What lies here unread would make the system throw the answer away.
        let mut scratch = [0; 4096];
        while this.linger.poll(cx).is_pending() {
            let mut unread = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.socket).poll_read(cx, &mut unread) {
                Poll::Pending if this.framing.has_more() => return Poll::Pending,
                Poll::Ready(Ok(())) if !unread.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.exchange.close();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[test]
    fn a_time_out_that_begins_again_passes_its_whole_limit_later() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let limit = Duration::from_millis(40);
        runtime.block_on(async {
            let mut timeout = Timeout::new(limit);
            let pending = poll_fn(|cx| Poll::Ready(timeout.poll(cx).is_pending())).await;
            assert!(pending, "it has only begun");
            sleep_until(Instant::now() + limit / 2).await;
            timeout.end();
            let begun = Instant::now();
            // The timer rings for the first beginning, and once more.
            poll_fn(|cx| timeout.poll(cx)).await;
            assert!(begun.elapsed() >= limit);
            poll_fn(|cx| timeout.poll(cx)).await;
            timeout.end();
            let begun = Instant::now();
            poll_fn(|cx| timeout.poll(cx)).await;
            assert!(begun.elapsed() >= limit, "one that has passed begins anew too");
        });
    }
}
