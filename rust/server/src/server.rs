//! A running server: its threads, and how it ends.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::access::Keyring;
use crate::app::{self, App};
use crate::config::{Limits, ServerConfig, Settings};
use crate::connection;
use crate::engine::EngineHandle;

/// How long streams may take to tell that they were cancelled.
const LAST_EVENTS_TIMEOUT: Duration = Duration::from_millis(200);
/// How long the reader of the log may hold up the end.
const LOG_TIMEOUT: Duration = Duration::from_millis(500);
/// How long work on the pool may hold up the end.
const POOL_TIMEOUT: Duration = Duration::from_millis(500);

/// An HTTP server in front of one engine, on threads of its own.
///
/// Dropping it is `close`.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    stop: Arc<Notify>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Process that the threads run in: a fork of it has none of them, and the locks may be held for ever.
    process: u32,
}

impl Server {
    /// Listens, and serves from now on.
    ///
    /// # Errors
    /// `InvalidInput` for a public address without keys that is not allowed; what the operating system says about the address or the threads.
    pub fn start(engine: EngineHandle, config: ServerConfig) -> io::Result<Self> {
        if !config.host.is_loopback() && !config.allow_public && config.keys.is_none() {
            let host = config.host;
            let message =
                format!("{host} is not a loopback address, and without API keys anybody there could use the engine");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let listener = TcpListener::bind((config.host, config.port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = runtime(config.worker_threads)?;
        let app = Arc::new(App::new(engine, config)?);
        let stop = Arc::new(Notify::new());
        let (serving, stopping) = (Arc::clone(&app), Arc::clone(&stop));
        let run = move || run(runtime, listener, &serving, stopping);
        let thread = std::thread::Builder::new().name("cbrs-http".to_owned()).spawn(run)?;
        Ok(Self { app, address, stop, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Threads that serve connections.
    pub fn worker_threads(&self) -> usize {
        self.app.config.worker_threads
    }

    /// The limits in effect, what follows from the model's context included.
    pub fn limits(&self) -> Limits {
        let limits = self.app.config.limits.clone();
        let body_bytes = limits.body_bytes(self.app.engine.submitter.max_model_len());
        Limits { max_body_bytes: Some(body_bytes), ..limits }
    }

    /// Requests and responses under way, until the last byte is with the system.
    pub fn num_active(&self) -> usize {
        self.app.lifecycle.num_active()
    }

    /// Puts other keys in force for requests that come from now on; those under way go on. Requests are whose they were, by name of the key.
    pub fn set_keys(&self, keys: Keyring) {
        self.app.access.set_keys(keys);
    }

    /// Replaces what `/version` tells.
    pub fn set_settings(&self, settings: Settings) {
        self.app.settings.store(Arc::new(settings));
    }

    /// Takes no new requests from now on; `/ready` says so. What is under way goes on.
    pub fn drain(&self) {
        self.app.lifecycle.drain();
    }

    /// Waits until nothing is under way: the last byte of every answer is with the system, or its client has gone. Returns whether that is so.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        self.app.lifecycle.wait_idle(timeout)
    }

    /// Ends every request that is under way: streams end with an error event.
    pub fn cancel_all(&self) {
        self.app.cut_all();
    }

    /// Ends the server: cancels what is under way, closes its socket and all connections and joins its threads. A second call does
    /// nothing, nor does one in a forked process.
    pub fn close(&self) {
        if std::process::id() != self.process {
            return;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            self.drain();
            self.cancel_all();
            self.wait_idle(LAST_EVENTS_TIMEOUT);
            self.stop.notify_one();
            // A panic was reported where it happened.
            let _ = thread.join();
            // A writer that was given is its owner's affair.
            if let Some(writer) = self.app.log_writer.as_ref().filter(|_| self.app.config.log_writer.is_none()) {
                writer.flush(LOG_TIMEOUT);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// With one thread, all connections are served by the thread that runs the runtime: nothing moves between cores.
fn runtime(worker_threads: usize) -> io::Result<Runtime> {
    if worker_threads <= 1 {
        return Builder::new_current_thread().enable_all().thread_name("cbrs-http-pool").build();
    }
    Builder::new_multi_thread().worker_threads(worker_threads).enable_all().thread_name("cbrs-http").build()
}

fn run(runtime: Runtime, listener: TcpListener, app: &Arc<App>, stop: Arc<Notify>) {
    let routes = app::routes(Arc::clone(app));
    let (routing, watching) = (Arc::clone(app), Arc::clone(app));
    runtime.block_on(async move {
        tokio::spawn(async move { routing.router.run(&routing.events).await });
        tokio::spawn(async move { watching.health.watch().await });
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                let app = Arc::clone(app);
                let serving = async move { connection::serve(listener, routes, app, stop).await };
                tokio::spawn(serving).await.unwrap_or_default();
            }
            Err(_) => app.lifecycle.drain(),
        }
    });
    // Drops what is left of connections, and so cancels their requests.
    runtime.shutdown_timeout(POOL_TIMEOUT);
    // Lines of the access log that waited for what nobody delivers any more.
    app.router.close_all();
}
