//! `/v1/requests`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;

use super::json;
use crate::app::App;
use crate::error::ApiError;
use crate::reply::write;
use crate::stream::Submitted;

/// Whether the caller may see what happened to a request.
fn is_visible(_request: &Submitted) -> bool {
    true
}

/// `GET /v1/requests/{id}`: what happened to the last requests of this name.
pub(crate) async fn request_events(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let mut out = b"{\"requests\":[".to_vec();
    let mut num_found = 0;
    app.events.look_up(&id, |record| {
        if is_visible(record.submitted()) {
            out.extend_from_slice(if num_found > 0 { b"," } else { b"" });
            record.write_json(&mut out);
            num_found += 1;
        }
    });
    if num_found == 0 {
        return Err(not_found("no request that is remembered is called", &id));
    }
    out.extend_from_slice(b"]}");
    Ok(json(out))
}

fn not_found(what: &str, id: &str) -> ApiError {
    let shown: String = id.chars().take(128).collect();
    ApiError::not_found(format!("{what} {shown:?}"), "request_not_found")
}

/// `POST /v1/requests/{id}/cancel`: by the response's id, or by the `x-request-id` that was sent.
pub(crate) async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let found = app.names.get(&id);
    let num_cancelled = found.iter().filter(|request| request.cancel(&app.engine.submitter)).count();
    if num_cancelled == 0 {
        return Err(not_found("no live request is called", &id));
    }
    let mut out = b"{\"cancelled\":".to_vec();
    write::list(&mut out, &found, |out, request| write::string(out, request.id()));
    out.push(b'}');
    Ok(json(out))
}
