//! Connections to one server: kept alive, taken when needed, and watched for when bytes arrive.

use std::io::{self, IoSlice};
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::config::{Config, Endpoint};
use crate::error::{Error, Result};

/// Nanoseconds since the load generator started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now_ns(self) -> u64 {
        self.at_ns(Instant::now())
    }

    pub(crate) fn at_ns(self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.0).as_nanos() as u64
    }
}

/// Where requests go, and what all have in their heads.
#[derive(Debug)]
pub(crate) struct Target {
    addresses: Vec<SocketAddr>,
    path: Uri,
    headers: HeaderMap,
}

impl Target {
    /// Reads the URL and looks the host up.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let bad = |reason| Error::Url { url: config.url.clone(), reason };
        let uri: Uri = config.url.parse().map_err(|_| bad("it is not a URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(bad("TLS is not supported")),
            _ => return Err(bad("it does not start with http://")),
        }
        if uri.query().is_some() {
            return Err(bad("it has a query"));
        }
        let authority = uri.authority().ok_or_else(|| bad("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("it has a user name"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let mut addresses: Vec<SocketAddr> = (host, authority.port_u16().unwrap_or(80))
            .to_socket_addrs()
            .map_err(|source| Error::Host { authority: authority.to_string(), source })?
            .collect();
        // `localhost` is often both; servers for development listen on 127.0.0.1.
        addresses.sort_by_key(SocketAddr::is_ipv6);
        let base = uri.path().trim_end_matches('/').trim_end_matches("/v1");
        let path = match config.endpoint {
            Endpoint::Completions => format!("{base}/v1/completions"),
            Endpoint::Chat => format!("{base}/v1/chat/completions"),
        };
        let mut headers = HeaderMap::new();
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| Error::Header { name: "url" })?;
        headers.insert(HOST, host);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &config.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.0));
            let mut value = value.map_err(|_| Error::Header { name: "api_key" })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(Self { addresses, path: path.parse().map_err(|_| bad("its path is wrong"))?, headers })
    }

    pub(crate) fn request(&self, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.path.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// What was read from a connection. One thread writes it and reads it.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    count: AtomicU64,
    last_ns: AtomicU64,
}

impl Reads {
    /// Reads of the socket that brought something.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// When the last of them was.
    pub(crate) fn last_ns(&self) -> u64 {
        self.last_ns.load(Relaxed)
    }
}

/// A connection that is ready for one request after the other.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) sender: SendRequest<Full<Bytes>>,
    pub(crate) reads: Arc<Reads>,
}

impl Connection {
    /// Connects; a task of the current runtime then serves the connection until it is dropped.
    pub(crate) async fn open(target: &Target, clock: Clock) -> io::Result<Self> {
        let stream = TcpStream::connect(&target.addresses[..]).await?;
        stream.set_nodelay(true)?;
        let reads = Arc::new(Reads::default());
        let watched = WatchedStream { stream, reads: Arc::clone(&reads), clock };
        let (sender, connection) = handshake(TokioIo::new(watched)).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            // What goes wrong is seen by the request as well.
            let _ = connection.await;
        });
        Ok(Self { sender, reads })
    }
}

/// Connections that no request uses; the last one returned is the first one taken.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Connection>>);

impl Pool {
    pub(crate) fn take(&self) -> Option<Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub(crate) fn give_back(&self, connection: Connection) {
        if !connection.sender.is_closed() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
    }
}

/// Notes when bytes came: the time of a token is that of the read that brought it.
#[derive(Debug)]
struct WatchedStream {
    stream: TcpStream,
    reads: Arc<Reads>,
    clock: Clock,
}

impl AsyncRead for WatchedStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buf);
        if buf.filled().len() > before {
            self.reads.count.store(self.reads.count() + 1, Relaxed);
            self.reads.last_ns.store(self.clock.now_ns(), Relaxed);
        }
        polled
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, more: &str) -> Result<Target> {
        Target::new(&Config::from_json(&format!(r#"{{"url": "{url}", "model": "m"{more}}}"#)).expect("valid"))
    }

    #[test]
    fn finds_the_path_of_the_endpoint() {
        for url in ["http://127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"] {
            assert_eq!(target(url, "").expect("valid").path, "/v1/completions");
        }
        let chat = target("http://[::1]:9/llm", r#", "endpoint": "chat""#).expect("valid");
        assert_eq!(chat.path, "/llm/v1/chat/completions");
        assert_eq!(chat.headers[HOST], "[::1]:9");
        assert_eq!(chat.addresses, ["[::1]:9".parse().expect("an address")]);
    }

    #[test]
    fn refuses_urls_that_cannot_be_called() {
        let message = |url| target(url, "").expect_err("it is wrong").to_string();
        assert_eq!(message("https://h"), r#"url "https://h": TLS is not supported; give http://HOST:PORT"#);
        assert!(message("127.0.0.1:80").contains("does not start with http://"));
        assert!(message("http://u:p@h").contains("user name"));
        assert!(message("http://h/?a=1").contains("query"));
    }

    #[test]
    fn the_key_goes_into_the_head_and_not_into_messages() {
        let with_key = target("http://127.0.0.1:9", r#", "api_key": "sesame""#).expect("valid");
        assert_eq!(with_key.headers[AUTHORIZATION], "Bearer sesame");
        assert!(!format!("{with_key:?}").contains("sesame"));
        let message = target("http://127.0.0.1:9", r#", "api_key": "ses\name""#).expect_err("it is wrong").to_string();
        assert!(!message.contains("ame\""), "{message}");
    }
}
