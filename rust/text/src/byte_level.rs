//! The fast way from text to ids for tokenizers of GPT-2's family: words are cut without regular expressions, and ids of words that
//! came before are remembered.
//!
//! 1. The ids are those that the tokenizers crate gives: words are tokenized one by one, and their ids come from its model.
//! 2. A tokenizer with anything else in its file than what is looked for here does not take this way.
//! 3. Nobody waits for a lock: whoever finds the memory in use does without it.
//! 4. With pauses no run is longer than `PAUSE_INTERVAL` and what it takes to look at the time, however long a word is: giant ones are merged here
//!    (`merges.rs`).

use std::collections::HashMap;
use std::sync::RwLock;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{Model as _, ModelWrapper};

use crate::gpt2_split::Words;
use crate::merges::{MergeEntry, Merges};

/// Words that are remembered; one more, and all are forgotten.
const MAX_WORDS: usize = 1 << 15;
/// Longer words are not remembered, in bytes.
const MAX_WORD_BYTES: usize = 32;
/// Longer words, in bytes, are merged with pauses.
const MAX_UNPAUSED_WORD_BYTES: usize = 512;
/// Longest run without a pause.
const PAUSE_INTERVAL: Duration = Duration::from_micros(250);
/// Text that takes much less than that.
const BYTES_BETWEEN_LOOKS: usize = 256;

/// What a `tokenizer.json` says about the way from text to ids, besides its model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pipeline<'a> {
    pub(crate) normalizer: &'a Value,
    pub(crate) pre_tokenizer: &'a Value,
    pub(crate) post_processor: &'a Value,
    pub(crate) model: &'a ModelKind,
    pub(crate) added_tokens: &'a [AddedToken],
}

/// What is looked at of a model.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ModelKind {
    #[serde(default)]
    r#type: Option<String>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    merges: Vec<MergeEntry>,
}

/// A token that is found in the text before it is cut into words.
#[derive(Debug, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // the fields of the file
pub(crate) struct AddedToken {
    pub(crate) id: u64,
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

/// Encodes texts as one tokenizer does.
#[derive(Debug)]
pub(crate) struct ByteLevelEncoder {
    added: AddedTokens,
    /// Each digit is a word.
    splits_digits: bool,
    known: RwLock<KnownWords>,
    /// Absent if giant words are left to the crate.
    merges: Option<Merges>,
}

impl ByteLevelEncoder {
    /// `None` if the file is not of the kind that this knows.
    pub(crate) fn new(pipeline: Pipeline<'_>, tokenizer_model: &ModelWrapper) -> Option<Self> {
        let Pipeline { normalizer, pre_tokenizer, post_processor, model, added_tokens } = pipeline;
        let is_plain = model.r#type.as_deref() == Some("BPE") && model.dropout.is_null() && normalizer.is_null();
        // A byte-level one changes offsets, and no ids.
        let adds_nothing = post_processor.is_null() || kind(post_processor) == Some("ByteLevel");
        if !is_plain || !adds_nothing {
            return None;
        }
        let splits_digits = match kind(pre_tokenizer)? {
            "ByteLevel" if is_byte_level(pre_tokenizer) => false,
            "Sequence" => match pre_tokenizer.get("pretokenizers")?.as_array()?.as_slice() {
                [digits, bytes] if is_single_digits(digits) && is_byte_level(bytes) => true,
                _ => return None,
            },
            _ => return None,
        };
        let added = AddedTokens::new(added_tokens)?;
        let is_none = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        // A whole word that is in the vocabulary would have to be looked for first, or parts would be spelled otherwise.
        let is_simple =
            !model.ignore_merges && is_none(&model.continuing_subword_prefix) && is_none(&model.end_of_word_suffix);
        let merges = Merges::new(&model.merges, |token| tokenizer_model.token_to_id(token)).filter(|_| is_simple);
        Some(Self { added, splits_digits, known: RwLock::default(), merges })
    }

    /// The ids of a text; `model` is the tokenizer's. With `pauses`, other threads get their turn in between.
    ///
    /// # Errors
    /// What the model says about a word that it cannot express.
    pub(crate) fn encode(&self, model: &ModelWrapper, text: &str, pauses: bool) -> tokenizers::Result<Vec<i32>> {
        let ids = Vec::with_capacity(text.len() / 4 + 8);
        let mut run = Run { encoder: self, model, ids, pauses: pauses.then(Pauses::start) };
        let mut rest = text;
        while let Some((start, end, id)) = self.added.find(rest) {
            run.part(&rest[..start])?;
            run.ids.push(id);
            rest = &rest[end..];
        }
        run.part(rest)?;
        Ok(run.ids)
    }
}

/// One text on its way.
struct Run<'a> {
    encoder: &'a ByteLevelEncoder,
    model: &'a ModelWrapper,
    ids: Vec<i32>,
    pauses: Option<Pauses>,
}

impl Run<'_> {
    /// Adds a text without added tokens.
    fn part(&mut self, text: &str) -> tokenizers::Result<()> {
        let mut rest = text;
        while let Some((start, end)) = find_digit(rest).filter(|_| self.encoder.splits_digits) {
            self.words(&rest[..start])?;
            self.word(&rest[start..end])?;
            rest = &rest[end..];
        }
        self.words(rest)
    }

    fn words(&mut self, text: &str) -> tokenizers::Result<()> {
        Words::of(text).try_for_each(|word| self.word(word))
    }

    fn word(&mut self, word: &str) -> tokenizers::Result<()> {
        if let Some(merges) = self.encoder.merges.as_ref().filter(|_| word.len() > MAX_UNPAUSED_WORD_BYTES) {
            let pauses = &mut self.pauses;
            let pause = |num_bytes| pauses.iter_mut().for_each(|pauses| pauses.after(num_bytes));
            merges.encode(word, &mut self.ids, pause);
            return Ok(());
        }
        if let Some(pauses) = &mut self.pauses {
            pauses.after(word.len());
        }
        let known = &self.encoder.known;
        let is_short = word.len() <= MAX_WORD_BYTES;
        if is_short
            && let Ok(known) = known.try_read()
            && let Some(of_word) = known.get(word)
        {
            self.ids.extend_from_slice(of_word);
            return Ok(());
        }
        let start = self.ids.len();
        let letters: String = word.bytes().map(byte_letter).collect();
        self.ids.extend(self.model.tokenize(&letters)?.iter().map(|token| token.id as i32));
        if is_short && let Ok(mut known) = known.try_write() {
            known.insert(word, &self.ids[start..]);
        }
        Ok(())
    }
}

/// Gives the processor to whoever waits for it, from time to time.
struct Pauses {
    /// Bytes until the next look at the time.
    num_left: usize,
    last: Instant,
}

impl Pauses {
    fn start() -> Self {
        Self { num_left: BYTES_BETWEEN_LOOKS, last: Instant::now() }
    }

    fn after(&mut self, num_bytes: usize) {
        self.num_left = self.num_left.saturating_sub(num_bytes);
        if self.num_left == 0 {
            self.num_left = BYTES_BETWEEN_LOOKS;
            if self.last.elapsed() >= PAUSE_INTERVAL {
                std::thread::yield_now();
                self.last = Instant::now();
            }
        }
    }
}

fn kind(value: &Value) -> Option<&str> {
    value.get("type")?.as_str()
}

fn is_single_digits(value: &Value) -> bool {
    kind(value) == Some("Digits") && value.get("individual_digits").and_then(Value::as_bool) == Some(true)
}

fn is_byte_level(value: &Value) -> bool {
    let has_prefix = value.get("add_prefix_space").and_then(Value::as_bool);
    let uses_regex = value.get("use_regex").map_or(Some(true), Value::as_bool);
    kind(value) == Some("ByteLevel") && has_prefix == Some(false) && uses_regex == Some(true)
}

/// The first digit of a text, of whatever script.
fn find_digit(text: &str) -> Option<(usize, usize)> {
    let is_digit = |character: &(usize, char)| character.1.is_numeric();
    let (start, digit) = text.char_indices().find(is_digit)?;
    Some((start, start + digit.len_utf8()))
}

/// The character that stands for a byte: itself if it can be printed, else one from U+0100 on.
pub(crate) fn byte_letter(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u32::from(byte),
        0x00..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte - 0x7F),
        0xAD => 0x143,
    };
    char::from_u32(code).expect("below the surrogates")
}

/// The text of a token and its id.
type Content = (Box<[u8]>, i32);

/// Tokens that are found in the text before it is cut into words: of those that begin first, the longest.
#[derive(Debug)]
struct AddedTokens {
    /// Texts and ids by first byte, longest first.
    by_first: HashMap<u8, Vec<Content>, RandomState>,
    is_first: [bool; 256],
}

impl AddedTokens {
    /// `None` if one of them is found by other rules.
    fn new(tokens: &[AddedToken]) -> Option<Self> {
        let mut this = Self { by_first: HashMap::default(), is_first: [false; 256] };
        for token in tokens {
            if token.single_word || token.lstrip || token.rstrip || token.normalized {
                return None;
            }
            if let Some(&first) = token.content.as_bytes().first() {
                this.is_first[usize::from(first)] = true;
                this.by_first.entry(first).or_default().push((token.content.as_bytes().into(), token.id as i32));
            }
        }
        for tokens in this.by_first.values_mut() {
            tokens.sort_by_key(|(content, _)| std::cmp::Reverse(content.len()));
        }
        Some(this)
    }

    /// Start, end and id of the first one in `text`.
    fn find(&self, text: &str) -> Option<(usize, usize, i32)> {
        let bytes = text.as_bytes();
        let mut from = 0;
        while let Some(found) = bytes[from..].iter().position(|&byte| self.is_first[usize::from(byte)]) {
            let start = from + found;
            let tokens = self.by_first.get(&bytes[start])?;
            if let Some((content, id)) = tokens.iter().find(|(content, _)| bytes[start..].starts_with(content)) {
                return Some((start, start + content.len(), *id));
            }
            from = start + 1;
        }
        None
    }
}

/// Ids of words that came before.
#[derive(Debug, Default)]
struct KnownWords {
    /// Place in `ids`.
    places: HashMap<Box<str>, (u32, u32), RandomState>,
    ids: Vec<i32>,
}

impl KnownWords {
    fn get(&self, word: &str) -> Option<&[i32]> {
        let &(start, end) = self.places.get(word)?;
        self.ids.get(start as usize..end as usize)
    }

    fn insert(&mut self, word: &str, ids: &[i32]) {
        if self.places.contains_key(word) {
            return;
        }
        if self.places.len() >= MAX_WORDS {
            self.places.clear();
            self.ids.clear();
        }
        let start = self.ids.len() as u32;
        self.ids.extend_from_slice(ids);
        self.places.insert(word.into(), (start, self.ids.len() as u32));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded() {
        let mut known = KnownWords::default();
        for number in 0..3 * MAX_WORDS {
            known.insert(&number.to_string(), &[number as i32]);
        }
        assert!(known.places.len() <= MAX_WORDS && known.ids.len() <= MAX_WORDS);
        assert_eq!(known.get(&(3 * MAX_WORDS - 1).to_string()), Some(&[3 * MAX_WORDS as i32 - 1][..]));
        assert_eq!(known.get("0"), None);
    }

    #[test]
    fn a_word_may_be_inserted_by_several() {
        let mut known = KnownWords::default();
        known.insert("a", &[1, 2]);
        known.insert("a", &[1, 2]);
        assert_eq!(known.get("a"), Some(&[1, 2][..]));
        assert_eq!(known.ids.len(), 2);
    }
}
