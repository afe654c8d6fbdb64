//! The `gpt2` tokenizer model: byte-level BPE with the merges of the file.

use serde_json::{Value, json};

use super::super::GgufFile;
use super::json::{Bpe, BpeOptions, TokenizerJson};
use super::pre::{self, byte_level};
use super::vocabulary::{Vocabulary, texts};
use super::{ADD_SPACE_PREFIX_KEY, MERGES_KEY, PRE_KEY, flag, text, tokenizer};
use crate::error::shown;
use crate::{ErrorKind, Result};

/// Builds the tokenizer.
///
/// # Errors
/// `UnknownName` for the pre-tokenizer, `Missing`, `BadMerge`, `MergeWithoutToken` for the merges.
pub(super) fn build<'a>(file: &'a GgufFile, vocabulary: &'a Vocabulary<'a>) -> Result<TokenizerJson<'a>> {
    let name = text(file, PRE_KEY).unwrap_or(pre::DEFAULT);
    let mut pre = pre::by_name(name).ok_or_else(|| {
        let found = shown(name);
        file.error(PRE_KEY, ErrorKind::UnknownName { what: "pre-tokenizer", found })
    })?;
    if flag(file, ADD_SPACE_PREFIX_KEY) == Some(true) {
        if !pre.is_plain_byte_level() {
            let what = "a leading space with this pre-tokenizer";
            return Err(file.error(ADD_SPACE_PREFIX_KEY, ErrorKind::Unsupported(what)));
        }
        pre.json = byte_level(true, true);
    }
    let normalizer = if pre.composes { json!({"type": "NFC"}) } else { Value::Null };
    let options = BpeOptions { unk_token: None, byte_fallback: false, ignore_merges: pre.ignores_merges };
    let model = Bpe::new(options, &vocabulary.tokens, merges(file, vocabulary)?);
    Ok(tokenizer(normalizer, pre.json, byte_level(false, true), model))
}

/// Reads the merges, in order of rank; each must join two tokens into a third one.
fn merges<'a>(file: &'a GgufFile, vocabulary: &Vocabulary<'a>) -> Result<Vec<(&'a str, &'a str)>> {
    let mut joined = String::new();
    let mut parse = |(index, rule): (u64, &'a str)| {
        // A part may itself start with a space, so the separator is not looked for at the start.
        let skipped = rule.chars().next().map_or(0, char::len_utf8);
        let space = rule[skipped..].find(' ').ok_or(ErrorKind::BadMerge { index })? + skipped;
        let (left, right) = (&rule[..space], &rule[space + 1..]);
        joined.clear();
        joined.extend([left, right]);
        for token in [left, right, &joined] {
            if !vocabulary.ids.contains_key(token) {
                return Err(ErrorKind::MergeWithoutToken { index, token: shown(token) });
            }
        }
        Ok((left, right))
    };
    (0..).zip(texts(file, MERGES_KEY)?).map(|rule| parse(rule).map_err(|kind| file.error(MERGES_KEY, kind))).collect()
}
