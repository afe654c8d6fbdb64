//! The text of one choice while it grows: detokenizing and stop strings put together.
//!
//! 1. `shown` never shrinks, and nothing of a stop string ever belongs to it unless the stream keeps stop strings.
//! 2. The deltas joined are the final text.

use std::sync::Arc;

use crate::detokenize::Detokenizer;
use crate::stop::{StopMatcher, StopStrings};
use crate::tokenizer::Tokenizer;

/// Turns the token ids of one choice into text that may be shown, up to a stop string.
///
/// ```
/// # use cbrs_text::{StopStrings, TextStream, Tokenizer};
/// # let json = r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"red": 0, "blue": 1, "?": 2}, "unk_token": "?"}}"#;
/// let tokenizer = Tokenizer::from_json(json).unwrap();
/// let mut stream = TextStream::new(tokenizer, StopStrings::new(&[" blue"]).unwrap(), true);
/// stream.push(0);
/// assert_eq!(stream.take_delta(), "red");
/// stream.push(1);
/// assert_eq!(stream.take_delta(), "");
/// assert_eq!(stream.stopped().map(|stop| &**stop), Some(" blue"));
/// ```
#[derive(Debug, Clone)]
pub struct TextStream {
    detokenizer: Detokenizer,
    /// Absent without stop strings.
    matcher: Option<StopMatcher>,
    /// Tokens whose text is not searched for stop strings.
    min_tokens: u32,
    num_tokens: u32,
    /// The stop string belongs to the text.
    keeps_stop: bool,
    text: String,
    /// Bytes of `text` that can no longer become part of a stop string.
    shown: usize,
    /// Bytes of `text` that `take_delta` has given out.
    taken: usize,
    stopped: Option<Arc<str>>,
}

impl TextStream {
    /// A stream without text.
    pub fn new(tokenizer: Tokenizer, stops: StopStrings, skip_special_tokens: bool) -> Self {
        Self {
            detokenizer: Detokenizer::new(tokenizer, skip_special_tokens),
            matcher: (!stops.is_empty()).then(|| StopMatcher::new(stops)),
            min_tokens: 0,
            num_tokens: 0,
            keeps_stop: false,
            text: String::new(),
            shown: 0,
            taken: 0,
            stopped: None,
        }
    }

    /// Lets the stop string that ends the text belong to it; nothing is held back then.
    #[must_use]
    pub fn keeping_stop(self, keeps_stop: bool) -> Self {
        Self { keeps_stop, ..self }
    }

    /// Looks for stop strings only in the text that follows the first `min_tokens` tokens.
    #[must_use]
    pub fn with_min_tokens(self, min_tokens: u32) -> Self {
        Self { min_tokens, ..self }
    }

    /// Makes the stream a continuation: characters that `prompt` left unfinished are completed by the first tokens, and
    /// a leading space stays. Without it the text is that of the generated ids alone.
    pub fn prime(&mut self, prompt: &[i32]) {
        let mut text = String::new();
        for &id in prompt {
            self.detokenizer.push(id, &mut text);
        }
    }

    /// Reads the next token; after a stop string further tokens change nothing.
    pub fn push(&mut self, id: i32) {
        cbrs_core::fault::point("stream: push");
        if self.stopped.is_none() {
            let start = self.text.len();
            self.num_tokens = self.num_tokens.saturating_add(1);
            self.detokenizer.push(id, &mut self.text);
            self.scan(start);
        }
    }

    /// Ends the text: what was held back belongs to it, and unfinished characters become U+FFFD.
    pub fn finish(&mut self) {
        if self.stopped.is_none() {
            let start = self.text.len();
            self.detokenizer.finish(&mut self.text);
            self.scan(start);
            self.shown = self.text.len();
        }
    }

    /// The stop string that ended the text, if one did.
    pub fn stopped(&self) -> Option<&Arc<str>> {
        self.stopped.as_ref()
    }

    /// The text that may be shown so far.
    pub fn shown(&self) -> &str {
        &self.text[..self.shown]
    }

    /// What may be shown since the last call.
    pub fn take_delta(&mut self) -> &str {
        let from = std::mem::replace(&mut self.taken, self.shown);
        &self.text[from..self.shown]
    }

    /// The final text; call `finish` first.
    pub fn into_text(mut self) -> String {
        self.text.truncate(self.shown);
        self.text
    }

    fn scan(&mut self, start: usize) {
        self.shown = self.text.len();
        let Some(matcher) = self.matcher.as_mut().filter(|_| self.num_tokens > self.min_tokens) else { return };
        if let Some(found) = matcher.feed(&self.text[start..]) {
            let end = start + found.end;
            self.text.truncate(if self.keeps_stop { end } else { end - found.stop.len() });
            self.shown = self.text.len();
            self.stopped = Some(found.stop);
        } else if !self.keeps_stop {
            self.shown -= matcher.held();
        }
    }
}
