//! The tokenizer of a GGUF file, as the text of a Hugging Face `tokenizer.json`.
//!
//! | file | owns |
//! | --- | --- |
//! | `vocabulary.rs` | tokens, their types and scores |
//! | `pre.rs` | which pre-tokenizer a name stands for |
//! | `bpe.rs` | the `gpt2` model: byte-level BPE with stored merges |
//! | `spm.rs` | the `llama` model: SentencePiece BPE, merges rebuilt from the scores |
//! | `json.rs` | the shape of a `tokenizer.json` |
//!
//! Invariants:
//!
//! 1. An unknown tokenizer model or pre-tokenizer is an error that names it: a near miss would
//!    silently give other ids.
//! 2. Every token keeps the id that it has in the file.

mod bpe;
mod json;
mod pre;
mod spm;
mod vocabulary;

use super::GgufFile;
use super::value::Value;
use crate::error::shown;
use crate::{ErrorKind, Result};
use json::{AddedToken, TokenizerJson, template};
use vocabulary::{TokenKind, Vocabulary};

pub(super) const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
pub(super) const TOKEN_TYPES_KEY: &str = "tokenizer.ggml.token_type";
pub(super) const SCORES_KEY: &str = "tokenizer.ggml.scores";
pub(super) const MERGES_KEY: &str = "tokenizer.ggml.merges";
pub(super) const ADD_BOS_KEY: &str = "tokenizer.ggml.add_bos_token";
pub(super) const ADD_EOS_KEY: &str = "tokenizer.ggml.add_eos_token";
pub(super) const ADD_SPACE_PREFIX_KEY: &str = "tokenizer.ggml.add_space_prefix";
pub(super) const CHAT_TEMPLATE_KEY: &str = "tokenizer.chat_template";
const MODEL_KEY: &str = "tokenizer.ggml.model";
const PRE_KEY: &str = "tokenizer.ggml.pre";

/// The id that means "this model has no such token".
pub(super) const NO_TOKEN: i128 = u32::MAX as i128;

/// The special tokens by the name that this crate gives them and the name in the key.
///
/// `seperator` is how the format spells it.
const SPECIAL_TOKENS: [(&str, &str); 9] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("eot", "eot"),
    ("eom", "eom"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
];

/// Says whether `key` holds the id of a special token.
pub(super) fn is_token_id_key(key: &str) -> bool {
    key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id")
}

/// Returns the special tokens that the file names, by our short names.
pub(super) fn special_token_ids(file: &GgufFile) -> Vec<(&'static str, u32)> {
    let present = |&(name, _): &(&'static str, &str)| Some((name, special_token_id(file, name)?));
    SPECIAL_TOKENS.iter().filter_map(present).collect()
}

/// Returns one special token by our short name; the open file was checked, so it is in range.
fn special_token_id(file: &GgufFile, name: &str) -> Option<u32> {
    let (_, stored) = SPECIAL_TOKENS.iter().find(|&&(short, _)| short == name)?;
    let id = file.value(&format!("tokenizer.ggml.{stored}_token_id"))?.as_integer()?;
    u32::try_from(id).ok().filter(|&id| i128::from(id) != NO_TOKEN)
}

/// Says whether the file's prompts start with the BOS token: its own word, else what its tokenizer
/// model and pre-tokenizer stand for.
pub(super) fn adds_bos(file: &GgufFile) -> bool {
    match (flag(file, ADD_BOS_KEY), text(file, MODEL_KEY)) {
        (Some(stated), _) => stated,
        (None, Some("llama")) => true,
        (None, Some("gpt2")) => text(file, PRE_KEY).and_then(pre::by_name).is_some_and(|pre| pre.adds_bos),
        (None, _) => false,
    }
}

fn flag(file: &GgufFile, key: &str) -> Option<bool> {
    match file.value(key) {
        Some(Value::Bool(value)) => Some(*value),
        _ => None,
    }
}

fn text<'a>(file: &'a GgufFile, key: &str) -> Option<&'a str> {
    match file.value(key) {
        Some(Value::Text(value)) => Some(value),
        _ => None,
    }
}

/// Builds the `tokenizer.json` of `file`.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<String> {
    let model = text(file, MODEL_KEY).ok_or_else(|| file.error(MODEL_KEY, ErrorKind::Missing))?;
    let vocabulary = Vocabulary::read(file)?;
    let mut tokenizer = match model {
        "gpt2" => bpe::build(file, &vocabulary)?,
        "llama" => spm::build(file, &vocabulary)?,
        other => {
            let found = shown(other);
            let kind = ErrorKind::UnknownName { what: "tokenizer model", found };
            return Err(file.error(MODEL_KEY, kind));
        }
    };
    tokenizer.added_tokens = added_tokens(file, &vocabulary);
    tokenizer.post_processor = template(
        marker(file, &vocabulary, "bos", adds_bos(file), ADD_BOS_KEY)?,
        marker(file, &vocabulary, "eos", flag(file, ADD_EOS_KEY) == Some(true), ADD_EOS_KEY)?,
    );
    serde_json::to_string(&tokenizer).map_err(|error| file.error(MODEL_KEY, error.into()))
}

/// Returns the token that is put before or after every text.
///
/// # Errors
/// `Missing` when the file asks for it by `asked_by` and has none.
fn marker<'a>(
    file: &GgufFile,
    vocabulary: &Vocabulary<'a>,
    name: &str,
    is_added: bool,
    asked_by: &str,
) -> Result<Option<(&'a str, u32)>> {
    if !is_added {
        return Ok(None);
    }
    match special_token_id(file, name) {
        Some(id) => Ok(Some((vocabulary.tokens[id as usize], id))),
        // Nobody asked: the default of the tokenizer model does not apply to a file without BOS.
        None if flag(file, asked_by).is_none() => Ok(None),
        None => Err(file.error(&format!("tokenizer.ggml.{name}_token_id"), ErrorKind::Missing)),
    }
}

/// Lists the tokens that are matched in the text before everything else.
///
/// Control tokens (and the unknown token) are special, i.e. left out of decoded text; user-defined
/// ones are ordinary text. A file without types has only the ids that it names.
fn added_tokens<'a>(file: &GgufFile, vocabulary: &Vocabulary<'a>) -> Vec<AddedToken<'a>> {
    let named: Vec<u32> =
        if vocabulary.has_kinds { Vec::new() } else { special_token_ids(file).into_iter().map(|(_, id)| id).collect() };
    let mut added = Vec::new();
    for ((id, &content), &kind) in (0..).zip(&vocabulary.tokens).zip(&vocabulary.kinds) {
        let special = match kind {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => false,
            TokenKind::Normal if named.contains(&id) => true,
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => continue,
        };
        // An empty token would match everywhere.
        if !content.is_empty() {
            added.push(AddedToken::new(id, content, special));
        }
    }
    added
}

/// Makes a tokenizer without added tokens and post-processor; both are the same for all models.
fn tokenizer(
    normalizer: serde_json::Value,
    pre_tokenizer: serde_json::Value,
    decoder: serde_json::Value,
    model: json::Bpe<'_>,
) -> TokenizerJson<'_> {
    TokenizerJson {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: Vec::new(),
        normalizer,
        pre_tokenizer,
        post_processor: serde_json::Value::Null,
        decoder,
        model,
    }
}
