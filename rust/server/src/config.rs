//! Where the server listens and what it calls the model.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

pub use crate::limits::Limits;

/// Settings of one server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 = one that is free.
    pub port: u16,
    /// Listen on an address that is not loopback, where anybody may use the engine.
    pub allow_public: bool,
    /// Threads that serve connections.
    pub worker_threads: usize,
    /// Names that requests may call the model by, the first one in answers; at least one.
    pub served_model_names: Vec<String>,
    /// What `/version` tells of the engine's settings, as a JSON object.
    pub engine_settings: Option<String>,
    /// How long the engine may have work and finish no step before `/health` says so.
    pub step_timeout: Duration,
    /// Bounds on connections and requests.
    pub limits: Limits,
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
            engine_settings: None,
            step_timeout: Duration::from_secs(60),
            limits: Limits::default(),
        }
    }
}
