//! What load to send where: one plain structure, checked once.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Which of the two generating endpoints is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `POST /v1/completions`, random prompts as token ids.
    Completions,
    /// `POST /v1/chat/completions`, random prompts as words.
    Chat,
}

/// A text that is never printed.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("***")
    }
}

/// A load. Arrivals are a closed loop unless `rate` or `trace` says otherwise.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `http://HOST:PORT`, with or without a path before `/v1`.
    pub url: String,
    /// What is called.
    #[serde(default = "default_endpoint")]
    pub endpoint: Endpoint,
    /// The model that requests name.
    pub model: String,
    /// Whether responses are streamed.
    #[serde(default = "yes")]
    pub stream: bool,
    /// Clients of a closed loop: each sends its next request when its last has ended.
    pub concurrency: Option<usize>,
    /// Requests per second of an open loop: a Poisson process, or the mean that the times of the trace
    /// are scaled to.
    pub rate: Option<f64>,
    /// A JSONL file (also .gz) that gives lengths and, without `concurrency`, arrival times.
    pub trace: Option<PathBuf>,
    /// Factor on the lengths of the trace.
    #[serde(default = "one")]
    pub length_scale: f64,
    /// Requests to send. Without it and `duration_s`: all of the trace, or two for each client and 8 at
    /// least, or 100 in an open loop.
    pub num_requests: Option<u64>,
    /// Seconds during which requests are started; those in flight then end on their own.
    pub duration_s: Option<f64>,
    /// Requests sent before the clock starts, in a closed loop; in no figure.
    #[serde(default)]
    pub warmup: u64,
    /// How often a request is sent again after 429 or 503.
    #[serde(default)]
    pub retries: u32,
    /// Seed of prompts and arrivals.
    #[serde(default)]
    pub seed: u64,
    /// Tokens (chat: words) of a random prompt, 128 by default; with a trace, the most.
    pub prompt_tokens: Option<usize>,
    /// Output tokens, 64 by default: exactly for random prompts, at most for those of a file; with a
    /// trace, the most.
    pub output_tokens: Option<usize>,
    /// Random token ids are below this.
    #[serde(default = "default_vocab_size")]
    pub vocab_size: usize,
    /// A file of prompts: JSON lines or plain lines.
    pub prompts: Option<PathBuf>,
    /// Sent as a bearer token.
    pub api_key: Option<Secret>,
    /// Threads of the client; connections are divided among them.
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// Seconds after which a request is given up.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: f64,
    /// Whether outputs go on after an end token, so that they have the length asked for. None = yes,
    /// except for prompts of a file.
    pub ignore_eos: Option<bool>,
    /// Further fields of every request; they replace fields of the same name.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

const fn default_endpoint() -> Endpoint {
    Endpoint::Completions
}

const fn yes() -> bool {
    true
}

const fn one() -> f64 {
    1.0
}

const fn default_vocab_size() -> usize {
    32_000
}

const fn default_threads() -> usize {
    1
}

const fn default_timeout_s() -> f64 {
    600.0
}

impl Config {
    /// Reads a configuration from a JSON object and checks it.
    ///
    /// # Errors
    /// As [`Self::check`]; `Config` for an unknown field or a wrong type.
    pub fn from_json(text: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(text)?;
        config.check()?;
        Ok(config)
    }

    /// Checks ranges and what excludes what.
    ///
    /// # Errors
    /// `OutOfRange` or `Conflict`.
    pub fn check(&self) -> Result<()> {
        let positive = "above 0";
        for (name, value) in [("rate", self.rate), ("duration_s", self.duration_s)] {
            check(name, value, |value| value > 0.0 && value <= 1e9, "above 0 and at most 1e9")?;
        }
        check("timeout_s", Some(self.timeout_s), |value| value > 0.0 && value <= 1e9, "above 0 and at most 1e9")?;
        check("length_scale", Some(self.length_scale), |value| value > 0.0, positive)?;
        let tokens = |value: Option<usize>| value.map(|value| value as f64);
        for (name, value) in [("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)] {
            check(name, tokens(value), |value| (1.0..=1e8).contains(&value), "from 1 to 1e8")?;
        }
        check("concurrency", tokens(self.concurrency), |value| (1.0..=65_536.0).contains(&value), "from 1 to 65536")?;
        check("threads", tokens(Some(self.threads)), |value| (1.0..=256.0).contains(&value), "from 1 to 256")?;
        check("vocab_size", tokens(Some(self.vocab_size)), |value| (1.0..=1e9).contains(&value), "from 1 to 1e9")?;
        check("num_requests", self.num_requests.map(|value| value as f64), |value| value >= 1.0, "at least 1")?;
        if self.concurrency.is_some() && self.rate.is_some() {
            return Err(Error::Conflict { first: "concurrency", second: "rate" });
        }
        if self.prompts.is_some() && self.trace.is_some() {
            return Err(Error::Conflict { first: "prompts", second: "trace" });
        }
        if self.prompts.is_some() && self.prompt_tokens.is_some() {
            return Err(Error::Conflict { first: "prompts", second: "prompt_tokens" });
        }
        Ok(())
    }
}

fn check(name: &'static str, value: Option<f64>, is_right: impl Fn(f64) -> bool, limit: &'static str) -> Result<()> {
    match value {
        Some(value) if !is_right(value) => Err(Error::OutOfRange { name, value, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(more: &str) -> String {
        let text = format!(r#"{{"url": "http://127.0.0.1:1", "model": "m"{more}}}"#);
        Config::from_json(&text).map_or_else(|error| error.to_string(), |_| "no error".to_owned())
    }

    #[test]
    fn two_fields_are_enough() {
        assert_eq!(message(""), "no error");
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(message(r#", "rate": 0"#), "rate is 0; it must be above 0 and at most 1e9");
        assert_eq!(message(r#", "concurrency": 0"#), "concurrency is 0; it must be from 1 to 65536");
        assert_eq!(message(r#", "num_requests": 0"#), "num_requests is 0; it must be at least 1");
        let both = message(r#", "rate": 1, "concurrency": 1"#);
        assert_eq!(both, "concurrency and rate exclude each other; leave one out");
        assert!(message(r#", "endpiont": "chat""#).contains("unknown field `endpiont`"));
        assert!(message(r#", "endpoint": "embeddings""#).contains("unknown variant `embeddings`"));
    }

    #[test]
    fn the_key_is_never_printed() {
        let config = Config::from_json(r#"{"url": "http://h:1", "model": "m", "api_key": "sesame"}"#).expect("valid");
        assert!(!format!("{config:?}").contains("sesame"));
    }
}
