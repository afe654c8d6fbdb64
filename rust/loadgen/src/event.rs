//! What an event of a stream, or a whole response, says: a token, usage, an error, the end.

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::Value;

use crate::config::Endpoint;

/// Bytes of an error message that are kept.
const MAX_MESSAGE_BYTES: usize = 300;

/// Token counts as the server reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Details {
    pub(crate) cached_tokens: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// There is text in it.
    Token,
    /// `[DONE]`.
    Done,
    /// No text: the role, the finish reason, usage.
    Other(Option<Usage>),
    /// The server gave up; why.
    Error(String),
}

/// The fields of a response or an event that matter here; the rest is skipped.
#[derive(Deserialize)]
struct Fields {
    usage: Option<Usage>,
    error: Option<Value>,
}

/// Reads events of one endpoint.
#[derive(Debug)]
pub(crate) struct EventReader {
    /// The end of the key whose value is text. A quote within a JSON string has a backslash before it,
    /// so that no text can look like a key.
    key: Finder<'static>,
}

impl EventReader {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        let key: &[u8] = match endpoint {
            Endpoint::Completions => b"text\":",
            // Also `reasoning_content`.
            Endpoint::Chat => b"content\":",
        };
        Self { key: Finder::new(key) }
    }

    /// Reads one event. Most have text, for which nothing is parsed.
    pub(crate) fn read(&self, data: &[u8]) -> Event {
        if self.has_text(data) {
            return Event::Token;
        }
        if data == b"[DONE]" {
            return Event::Done;
        }
        match read_body(data) {
            Ok(usage) => Event::Other(usage),
            Err(message) => Event::Error(message),
        }
    }

    fn has_text(&self, data: &[u8]) -> bool {
        let mut rest = data;
        while let Some(found) = self.key.find(rest) {
            rest = &rest[found + self.key.needle().len()..];
            let value = rest.trim_ascii_start();
            if value.starts_with(b"\"") && !value.starts_with(b"\"\"") {
                return true;
            }
        }
        false
    }
}

/// The usage that a response or an event reports, or its error.
pub(crate) fn read_body(data: &[u8]) -> Result<Option<Usage>, String> {
    match serde_json::from_slice(data) {
        Ok(Fields { error: None, usage }) => Ok(usage),
        Ok(Fields { error: Some(error), .. }) => Err(message_of(&error)),
        Err(error) => Err(format!("the server sent what is not JSON: {error}")),
    }
}

/// The message of a body that came with an error status; the start of the body if it has none.
pub(crate) fn error_message(body: &[u8]) -> String {
    let error = serde_json::from_slice(body).ok().and_then(|Fields { error, .. }| error);
    let text = error.map_or_else(|| String::from_utf8_lossy(body).into_owned(), |error| message_of(&error));
    shortened(text.trim())
}

fn message_of(error: &Value) -> String {
    let message = error.get("message").unwrap_or(error);
    shortened(&message.as_str().map_or_else(|| message.to_string(), str::to_owned))
}

fn shortened(text: &str) -> String {
    let mut end = text.len().min(MAX_MESSAGE_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(data: &str) -> Event {
        EventReader::new(Endpoint::Chat).read(data.as_bytes())
    }

    fn completion(data: &str) -> Event {
        EventReader::new(Endpoint::Completions).read(data.as_bytes())
    }

    #[test]
    fn an_event_with_text_is_a_token() {
        assert_eq!(chat(r#"{"choices":[{"delta":{"content":"a"}}]}"#), Event::Token);
        assert_eq!(chat(r#"{"choices":[{"delta":{"content": "\"" }}]}"#), Event::Token);
        assert_eq!(chat(r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#), Event::Token);
        let logprobs = r#"{"choices":[{"logprobs":{"content":[{"token":"a"}]},"delta":{"content":"a"}}]}"#;
        assert_eq!(chat(logprobs), Event::Token);
        assert_eq!(completion(r#"{"choices":[{"index":0,"text":" a","finish_reason":null}]}"#), Event::Token);
    }

    #[test]
    fn an_event_without_text_is_none() {
        assert_eq!(chat(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#), Event::Other(None));
        assert_eq!(chat(r#"{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}"#), Event::Other(None));
        assert_eq!(chat(r#"{"choices":[{"delta":{"content":null}}]}"#), Event::Other(None));
        assert_eq!(completion(r#"{"choices":[{"text":"","logprobs":null}]}"#), Event::Other(None));
        assert_eq!(completion(r#"{"id":"\"text\":\"x","choices":[{"text":""}]}"#), Event::Other(None));
        assert_eq!(completion("[DONE]"), Event::Done);
    }

    #[test]
    fn usage_is_read() {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,
            "prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0}}}"#;
        let details = Some(Details { cached_tokens: 4 });
        let right = Usage { prompt_tokens: 7, completion_tokens: 3, prompt_tokens_details: details };
        assert_eq!(completion(usage), Event::Other(Some(right)));
    }

    #[test]
    fn errors_keep_their_message() {
        assert_eq!(chat(r#"{"error":{"message":"gone","code":500}}"#), Event::Error("gone".to_owned()));
        assert_eq!(chat(r#"{"error":"gone"}"#), Event::Error("gone".to_owned()));
        assert!(matches!(chat("{"), Event::Error(message) if message.contains("not JSON")));
        assert_eq!(error_message(br#"{"error":{"message":"slow down"}}"#), "slow down");
        assert_eq!(error_message(b"<html> no\n"), "<html> no");
        assert_eq!(error_message("\u{e4}".repeat(400).as_bytes()).len(), MAX_MESSAGE_BYTES);
    }
}
