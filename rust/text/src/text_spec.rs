//! What a request asks for that concerns text: checked here, because the scheduler never sees text.

use cbrs_core::{Error, Result};

use crate::stop::StopStrings;
use crate::tokenizer::Tokenizer;

/// Most strings that a request may ban.
pub(crate) const MAX_BAD_WORDS: usize = 256;
/// Longest banned string, in characters.
pub(crate) const MAX_BAD_WORD_CHARS: usize = 256;

/// The text parameters of a request.
#[derive(Debug, Clone)]
pub struct TextSpec {
    /// Strings that end the output.
    pub stops: StopStrings,
    /// The stop string that ended the output stays in its text.
    pub include_stop_str_in_output: bool,
    /// Strings that must not be generated.
    pub bad_words: Vec<String>,
    /// Special tokens add nothing to the text.
    pub skip_special_tokens: bool,
    /// There is a text besides the ids.
    pub detokenize: bool,
}

impl Default for TextSpec {
    fn default() -> Self {
        Self {
            stops: StopStrings::default(),
            include_stop_str_in_output: false,
            bad_words: Vec::new(),
            skip_special_tokens: true,
            detokenize: true,
        }
    }
}

impl TextSpec {
    /// Only stop strings.
    pub fn with_stops(stops: StopStrings) -> Self {
        Self { stops, ..Self::default() }
    }

    /// Refuses what needs a text that there is not.
    ///
    /// # Errors
    /// `UnusableParameter` for stop strings or banned strings without a tokenizer, and for stop strings without a text;
    /// `TooManyEntries` and `InvalidLength` for banned strings out of bounds.
    pub(crate) fn validate(&self, has_tokenizer: bool) -> Result<()> {
        let refused = |name, reason| Err(Error::UnusableParameter { name, reason });
        if !self.stops.is_empty() && !has_tokenizer {
            return refused("stop", "needs a tokenizer; use stop_token_ids");
        }
        if !self.stops.is_empty() && !self.detokenize {
            return refused("stop", "needs the text that detokenize=False leaves out; use stop_token_ids");
        }
        if !self.bad_words.is_empty() && !has_tokenizer {
            return refused("bad_words", "needs a tokenizer; use bad_words_token_ids or logit_bias");
        }
        if self.bad_words.len() > MAX_BAD_WORDS {
            let len = self.bad_words.len();
            return Err(Error::TooManyEntries { name: "bad_words", len, limit: MAX_BAD_WORDS });
        }
        let lengths = self.bad_words.iter().map(|word| word.chars().count());
        match lengths.into_iter().find(|len| !(1..=MAX_BAD_WORD_CHARS).contains(len)) {
            Some(len) => Err(Error::InvalidLength { name: "bad_words", len, unit: "characters", expected: "1 to 256" }),
            None => Ok(()),
        }
    }

    /// Appends the token sequences of the banned strings to `banned`: each word as the start of a text, and as it stands
    /// after a space, where that begins with another token. None comes twice.
    ///
    /// # Errors
    /// `Tokenizer` if the vocabulary cannot express a word.
    pub(crate) fn add_bad_words(&self, tokenizer: &Tokenizer, banned: &mut Vec<Vec<i32>>) -> Result<()> {
        for word in &self.bad_words {
            let bare = word.trim_start_matches(' ');
            if bare.is_empty() {
                add_new(banned, tokenizer.encode(word, false)?);
                continue;
            }
            let first = tokenizer.encode(bare, false)?;
            let spaced = tokenizer.encode(&format!(" {bare}"), false)?;
            let is_other = !spaced.is_empty() && spaced.first() != first.first();
            add_new(banned, first);
            if is_other {
                add_new(banned, spaced);
            }
        }
        Ok(())
    }
}

fn add_new(banned: &mut Vec<Vec<i32>>, word: Vec<i32>) {
    if !banned.contains(&word) {
        banned.push(word);
    }
}
