//! The fast way from text to ids gives what the tokenizers crate gives.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::io::Read;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::Tokenizer;

/// Parts that random texts are made of: words, contractions, digits of several scripts, all kinds of spaces, added tokens whole and
/// cut, marks and letters that are easily taken for each other.
const PARTS: [&str; 46] = [
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\u{a0}",
    "\u{2003}",
    "\u{3000}",
    "\u{200b}",
    "\u{85}",
    "'",
    "'s",
    "'S",
    "'re",
    "'ll",
    "'lt",
    "\"",
    "a",
    "Z",
    "the",
    " world",
    "hello",
    "don't",
    "_",
    "-",
    "!?",
    "…",
    "é",
    "e\u{301}",
    "ß",
    "ſ",
    "ªº",
    "Ⅷ",
    "½²",
    "٣",
    "४२",
    "7",
    "2024",
    "你好",
    "한",
    "ไทย",
    "🚀",
    "👩\u{200d}🚀",
    "𝔘",
    "<|im_start|>",
    "<|im_en",
];

fn random_text(state: &mut u64) -> String {
    let mut next = |bound: usize| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize % bound
    };
    let num_parts = 1 + next(12);
    (0..num_parts).map(|_| PARTS[next(PARTS.len())]).collect()
}

/// A tokenizer of bytes and some merges, whose file has `changes` at the top.
fn small(changes: &Value) -> Tokenizer {
    let letters: Vec<String> = (0..=255u8).map(|byte| crate::byte_level::byte_letter(byte).to_string()).collect();
    let mut vocab: serde_json::Map<String, Value> =
        letters.iter().enumerate().map(|(id, letter)| (letter.clone(), json!(id))).collect();
    let mut merges = Vec::new();
    for (first, second) in
        [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ġ", "Ġ"), ("2", "0"), ("Ã", "©"), ("'", "s")]
    {
        vocab.insert(format!("{first}{second}"), json!(vocab.len()));
        merges.push(format!("{first} {second}"));
    }
    let added = |content: &str| {
        json!({"id": 256 + merges.len() + usize::from(content.len() > 9), "content": content, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    };
    let mut file = json!({
        "version": "1.0",
        "added_tokens": [added("<|im_en"), added("<|im_start|>")],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    Tokenizer::from_json(&file.to_string()).unwrap()
}

fn shared(name: &str) -> Option<Tokenizer> {
    let Some(folder) = std::env::var_os("CBRS_DATA").map(PathBuf::from) else {
        eprintln!("skipped: CBRS_DATA is not set");
        return None;
    };
    let file = std::fs::File::open(folder.join("tokenizers").join(name)).unwrap();
    let mut json = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut json).unwrap();
    Some(Tokenizer::from_json(&json).unwrap())
}

fn without_digits() -> Value {
    json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}})
}

#[test]
fn words_encode_to_what_the_crate_gives() {
    let shared = ["smollm2_tokenizer.json.gz", "gpt2_tokenizer.json.gz"].map(shared);
    let made = [small(&json!({})), small(&without_digits())];
    let mut state = 1;
    for tokenizer in made.iter().chain(shared.iter().flatten()) {
        assert!(tokenizer.inner.byte_level.is_some());
        for _ in 0..3000 {
            let text = random_text(&mut state);
            let expected = tokenizer.encode_by_crate(&text, true).unwrap();
            // The second time the words are known.
            assert_eq!(tokenizer.encode(&text, true).unwrap(), expected, "{text:?}");
            assert_eq!(tokenizer.encode(&text, true).unwrap(), expected, "{text:?}");
        }
    }
}

#[test]
fn giant_words_encode_to_what_the_crate_gives() {
    let shared = ["smollm2_tokenizer.json.gz", "gpt2_tokenizer.json.gz"].map(shared);
    let made = [small(&json!({})), small(&without_digits())];
    let mut state = 7u64;
    let mut letters = |alphabet: &str, count: usize| -> String {
        let alphabet: Vec<char> = alphabet.chars().collect();
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % alphabet.len()
        };
        (0..count).map(|_| alphabet[next()]).collect()
    };
    let words = [
        "a".repeat(4_000),
        "hell".repeat(1_500),
        letters("ehl", 3_000),
        letters("abcdefghijklmnopqrstuvwxyz", 6_000),
        letters("etaoinshrdluéß你好한ไ𝔘", 2_000),
        letters("!?-_=.…🚀", 2_000),
        " ".repeat(3_000),
        "½²Ⅷ".repeat(700),
    ];
    for tokenizer in made.iter().chain(shared.iter().flatten()) {
        for word in &words {
            for text in [word.clone(), format!("and {word} 2024")] {
                let expected = tokenizer.encode_by_crate(&text, false).unwrap();
                assert_eq!(tokenizer.encode(&text, false).unwrap(), expected, "{word:.20}");
                assert_eq!(tokenizer.encode_in_background(&text, false).unwrap(), expected, "{word:.20}");
            }
        }
    }
}

#[test]
fn every_character_of_the_first_planes_encodes_to_what_the_crate_gives() {
    let tokenizer = small(&json!({}));
    let all: Vec<char> = (1..=0x1_FFFF).chain(0x2_F000..=0x2_FFFF).filter_map(char::from_u32).collect();
    for characters in all.chunks(512) {
        // Each between letters, between spaces, and beside the one before.
        let parts = characters.iter().map(|&character| ['a', character, 'b', ' ', character, ' ', character]);
        let text: String = parts.flatten().collect();
        let expected = tokenizer.encode_by_crate(&text, false).unwrap();
        assert_eq!(tokenizer.encode_in_background(&text, false).unwrap(), expected);
    }
}

#[test]
fn a_file_with_anything_else_goes_the_crate_s_way() {
    let byte_level = |changes: &Value| {
        let mut whole =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        whole.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        whole
    };
    let added = |name: &str| {
        let mut token = json!({"id": 264, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false, "special": true});
        token[name] = json!(true);
        json!({"added_tokens": [token]})
    };
    for changes in [
        json!({"normalizer": {"type": "NFC"}}),
        json!({"pre_tokenizer": byte_level(&json!({"add_prefix_space": true}))}),
        json!({"pre_tokenizer": byte_level(&json!({"use_regex": false}))}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": false}, byte_level(&json!({}))]}}),
        json!({"pre_tokenizer": null}),
        json!({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
               "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}}}),
        added("normalized"),
        added("lstrip"),
        added("rstrip"),
        added("single_word"),
    ] {
        assert!(small(&changes).inner.byte_level.is_none(), "{changes}");
    }
    assert!(small(&json!({"post_processor": byte_level(&json!({}))})).inner.byte_level.is_some());
}
