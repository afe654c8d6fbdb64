//! Who may ask for what: the `Host` header, API keys, and what a key may claim.
//!
//! 1. One table of paths decides (`path.rs`): a path that is not in it needs a key, so a new route does, too.
//! 2. A request that is refused here reaches no route, and its body is not read.
//! 3. No answer of this server permits anything to a page of another origin: there is no header of CORS anywhere.
//! 4. A secret is kept as its digest only; what is shown of a key is its name.

mod claim;
mod host;
mod keys;
mod path;

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;

use crate::app::App;
use crate::config::ServerConfig;
use crate::error::ApiError;
pub(crate) use claim::claim;
use host::AllowedHosts;
pub use keys::{ApiKey, Keyring};
use path::Need;

/// What decides over requests before any route sees them.
#[derive(Debug)]
pub(crate) struct Access {
    /// Without any, everybody may do everything.
    keys: ArcSwapOption<Keyring>,
    has_open_metrics: bool,
    hosts: AllowedHosts,
}

/// The key that a request was let in with.
#[derive(Debug, Clone)]
struct Caller(Arc<ApiKey>);

impl Access {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self {
            keys: ArcSwapOption::new(config.keys.clone().map(Arc::new)),
            has_open_metrics: config.has_open_metrics,
            hosts: AllowedHosts::new(config.host, &config.allowed_hosts),
        }
    }

    /// Puts other keys in force for requests that come from now on.
    pub(crate) fn set_keys(&self, keys: Keyring) {
        self.keys.store(Some(Arc::new(keys)));
    }

    /// The key of a request, if it needs one.
    ///
    /// # Errors
    /// 421 for a host that is not this server's, 401 without a valid key.
    fn check(&self, request: &Request) -> Result<Option<Arc<ApiKey>>, ApiError> {
        let need = Need::of(request.uri().path(), self.has_open_metrics);
        self.hosts.check(request, need)?;
        let keys = self.keys.load();
        let Some(keys) = keys.as_ref().filter(|_| need == Need::Key) else { return Ok(None) };
        let token = bearer(request.headers()).ok_or_else(|| {
            let message = "an API key is needed: send it in the header Authorization, as \"Bearer KEY\"";
            ApiError::unauthorized(message)
        })?;
        let key = keys.find(token).ok_or_else(|| ApiError::unauthorized("the API key is not valid here"))?;
        Ok(Some(Arc::clone(key)))
    }
}

/// The token of `Authorization: Bearer TOKEN`, if that stands there once.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (value, None) = (values.next()?.as_bytes(), values.next()) else { return None };
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// Lets requests in, each with its key.
pub(crate) async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.access.check(&request) {
        Ok(None) => next.run(request).await,
        Ok(Some(key)) => {
            request.extensions_mut().insert(Caller(key));
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// The key that a request was let in with; none if no keys are configured.
pub(crate) fn caller(request: &Request) -> Option<Arc<ApiKey>> {
    request.extensions().get::<Caller>().map(|caller| Arc::clone(&caller.0))
}

/// Whether a caller may see, cancel and read what `owner` has submitted. Without keys there is nobody to hide it from.
pub(crate) fn may_see(caller: Option<&ApiKey>, owner: Option<&ApiKey>) -> bool {
    caller.is_none_or(|caller| caller.is_admin() || owner.is_some_and(|owner| owner.name() == caller.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, is_admin: bool) -> ApiKey {
        let key = ApiKey::new(name, ApiKey::digest(name.as_bytes()));
        if is_admin { key.with_admin() } else { key }
    }

    #[test]
    fn a_key_sees_its_own_and_an_admin_all() {
        let (alice, bob, root) = (key("alice", false), key("bob", false), key("root", true));
        let again = ApiKey::new("alice", ApiKey::digest(b"another secret"));
        assert!(may_see(None, None) && may_see(None, Some(&alice)));
        assert!(may_see(Some(&alice), Some(&alice)) && may_see(Some(&again), Some(&alice)));
        assert!(
            !may_see(Some(&alice), Some(&bob)) && !may_see(Some(&alice), Some(&root)) && !may_see(Some(&alice), None)
        );
        assert!(may_see(Some(&root), Some(&alice)) && may_see(Some(&root), None));
    }

    #[test]
    fn a_token_stands_once_behind_its_scheme() {
        let read = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, hyper::header::HeaderValue::from_static(value));
            }
            bearer(&headers).map(<[u8]>::to_vec)
        };
        assert_eq!(read(&["Bearer abc"]), Some(b"abc".to_vec()));
        assert_eq!(read(&["bearer  abc "]), Some(b"abc".to_vec()));
        assert_eq!(read(&["Bearer "]), Some(Vec::new()));
        for refused in [
            &[] as &[&'static str],
            &["abc"],
            &["Basic abc"],
            &["Bearer"],
            &["Bearer a", "Bearer a"],
            &["Bearer\u{9}a"],
        ] {
            assert_eq!(read(refused), None, "{refused:?}");
        }
    }
}
