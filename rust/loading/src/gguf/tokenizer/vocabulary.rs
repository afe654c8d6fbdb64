//! Tokens, their types and scores.
//!
//! Invariant: `tokens`, `kinds` and (where there are any) `scores` have the same length, the tokens
//! are unique, and `ids` finds each of them.

use std::collections::HashMap;

use super::super::GgufFile;
use super::super::value::Value;
use super::{SCORES_KEY, TOKEN_TYPES_KEY, TOKENS_KEY};
use crate::{ErrorKind, Result};

/// What a token is, by the numbers of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Ordinary text, made by merges.
    Normal,
    /// Stands for what the vocabulary cannot express.
    Unknown,
    /// Never part of the text.
    Control,
    /// Text that is matched as a whole.
    UserDefined,
    /// A place that is left free.
    Unused,
    /// One byte, written `<0x..>`.
    Byte,
}

/// The vocabulary of a file.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    pub(super) tokens: Vec<&'a str>,
    pub(super) kinds: Vec<TokenKind>,
    /// Whether the file states the kinds; otherwise all are [`TokenKind::Normal`].
    pub(super) has_kinds: bool,
    pub(super) scores: Option<Vec<f32>>,
    pub(super) ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary of `file`.
    ///
    /// # Errors
    /// `Missing`, `NotUtf8`, `Duplicate`, `OutOfRange`, with the number of the token in the field.
    pub(super) fn read(file: &'a GgufFile) -> Result<Self> {
        let tokens = texts(file, TOKENS_KEY)?;
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, &token) in (0..).zip(&tokens) {
            if ids.insert(token, id).is_some() {
                return Err(file.error(&format!("{TOKENS_KEY}[{id}]"), ErrorKind::Duplicate));
            }
        }
        let stated = kinds(file)?;
        let has_kinds = stated.is_some();
        let kinds = stated.unwrap_or_else(|| vec![TokenKind::Normal; tokens.len()]);
        Ok(Self { tokens, kinds, has_kinds, scores: scores(file)?, ids })
    }
}

/// Reads an array of texts without copying them.
pub(super) fn texts<'a>(file: &'a GgufFile, key: &str) -> Result<Vec<&'a str>> {
    let Some(Value::Array(array)) = file.value(key) else {
        return Err(file.error(key, ErrorKind::Missing));
    };
    (0_usize..)
        .zip(array.texts(file.map.bytes()))
        .map(|(index, text)| text.map_err(|kind| file.error(&format!("{key}[{index}]"), kind)))
        .collect()
}

fn kinds(file: &GgufFile) -> Result<Option<Vec<TokenKind>>> {
    let Some(Value::Array(array)) = file.value(TOKEN_TYPES_KEY) else { return Ok(None) };
    let kind_of = |(index, value): (usize, Result<Value, ErrorKind>)| {
        let found = value.ok().and_then(|value| value.as_integer()).unwrap_or_default();
        Ok(match found {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => {
                let kind = ErrorKind::OutOfRange { found, low: 1, high: 6 };
                return Err(file.error(&format!("{TOKEN_TYPES_KEY}[{index}]"), kind));
            }
        })
    };
    array.scalars(file.map.bytes()).enumerate().map(kind_of).collect::<Result<_>>().map(Some)
}

fn scores(file: &GgufFile) -> Result<Option<Vec<f32>>> {
    let Some(Value::Array(array)) = file.value(SCORES_KEY) else { return Ok(None) };
    let scores = array.scalars(file.map.bytes()).map(|value| match value {
        Ok(Value::Float(score)) => Ok(score as f32),
        Ok(other) => Err(ErrorKind::WrongType { expected: "a float", found: other.type_name() }),
        Err(kind) => Err(kind),
    });
    let scores: Result<_, ErrorKind> = scores.collect();
    scores.map(Some).map_err(|kind| file.error(SCORES_KEY, kind))
}
