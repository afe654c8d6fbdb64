//! What probes and people look at.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use cbrs_core::Figure;
use hyper::header::{CONTENT_TYPE, HeaderValue};

use super::json;
use crate::access;
use crate::app::App;
use crate::error::ApiError;
use crate::lifecycle::Phase;
use crate::metrics;
use crate::reply::write;

/// `GET /health`: whether the engine makes progress.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.health.check().map_err(ApiError::unavailable)?;
    Ok(json(b"{\"status\":\"ok\"}".to_vec()))
}

/// `GET /ready`: whether new requests are taken.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.health.check().map_err(ApiError::unavailable)?;
    match app.lifecycle.phase() {
        Phase::Ready => Ok(json(b"{\"status\":\"ready\"}".to_vec())),
        Phase::Draining => Err(ApiError::unavailable("the server is shutting down")),
    }
}

/// `GET /version`: the version and the settings in effect.
pub(crate) async fn version(State(app): State<Arc<App>>, request: Request) -> Response {
    let settings = app.settings.load();
    let sees_tenants = access::caller(&request).is_none_or(|key| key.is_admin());
    let engine = if sees_tenants { &settings.engine } else { &settings.engine_for_tenants };
    let mut out = b"{\"version\":".to_vec();
    write::string(&mut out, env!("CARGO_PKG_VERSION"));
    out.extend_from_slice(b",\"engine\":");
    out.extend_from_slice(engine.as_bytes());
    out.extend_from_slice(b",\"server\":");
    out.extend_from_slice(settings.server.as_bytes());
    out.push(b'}');
    json(out)
}

/// `GET /metrics`: all figures in Prometheus' text format.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut response = Response::new(Body::from(metrics::write_page(&app)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    response
}

/// `GET /stats`: the scheduler's figures by name.
pub(crate) async fn stats(State(app): State<Arc<App>>) -> Response {
    let mut out = b"{\"num_active_responses\":".to_vec();
    write::integer(&mut out, app.lifecycle.num_active());
    for (name, figure) in app.engine.submitter.stats().entries() {
        out.push(b',');
        write::string(&mut out, name);
        out.push(b':');
        match figure {
            Figure::Count(count) => write::integer(&mut out, count),
            Figure::Measure(value) if value.is_finite() => write::integer(&mut out, value),
            Figure::Measure(_) => out.extend_from_slice(b"null"),
        }
    }
    out.push(b'}');
    json(out)
}
