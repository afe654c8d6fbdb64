//! Where the server listens and what it calls the model.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use crate::access::Keyring;
use crate::access_log::LogFormat;
pub use crate::limits::Limits;
use crate::log_writer::LogWriter;

/// Settings of one server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 = one that is free.
    pub port: u16,
    /// Listen on an address that is not loopback although there are no keys: anybody there may use the engine.
    pub allow_public: bool,
    /// Who may use it; without keys everybody.
    pub keys: Option<Keyring>,
    /// `/metrics` and `/stats` need no key.
    pub has_open_metrics: bool,
    /// Names that the `Host` header may have besides those of loopback; "*" = any.
    pub allowed_hosts: Vec<String>,
    /// Threads that serve connections.
    pub worker_threads: usize,
    /// Names that requests may call the model by, the first one in answers; at least one.
    pub served_model_names: Vec<String>,
    /// What `/version` tells of the settings.
    pub settings: Settings,
    /// How long the engine may have work and finish no step before `/health` says so.
    pub step_timeout: Duration,
    /// How the line for each request looks that goes to the standard error output; absent = none is written.
    pub access_log: Option<LogFormat>,
    /// Who writes that line; absent = a writer of the server's own.
    pub log_writer: Option<Arc<LogWriter>>,
    /// Bounds on connections and requests.
    pub limits: Limits,
}

/// Settings in effect, as JSON values without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The engine's.
    pub engine: String,
    /// The same for keys without all rights, who see nothing of other tenants.
    pub engine_for_tenants: String,
    /// The server's.
    pub server: String,
}

impl Default for Settings {
    fn default() -> Self {
        let none = || "null".to_owned();
        Self { engine: none(), engine_for_tenants: none(), server: none() }
    }
}

impl Default for ServerConfig {
    /// 127.0.0.1, a free port; one thread on up to two cores, otherwise up to four.
    fn default() -> Self {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            allow_public: false,
            worker_threads: (num_cores / 2).clamp(1, 4),
            served_model_names: vec!["model".to_owned()],
            keys: None,
            has_open_metrics: false,
            allowed_hosts: Vec::new(),
            settings: Settings::default(),
            step_timeout: Duration::from_secs(60),
            access_log: None,
            log_writer: None,
            limits: Limits::default(),
        }
    }
}
