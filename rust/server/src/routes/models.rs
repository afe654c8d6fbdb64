//! `/v1/models`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;

use super::{Segment, json};
use crate::app::App;
use crate::error::ApiError;
use crate::reply::write;

/// `GET /v1/models`
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    let mut out = b"{\"object\":\"list\",\"data\":".to_vec();
    write::list(&mut out, &app.config.served_model_names, |out, name| write_model(&app, name, out));
    out.push(b'}');
    json(out)
}

/// `GET /v1/models/{id}`
pub(crate) async fn model(State(app): State<Arc<App>>, Segment(id): Segment) -> Result<Response, ApiError> {
    app.check_model(&id)?;
    let mut out = Vec::new();
    write_model(&app, &id, &mut out);
    Ok(json(out))
}

fn write_model(app: &App, name: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"id\":");
    write::string(out, name);
    out.extend_from_slice(b",\"object\":\"model\",\"created\":");
    write::integer(out, app.started);
    out.extend_from_slice(b",\"owned_by\":\"cbrs\",\"max_model_len\":");
    write::integer(out, app.engine.submitter.max_model_len());
    out.push(b'}');
}
