//! Where the server listens, what it calls the model, and what it lets requests ask for.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::access_log::LogFormat;

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
    /// How the line for each request looks that goes to the standard error output; absent = none is written.
    pub access_log: Option<LogFormat>,
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
            access_log: None,
            limits: Limits::default(),
        }
    }
}

/// Bounds on connections and on what requests may ask for, besides those of the core.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a body.
    pub max_body_bytes: usize,
    /// Time that a body may take.
    pub body_timeout: Duration,
    /// Time that the head of a request may take, from the end of the one before.
    pub head_timeout: Duration,
    /// Bytes of the head of a request.
    pub max_head_bytes: usize,
    /// Header fields of a request.
    pub max_headers: usize,
    /// Prompts of one request, and choices of all of them together.
    pub max_choices: usize,
    /// Stop strings of one request.
    pub max_stops: usize,
    /// Most likely tokens that a completion may ask for with each token.
    pub max_completion_logprobs: u32,
    /// Longer texts, in bytes, are tokenized on a thread of the pool, where they delay nobody.
    pub max_inline_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 4 << 20,
            body_timeout: Duration::from_secs(30),
            head_timeout: Duration::from_secs(60),
            max_head_bytes: 16 << 10,
            max_headers: 100,
            max_choices: 128,
            max_stops: 4,
            max_completion_logprobs: 5,
            max_inline_bytes: 4096,
        }
    }
}
