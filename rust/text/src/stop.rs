//! Stop strings: finding the first one in a text that arrives in parts.
//!
//! 1. The result does not depend on how the text is cut: the stop string that is complete first wins, and of several that
//!    are complete with the same character the longest, so that no part of a stop string is ever shown.
//! 2. What is held back is exactly the longest end of the text that is the beginning of a stop string.
//!
//! Each string has its own Knuth-Morris-Pratt automaton over bytes: work per byte is constant, amortised.

use std::sync::Arc;

use cbrs_core::{Error, Result};

/// Most stop strings that one request may have.
pub const MAX_STOP_STRINGS: usize = 16;
/// Longest stop string, in characters.
pub const MAX_STOP_CHARS: usize = 256;

#[derive(Debug)]
struct Pattern {
    text: Arc<str>,
    /// For each length `n >= 1`, at `n - 1`: the longest proper beginning of the pattern that ends its first `n` bytes.
    fallback: Vec<u16>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0u16; bytes.len()];
        let mut matched = 0usize;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = fallback[matched - 1] as usize;
            }
            if bytes[at] == bytes[matched] {
                matched += 1;
            }
            fallback[at] = matched as u16;
        }
        Self { text: text.into(), fallback }
    }

    /// Bytes of the pattern that match after one more byte of text.
    fn advance(&self, matched: u16, byte: u8) -> u16 {
        let bytes = self.text.as_bytes();
        let mut matched = matched as usize;
        while matched > 0 && (matched == bytes.len() || bytes[matched] != byte) {
            matched = self.fallback[matched - 1] as usize;
        }
        (matched + usize::from(bytes[matched] == byte)) as u16
    }
}

/// The stop strings of one request, checked and prepared; by default none.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
}

impl StopStrings {
    /// Checks and prepares `stops`; an empty list never stops anything.
    ///
    /// # Errors
    /// `TooManyEntries` above 16 strings; `InvalidLength` unless each has 1 to 256 characters.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self> {
        if stops.len() > MAX_STOP_STRINGS {
            return Err(Error::TooManyEntries { name: "stop", len: stops.len(), limit: MAX_STOP_STRINGS });
        }
        for stop in stops {
            let len = stop.as_ref().chars().count();
            if len == 0 || len > MAX_STOP_CHARS {
                return Err(Error::InvalidLength { name: "stop", len, unit: "characters", expected: "1 to 256" });
            }
        }
        Ok(Self { patterns: stops.iter().map(|stop| Pattern::new(stop.as_ref())).collect() })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }
}

/// A stop string that was found.
#[derive(Debug, Clone)]
pub(crate) struct StopMatch {
    /// The stop string.
    pub(crate) stop: Arc<str>,
    /// Bytes of the part just fed up to and including its end.
    pub(crate) end: usize,
}

/// Position of one text in all of its stop strings.
#[derive(Debug, Clone)]
pub(crate) struct StopMatcher {
    stops: StopStrings,
    /// Bytes of each stop string that the end of the text matches.
    matched: Vec<u16>,
}

impl StopMatcher {
    pub(crate) fn new(stops: StopStrings) -> Self {
        let matched = vec![0; stops.patterns.len()];
        Self { stops, matched }
    }

    /// Reads the next part of the text; after a match the matcher is spent.
    pub(crate) fn feed(&mut self, part: &str) -> Option<StopMatch> {
        for (at, &byte) in part.as_bytes().iter().enumerate() {
            let mut found: Option<&Pattern> = None;
            for (pattern, matched) in self.stops.patterns.iter().zip(&mut self.matched) {
                *matched = pattern.advance(*matched, byte);
                let is_complete = *matched as usize == pattern.text.len();
                if is_complete && found.is_none_or(|found| pattern.text.len() > found.text.len()) {
                    found = Some(pattern);
                }
            }
            if let Some(pattern) = found {
                return Some(StopMatch { stop: Arc::clone(&pattern.text), end: at + 1 });
            }
        }
        None
    }

    /// Bytes at the end of the text that may still become a stop string.
    pub(crate) fn held(&self) -> usize {
        self.matched.iter().copied().max().unwrap_or(0) as usize
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Text before the stop and the stop, for every way to cut `text` in two.
    fn run(text: &str, stops: &[&str]) -> Option<(String, String)> {
        let mut results = Vec::new();
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let mut matcher = StopMatcher::new(StopStrings::new(stops).unwrap());
            let mut base = 0;
            let mut result = None;
            for part in [&text[..cut], &text[cut..]] {
                if let Some(found) = matcher.feed(part) {
                    let end = base + found.end;
                    result = Some((text[..end - found.stop.len()].to_owned(), found.stop.to_string()));
                    break;
                }
                base += part.len();
            }
            results.push(result);
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "the cut changed the result: {results:?}");
        results.pop().unwrap()
    }

    fn found(before: &str, stop: &str) -> (String, String) {
        (before.to_owned(), stop.to_owned())
    }

    #[test]
    fn the_stop_string_that_is_complete_first_wins() {
        assert_eq!(run("one two three", &["three", "two"]), Some(found("one ", "two")));
        assert_eq!(run("abcd", &["abc", "ab"]), Some(found("", "ab")));
        assert_eq!(run("xabcd", &["abcd", "bc"]), Some(found("xa", "bc")));
        assert_eq!(run("nothing", &["else"]), None);
        assert_eq!(run("nothing", &[]), None);
    }

    #[test]
    fn of_two_that_end_together_the_longer_one_wins() {
        assert_eq!(run("say abc", &["bc", "abc"]), Some(found("say ", "abc")));
        assert_eq!(run("say abc", &["abc", "bc"]), Some(found("say ", "abc")));
    }

    #[test]
    fn a_failed_beginning_does_not_hide_a_later_match() {
        assert_eq!(run("aaab", &["aab"]), Some(found("a", "aab")));
        assert_eq!(run("ababac", &["abac"]), Some(found("ab", "abac")));
        assert_eq!(run("né né né!", &["né né!"]), Some(found("né ", "né né!")));
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut matcher = StopMatcher::new(StopStrings::new(&["DEFG", "FX"]).unwrap());
        assert!(matcher.feed("abcDE").is_none());
        assert_eq!(matcher.held(), 2);
        assert!(matcher.feed("F").is_none());
        assert_eq!(matcher.held(), 3);
        assert!(matcher.feed("F").is_none());
        assert_eq!(matcher.held(), 1);
        assert!(matcher.feed("z").is_none());
        assert_eq!(matcher.held(), 0);
    }

    #[test]
    fn limits_are_checked_with_the_numbers() {
        let many = vec!["x"; 17];
        assert_eq!(StopStrings::new(&many).unwrap_err(), Error::TooManyEntries { name: "stop", len: 17, limit: 16 });
        assert!(StopStrings::new(&many[..16]).is_ok());
        let long = "é".repeat(257);
        let error = StopStrings::new(&[&long]).unwrap_err();
        assert_eq!(error.to_string(), "stop is 257 characters long, but must be 1 to 256");
        assert!(StopStrings::new(&["é".repeat(256)]).is_ok());
        assert!(matches!(StopStrings::new(&[""]), Err(Error::InvalidLength { len: 0, .. })));
    }
}
