//! The body of a request, up to its limits.

use std::future::poll_fn;
use std::pin::Pin;

use axum::body::Body;
use axum::extract::Request;
use http_body::Body as _;
use hyper::StatusCode;

use crate::config::Limits;
use crate::error::ApiError;

/// Room for a body at first: what a client says about its length is not believed.
const MAX_FIRST_ROOM: usize = 64 << 10;

/// Reads a whole body for a model that takes `max_model_len` tokens. One that says to be too long is not read at all.
pub(crate) async fn read(request: Request, limits: &Limits, max_model_len: usize) -> Result<Vec<u8>, ApiError> {
    let body = request.into_body();
    let limit = limits.body_bytes(max_model_len);
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large(limit));
    }
    let read = tokio::time::timeout(limits.body_timeout, collect(body, limit)).await;
    read.unwrap_or_else(|_| {
        let message = format!("the body took more than {} s", limits.body_timeout.as_secs_f64());
        Err(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, message))
    })
}

async fn collect(mut body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::with_capacity(MAX_FIRST_ROOM.min(body.size_hint().lower() as usize));
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(|_| ApiError::bad_request("the body ended early"))?;
        if let Some(part) = frame.data_ref() {
            if bytes.len() + part.len() > limit {
                return Err(too_large(limit));
            }
            bytes.extend_from_slice(part);
        }
    }
    Ok(bytes)
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("the body has more than {limit} bytes");
    ApiError::with_status(StatusCode::PAYLOAD_TOO_LARGE, message)
}
