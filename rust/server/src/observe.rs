//! What every request is counted by, whatever its route.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use hyper::{Method, StatusCode};

use crate::access_log::Entry;
use crate::app::App;
use crate::error::ErrorCode;

/// The route of paths that have none: what clients send there is not repeated.
const NO_ROUTE: &str = "unknown";

/// A request whose response has no head yet; if it is dropped, the client did not wait for one.
struct Pending {
    app: Arc<App>,
    entry: Option<Arc<Entry>>,
    is_answered: bool,
}

impl Pending {
    fn answer(mut self, response: &mut Response) {
        self.is_answered = true;
        self.app.metrics.count_response(response.status());
        if let Some(entry) = &self.entry {
            let code = response.extensions_mut().remove::<ErrorCode>();
            entry.respond(response.status(), code.map(|ErrorCode(code)| code));
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_answered {
            self.app.metrics.count_response(StatusCode::from_u16(499).expect("a status of three digits"));
        }
    }
}

/// The name of a method; clients may send any word.
fn known_method(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"];
    KNOWN.into_iter().find(|&known| method.as_str() == known).unwrap_or("other")
}

/// Counts the response, and begins a line of the access log that the route may add to.
pub(crate) async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let entry = app.access_log.as_ref().map(|log| {
        let route = request.extensions().get::<MatchedPath>().map_or(NO_ROUTE, MatchedPath::as_str);
        log.begin(known_method(request.method()), route)
    });
    if let Some(entry) = &entry {
        request.extensions_mut().insert(Arc::clone(entry));
    }
    let pending = Pending { app, entry, is_answered: false };
    let mut response = next.run(request).await;
    pending.answer(&mut response);
    response
}
