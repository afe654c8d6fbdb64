//! Connections: accepted, served with HTTP/1.1 under the limits, and finished when the server ends.
//!
//! One request's way: `admission.rs` finds a place for its connection, `guarded.rs` reads it and keeps the times, `framing.rs`
//! checks its head, hyper parses it, `refusal.rs` answers it if one of these found a fault, otherwise the routes do, and `exchange.rs` sees
//! the last byte of the answer off, after which it is the next one's turn.

mod admission;
mod chunks;
mod exchange;
mod framing;
#[cfg(test)]
mod framing_tests;
mod guarded;
mod refusal;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router as Routes;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::GracefulShutdown;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::app::App;
use crate::metrics::OpenConnection;
use admission::{Admission, Excess};
use exchange::Exchange;
use guarded::Guarded;

/// How long the last bytes of answers may take once the server ends.
const LAST_BYTES_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a refusal of the operating system, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Asked for; the system takes twice as much. What a reader does not take should fill little memory, and soon be noticed.
const SEND_BUFFER: usize = 128 << 10;
/// The smallest buffer that hyper takes.
const MIN_BUFFER: usize = 8192;

/// Serves connections until `stop`; then open answers may finish for a moment.
pub(crate) async fn serve(listener: TcpListener, routes: Routes, app: Arc<App>, stop: Arc<Notify>) {
    // Inherited by the connections. Without it only more memory is filled.
    let _ = SockRef::from(&listener).set_send_buffer_size(SEND_BUFFER);
    let metrics = Arc::clone(&app.metrics);
    let mut door = Door::new(routes, app);
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((socket, peer)) => door.open(socket, peer, metrics.open_connection()),
                Err(error) => pause_after(&error).await,
            }
        }
    };
    race(accepting, stop.notified()).await;
    drop(listener);
    let _ = tokio::time::timeout(LAST_BYTES_TIMEOUT, door.graceful.shutdown()).await;
}

/// Runs `work`, which never ends, until `stop` does.
async fn race(work: impl Future<Output = Infallible>, stop: impl Future<Output = ()>) {
    let mut work = std::pin::pin!(work);
    let mut stop = std::pin::pin!(stop);
    std::future::poll_fn(|cx| {
        if stop.as_mut().poll(cx).is_ready() {
            return std::task::Poll::Ready(());
        }
        work.as_mut().poll(cx).map(|never| match never {})
    })
    .await;
}

/// Where connections come in.
struct Door {
    routes: Routes,
    app: Arc<App>,
    builder: http1::Builder,
    graceful: GracefulShutdown,
    admission: Arc<Admission>,
    excess: Excess,
}

impl Door {
    fn new(routes: Routes, app: Arc<App>) -> Self {
        let limits = &app.config.limits;
        let mut builder = http1::Builder::new();
        // Hyper sees whole heads only: the times are `Guarded`'s.
        builder
            .header_read_timeout(None)
            .max_buf_size(limits.max_head_bytes.max(MIN_BUFFER))
            .max_headers(limits.max_header_fields);
        let admission = Admission::new(limits);
        Self { routes, app, builder, graceful: GracefulShutdown::new(), admission, excess: Excess::default() }
    }

    fn open(&mut self, socket: TcpStream, peer: SocketAddr, open: OpenConnection) {
        // Without it a small event may wait for the acknowledgement of the one before.
        let _ = socket.set_nodelay(true);
        let admitted = self.admission.admit(peer.ip());
        let exchange = Arc::<Exchange>::default();
        let guarded = Guarded::new(socket, &self.app.config.limits, Arc::clone(&exchange));
        let excess = admitted.as_ref().err().cloned();
        let service = refusal::service(Arc::clone(&self.app), self.routes.clone(), exchange, excess);
        let mut builder = self.builder.clone();
        let connection = builder.keep_alive(admitted.is_ok()).serve_connection(TokioIo::new(guarded), service);
        let connection = self.graceful.watch(connection);
        let permit = admitted.ok();
        let is_excess = permit.is_none();
        let task = tokio::spawn(async move {
            // What goes wrong with a connection is the client's affair: its requests are cancelled.
            let _ = connection.await;
            drop((permit, open));
        });
        if is_excess {
            self.excess.add(task.abort_handle());
        }
    }
}

async fn pause_after(error: &io::Error) {
    let is_clients = matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !is_clients {
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}
