//! One function per route.

mod completions;
mod models;
mod requests;
mod status;
mod tokenize;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Request};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::app::App;
use crate::body;
use crate::engine::apart;
use crate::error::ApiError;
use crate::wire;

pub(crate) use completions::{chat_completions, completions};
pub(crate) use models::{model, models};
pub(crate) use requests::{cancel, request_events};
pub(crate) use status::{health, metrics, ready, stats, version};
pub(crate) use tokenize::{detokenize, tokenize};

/// Longer bodies are read on a thread of the pool, where they delay nobody.
const MAX_INLINE_BODY: usize = 64 << 10;

/// What a route has in place of `{id}`, decoded.
pub(crate) struct Segment(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let decoded = Path::<String>::from_request_parts(parts, state).await;
        decoded.map(|Path(id)| Self(id)).map_err(|_| ApiError::bad_request("the path is not UTF-8 once it is decoded"))
    }
}

/// Reads the body of a request as JSON.
async fn read<T: DeserializeOwned + Send + 'static>(app: &Arc<App>, request: Request) -> Result<T, ApiError> {
    let limits = &app.config.limits;
    let bytes = body::read(request, limits, app.engine.submitter.max_model_len()).await?;
    let (is_short, max_depth) = (bytes.len() <= MAX_INLINE_BODY, limits.max_body_depth);
    let parse = move || wire::check_depth(&bytes, max_depth).and_then(|()| wire::parse(&bytes));
    if is_short { parse() } else { apart(parse).await }
}

/// 200 with a body of JSON.
fn json(body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// No route has this path.
pub(crate) async fn unknown_path(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::not_found(format!("there is no {path} here; docs/serving.md lists the routes"), "unknown_path")
        .into_response()
}

/// The route of this path has another method.
pub(crate) async fn wrong_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path} does not take {method}");
    ApiError::with_status(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}
