//! Where in a text each of its tokens begins, counted in characters.
//!
//! A token begins where the first character begins of which it has bytes: so the tokens of one character that is split all begin at that
//! character. A token that adds nothing, such as a special one that is left out, begins where the text goes on.

use crate::detokenize::Detokenizer;
use crate::tokenizer::Tokenizer;

/// Finds the offsets of tokens while their text grows.
///
/// ```
/// # use cbrs_text::{TextOffsets, Tokenizer};
/// # let json = r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"red": 0, "blue": 1, "?": 2}, "unk_token": "?"}}"#;
/// let tokenizer = Tokenizer::from_json(json).unwrap();
/// let mut offsets = TextOffsets::new(tokenizer, true);
/// assert_eq!([0, 1, 1].map(|id| offsets.push(id)), [0, 3, 8]);
/// ```
#[derive(Debug, Clone)]
pub struct TextOffsets {
    detokenizer: Detokenizer,
    num_chars: usize,
    /// Scratch.
    text: String,
}

impl TextOffsets {
    /// Offsets from the start of a text with or without special tokens.
    pub fn new(tokenizer: Tokenizer, skip_special_tokens: bool) -> Self {
        let detokenizer = Detokenizer::new(tokenizer, skip_special_tokens);
        Self { detokenizer, num_chars: 0, text: String::new() }
    }

    /// Offset of the next token.
    pub fn push(&mut self, id: i32) -> usize {
        let num_given_up = self.detokenizer.num_given_up_before(id);
        let offset = self.num_chars + num_given_up;
        self.text.clear();
        self.detokenizer.push(id, &mut self.text);
        self.num_chars += self.text.chars().count();
        offset
    }

    /// Offsets of the tokens of a text that they were made of, in which special tokens are spelled out; those that were added to it, as a
    /// BOS is, add nothing. No offset is beyond the text.
    pub fn of_text(tokenizer: &Tokenizer, text: &str, ids: &[i32]) -> Vec<usize> {
        let num_chars = text.chars().count();
        let (mut this, mut at) = (Self::new(tokenizer.clone(), false), 0);
        let mut offset_of = |id: i32| {
            let piece = tokenizer.pieces().get(id);
            let is_added = piece.is_some_and(|piece| {
                piece.is_special && !text.as_bytes().get(at..).is_some_and(|rest| rest.starts_with(piece.bytes))
            });
            if is_added {
                return this.num_chars;
            }
            let offset = this.push(id);
            at += this.text.len();
            offset
        };
        ids.iter().map(|&id| offset_of(id).min(num_chars)).collect()
    }
}
