//! Names of requests: the id that a response carries, and the `x-request-id` that a client may give.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

use crate::stream::Submitted;

/// The header that names a request.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest name that a client may give.
const MAX_NAME_BYTES: usize = 128;

/// Makes ids that nobody can guess: a keyed hash of a counter, and the counter, so that none comes twice.
#[derive(Debug)]
pub(crate) struct IdSource {
    key: RandomState,
    count: AtomicU64,
}

impl IdSource {
    pub(crate) fn new() -> Self {
        Self { key: RandomState::new(), count: AtomicU64::new(0) }
    }

    /// `prefix` and 32 hexadecimal digits.
    pub(crate) fn next(&self, prefix: &str) -> String {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{count:016x}", self.key.hash_one(count))
    }
}

/// The name that the client gave, if it is one: up to 128 visible ASCII characters.
pub(crate) fn given_name(headers: &HeaderMap) -> Option<&HeaderValue> {
    let value = headers.get(REQUEST_ID)?;
    let bytes = value.as_bytes();
    let is_usable = (1..=MAX_NAME_BYTES).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
    is_usable.then_some(value)
}

/// Live requests by name. A name that several have stands for all of them.
#[derive(Debug, Default)]
pub(crate) struct Names {
    live: Mutex<HashMap<String, Vec<Arc<Submitted>>, foldhash::fast::RandomState>>,
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<Submitted>>, foldhash::fast::RandomState>> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, request: &Arc<Submitted>) {
        let mut live = self.lock();
        for name in request.names() {
            live.entry(name.to_owned()).or_default().push(Arc::clone(request));
        }
    }

    pub(crate) fn remove(&self, request: &Arc<Submitted>) {
        let mut live = self.lock();
        for name in request.names() {
            if let Some(all) = live.get_mut(name) {
                all.retain(|other| !Arc::ptr_eq(other, request));
                if all.is_empty() {
                    live.remove(name);
                }
            }
        }
    }

    /// Live requests of this name.
    pub(crate) fn get(&self, name: &str) -> Vec<Arc<Submitted>> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// All live requests; each may come several times.
    pub(crate) fn all(&self) -> Vec<Arc<Submitted>> {
        self.lock().values().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids = IdSource::new();
        let (first, second) = (ids.next("cmpl-"), ids.next("cmpl-"));
        assert_ne!(first, second);
        assert_eq!(first.len(), "cmpl-".len() + 32);
    }

    #[test]
    fn a_name_is_short_and_printable() {
        let named = |name: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(name).expect("a header can hold it"));
            given_name(&headers).is_some()
        };
        assert!(named(b"mine-1"));
        assert!(named(&[b'x'; 128]));
        assert!(!named(&[b'x'; 129]));
        assert!(!named(b""));
        assert!(!named(b"two words"));
        assert!(!named("näme".as_bytes()));
    }
}
