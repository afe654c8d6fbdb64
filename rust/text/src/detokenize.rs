//! Turning token ids into text one at a time, without ever looking back.
//!
//! 1. The pieces joined are the text of the whole sequence: decoding a whole sequence is this, run to its end.
//! 2. A character is given out by the token that completes it; a part of a character never is.
//! 3. At most three bytes wait; work per token is proportional to the token's own length.

use crate::pieces::{ByteRule, Decoder};
use crate::tokenizer::Tokenizer;

/// Position in the decoding of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    is_first: bool,
    chars: CharStream,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special_tokens: bool) -> Self {
        let strip_left = tokenizer.pieces().decoder.strip.map_or(0, |(_, count)| count);
        let chars = CharStream { pending: Vec::new(), strip_left };
        Self { tokenizer, skip_special_tokens, is_first: true, chars }
    }

    /// Appends to `out` the text that `id` completes; ids without a token add nothing.
    pub(crate) fn push(&mut self, id: i32, out: &mut String) {
        let table = self.tokenizer.pieces();
        let Some(piece) = table.get(id).filter(|piece| !(piece.is_special && self.skip_special_tokens)) else {
            return;
        };
        let decoder = &table.decoder;
        if std::mem::replace(&mut self.is_first, false) && decoder.first_differs() {
            let bytes = self.tokenizer.first_contribution(id);
            self.chars.push(decoder, &bytes, piece.is_byte, out);
        } else {
            self.chars.push(decoder, piece.bytes, piece.is_byte, out);
        }
    }

    /// Characters that the next token, `id`, does not belong to although it makes them appear: bytes that waited for another one than it brings.
    pub(crate) fn num_given_up_before(&self, id: i32) -> usize {
        let pending = &self.chars.pending;
        let table = self.tokenizer.pieces();
        let piece = table.get(id).filter(|piece| !(piece.is_special && self.skip_special_tokens));
        let Some(piece) = piece.filter(|_| !pending.is_empty()) else { return 0 };
        let rule = table.decoder.byte_rule;
        if rule != ByteRule::Stream && !piece.is_byte {
            return num_replacements(rule, pending.len());
        }
        let bytes = [pending, piece.bytes].concat();
        let invalid = bytes
            .utf8_chunks()
            .next()
            .filter(|chunk| chunk.valid().is_empty())
            .map_or(0, |chunk| chunk.invalid().len());
        let is_given_up = (1..=pending.len()).contains(&invalid) && !is_unfinished(&bytes[..invalid], bytes.len());
        if is_given_up { num_replacements(rule, invalid) } else { 0 }
    }

    /// Ends the sequence: bytes that never became a character are given out as replacement characters.
    pub(crate) fn finish(&mut self, out: &mut String) {
        self.chars.flush(&self.tokenizer.pieces().decoder, out);
    }
}

/// Makes characters of bytes.
#[derive(Debug, Clone)]
struct CharStream {
    /// Bytes of a character that is not complete yet.
    pending: Vec<u8>,
    /// Characters that may still be removed from the start of the text.
    strip_left: u32,
}

impl CharStream {
    fn push(&mut self, decoder: &Decoder, bytes: &[u8], is_byte: bool, out: &mut String) {
        if decoder.byte_rule != ByteRule::Stream && !is_byte {
            self.flush(decoder, out);
        }
        if self.pending.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            self.emit(decoder, text, out);
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(bytes);
        let decided = self.drain(decoder, &pending, out);
        pending.drain(..decided);
        self.pending = pending;
    }

    /// Gives out everything of `bytes` that is decided; returns how much that was.
    fn drain(&mut self, decoder: &Decoder, bytes: &[u8], out: &mut String) -> usize {
        let mut rest = bytes;
        for chunk in bytes.utf8_chunks() {
            self.emit(decoder, chunk.valid(), out);
            rest = &rest[chunk.valid().len()..];
            let invalid = chunk.invalid();
            if is_unfinished(invalid, rest.len()) {
                break;
            }
            self.emit_replacements(decoder, invalid.len(), out);
            rest = &rest[invalid.len()..];
        }
        bytes.len() - rest.len()
    }

    fn flush(&mut self, decoder: &Decoder, out: &mut String) {
        if !self.pending.is_empty() {
            let invalid = self.pending.len();
            self.pending.clear();
            self.emit_replacements(decoder, invalid, out);
        }
    }

    fn emit_replacements(&mut self, decoder: &Decoder, num_bytes: usize, out: &mut String) {
        for _ in 0..num_replacements(decoder.byte_rule, num_bytes) {
            self.emit(decoder, "\u{FFFD}", out);
        }
    }

    fn emit(&mut self, decoder: &Decoder, text: &str, out: &mut String) {
        let mut rest = text;
        if let Some((content, _)) = decoder.strip.filter(|_| self.strip_left > 0) {
            while self.strip_left > 0
                && let Some(stripped) = rest.strip_prefix(content)
            {
                rest = stripped;
                self.strip_left -= 1;
            }
            if !rest.is_empty() {
                self.strip_left = 0;
            }
        }
        out.push_str(rest);
    }
}

/// Replacement characters in place of so many invalid bytes.
fn num_replacements(rule: ByteRule, num_bytes: usize) -> usize {
    match rule {
        ByteRule::Runs => num_bytes,
        ByteRule::Stream | ByteRule::Text => usize::from(num_bytes > 0),
    }
}

/// Whether `invalid`, followed by nothing more (`left` counts all that is left, itself included), may become a character.
fn is_unfinished(invalid: &[u8], left: usize) -> bool {
    !invalid.is_empty()
        && invalid.len() == left
        && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none())
}
