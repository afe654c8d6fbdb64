//! Encoding against the vectors of the shared data; malformed files; what a tokenizer promises.

#![allow(clippy::unwrap_used)]

mod common;

use cbrs_text::Tokenizer;
use common::{byte_level, rows, spm};
use serde_json::json;

fn ids(row: &serde_json::Value) -> Vec<i32> {
    row["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

#[test]
fn all_vectors_of_the_shared_tokenizers_encode_to_the_same_ids() {
    let Some(rows) = rows("conformance/tokenizer_vectors.jsonl") else { return };
    let files = [
        ("gpt-2", "tokenizers/gpt2_tokenizer.json.gz"),
        ("qwen2", "tokenizers/qwen2_tokenizer.json.gz"),
        ("smollm2", "tokenizers/smollm2_tokenizer.json.gz"),
        ("stories260k", "models/stories260K/tokenizer.json"),
    ];
    for (name, file) in files {
        let tokenizer = Tokenizer::from_json(&common::read(file).unwrap()).unwrap();
        let rows: Vec<_> = rows.iter().filter(|row| row["tokenizer"] == name).collect();
        assert!(rows.len() >= 10, "{name} has {} vectors", rows.len());
        for row in rows {
            let text = row["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids(row), "{name}: {text:?}");
        }
    }
}

#[test]
fn texts_come_back_from_their_ids() {
    let Some(rows) = rows("conformance/tokenizer_vectors.jsonl") else { return };
    let tokenizer = Tokenizer::from_json(&common::read("tokenizers/smollm2_tokenizer.json.gz").unwrap()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    for row in rows.iter().filter(|row| row["tokenizer"] == "smollm2") {
        assert_eq!(tokenizer.decode(&ids(row), false), row["text"].as_str().unwrap());
    }
}

#[test]
fn golden_texts_are_decoded_from_the_golden_ids() {
    for (file, golden) in [
        ("tokenizers/smollm2_tokenizer.json.gz", include_str!("../../../tests/golden/smollm2_greedy.json")),
        ("models/stories260K/tokenizer.json", include_str!("../../../tests/golden/stories260k_greedy.json")),
    ] {
        let Some(json) = common::read(file) else { return };
        let tokenizer = Tokenizer::from_json(&json).unwrap();
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let ids: Vec<i32> = serde_json::from_value(case["output_ids"].clone()).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), case["text"].as_str().unwrap(), "{}", case["name"]);
        }
    }
}

#[test]
fn bos_comes_first_exactly_once() {
    let plain = spm();
    assert_eq!(plain.encode("a", true).unwrap(), plain.encode("a", false).unwrap());
    let tokenizer = spm().with_bos("<s>").unwrap();
    let with_bos = tokenizer.encode("a", true).unwrap();
    assert_eq!(with_bos[0], 1);
    assert_eq!(with_bos[1..], tokenizer.encode("a", false).unwrap());
    assert_eq!(tokenizer.encode("<s>", true).unwrap().iter().filter(|&&id| id == 1).count(), 1);
    let message = spm().with_bos("<bos>").unwrap_err().to_string();
    assert!(message.contains("\"<bos>\" is not in the vocabulary"), "{message}");
}

#[test]
fn tokens_are_found_by_text_and_by_id() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.vocab_size(), 263);
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(common::END));
    assert_eq!(tokenizer.id_to_token(common::WORLD).as_deref(), Some("Ġworld"));
    assert_eq!(tokenizer.token_to_id("nowhere"), None);
    assert_eq!(tokenizer.id_to_token(263), None);
    assert_eq!(tokenizer.id_to_token(-1), None);
}

#[test]
fn a_prompt_is_never_truncated_or_padded_by_the_file() {
    let json = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "a"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
    });
    let tokenizer = Tokenizer::from_json(&json.to_string()).unwrap();
    assert_eq!(tokenizer.encode("a b a b", true).unwrap(), [0, 1, 0, 1]);
    assert_eq!(tokenizer.decode(&[0, 1, 0], true), "a b a");
}

#[test]
fn malformed_files_end_in_one_error() {
    let model = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
    let beyond = json!([{"id": 4_000_000_000_u64, "content": "<x>", "single_word": false, "lstrip": false,
                         "rstrip": false, "normalized": false, "special": true}]);
    let cases = [
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        "null".to_owned(),
        "{\"version\": \"1.0\"}".to_owned(),
        r#"{"version": "1.0", "decoder": {"type": "Byt"#.to_owned(),
        json!({"version": "1.0", "model": {"type": "Unknown"}}).to_string(),
        json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "nowhere"]]}})
            .to_string(),
        json!({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}).to_string(),
        json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}).to_string(),
        json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4_294_967_295_u32}, "unk_token": "a"}})
            .to_string(),
        json!({"version": "1.0", "model": model, "added_tokens": beyond}).to_string(),
        json!({"version": "1.0", "model": model, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}})
            .to_string(),
        json!({"version": "1.0", "model": model, "pre_tokenizer":
               {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false}})
        .to_string(),
    ];
    for case in cases {
        let error = Tokenizer::from_json(&case).unwrap_err();
        assert!(matches!(error, cbrs_core::Error::Tokenizer { .. }), "{case}: {error}");
    }
}
