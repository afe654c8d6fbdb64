//! What every request is counted by, whatever its route, and those that reach none.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::{Method, StatusCode};

use crate::access_log::{Entry, UNKNOWN};
use crate::app::App;
use crate::error::{ApiError, ErrorCode};

/// The route of paths that have none: what clients send there is not repeated.
const NO_ROUTE: &str = "unknown";

/// A request whose response has no head yet; if it is dropped, the client did not wait for one.
struct Pending {
    app: Arc<App>,
    entry: Arc<Entry>,
    is_answered: bool,
}

impl Pending {
    fn answer(mut self, response: &mut Response) {
        self.is_answered = true;
        tell(&self.app, Arc::clone(&self.entry), response);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_answered {
            self.app.metrics.count_response(StatusCode::from_u16(499).expect("a status of three digits"));
        }
    }
}

/// Counts a response, whose entry goes with it to the connection.
fn tell(app: &App, entry: Arc<Entry>, response: &mut Response) {
    app.metrics.count_response(response.status());
    let code = response.extensions_mut().remove::<ErrorCode>();
    entry.respond(response.status(), code.map(|ErrorCode(code)| code), &app.lifecycle);
    response.extensions_mut().insert(entry);
}

/// The name of a method; clients may send any word.
fn known_method(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"];
    KNOWN.into_iter().find(|&known| method.as_str() == known).unwrap_or("other")
}

/// Counts the response, and begins an entry that the route may add to.
pub(crate) async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or(NO_ROUTE, MatchedPath::as_str);
    let entry = Entry::begin(app.access_log.as_ref(), known_method(request.method()), route);
    request.extensions_mut().insert(Arc::clone(&entry));
    let pending = Pending { app, entry, is_answered: false };
    let mut response = next.run(request).await;
    pending.answer(&mut response);
    response
}

/// Counts a refusal of the connection. `method`: of the request, if it could be read.
pub(crate) fn refused(app: &App, method: Option<&Method>, error: ApiError) -> Response {
    let entry = Entry::begin(app.access_log.as_ref(), method.map_or(UNKNOWN, known_method), UNKNOWN);
    entry.name(UNKNOWN, None);
    let mut response = error.into_response();
    tell(app, entry, &mut response);
    response
}
