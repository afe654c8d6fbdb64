//! The `Host` and `Origin` headers: by which names the server may be called, and by whose pages.
//!
//! A page of a stranger can have its own name resolve to 127.0.0.1 and then is of the server's origin for the browser (DNS rebinding).
//! What the browser still tells is the page's name, in `Host`. So a server on loopback answers to names of loopback only.
//!
//! And a stranger's page may send a plain POST to any address, blindly. The browser tells its name then, in `Origin`.

use std::net::IpAddr;

use axum::extract::Request;
use hyper::header::{HOST, ORIGIN};

use super::path::Need;
use crate::error::ApiError;

/// Allows every name.
const ANY: &str = "*";

/// Names that a request may call the server by.
#[derive(Debug)]
pub(super) struct AllowedHosts {
    /// In lower case, without ports; none = any.
    names: Option<Vec<String>>,
    is_loopback: bool,
}

impl AllowedHosts {
    /// On loopback `localhost`, the addresses of loopback and `more`; elsewhere any, unless `more` says which.
    pub(super) fn new(address: IpAddr, more: &[String]) -> Self {
        let is_loopback = address.is_loopback();
        let is_any = more.iter().any(|name| name == ANY) || (!is_loopback && more.is_empty());
        let names = (!is_any).then(|| {
            let own = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned(), address.to_string()];
            own.into_iter().chain(more.iter().map(|name| normal(name))).collect()
        });
        Self { names, is_loopback }
    }

    /// Refuses a request that calls the server by another name. None at all is no browser's doing. On the network what needs no key is asked for
    /// under addresses that the server does not know, by probes and collectors; on loopback, where a page of a stranger could come from, nothing
    /// is told under a strange name.
    pub(super) fn check(&self, request: &Request, need: Need) -> Result<(), ApiError> {
        let Some(names) = self.names.as_ref().filter(|_| self.is_loopback || need != Need::Nothing) else {
            return Ok(());
        };
        let is_own = |name: &str| names.iter().any(|own| *own == normal(name));
        let in_target = request.uri().host();
        let in_header = request.headers().get_all(HOST).iter().map(|value| value.to_str().unwrap_or_default());
        if let Some(name) = in_target.into_iter().chain(in_header).find(|name| !is_own(name)) {
            return Err(ApiError::misdirected(name));
        }
        let mut origins = request.headers().get_all(ORIGIN).iter().map(|value| value.to_str().unwrap_or_default());
        match origins.find(|origin| !origin.split_once("://").is_some_and(|(_, host)| is_own(host))) {
            Some(origin) => Err(ApiError::foreign_origin(origin)),
            None => Ok(()),
        }
    }
}

/// A name without its port, brackets, a final dot and capitals.
fn normal(host: &str) -> String {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        // An address of version 6 without brackets has several colons, and no port.
        None if host.matches(':').count() > 1 => host,
        None => host.split(':').next().unwrap_or_default(),
    };
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn is_allowed(hosts: &AllowedHosts, host: &str, need: Need) -> bool {
        let request = Request::builder().uri("/v1/models").header(HOST, host).body(Body::empty());
        hosts.check(&request.expect("it is a request"), need).is_ok()
    }

    fn hosts(address: &str, more: &[&str]) -> AllowedHosts {
        let more: Vec<String> = more.iter().map(|&name| name.to_owned()).collect();
        AllowedHosts::new(address.parse().expect("it is an address"), &more)
    }

    #[test]
    fn loopback_answers_to_names_of_loopback_only() {
        let hosts = hosts("127.0.0.2", &["My-Box.example:80"]);
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "127.0.0.1:1",
            "[::1]",
            "[::1]:80",
            "127.0.0.2",
            "my-box.EXAMPLE:9",
        ] {
            assert!(is_allowed(&hosts, host, Need::Key), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "10.0.0.1",
            "",
            "[::2]",
            "127.0.0.3",
            "evil:127.0.0.1",
        ] {
            assert!(!is_allowed(&hosts, host, Need::Nothing), "{host}");
        }
    }

    #[test]
    fn the_target_and_each_header_count() {
        let hosts = hosts("127.0.0.1", &[]);
        let request = |uri: &str, names: &[&str]| {
            let builder = names.iter().fold(Request::builder().uri(uri), |builder, name| builder.header(HOST, *name));
            hosts.check(&builder.body(Body::empty()).expect("it is a request"), Need::Key).is_ok()
        };
        assert!(request("/x", &[]) && request("http://localhost/x", &["localhost"]));
        assert!(!request("http://evil.example/x", &["localhost"]) && !request("/x", &["localhost", "evil.example"]));
    }

    #[test]
    fn pages_of_strangers_are_refused() {
        let asked_by = |more: &[&str], origin: &'static str| {
            let request = Request::builder().uri("/x").header(HOST, "localhost:8000").header(ORIGIN, origin);
            hosts("127.0.0.1", more).check(&request.body(Body::empty()).expect("it is a request"), Need::Key).is_ok()
        };
        assert!(
            asked_by(&[], "http://localhost:3000")
                && asked_by(&[], "https://127.0.0.1")
                && asked_by(&[], "http://[::1]:1")
        );
        for foreign in ["https://evil.example", "null", "", "file://", "http://localhost.evil.example", "localhost"] {
            assert!(!asked_by(&[], foreign), "{foreign}");
            assert!(asked_by(&["*"], foreign), "{foreign}");
        }
        assert!(asked_by(&["ui.example"], "https://ui.example"));
    }

    #[test]
    fn the_network_is_asked_by_any_name_unless_some_are_given() {
        assert!(is_allowed(&hosts("0.0.0.0", &[]), "anything", Need::Key));
        let named = hosts("0.0.0.0", &["api.example"]);
        assert!(is_allowed(&named, "api.example:8000", Need::Key) && !is_allowed(&named, "10.0.0.7", Need::Key));
        assert!(is_allowed(&named, "10.0.0.7:8000", Need::Nothing), "a probe knows the address only");
        assert!(is_allowed(&hosts("127.0.0.1", &["*"]), "anything", Need::Key));
    }
}
