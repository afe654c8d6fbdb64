//! The `tokenizer.json` of small GGUF files, part by part.

#![allow(clippy::unwrap_used)]

mod support;

use cbrs_loading::gguf::GgufFile;
use serde_json::{Value, json};
use support::*;

fn open(file: &Gguf) -> GgufFile {
    let folder = tempfile::tempdir().unwrap();
    // The map outlives the name of the file.
    GgufFile::open(file.write(folder.path())).unwrap()
}

fn tokenizer(file: &Gguf) -> Value {
    serde_json::from_str(&open(file).tokenizer_json().unwrap()).unwrap()
}

/// A SentencePiece vocabulary: `<unk>`, `<s>`, all bytes, pieces.
fn spm() -> Gguf {
    let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    let pieces = ["\u{2581}", "a", "b", "ab", "\u{2581}a", "aab", "<tool>"];
    let scores = [0.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0];
    let tokens: Vec<&str> =
        ["<unk>", "<s>"].into_iter().chain(bytes.iter().map(String::as_str)).chain(pieces).collect();
    let kinds: Vec<i32> = [2, 3].into_iter().chain([6; 256]).chain([1; 6]).chain([4]).collect();
    let scores: Vec<f32> = [0.0; 258].into_iter().chain(scores).collect();
    Gguf::new()
        .text("tokenizer.ggml.model", "llama")
        .entry("tokenizer.ggml.tokens", ARRAY, &texts(&tokens))
        .entry("tokenizer.ggml.token_type", ARRAY, &integers(&kinds))
        .entry("tokenizer.ggml.scores", ARRAY, &floats(&scores))
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.unknown_token_id", 0)
}

#[test]
fn byte_level_models_take_vocabulary_and_merges_from_the_file() {
    let json = tokenizer(&Gguf::llama());
    assert_eq!(json["model"]["type"], "BPE");
    assert_eq!(json["model"]["vocab"], json!({"<s>": 0, "a": 1, "b": 2, "ab": 3}));
    assert_eq!(json["model"]["merges"], json!([["a", "b"]]));
    assert_eq!(json["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
    assert_eq!(json["post_processor"], Value::Null);
    assert_eq!(json["decoder"]["type"], "ByteLevel");
}

#[test]
fn token_types_decide_which_tokens_are_matched_whole_and_which_are_special() {
    let json = tokenizer(&spm());
    let added = json["added_tokens"].as_array().unwrap();
    let found: Vec<_> =
        added.iter().map(|token| (token["content"].as_str().unwrap(), token["special"].as_bool().unwrap())).collect();
    assert_eq!(found, [("<unk>", true), ("<s>", true), ("<tool>", false)]);
    assert!(added.iter().all(|token| token["normalized"] == false));
}

#[test]
fn without_token_types_the_named_special_tokens_are_special() {
    let json = tokenizer(&Gguf::llama().without("tokenizer.ggml.token_type"));
    assert_eq!(json["added_tokens"].as_array().unwrap().len(), 1);
    assert_eq!(json["added_tokens"][0]["content"], "<s>");
}

#[test]
fn sentencepiece_merges_are_rebuilt_best_score_first() {
    let json = tokenizer(&spm());
    // "aab" can be made as a + ab only: "aa" is no piece.
    assert_eq!(json["model"]["merges"], json!([["\u{2581}", "a"], ["a", "b"], ["a", "ab"]]));
    assert_eq!(json["model"]["byte_fallback"], true);
    assert_eq!(json["model"]["unk_token"], "<unk>");
    assert_eq!(json["normalizer"]["normalizers"][0]["prepend"], "\u{2581}");
}

#[test]
fn the_leading_space_follows_add_space_prefix() {
    let json = tokenizer(&spm().bool("tokenizer.ggml.add_space_prefix", false));
    assert_eq!(json["normalizer"]["type"], "Replace");
    assert_eq!(json["decoder"]["decoders"].as_array().unwrap().len(), 3);
    let json = tokenizer(&spm());
    assert_eq!(json["decoder"]["decoders"].as_array().unwrap().len(), 4);

    let plain = Gguf::llama()
        .without("tokenizer.ggml.pre")
        .text("tokenizer.ggml.pre", "gpt-2")
        .bool("tokenizer.ggml.add_space_prefix", true);
    assert_eq!(tokenizer(&plain)["pre_tokenizer"]["add_prefix_space"], true);
    let refused = open(&Gguf::llama().bool("tokenizer.ggml.add_space_prefix", true));
    assert_eq!(refused.tokenizer_json().unwrap_err().field(), "tokenizer.ggml.add_space_prefix");
}

#[test]
fn bos_is_put_before_every_text_when_the_file_or_its_model_asks() {
    let single = json!([
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]);
    // SentencePiece models ask by themselves, byte-level ones do not.
    assert_eq!(tokenizer(&spm())["post_processor"]["single"], single);
    assert!(open(&spm()).add_bos_token());
    assert!(!open(&Gguf::llama()).add_bos_token());
    let asked = Gguf::llama().bool("tokenizer.ggml.add_bos_token", true);
    assert_eq!(tokenizer(&asked)["post_processor"]["single"], single);
    let declined = spm().bool("tokenizer.ggml.add_bos_token", false);
    assert_eq!(tokenizer(&declined)["post_processor"], Value::Null);
    let llama3 = Gguf::llama().without("tokenizer.ggml.pre").text("tokenizer.ggml.pre", "llama-bpe");
    assert!(open(&llama3).add_bos_token());
    assert_eq!(tokenizer(&llama3)["model"]["ignore_merges"], true);
}

#[test]
fn eos_is_put_after_every_text_when_the_file_asks() {
    let file = Gguf::llama().u32("tokenizer.ggml.eos_token_id", 3).bool("tokenizer.ggml.add_eos_token", true);
    let single = tokenizer(&file)["post_processor"]["single"].clone();
    assert_eq!(single[1], json!({"SpecialToken": {"id": "ab", "type_id": 0}}));
    assert_eq!(
        tokenizer(&file)["post_processor"]["special_tokens"]["ab"],
        json!({"id": "ab", "ids": [3], "tokens": ["ab"]})
    );
}

#[test]
fn an_id_of_all_ones_means_that_there_is_no_such_token() {
    let file = Gguf::llama()
        .u32("tokenizer.ggml.padding_token_id", u32::MAX)
        .u32("tokenizer.ggml.seperator_token_id", u32::MAX)
        .u32("tokenizer.ggml.eos_token_id", 2);
    assert_eq!(open(&file).special_token_ids(), [("bos", 0), ("eos", 2)]);
}

#[test]
fn the_chat_template_comes_from_the_file() {
    assert_eq!(open(&Gguf::llama()).chat_template(), None);
    let file = Gguf::llama().text("tokenizer.chat_template", "{{ messages }}");
    assert_eq!(open(&file).chat_template(), Some("{{ messages }}"));
}

#[test]
fn unknown_names_are_repeated_in_the_error() {
    let named = |key: &str| open(&Gguf::llama().without(key).text(key, "klingon"));
    for key in ["tokenizer.ggml.pre", "tokenizer.ggml.model"] {
        let error = named(key).tokenizer_json().unwrap_err();
        assert_eq!(error.field(), key);
        assert!(error.to_string().contains("klingon"), "{error}");
    }
}
