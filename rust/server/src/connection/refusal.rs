//! What stands between a connection and the routes: refusals that need no route, and the end of connections that cannot go on.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router as Routes;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use hyper::service::{Service, service_fn};
use hyper::{Request, StatusCode};
use hyper_util::service::TowerToHyperService;

use crate::error::ApiError;

/// Paths that are answered however many connections there are.
const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];

/// Why one head of a connection is refused, until its turn comes: answers leave in the order of the heads.
#[derive(Debug, Default)]
pub(super) struct Refusal {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Heads whose turn has come.
    num_heads: usize,
    /// Number of the refused head, and why.
    refused: Option<(usize, ApiError)>,
}

impl Refusal {
    /// Refuses head number `head`, counted from 0.
    pub(super) fn set(&self, head: usize, error: ApiError) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).refused = Some((head, error));
    }

    /// It is the next head's turn; returns why that one is refused, if it is.
    fn next(&self) -> Option<ApiError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let head = state.num_heads;
        state.num_heads += 1;
        state.refused.take_if(|(refused, _)| *refused == head).map(|(_, error)| error)
    }
}

/// The routes for one connection. `excess`: why all but the probes are refused, if they are.
pub(super) fn service(
    routes: Routes,
    refusal: Arc<Refusal>,
    excess: Option<String>,
) -> impl Service<Request<Incoming>, Response = Response, Error = Infallible, Future: Send> + Send {
    let routes = TowerToHyperService::new(routes);
    service_fn(move |request: Request<Incoming>| {
        let excess = excess.as_ref().filter(|_| !PROBES.contains(&request.uri().path()));
        let refused = refusal.next().or_else(|| excess.map(ApiError::too_many_connections));
        // Where a chunked body ends is not known here.
        let is_last = request.headers().contains_key(TRANSFER_ENCODING);
        let answer = refused.map_or_else(|| Ok(routes.call(request)), Err);
        async move {
            let response = match answer {
                Ok(answer) => answer.await?,
                Err(error) => return Ok(closing(error.into_response())),
            };
            Ok(if is_last || has_unread_body(response.status()) { closing(response) } else { response })
        }
    })
}

/// Whether it is an answer to a request whose body was not read to its end.
fn has_unread_body(status: StatusCode) -> bool {
    matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE)
}

fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
