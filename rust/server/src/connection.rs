//! Connections: accepted, served with HTTP/1.1 under the limits, and finished when the server ends.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router as Routes;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::config::Limits;
use crate::metrics::{Metrics, OpenConnection};

/// How long the last bytes of answers may take once the server ends.
const LAST_BYTES_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a refusal of the operating system, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Serves connections until `stop`; then open answers may finish for a moment.
pub(crate) async fn serve(
    listener: TcpListener,
    routes: Routes,
    limits: Limits,
    metrics: &Arc<Metrics>,
    stop: Arc<Notify>,
) {
    let builder = builder(&limits);
    let graceful = GracefulShutdown::new();
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => spawn(&builder, &graceful, stream, routes.clone(), metrics.open_connection()),
                Err(error) => pause_after(&error).await,
            }
        }
    };
    race(accepting, stop.notified()).await;
    drop(listener);
    let _ = tokio::time::timeout(LAST_BYTES_TIMEOUT, graceful.shutdown()).await;
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

fn builder(limits: &Limits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.max_head_bytes)
        .max_headers(limits.max_headers);
    builder
}

fn spawn(
    builder: &http1::Builder,
    graceful: &GracefulShutdown,
    stream: TcpStream,
    routes: Routes,
    open: OpenConnection,
) {
    // Without it a small event may wait for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let watched = graceful.watch(connection);
    tokio::spawn(async move {
        // What goes wrong with a connection is the client's affair: its requests are cancelled.
        let _ = watched.await;
        drop(open);
    });
}

async fn pause_after(error: &io::Error) {
    let is_clients = matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !is_clients {
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}
