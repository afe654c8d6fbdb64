//! `/v1/requests`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::{Segment, json};
use crate::access;
use crate::app::App;
use crate::engine::apart;
use crate::error::ApiError;
use crate::reply::write;

/// `GET /v1/requests/{id}`: what happened to the last requests of this name.
pub(crate) async fn request_events(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = access::caller(&request);
    // Another's is as good as none.
    let found = app.events.look_up(&id, |submitted| submitted.is_visible_to(caller.as_deref()));
    if found.is_empty() {
        return Err(not_found("no request that is remembered is called", &id));
    }
    let written = apart(move || {
        let mut out = b"{\"requests\":".to_vec();
        write::list(&mut out, &found, |out, record| record.write_json(out));
        out.push(b'}');
        Ok(out)
    });
    written.await.map(json)
}

fn not_found(what: &str, id: &str) -> ApiError {
    let shown: String = id.chars().take(128).collect();
    ApiError::not_found(format!("{what} {shown:?}"), "request_not_found")
}

/// `POST /v1/requests/{id}/cancel`: by the response's id, or by the `x-request-id` that was sent.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = access::caller(&request);
    let mut found = app.names.get(&id);
    found.retain(|request| request.is_visible_to(caller.as_deref()));
    found.retain(|request| request.cancel(&app.engine.submitter));
    if found.is_empty() {
        return Err(not_found("no live request is called", &id));
    }
    let mut out = b"{\"cancelled\":".to_vec();
    write::list(&mut out, &found, |out, request| write::string(out, request.id()));
    out.push(b'}');
    Ok(json(out))
}
