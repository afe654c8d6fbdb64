//! What hyper sees of a connection, however its bytes arrive.
#![allow(clippy::unwrap_used)]

use super::framing::Framing;
use crate::config::Limits;

const GET: &str = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";

fn limits() -> Limits {
    Limits { max_head_bytes: 300, max_request_line_bytes: 64, max_header_fields: 4, ..Limits::default() }
}

/// Sends `bytes` in parts of `size`, each request answered as soon as all of it was handed on; returns what is handed on, and the status of a
/// refusal.
fn send(bytes: &[u8], size: usize) -> (Vec<u8>, Option<u16>) {
    let mut framing = Framing::new(&limits());
    let mut seen = Vec::new();
    for part in bytes.chunks(size) {
        let num_direct = framing.pass(part);
        seen.extend_from_slice(&part[..num_direct]);
        let mut held = framing.hold(&part[num_direct..]);
        while held.is_ok() && !framing.free().is_empty() {
            seen.extend_from_slice(framing.free());
            framing.handed_on(framing.free().len());
            held = framing.answered();
        }
        if let Err(error) = held {
            framing.refuse();
            assert!(framing.is_refused() && framing.free().starts_with(b"GET / "));
            return (seen, Some(error.status.as_u16()));
        }
    }
    (seen, None)
}

/// What comes of `bytes` is the same for every size of parts.
fn sent(bytes: &[u8]) -> (Vec<u8>, Option<u16>) {
    let whole = send(bytes, bytes.len());
    for size in [1, 2, 3, 7, 50] {
        assert_eq!(send(bytes, size), whole, "in parts of {size}: {:?}", String::from_utf8_lossy(bytes));
    }
    whole
}

fn status_of(head: &str) -> Option<u16> {
    let (seen, status) = sent(head.as_bytes());
    assert!(status.is_none() || seen.is_empty(), "nothing of a refused head is seen");
    status
}

#[test]
fn good_requests_pass_unchanged() {
    let post = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n\r\n{\"a\":1}";
    let empty = "POST /a HTTP/1.1\r\ncontent-length: 0\r\n\r\n";
    let all = [GET, post, empty, post, GET, "GET /old HTTP/1.0\r\n\r\n"].concat();
    assert_eq!(sent(all.as_bytes()), (all.clone().into_bytes(), None));
}

#[test]
fn empty_lines_in_front_of_a_head_are_dropped() {
    let post = "POST /a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc";
    let all = ["\r\n", post, "\r\n\r\n\r\n", GET, "\r\n", post, "\r\n\r"].concat();
    assert_eq!(sent(all.as_bytes()), ([post, GET, post].concat().into_bytes(), None));
    for rest in ["\r\n", "\r\n\r", "\r"] {
        let mut framing = Framing::new(&limits());
        framing.hold(post.as_bytes()).unwrap();
        framing.handed_on(framing.free().len());
        framing.hold(rest.as_bytes()).unwrap();
        framing.answered().unwrap();
        assert!(!framing.is_in_head() && framing.is_idle(), "nothing has begun with {rest:?}");
    }
    assert_eq!(status_of("\r\n\r\n\n"), Some(400), "a bare line feed is none");
    assert_eq!(status_of("\rGET / HTTP/1.1\r\n\r\n"), Some(400));
}

#[test]
fn the_next_request_waits_for_the_end_of_the_answer() {
    let post = "POST /a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc";
    let mut framing = Framing::new(&limits());
    framing.hold([post, GET, post, "GET / HTTP/1.1\n"].concat().as_bytes()).unwrap();
    for expected in [post, GET, post] {
        assert_eq!(framing.free(), expected.as_bytes());
        framing.handed_on(expected.len());
        assert!(framing.free().is_empty() && !framing.is_in_head() && !framing.is_idle());
        let is_last = framing.answered().is_err();
        assert_eq!(is_last, framing.free().is_empty());
    }
}

#[test]
fn what_waits_has_a_limit() {
    for request in [GET, "POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"] {
        let mut framing = Framing::new(&limits());
        framing.hold(request.as_bytes()).unwrap();
        framing.handed_on(request.len());
        framing.hold(&[b'x'; 299]).unwrap();
        assert!(!framing.is_full() && framing.free().is_empty(), "{request:?}");
        framing.hold(b"x").unwrap();
        assert!(framing.is_full(), "{request:?}");
    }
    let mut framing = Framing::new(&limits());
    framing.hold(b"GET / HTTP/1.1\r\n").unwrap();
    framing.hold(&[b'x'; 300 - 16]).unwrap();
    assert!(!framing.is_full(), "the end of a head that has begun is waited for");
}

#[test]
fn a_body_is_not_looked_at() {
    let body = "GET / HTTP/1.1\nbad\n\n\0";
    let all = format!("POST /a HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}{GET}", body.len());
    assert_eq!(sent(all.as_bytes()), (all.clone().into_bytes(), None));
}

#[test]
fn what_follows_a_body_is() {
    let post = "POST /a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc";
    let (seen, status) = sent(format!("{post}GET / HTTP/1.1\nhost: x\n\n").as_bytes());
    assert_eq!((seen, status), (post.as_bytes().to_vec(), Some(400)));
}

#[test]
fn what_others_may_read_differently_is_refused() {
    for fields in [
        "content-length: 3\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 3",
        "content-length: 3\r\ncontent-length: 3",
        "content-length: 3\r\ncontent-length: 4",
        "content-length: 3, 3",
        "content-length: +3",
        "content-length: 0x3",
        "content-length:",
        "content-length: 18446744073709551616",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        "transfer-encoding: gzip, chunked",
        "transfer-encoding: identity",
        "host: x\ny: z",
        "host: x\n\r\ny: z",
        "host: a\0b",
        "host: a\rb",
        "a: b\r\n c",
        "a: b\r\n\tc",
        "content-length : 3",
        "no colon",
        ": no name",
        "a b: c",
    ] {
        assert_eq!(status_of(&format!("POST /a HTTP/1.1\r\n{fields}\r\n\r\nabc")), Some(400), "{fields:?}");
    }
    for line in [
        "GET /a",
        "GET /a HTTP/2.0",
        "GET /a HTTP/1.2",
        "GET  /a HTTP/1.1",
        "G\0T /a HTTP/1.1",
        "GET \u{e4} HTTP/1.1",
        "",
    ] {
        assert_eq!(status_of(&format!("{line}\r\nhost: x\r\n\r\n")), Some(400), "{line:?}");
    }
    assert_eq!(status_of("POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n"), Some(400));
    assert_eq!(status_of("\n"), Some(400));
}

#[test]
fn a_chunked_body_is_the_last() {
    let post = "POST /a HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let (seen, status) = sent([post, "GET / HTTP/1.1\n\n", GET].concat().as_bytes());
    assert_eq!((seen, status), (post.as_bytes().to_vec(), None), "nothing behind it is seen");
    let broken = "POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n";
    assert_eq!(sent(broken.as_bytes()), (broken.as_bytes().to_vec(), None), "hyper refuses it");
}

#[test]
fn a_line_has_a_limit() {
    let line = |len: usize| format!("GET /{} HTTP/1.1", "a".repeat(len - "GET / HTTP/1.1".len()));
    assert_eq!(status_of(&format!("{}\r\n\r\n", line(64))), None);
    assert_eq!(status_of(&format!("{}\r\n\r\n", line(65))), Some(414));
    assert_eq!(status_of(&"a".repeat(66)), Some(414), "it need not be complete");
    assert_eq!(status_of(&"a".repeat(65)), None);
}

#[test]
fn a_head_has_a_limit_of_bytes_and_fields() {
    let head = |len: usize| {
        let rest = "GET / HTTP/1.1\r\na: \r\n\r\n";
        rest.replace("a: ", &format!("a: {}", "b".repeat(len - rest.len())))
    };
    assert_eq!(head(300).len(), 300);
    assert_eq!(status_of(&head(300)), None);
    assert_eq!(status_of(&head(301)), Some(431));
    assert_eq!(status_of(&head(400)[..301]), Some(431), "it need not be complete");
    assert_eq!(status_of(&head(400)[..300]), None);
    let fields = |count: usize| format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(count));
    assert_eq!(status_of(&fields(4)), None);
    assert_eq!(status_of(&fields(5)), Some(431));
}

#[test]
fn an_idle_connection_holds_nothing() {
    let mut framing = Framing::new(&limits());
    assert!(!framing.has_more() && !framing.is_in_head());
    framing.hold(&GET.as_bytes()[..9]).unwrap();
    assert!(framing.has_more() && framing.is_in_head() && framing.free().is_empty());
    framing.hold(&GET.as_bytes()[9..]).unwrap();
    assert!(!framing.is_in_head());
    assert_eq!(framing.free(), GET.as_bytes());
    framing.handed_on(GET.len());
    framing.answered().unwrap();
    assert!(!framing.has_more() && framing.is_idle());
}

#[test]
fn a_limit_above_the_room_on_the_stack_holds_as_well() {
    for (count, is_good) in [(128, true), (129, true), (200, true), (201, false)] {
        let limits = Limits { max_head_bytes: 4096, max_header_fields: 200, ..Limits::default() };
        let head = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(count));
        assert_eq!(Framing::new(&limits).hold(head.as_bytes()).is_ok(), is_good, "{count}");
    }
}
