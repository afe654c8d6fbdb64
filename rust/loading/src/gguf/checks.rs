//! Checks the metadata keys that this crate and the model code rely on.
//!
//! Invariant: after [`check`] a known key, where it is present, has its type; lists that belong to
//! the vocabulary have its length; and a special token id is inside the vocabulary or "none".

use super::GgufFile;
use super::tokenizer::{self, MERGES_KEY, NO_TOKEN, SCORES_KEY, TOKEN_TYPES_KEY, TOKENS_KEY, is_token_id_key};
use super::value::Value;
use crate::limits::{MAX_MERGES, MAX_TOKENS};
use crate::{ErrorKind, Result};

const EMBEDDING: &str = "token_embd.weight";

/// What a known key must hold.
#[derive(Clone, Copy)]
enum Shape {
    Text,
    Bool,
    Integer,
    Number,
    Texts,
    Integers,
    Floats,
    IntegerOrIntegers,
}

impl Shape {
    fn matches(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Text, Value::Text(_)) | (Self::Bool, Value::Bool(_)) | (Self::Number, Value::Float(_)) => true,
            (Self::Integer | Self::Number | Self::IntegerOrIntegers, value) if value.as_integer().is_some() => true,
            (Self::Texts, Value::Array(array)) => array.is_text(),
            (Self::Integers | Self::IntegerOrIntegers, Value::Array(array)) => array.is_integer(),
            (Self::Floats, Value::Array(array)) => array.is_float(),
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Text => "a string",
            Self::Bool => "a bool",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Texts => "an array of strings",
            Self::Integers => "an array of integers",
            Self::Floats => "an array of floats",
            Self::IntegerOrIntegers => "an integer or an array of integers",
        }
    }
}

/// Keys under their full names.
const KEYS: [(&str, Shape); 13] = [
    ("general.architecture", Shape::Text),
    ("general.name", Shape::Text),
    ("tokenizer.ggml.model", Shape::Text),
    ("tokenizer.ggml.pre", Shape::Text),
    (TOKENS_KEY, Shape::Texts),
    (TOKEN_TYPES_KEY, Shape::Integers),
    (SCORES_KEY, Shape::Floats),
    (MERGES_KEY, Shape::Texts),
    (tokenizer::ADD_BOS_KEY, Shape::Bool),
    (tokenizer::ADD_EOS_KEY, Shape::Bool),
    (tokenizer::ADD_SPACE_PREFIX_KEY, Shape::Bool),
    (tokenizer::CHAT_TEMPLATE_KEY, Shape::Text),
    ("general.file_type", Shape::Integer),
];

/// Keys that stand behind the name of the architecture.
const ARCHITECTURE_KEYS: [(&str, Shape); 18] = [
    ("block_count", Shape::Integer),
    ("context_length", Shape::Integer),
    ("embedding_length", Shape::Integer),
    ("feed_forward_length", Shape::IntegerOrIntegers),
    ("vocab_size", Shape::Integer),
    ("attention.head_count", Shape::IntegerOrIntegers),
    ("attention.head_count_kv", Shape::IntegerOrIntegers),
    ("attention.key_length", Shape::Integer),
    ("attention.value_length", Shape::Integer),
    ("attention.layer_norm_rms_epsilon", Shape::Number),
    ("attention.layer_norm_epsilon", Shape::Number),
    ("attention.sliding_window", Shape::Integer),
    ("rope.dimension_count", Shape::Integer),
    ("rope.freq_base", Shape::Number),
    ("rope.scaling.type", Shape::Text),
    ("rope.scaling.factor", Shape::Number),
    ("rope.scaling.original_context_length", Shape::Integer),
    ("rope.scaling.attn_factor", Shape::Number),
];

/// Checks the known keys of `file`.
pub(super) fn check(file: &GgufFile) -> Result<()> {
    for (key, shape) in KEYS {
        check_type(file, key, shape)?;
    }
    if let Some(Value::Text(architecture)) = file.value("general.architecture") {
        for (key, shape) in ARCHITECTURE_KEYS {
            check_type(file, &format!("{architecture}.{key}"), shape)?;
        }
    }
    let vocab_size = check_vocabulary(file)?;
    check_token_ids(file, vocab_size)
}

fn check_type(file: &GgufFile, key: &str, shape: Shape) -> Result<()> {
    match file.value(key) {
        Some(value) if !shape.matches(value) => {
            let kind = ErrorKind::WrongType { expected: shape.name(), found: value.type_name() };
            Err(file.error(key, kind))
        }
        _ => Ok(()),
    }
}

/// Checks that the lists of the vocabulary agree, and returns the number of tokens if it is known.
fn check_vocabulary(file: &GgufFile) -> Result<Option<u64>> {
    let length = |key| match file.value(key) {
        Some(Value::Array(array)) => Some(array.len() as u64),
        _ => None,
    };
    let embedding_rows = file.tensor(EMBEDDING).ok().map(|info| info.shape[0] as u64);
    let check = |key, found, limit| ErrorKind::check_limit(found, limit).map_err(|kind| file.error(key, kind));
    check(MERGES_KEY, length(MERGES_KEY).unwrap_or(0), MAX_MERGES)?;
    let Some(num_tokens) = length(TOKENS_KEY) else { return Ok(embedding_rows) };
    // More rows than tokens are padding; a token without a row could not be computed with.
    check(TOKENS_KEY, num_tokens, embedding_rows.unwrap_or(MAX_TOKENS).min(MAX_TOKENS))?;
    for key in [TOKEN_TYPES_KEY, SCORES_KEY] {
        if let Some(found) = length(key).filter(|&found| found != num_tokens) {
            let kind = ErrorKind::LengthMismatch { found, expected: num_tokens, of: "tokens" };
            return Err(file.error(key, kind));
        }
    }
    Ok(Some(num_tokens))
}

fn check_token_ids(file: &GgufFile, vocab_size: Option<u64>) -> Result<()> {
    for (key, value) in file.metadata().iter().filter(|(key, _)| is_token_id_key(key)) {
        check_type(file, key, Shape::Integer)?;
        let found = value.as_integer().unwrap_or(NO_TOKEN);
        // Some writers store the "none" of a signed integer.
        let is_none = found == NO_TOKEN || found == -1;
        let high = i128::from(vocab_size.unwrap_or(u64::from(u32::MAX))) - 1;
        if !is_none && !(0..=high).contains(&found) {
            return Err(file.error(key, ErrorKind::OutOfRange { found, low: 0, high }));
        }
    }
    Ok(())
}
