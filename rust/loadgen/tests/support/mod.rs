//! A server whose behaviour a test writes: hyper, on a thread of its own.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use cbrs_loadgen::{Config, Error, Report, run};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;

/// The body of a response.
pub(crate) type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

/// A request as a handler sees it.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Counted from 0.
    pub(crate) number: usize,
    /// Requests being answered, this one included.
    pub(crate) num_in_flight: usize,
    /// The path.
    pub(crate) path: String,
    /// The header `authorization`.
    pub(crate) authorization: Option<String>,
    /// The parsed body.
    pub(crate) body: Value,
}

struct InFlight<'a>(&'a AtomicUsize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Serves with this handler until the process ends; returns the address.
pub(crate) fn serve<F, R>(handler: F) -> String
where
    F: Fn(Seen) -> R + Send + Sync + 'static,
    R: Future<Output = Response<Answer>> + Send,
{
    let (to_test, address) = std::sync::mpsc::channel::<SocketAddr>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(accept(Arc::new(handler), to_test));
    });
    format!("http://{}", address.recv().expect("the server listens"))
}

async fn accept<F, R>(handler: Arc<F>, to_test: std::sync::mpsc::Sender<SocketAddr>)
where
    F: Fn(Seen) -> R + Send + Sync + 'static,
    R: Future<Output = Response<Answer>> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    to_test.send(listener.local_addr().expect("an address")).expect("the test waits");
    let counts = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("a TCP option");
        let (handler, counts) = (Arc::clone(&handler), Arc::clone(&counts));
        let service = service_fn(move |request: Request<Incoming>| {
            let (handler, counts) = (Arc::clone(&handler), Arc::clone(&counts));
            async move {
                let number = counts.0.fetch_add(1, SeqCst);
                let num_in_flight = counts.1.fetch_add(1, SeqCst) + 1;
                let _in_flight = InFlight(&counts.1);
                let path = request.uri().path().to_owned();
                let authorization = request.headers().get("authorization");
                let authorization = authorization.map(|value| value.to_str().expect("ASCII").to_owned());
                let body = request.into_body().collect().await.expect("a body").to_bytes();
                let body = serde_json::from_slice(&body).expect("JSON");
                Ok::<_, Infallible>(handler(Seen { number, num_in_flight, path, authorization, body }).await)
            }
        });
        tokio::spawn(async move {
            // A cut stream is an error here too.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// A response in one piece.
pub(crate) fn whole(status: u16, body: impl Into<Bytes>) -> Response<Answer> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).body(body).expect("a response")
}

/// A stream of pieces, each after its pause and as a chunk of its own; `None` cuts the connection.
pub(crate) fn pieces(pieces: Vec<(Duration, Option<Bytes>)>) -> Response<Answer> {
    let body = Pieces { pieces: pieces.into_iter(), next: None };
    Response::builder().header("content-type", "text/event-stream").body(body.boxed_unsync()).expect("a response")
}

struct Pieces {
    pieces: std::vec::IntoIter<(Duration, Option<Bytes>)>,
    next: Option<(Pin<Box<tokio::time::Sleep>>, Option<Bytes>)>,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        if self.next.is_none() {
            let Some((pause, piece)) = self.pieces.next() else { return Poll::Ready(None) };
            self.next = Some((Box::pin(tokio::time::sleep(pause)), piece));
        }
        let Some((sleep, piece)) = &mut self.next else { return Poll::Ready(None) };
        if sleep.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let piece = piece.take();
        self.next = None;
        Poll::Ready(Some(piece.map(Frame::data).ok_or_else(|| std::io::Error::other("cut"))))
    }
}

/// The events of a completion of `num_tokens` tokens, with usage and `[DONE]`.
pub(crate) fn completion(num_tokens: usize) -> String {
    let token = "data: {\"choices\":[{\"index\":0,\"text\":\" x\",\"finish_reason\":null}]}\n\n";
    let last = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n";
    let usage = format!(
        "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":11,\"completion_tokens\":{num_tokens},\
         \"prompt_tokens_details\":{{\"cached_tokens\":4}}}}}}\n\n"
    );
    token.repeat(num_tokens) + last + &usage + "data: [DONE]\n\n"
}

/// A load on this server, with further fields of the configuration.
pub(crate) fn config(url: &str, more: &str) -> Config {
    let text = format!(r#"{{"url": "{url}", "model": "m", "prompt_tokens": 5, "output_tokens": 4, {more}}}"#);
    Config::from_json(&text).expect("a valid configuration")
}

/// Runs a load.
pub(crate) fn load(url: &str, more: &str) -> Result<Report, Error> {
    run(&config(url, more), |_| true)
}
