//! The shape of a Hugging Face `tokenizer.json`, as far as the tokenizers of GGUF files need it.

use serde::ser::{Serialize, Serializer};
use serde_json::{Value, json};

/// A whole `tokenizer.json`.
#[derive(Debug, serde::Serialize)]
pub(super) struct TokenizerJson<'a> {
    pub(super) version: &'static str,
    pub(super) truncation: (),
    pub(super) padding: (),
    pub(super) added_tokens: Vec<AddedToken<'a>>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) decoder: Value,
    pub(super) model: Bpe<'a>,
}

/// A token that is matched as a whole before the text is normalised.
#[derive(Debug, serde::Serialize)]
#[allow(clippy::struct_excessive_bools, reason = "the fields are those of the format")]
pub(super) struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

impl<'a> AddedToken<'a> {
    pub(super) fn new(id: u32, content: &'a str, special: bool) -> Self {
        let (single_word, lstrip, rstrip, normalized) = (false, false, false, false);
        Self { id, content, single_word, lstrip, rstrip, normalized, special }
    }
}

/// The BPE model.
#[derive(Debug, serde::Serialize)]
pub(super) struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: (),
    unk_token: Option<&'a str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Tokens<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

/// The switches in which the BPE models of the files differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct BpeOptions<'a> {
    /// The token for what the vocabulary cannot express.
    pub(super) unk_token: Option<&'a str>,
    /// Whether characters without a token become `<0x..>` tokens.
    pub(super) byte_fallback: bool,
    /// Whether a word that is a token is taken as it is.
    pub(super) ignore_merges: bool,
}

impl<'a> Bpe<'a> {
    pub(super) fn new(options: BpeOptions<'a>, tokens: &'a [&'a str], merges: Vec<(&'a str, &'a str)>) -> Self {
        Self {
            kind: "BPE",
            dropout: (),
            unk_token: options.unk_token,
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: options.unk_token.is_some(),
            byte_fallback: options.byte_fallback,
            ignore_merges: options.ignore_merges,
            vocab: Tokens(tokens),
            merges,
        }
    }
}

/// Tokens in the order of their ids, written as a map from token to id.
#[derive(Debug)]
struct Tokens<'a>(&'a [&'a str]);

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().zip(0_u32..))
    }
}

/// Makes the post-processor that puts `before` and `after` around every text; null without both.
pub(super) fn template(before: Option<(&str, u32)>, after: Option<(&str, u32)>) -> Value {
    if before.is_none() && after.is_none() {
        return Value::Null;
    }
    let special = |token: Option<(&str, u32)>, type_id: u32| {
        token.map(|(token, _)| json!({"SpecialToken": {"id": token, "type_id": type_id}}))
    };
    let around = |sequence: &str, type_id: u32| -> Vec<Value> {
        let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
        special(before, type_id).into_iter().chain([text]).chain(special(after, type_id)).collect()
    };
    let single = around("A", 0);
    let pair: Vec<Value> = single.iter().cloned().chain(around("B", 1)).collect();
    let tokens: serde_json::Map<String, Value> = [before, after]
        .into_iter()
        .flatten()
        .map(|(token, id)| (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
}
