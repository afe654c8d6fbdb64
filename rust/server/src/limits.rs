//! Bounds on connections and on what requests may ask for, besides those of the core.

use std::ops::RangeInclusive;
use std::time::Duration;

use cbrs_core::request::MAX_CHOICES;
use cbrs_core::sampling::MAX_LOGPROBS;
use cbrs_text::stop::MAX_STOP_STRINGS;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

/// Bounds of the bytes of a body that follow from the context, when none are set.
const BODY_BYTES: (usize, usize) = (4 << 20, 64 << 20);
/// A token id in a body with what separates it from the next, or a token of text: hardly one takes more.
const BYTES_PER_TOKEN: usize = 8;
/// Times that can be set, in seconds.
const SECONDS: RangeInclusive<f64> = 0.001..=1e6;
/// serde gives up at 128, wherever it is.
const MAX_DEPTH: usize = 127;

/// Bounds on connections and on what requests may ask for. As JSON, times are in seconds and their names end in `_s`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Connections at a time. More are told so and closed, unless they ask for a probe.
    pub max_connections: usize,
    /// Connections at a time from one address; none = as many as there may be.
    pub max_connections_per_address: Option<usize>,
    /// Time without a request after which a connection is closed.
    #[serde(rename = "idle_timeout_s", with = "seconds")]
    pub idle_timeout: Duration,
    /// Time that the head of a request may take from its first byte.
    #[serde(rename = "head_timeout_s", with = "seconds")]
    pub head_timeout: Duration,
    /// Bytes of the head of a request.
    pub max_head_bytes: usize,
    /// Header fields of a request.
    pub max_header_fields: usize,
    /// Bytes of the first line of a request.
    pub max_request_line_bytes: usize,
    /// Time that a body may take.
    #[serde(rename = "body_timeout_s", with = "seconds")]
    pub body_timeout: Duration,
    /// Bytes of a body; none = what prompts of the whole context need.
    pub max_body_bytes: Option<usize>,
    /// Arrays and objects of a body within each other.
    pub max_body_depth: usize,
    /// Time for which a reader may take nothing of an answer that is waiting for it.
    #[serde(rename = "write_timeout_s", with = "seconds")]
    pub write_timeout: Duration,
    /// Prompts of one request, and choices of all of them together.
    pub max_choices: usize,
    /// Stop strings of one request.
    #[serde(rename = "max_stop_strings")]
    pub max_stops: usize,
    /// Most likely tokens that a completion may ask for with each token.
    pub max_completion_logprobs: u32,
    /// Longer texts, in bytes, are tokenized on a thread of the pool, where they delay nobody.
    #[serde(skip)]
    pub max_inline_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_connections_per_address: None,
            idle_timeout: Duration::from_secs(60),
            head_timeout: Duration::from_secs(10),
            max_head_bytes: 16 << 10,
            max_header_fields: 100,
            max_request_line_bytes: 8 << 10,
            body_timeout: Duration::from_secs(30),
            max_body_bytes: None,
            max_body_depth: 64,
            write_timeout: Duration::from_secs(30),
            max_choices: 128,
            max_stops: 4,
            max_completion_logprobs: 5,
            max_inline_bytes: 4096,
        }
    }
}

impl Limits {
    /// Reads the limits that an object of JSON sets; the others are the defaults.
    ///
    /// # Errors
    /// Which of them is unknown or cannot be had, and why.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let limits: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| format!("limits: {error}"))?;
        limits.check()?;
        Ok(limits)
    }

    /// All of them as an object of JSON, which `from_json` reads.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers under fixed names")
    }

    /// Bytes that a body may have if prompts may have `max_model_len` tokens.
    pub(crate) fn body_bytes(&self, max_model_len: usize) -> usize {
        let needed = max_model_len.saturating_mul(BYTES_PER_TOKEN).saturating_mul(self.max_choices);
        self.max_body_bytes.unwrap_or(needed.clamp(BODY_BYTES.0, BODY_BYTES.1))
    }

    fn check(&self) -> Result<(), String> {
        let per_address = self.max_connections_per_address.unwrap_or(1);
        let counts: [(&str, usize, RangeInclusive<usize>); 10] = [
            ("max_connections", self.max_connections, 1..=1_000_000),
            ("max_connections_per_address", per_address, 1..=1_000_000),
            ("max_head_bytes", self.max_head_bytes, 256..=1 << 20),
            ("max_header_fields", self.max_header_fields, 1..=10_000),
            ("max_request_line_bytes", self.max_request_line_bytes, 64..=1 << 20),
            ("max_body_bytes", self.max_body_bytes.unwrap_or(BODY_BYTES.0), 1..=1 << 30),
            ("max_body_depth", self.max_body_depth, 1..=MAX_DEPTH),
            ("max_choices", self.max_choices, 1..=MAX_CHOICES as usize),
            ("max_stop_strings", self.max_stops, 0..=MAX_STOP_STRINGS),
            ("max_completion_logprobs", self.max_completion_logprobs as usize, 0..=MAX_LOGPROBS as usize),
        ];
        match counts.iter().find(|(_, value, range)| !range.contains(value)) {
            None => Ok(()),
            Some((name, value, range)) => {
                Err(format!("limits: {name} is {value}, but must be in {}..={}", range.start(), range.end()))
            }
        }
    }
}

/// Times as numbers of seconds.
mod seconds {
    use super::{Deserialize, Deserializer, Duration, Error, SECONDS, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        time.as_secs_f64().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let value = f64::deserialize(deserializer)?;
        if !SECONDS.contains(&value) {
            let message = format!("{value} s is not in {}..={} s", SECONDS.start(), SECONDS.end());
            return Err(D::Error::custom(message));
        }
        Ok(Duration::from_secs_f64(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_set_is_the_default() {
        let limits = Limits::from_json(r#"{"max_connections": 7, "head_timeout_s": 0.5, "max_body_bytes": null}"#);
        let limits = limits.expect("they are right");
        assert_eq!((limits.max_connections, limits.max_stops), (7, 4));
        assert_eq!(limits.head_timeout, Duration::from_millis(500));
        assert_eq!(limits.max_body_bytes, None);
    }

    #[test]
    fn what_is_written_can_be_read() {
        let limits = Limits { idle_timeout: Duration::from_millis(1500), max_stops: 7, ..Limits::default() };
        let json = limits.to_json();
        assert!(json.contains("\"idle_timeout_s\":1.5") && json.contains("\"max_stop_strings\":7"), "{json}");
        assert_eq!(Limits::from_json(&json).expect("it was written").to_json(), json);
    }

    #[test]
    fn what_cannot_be_had_is_named() {
        for (json, part) in [
            (r#"{"max_connection": 7}"#, "max_connection"),
            (r#"{"max_connections": 0}"#, "max_connections is 0"),
            (r#"{"max_connections": -1}"#, "max_connections"),
            (r#"{"max_connections_per_address": 0}"#, "max_connections_per_address is 0"),
            (r#"{"max_stop_strings": 17}"#, "0..=16"),
            (r#"{"max_completion_logprobs": 21}"#, "0..=20"),
            (r#"{"max_body_depth": 128}"#, "max_body_depth"),
            (r#"{"head_timeout_s": 0}"#, "head_timeout_s"),
            (r#"{"write_timeout_s": 1e9}"#, "write_timeout_s"),
            (r#"{"max_inline_bytes": 1}"#, "max_inline_bytes"),
            ("1", "limits"),
        ] {
            let message = Limits::from_json(json).expect_err(json);
            assert!(message.contains(part), "{json}: {message}");
        }
    }

    #[test]
    fn a_body_may_hold_prompts_of_the_whole_context() {
        let limits = Limits::default();
        assert_eq!(limits.body_bytes(512), 4 << 20);
        assert_eq!(limits.body_bytes(8192), 8 * 8192 * 128);
        assert_eq!(limits.body_bytes(1 << 20), 64 << 20);
        assert_eq!(Limits { max_body_bytes: Some(9), ..limits }.body_bytes(8192), 9);
    }
}
