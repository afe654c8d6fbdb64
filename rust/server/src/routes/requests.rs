//! `/v1/requests`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;

use super::json;
use crate::app::App;
use crate::error::ApiError;
use crate::reply::write;

/// `POST /v1/requests/{id}/cancel`: by the response's id, or by the `x-request-id` that was sent.
pub(crate) async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let found = app.names.get(&id);
    let num_cancelled = found.iter().filter(|request| request.cancel(&app.engine.submitter)).count();
    if num_cancelled == 0 {
        let shown: String = id.chars().take(128).collect();
        return Err(ApiError::not_found(format!("no live request is called {shown:?}"), "request_not_found"));
    }
    let mut out = b"{\"cancelled\":".to_vec();
    write::list(&mut out, &found, |out, request| write::string(out, request.id()));
    out.push(b'}');
    Ok(json(out))
}
