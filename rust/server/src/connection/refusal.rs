//! What stands between a connection and the routes: refusals that need no route, the end of connections that cannot go on, and who hears of
//! the end of an answer.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router as Routes;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use hyper::service::{Service, service_fn};
use hyper::{Request, StatusCode};
use hyper_util::service::TowerToHyperService;

use super::exchange::{AnswerBody, Exchange};
use crate::access_log::Entry;
use crate::app::App;
use crate::error::ApiError;
use crate::observe;

/// Paths that are answered however many connections there are.
const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];

/// The routes for one connection. `excess`: why all but the probes are refused, if they are.
pub(super) fn service(
    app: Arc<App>,
    routes: Routes,
    exchange: Arc<Exchange>,
    excess: Option<String>,
) -> impl Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future: Send> + Send {
    let routes = TowerToHyperService::new(routes);
    service_fn(move |request: Request<Incoming>| {
        let exchange = Arc::clone(&exchange);
        let excess = excess.as_ref().filter(|_| !PROBES.contains(&request.uri().path()));
        // Where a chunked body ends is not known here.
        let is_last = request.headers().contains_key(TRANSFER_ENCODING);
        let answer = match (exchange.take_refusal(), excess) {
            // What hyper has read stands in for the head that is refused.
            (Some(error), _) => Err(observe::refused(&app, None, error)),
            (None, Some(why)) => {
                Err(observe::refused(&app, Some(request.method()), ApiError::too_many_connections(why)))
            }
            (None, None) => Ok(routes.call(request)),
        };
        async move {
            let response = match answer {
                Ok(answer) => {
                    let response = answer.await?;
                    if is_last || has_unread_body(response.status()) { closing(response) } else { response }
                }
                Err(refusal) => closing(refusal),
            };
            Ok(watched(response, exchange))
        }
    })
}

/// Has the exchange know of the end of an answer.
fn watched(mut response: Response, exchange: Arc<Exchange>) -> Response<AnswerBody> {
    let entry = response.extensions_mut().remove::<Arc<Entry>>().expect("every answer is observed");
    response.map(|body| AnswerBody::new(body, entry, exchange))
}

/// Whether it is an answer to a request whose body was not read to its end.
fn has_unread_body(status: StatusCode) -> bool {
    matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE)
}

fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
