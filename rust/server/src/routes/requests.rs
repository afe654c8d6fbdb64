//! `/v1/requests`.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::Response;

use super::json;
use crate::access;
use crate::app::App;
use crate::error::ApiError;
use crate::reply::write;

/// `POST /v1/requests/{id}/cancel`: by the response's id, or by the `x-request-id` that was sent.
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = access::caller(&request);
    let mut found = app.names.get(&id);
    // Another's is as good as none.
    found.retain(|request| request.is_visible_to(caller.as_deref()));
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
