//! A tokenizer read from a `tokenizer.json`: text to ids by the tokenizers crate, ids to text by our own table.
//!
//! 1. Cheap to clone and shared by all threads; nothing changes after construction.
//! 2. Truncation and padding that a file asks for are switched off: a prompt is never silently changed.
//! 3. Ids name tokens exactly as the file says, or the file is refused.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use cbrs_core::{Error, Result};

use crate::byte_level::{AddedToken, ByteLevelEncoder, ModelKind, Pipeline};
use crate::detokenize::Detokenizer;
use crate::pieces::{Decoder, MAX_VOCAB_SIZE, PieceTable};

/// The parts of a `tokenizer.json` that are checked or used here; reading it also proves that the whole file is JSON.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    decoder: Option<Value>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    model: ModelKind,
}

#[derive(Debug)]
struct Inner {
    tokenizer: tokenizers::Tokenizer,
    pieces: PieceTable,
    /// Absent for tokenizers of another kind.
    byte_level: Option<ByteLevelEncoder>,
    /// Put before every encoded text that asks for special tokens and does not have it yet.
    add_bos: Option<i32>,
}

/// Turns text into token ids and back.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Tokenizer` if the file is malformed or of a kind that cannot be decoded token by token.
    pub fn from_json(json: &str) -> Result<Self> {
        let header: Header =
            serde_json::from_str(json).map_err(|error| refused(format!("not a tokenizer.json: {error}")))?;
        let decoder = Decoder::from_json(header.decoder.as_ref())?;
        let mut tokenizer = read(json)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| refused(error.to_string()))?;
        check_added_tokens(&tokenizer, &header.added_tokens)?;
        let byte_level = ByteLevelEncoder::new(header.pipeline(), tokenizer.get_model());
        let special: HashSet<String> =
            header.added_tokens.into_iter().filter(|token| token.special).map(|token| token.content).collect();
        let tokens = (0..vocab_size(&tokenizer)?).map(|id| {
            let text = tokenizer.id_to_token(id as u32)?;
            let is_special = special.contains(&text);
            Some((text, is_special))
        });
        let pieces = PieceTable::new(decoder, tokens);
        Ok(Self { inner: Arc::new(Inner { tokenizer, pieces, byte_level, add_bos: None }) })
    }

    /// The same tokenizer, putting `bos_token` before every text that is encoded with special tokens.
    ///
    /// # Errors
    /// `Tokenizer` if there is no such token.
    pub fn with_bos(self, bos_token: &str) -> Result<Self> {
        let id = self.token_to_id(bos_token);
        let id = id.ok_or_else(|| refused(format!("the BOS token {bos_token:?} is not in the vocabulary")))?;
        let mut inner = Arc::try_unwrap(self.inner)
            .map_err(|_| refused("the BOS token must be set before the tokenizer is shared".to_owned()))?;
        inner.add_bos = Some(id);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Number of token ids, added tokens included: the highest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// Id of a token given by its exact text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<i32> {
        self.inner.tokenizer.token_to_id(token).map(|id| id as i32)
    }

    /// Text of a token in the vocabulary (not what it decodes to).
    pub fn id_to_token(&self, id: i32) -> Option<String> {
        self.inner.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Splits `text` into token ids. Special tokens written out in the text are always recognised;
    /// `add_special_tokens` adds those that the model wants around every text, such as BOS.
    ///
    /// # Errors
    /// `Tokenizer` if the text contains something that the vocabulary cannot express.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>> {
        self.encode_with(text, add_special_tokens, false)
    }

    /// As `encode`, for threads whose work nobody waits for: where the kind of tokenizer allows it (byte-level BPE as of GPT-2), other
    /// threads get their turn several times in a millisecond.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_in_background(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>> {
        self.encode_with(text, add_special_tokens, true)
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool, pauses: bool) -> Result<Vec<i32>> {
        cbrs_core::fault::point("encode");
        let Inner { tokenizer, byte_level, .. } = &*self.inner;
        let encoded = match byte_level {
            Some(encoder) => encoder.encode(tokenizer.get_model(), text, pauses),
            None => self.encode_by_crate(text, add_special_tokens),
        };
        let mut ids = encoded.map_err(|error| refused(error.to_string()))?;
        let bos = self.inner.add_bos.filter(|_| add_special_tokens);
        if let Some(bos) = bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// As the tokenizers crate does it, for tokenizers of any kind.
    fn encode_by_crate(&self, text: &str, add_special_tokens: bool) -> tokenizers::Result<Vec<i32>> {
        let encoding = self.inner.tokenizer.encode_fast(text, add_special_tokens)?;
        Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
    }

    /// The text of a whole sequence. Ids without a token add nothing; bytes that form no character become U+FFFD.
    pub fn decode(&self, ids: &[i32], skip_special_tokens: bool) -> String {
        cbrs_core::fault::point("decode");
        let mut detokenizer = Detokenizer::new(self.clone(), skip_special_tokens);
        let mut text = String::with_capacity(ids.len() * 4);
        for &id in ids {
            detokenizer.push(id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// Appends the bytes that `id` adds inside a text, special or not; an id without a token adds none.
    pub fn push_token_bytes(&self, id: i32, bytes: &mut Vec<u8>) {
        if let Some(piece) = self.pieces().get(id) {
            bytes.extend_from_slice(piece.bytes);
        }
    }

    pub(crate) fn pieces(&self) -> &PieceTable {
        &self.inner.pieces
    }

    /// What `id` adds to a text as its first token.
    pub(crate) fn first_contribution(&self, id: i32) -> Vec<u8> {
        self.id_to_token(id).map_or_else(Vec::new, |token| self.pieces().decoder.contribution(&token, true).0)
    }
}

impl Header {
    fn pipeline(&self) -> Pipeline<'_> {
        let Self { normalizer, pre_tokenizer, post_processor, model, added_tokens, .. } = self;
        Pipeline { normalizer, pre_tokenizer, post_processor, model, added_tokens }
    }
}

fn refused(message: String) -> Error {
    Error::Tokenizer { message }
}

/// Builds the tokenizer; the crate panics on some malformed files, and such a panic must not reach the host.
fn read(json: &str) -> Result<tokenizers::Tokenizer> {
    match catch_unwind(AssertUnwindSafe(|| json.parse::<tokenizers::Tokenizer>())) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(error)) => Err(refused(format!("not a usable tokenizer.json: {error}"))),
        Err(_) => Err(refused("not a usable tokenizer.json".to_owned())),
    }
}

/// The crate renumbers added tokens whose id it does not like; the model's ids are those of the file.
fn check_added_tokens(tokenizer: &tokenizers::Tokenizer, added: &[AddedToken]) -> Result<()> {
    for token in added.iter().filter(|token| !token.content.is_empty()) {
        let got = tokenizer.token_to_id(&token.content).map(u64::from);
        if got != Some(token.id) {
            let got = got.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let AddedToken { id, content, .. } = token;
            return Err(refused(format!("added token {content:?} has id {id}, but the vocabulary gives it {got}")));
        }
    }
    Ok(())
}

/// The highest id plus one.
fn vocab_size(tokenizer: &tokenizers::Tokenizer) -> Result<usize> {
    let num_tokens = tokenizer.get_vocab_size(true);
    // As a rule each id below has a token. Listing all of them, to find the highest one, costs as much as reading the file.
    let is_dense = (0..num_tokens).all(|id| tokenizer.id_to_token(id as u32).is_some());
    let highest = || tokenizer.get_vocab(true).into_values().max();
    let size = if is_dense { num_tokens } else { highest().map_or(0, |id| id as usize + 1) };
    if size == 0 || size > MAX_VOCAB_SIZE {
        return Err(refused(format!("the vocabulary spans {size} ids, but must span 1 to {MAX_VOCAB_SIZE}")));
    }
    Ok(size)
}

#[cfg(test)]
mod tests;
