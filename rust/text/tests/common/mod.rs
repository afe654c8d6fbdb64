//! Two small tokenizers made here, and the shared data (skipped without `CBRS_DATA`).
#![allow(dead_code, clippy::unwrap_used, clippy::print_stderr)] // each test file uses its own part

pub(crate) mod rig;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

use cbrs_text::Tokenizer;
use serde_json::{Value, json};

/// The folder of the shared data, or a note that the test was skipped.
pub(crate) fn data() -> Option<PathBuf> {
    let folder = std::env::var_os("CBRS_DATA").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: CBRS_DATA is not set");
    }
    folder
}

/// Text of a file of the shared data, unpacked if it ends in `.gz`.
pub(crate) fn read(path: &str) -> Option<String> {
    let path = data()?.join(path);
    let bytes = fs::read(&path).unwrap();
    let mut text = String::new();
    if path.extension().is_some_and(|extension| extension == "gz") {
        flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text).unwrap();
    } else {
        text = String::from_utf8(bytes).unwrap();
    }
    Some(text)
}

/// Rows of a JSONL file of the shared data.
pub(crate) fn rows(path: &str) -> Option<Vec<Value>> {
    Some(read(path)?.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": special})
}

/// The character that stands for `byte` in a byte-level vocabulary.
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let byte = u32::from(byte);
    let code = if printable(byte) { byte } else { 0x100 + (0..byte).filter(|&lower| !printable(lower)).count() as u32 };
    char::from_u32(code).unwrap()
}

/// Ids of the byte-level tokenizer that are more than one byte.
pub(crate) const HELLO: i32 = 256;
/// " world"
pub(crate) const WORLD: i32 = 257;
/// A space and the first byte of "é".
pub(crate) const SPACE_C3: i32 = 258;
/// The first two bytes of "你".
pub(crate) const E4_BD: i32 = 259;
/// The added, not special token "\n".
pub(crate) const NEWLINE: i32 = 260;
/// The added, not special token "‼".
pub(crate) const BANGBANG: i32 = 261;
/// The special token "<|end|>".
pub(crate) const END: i32 = 262;

/// Byte-level: ids 0 to 255 are the bytes, then a few longer tokens and added ones.
pub(crate) fn byte_level() -> Tokenizer {
    let mut vocab: BTreeMap<String, usize> =
        (0..=255u8).map(|byte| (byte_char(byte).to_string(), byte.into())).collect();
    for (offset, bytes) in ["hello".as_bytes(), b" world", b" \xC3", b"\xE4\xBD"].iter().enumerate() {
        vocab.insert(bytes.iter().copied().map(byte_char).collect(), 256 + offset);
    }
    let json = json!({
        "version": "1.0",
        "added_tokens": [added(260, "\n", false), added(261, "‼", false), added(262, "<|end|>", true)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(&json.to_string()).unwrap()
}

/// SentencePiece style: 0 to 2 special, 3 to 258 the bytes, then words with their leading space marked.
pub(crate) fn spm() -> Tokenizer {
    let mut vocab: BTreeMap<String, usize> =
        BTreeMap::from([("<unk>".into(), 0), ("<s>".into(), 1), ("</s>".into(), 2)]);
    vocab.extend((0..=255usize).map(|byte| (format!("<0x{byte:02X}>"), byte + 3)));
    for (offset, word) in SPM_WORDS.iter().enumerate() {
        vocab.insert((*word).to_owned(), 259 + offset);
    }
    let json = json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
    });
    Tokenizer::from_json(&json.to_string()).unwrap()
}

/// Words of the SentencePiece tokenizer, from id 259.
pub(crate) const SPM_WORDS: [&str; 8] = ["▁", "▁the", "a", "b", "▁▁▁▁", "안", "é", "▁word"];

/// Id of a word of the SentencePiece tokenizer.
pub(crate) fn spm_word(word: &str) -> i32 {
    259 + SPM_WORDS.iter().position(|&known| known == word).unwrap() as i32
}

/// Id of a byte token of the SentencePiece tokenizer.
pub(crate) fn spm_byte(byte: u8) -> i32 {
    i32::from(byte) + 3
}
