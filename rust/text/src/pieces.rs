//! What each token id adds to a text: the decoder of a `tokenizer.json`, evaluated once per vocabulary entry.
//!
//! 1. After construction a token's contribution depends on its id and on whether it is the first token, nothing else.
//! 2. A decoder that is not of that kind (WordPiece, CTC, …) is refused by name, never approximated.

use serde_json::Value;

use cbrs_core::{Error, Result};

/// Most ids that a vocabulary may span; bounds the table built from an unverified file.
pub(crate) const MAX_VOCAB_SIZE: usize = 1 << 22;

/// How contributions of tokens become characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteRule {
    /// Tokens are whole text.
    Text,
    /// All tokens are bytes of one stream; invalid bytes become one replacement character per maximal invalid part.
    Stream,
    /// Tokens are whole text, except that a run of `<0xNN>` tokens is a byte stream of its own; each invalid byte becomes
    /// one replacement character, as SentencePiece does it.
    Runs,
}

/// One step that rewrites the text of a single token.
#[derive(Debug, Clone)]
enum Step {
    Replace {
        from: String,
        to: String,
    },
    /// Replaces the word marker by a space; a first token loses it instead if `drop_first`.
    Metaspace {
        marker: char,
        drop_first: bool,
    },
}

/// The decoder of a tokenizer, in the form that can run token by token.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    steps: Vec<Step>,
    pub(crate) byte_rule: ByteRule,
    /// Tokens are words: a space goes before each but the first (tokenizers without a decoder).
    spaced: bool,
    /// Characters to remove from the start of the whole text, at most so many.
    pub(crate) strip: Option<(char, u32)>,
}

impl Decoder {
    /// Reads the `decoder` entry of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Tokenizer` if it is of a kind that cannot run token by token.
    pub(crate) fn from_json(decoder: Option<&Value>) -> Result<Self> {
        let mut this = Self { steps: Vec::new(), byte_rule: ByteRule::Text, spaced: false, strip: None };
        match decoder {
            None | Some(Value::Null) => this.spaced = true,
            Some(value) => {
                let mut fused = false;
                this.add(value, &mut fused)?;
            }
        }
        Ok(this)
    }

    fn add(&mut self, step: &Value, fused: &mut bool) -> Result<()> {
        let kind = step.get("type").and_then(Value::as_str).unwrap_or("without a type");
        let is_whole_text = *fused || self.byte_rule == ByteRule::Stream;
        match kind {
            "Sequence" => {
                let steps = step.get("decoders").and_then(Value::as_array);
                for inner in steps.ok_or_else(|| unsupported(kind, "has no decoders"))? {
                    self.add(inner, fused)?;
                }
            }
            "Fuse" => *fused = true,
            "ByteLevel" if !is_whole_text && self.byte_rule == ByteRule::Text => self.byte_rule = ByteRule::Stream,
            "ByteFallback" if !is_whole_text => self.byte_rule = ByteRule::Runs,
            "Replace" if !is_whole_text && self.byte_rule == ByteRule::Text => self.steps.push(replace_step(step)?),
            "Metaspace" if !is_whole_text && self.byte_rule == ByteRule::Text => self.steps.push(metaspace_step(step)?),
            "Strip" if is_whole_text && self.strip.is_none() => self.strip = strip_rule(step)?,
            "ByteLevel" | "ByteFallback" | "Replace" | "Metaspace" | "Strip" => {
                return Err(unsupported(kind, "is not supported at this place of the decoder sequence"));
            }
            _ => return Err(unsupported(kind, "is not supported")),
        }
        Ok(())
    }

    /// Whether a token adds something else when it is the first.
    pub(crate) fn first_differs(&self) -> bool {
        self.spaced || self.steps.iter().any(|step| matches!(step, Step::Metaspace { drop_first: true, .. }))
    }

    /// What `token` adds to the text, and whether it is a single byte of a run.
    pub(crate) fn contribution(&self, token: &str, is_first: bool) -> (Vec<u8>, bool) {
        let mut text = token.to_owned();
        for step in &self.steps {
            text = match step {
                Step::Replace { from, to } => text.replace(from.as_str(), to),
                Step::Metaspace { marker, drop_first: true } if is_first => text.replace(*marker, ""),
                Step::Metaspace { marker, .. } => text.replace(*marker, " "),
            };
        }
        if self.spaced && !is_first {
            text.insert(0, ' ');
        }
        match self.byte_rule {
            ByteRule::Text => (text.into_bytes(), false),
            ByteRule::Stream => (byte_level_bytes(&text).unwrap_or_else(|| text.into_bytes()), false),
            ByteRule::Runs => match fallback_byte(&text) {
                Some(byte) => (vec![byte], true),
                None => (text.into_bytes(), false),
            },
        }
    }
}

fn unsupported(kind: &str, what: &str) -> Error {
    Error::Tokenizer { message: format!("decoder {kind:?} {what}") }
}

fn replace_step(step: &Value) -> Result<Step> {
    let from = step.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str);
    let to = step.get("content").and_then(Value::as_str);
    match (from, to) {
        (Some(from), Some(to)) if !from.is_empty() => Ok(Step::Replace { from: from.to_owned(), to: to.to_owned() }),
        _ => Err(unsupported("Replace", "needs a non-empty String pattern and a content")),
    }
}

fn metaspace_step(step: &Value) -> Result<Step> {
    let marker = step.get("replacement").and_then(Value::as_str).and_then(only_char);
    let marker = marker.ok_or_else(|| unsupported("Metaspace", "needs one character as its replacement"))?;
    let never = step.get("prepend_scheme").and_then(Value::as_str) == Some("never")
        || step.get("add_prefix_space").and_then(Value::as_bool) == Some(false);
    Ok(Step::Metaspace { marker, drop_first: !never })
}

fn strip_rule(step: &Value) -> Result<Option<(char, u32)>> {
    let content = step.get("content").and_then(Value::as_str).and_then(only_char);
    let content = content.ok_or_else(|| unsupported("Strip", "needs one character as its content"))?;
    let count = |name| step.get(name).and_then(Value::as_u64).unwrap_or(0);
    if count("stop") > 0 {
        return Err(unsupported("Strip", "with a stop count is not supported"));
    }
    let start = u32::try_from(count("start")).unwrap_or(u32::MAX);
    Ok((start > 0).then_some((content, start)))
}

fn only_char(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// Reads `<0xNN>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_byte.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// The bytes that a byte-level token stands for, or `None` if a character lies outside that alphabet (added tokens do).
fn byte_level_bytes(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_level_byte).collect()
}

/// Undoes GPT-2's bytes-to-characters map: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
fn byte_level_byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Contribution of every id of a vocabulary, in one allocation.
#[derive(Debug)]
pub(crate) struct PieceTable {
    pub(crate) decoder: Decoder,
    bytes: Vec<u8>,
    /// `[vocab_size + 1]` offsets into `bytes`.
    start: Vec<u32>,
    flags: Vec<u8>,
}

const IS_BYTE: u8 = 1;
const IS_SPECIAL: u8 = 2;

/// What one id adds to a text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) bytes: &'a [u8],
    /// One byte of a run of byte tokens.
    pub(crate) is_byte: bool,
    /// Left out of texts without special tokens.
    pub(crate) is_special: bool,
}

impl PieceTable {
    /// Evaluates `decoder` for all tokens; `tokens` gives text and specialness by id, `None` for ids without a token.
    pub(crate) fn new(decoder: Decoder, tokens: impl Iterator<Item = Option<(String, bool)>>) -> Self {
        let mut this = Self { decoder, bytes: Vec::new(), start: vec![0], flags: Vec::new() };
        for token in tokens {
            let mut flags = 0;
            if let Some((text, is_special)) = token {
                let (bytes, is_byte) = this.decoder.contribution(&text, false);
                this.bytes.extend_from_slice(&bytes);
                flags = if is_byte { IS_BYTE } else { 0 } | if is_special { IS_SPECIAL } else { 0 };
            }
            this.start.push(this.bytes.len() as u32);
            this.flags.push(flags);
        }
        this
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.flags.len()
    }

    /// What `id` adds after the first token; `None` for an id outside the vocabulary.
    pub(crate) fn get(&self, id: i32) -> Option<Piece<'_>> {
        let index = usize::try_from(id).ok()?;
        let flags = *self.flags.get(index)?;
        let bytes = &self.bytes[self.start[index] as usize..self.start[index + 1] as usize];
        Some(Piece { bytes, is_byte: flags & IS_BYTE != 0, is_special: flags & IS_SPECIAL != 0 })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_byte_alphabet_covers_every_byte_once() {
        let mut seen = [false; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_level_byte) {
                assert!(!seen[byte as usize], "byte {byte:#x} twice");
                seen[byte as usize] = true;
            }
        }
        assert!(seen.iter().all(|&seen| seen));
        assert_eq!(byte_level_bytes("Ġhi"), Some(b" hi".to_vec()));
        assert_eq!(byte_level_bytes("Ċ"), Some(b"\n".to_vec()));
    }

    #[test]
    fn decoders_that_cannot_run_token_by_token_are_refused_by_name() {
        for (decoder, name) in [
            (json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "WordPiece"),
            (json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}), "Strip"),
            (json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}), "Replace"),
            (
                json!({"type": "Sequence", "decoders": [
                    {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 2}]}),
                "Strip",
            ),
            (json!({"kind": "?"}), "without a type"),
        ] {
            let message = Decoder::from_json(Some(&decoder)).unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn byte_tokens_are_told_from_text() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xff>"), Some(255));
        assert_eq!(fallback_byte("<0x+5>"), None);
        assert_eq!(fallback_byte("<0x123>"), None);
        assert_eq!(fallback_byte("0x41"), None);
    }

    #[test]
    fn a_first_token_loses_its_word_marker_with_metaspace() {
        let decoder =
            Decoder::from_json(Some(&json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})));
        let decoder = decoder.unwrap();
        assert!(decoder.first_differs());
        assert_eq!(decoder.contribution("▁a", true).0, b"a");
        assert_eq!(decoder.contribution("▁a", false).0, b" a");
    }
}
