//! JSON into a buffer, without values in between.

use std::io::Write;

use cbrs_core::FinishReason;

/// What stands for a log-probability of minus infinity.
const LOGPROB_FLOOR: f32 = -9999.0;

/// A string with its quotes.
pub(crate) fn string(out: &mut Vec<u8>, text: &str) {
    // Most tokens have nothing to escape.
    if text.bytes().any(|byte| byte < b' ' || byte == b'"' || byte == b'\\') {
        return serde_json::to_writer(out, text).expect("a string, written to memory");
    }
    out.push(b'"');
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
}

/// An integer.
pub(crate) fn integer(out: &mut Vec<u8>, number: impl std::fmt::Display) {
    write!(out, "{number}").expect("memory takes everything");
}

/// A log-probability, always a number.
pub(crate) fn logprob(out: &mut Vec<u8>, value: f32) {
    let value = if value.is_finite() { value.max(LOGPROB_FLOOR) } else { LOGPROB_FLOOR };
    serde_json::to_writer(out, &value).expect("a finite number, written to memory");
}

/// A list of ids.
pub(crate) fn ids(out: &mut Vec<u8>, ids: &[i32]) {
    let mut digits = itoa::Buffer::new();
    out.push(b'[');
    for (index, &id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(digits.format(id).as_bytes());
    }
    out.push(b']');
}

/// A list.
pub(crate) fn list<T>(out: &mut Vec<u8>, items: impl IntoIterator<Item = T>, item: impl Fn(&mut Vec<u8>, T)) {
    out.push(b'[');
    for (index, value) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        item(out, value);
    }
    out.push(b']');
}

/// `null` or a reason in quotes. Ends that the wire has no name for become errors before they come here.
pub(crate) fn finish_reason(out: &mut Vec<u8>, reason: Option<FinishReason>) {
    match reason {
        None => out.extend_from_slice(b"null"),
        Some(reason) => string(out, reason.as_str()),
    }
}

/// The fields that all answers begin with, up to and with the comma.
pub(crate) fn head(out: &mut Vec<u8>, id: &str, object: &str, created: u64, model: &str) {
    out.extend_from_slice(b"{\"id\":");
    string(out, id);
    out.extend_from_slice(b",\"object\":");
    string(out, object);
    out.extend_from_slice(b",\"created\":");
    integer(out, created);
    out.extend_from_slice(b",\"model\":");
    string(out, model);
    out.push(b',');
}
