//! What all routes share, and the table of routes.

use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use axum::Router as Routes;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

use crate::access::{self, Access};
use crate::access_log::AccessLog;
use crate::config::{ServerConfig, Settings};
use crate::engine::EngineHandle;
use crate::error::ApiError;
use crate::events::EventLog;
use crate::health::Health;
use crate::lifecycle::Lifecycle;
use crate::log_writer::LogWriter;
use crate::metrics::Metrics;
use crate::names::{IdSource, Names};
use crate::observe::observe;
use crate::routes;
use crate::stream::Router;

/// The state of one server.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) config: ServerConfig,
    pub(crate) access: Access,
    /// What `/version` tells; another one after a reload.
    pub(crate) settings: ArcSwap<Settings>,
    pub(crate) router: Router,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) health: Health,
    pub(crate) names: Names,
    pub(crate) ids: IdSource,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) events: EventLog,
    /// Absent if no line is wanted.
    pub(crate) access_log: Option<Arc<AccessLog>>,
    /// Who writes the log; absent if nobody does.
    pub(crate) log_writer: Option<Arc<LogWriter>>,
    /// Seconds since 1970 at which the server started.
    pub(crate) started: u64,
}

impl App {
    pub(crate) fn new(engine: EngineHandle, config: ServerConfig) -> io::Result<Self> {
        let health = Health::new(engine.submitter.clone(), config.step_timeout);
        let log_writer = match &config.log_writer {
            None if config.access_log.is_some() => Some(Arc::new(LogWriter::to_stderr()?)),
            given => given.clone(),
        };
        let access_log = config.access_log.zip(log_writer.clone());
        let access_log = access_log.map(|(format, writer)| AccessLog::new(format, Arc::clone(&engine.clock), writer));
        Ok(Self {
            metrics: Arc::default(),
            events: EventLog::new(engine.submitter.trace()),
            access_log: access_log.map(Arc::new),
            log_writer,
            engine,
            access: Access::new(&config),
            settings: ArcSwap::from_pointee(config.settings.clone()),
            config,
            router: Router::new(),
            lifecycle: Arc::default(),
            health,
            names: Names::default(),
            ids: IdSource::new(),
            started: unix_time(),
        })
    }

    /// The name that answers call the model by.
    pub(crate) fn model(&self) -> &str {
        self.config.served_model_names.first().map_or("", String::as_str)
    }

    /// Refuses a model that is not served.
    pub(crate) fn check_model(&self, name: &str) -> Result<(), ApiError> {
        let is_served = self.config.served_model_names.iter().any(|served| served == name);
        if is_served { Ok(()) } else { Err(ApiError::unknown_model(name)) }
    }

    /// Ends all requests that are under way, because the server ends.
    pub(crate) fn cut_all(&self) {
        for request in self.names.all() {
            request.cut(&self.engine.submitter);
        }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The table of routes.
pub(crate) fn routes(app: Arc<App>) -> Routes {
    Routes::new()
        .route("/v1/completions", post(routes::completions))
        .route("/v1/chat/completions", post(routes::chat_completions))
        .route("/v1/models", get(routes::models))
        .route("/v1/models/{*id}", get(routes::model))
        .route("/v1/requests/{id}", get(routes::request_events))
        .route("/v1/requests/{id}/cancel", post(routes::cancel))
        .route("/tokenize", post(routes::tokenize))
        .route("/detokenize", post(routes::detokenize))
        .route("/health", get(routes::health))
        .route("/ready", get(routes::ready))
        .route("/metrics", get(routes::metrics))
        .route("/version", get(routes::version))
        .route("/stats", get(routes::stats))
        .fallback(routes::unknown_path)
        .method_not_allowed_fallback(routes::wrong_method)
        // Around everything above, whatever its path; what is not let in is counted and logged as well.
        .layer(from_fn_with_state(Arc::clone(&app), access::guard))
        .layer(from_fn_with_state(Arc::clone(&app), observe))
        .with_state(app)
}
