//! Every malformed GGUF file gives one error that names the file and the field, at once and within
//! bounded memory.

#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use cbrs_loading::gguf::GgufFile;
use cbrs_loading::{Error, ErrorKind};
use support::*;

/// Name, bytes, the field that the error has to name.
type Case = (&'static str, Vec<u8>, &'static str);

/// Opens a file and does everything that can be done with one.
fn use_fully(path: &std::path::Path) -> Result<(), Error> {
    let file = GgufFile::open(path)?;
    for info in file.tensors() {
        file.tensor_f32(&info.name)?;
    }
    file.tokenizer_json().map(|_| ())
}

fn version(version: u32) -> Gguf {
    Gguf { version: version.to_le_bytes(), ..Gguf::llama() }
}

/// A file with one tensor entry and 64 bytes of data.
fn one_tensor(dimensions: &[u64], kind: u32, offset: u64) -> Gguf {
    Gguf::llama().tensor("w", dimensions, kind, offset).data([0; 64])
}

fn with_dimension_count(count: u32) -> Gguf {
    let entry = [text("w"), count.to_le_bytes().to_vec(), vec![1; 24]].concat();
    Gguf::llama().raw_tensor(entry).data([0; 64])
}

fn replaced(key: &str, kind: u32, payload: &[u8]) -> Gguf {
    Gguf::llama().without(key).entry(key, kind, payload)
}

/// Damage to the first bytes and the counts.
fn damaged_preamble() -> Vec<Case> {
    vec![
        ("empty", Vec::new(), "file"),
        ("three bytes", b"GGU".to_vec(), "magic"),
        ("four bytes", b"GGUF".to_vec(), "version"),
        ("header ends after the version", b"GGUF\x03\0\0\0".to_vec(), "tensor count"),
        ("wrong magic", Gguf { magic: *b"GGML", ..Gguf::llama() }.build(), "magic"),
        ("big-endian", Gguf { version: 3_u32.to_be_bytes(), ..Gguf::llama() }.build(), "version"),
        ("version 0", version(0).build(), "version"),
        ("version 1", version(1).build(), "version"),
        ("version 99", version(99).build(), "version"),
        ("tensor count 2^63", Gguf { num_tensors: Some(1 << 63), ..Gguf::llama() }.build(), "tensor count"),
        ("metadata count 2^63", Gguf { num_entries: Some(1 << 63), ..Gguf::llama() }.build(), "metadata count"),
        (
            "more tensors than the file has",
            Gguf { num_tensors: Some(2), ..one_tensor(&[16], F32, 0) }.data([0; 256]).build(),
            "tensor name 1",
        ),
        (
            "more keys than the file has",
            Gguf { num_entries: Some(12), ..Gguf::llama() }.data([0xff; 256]).build(),
            "metadata key",
        ),
    ]
}

/// Damage to the metadata.
fn damaged_metadata() -> Vec<Case> {
    let entry = |kind: u32, payload: &[u8]| Gguf::llama().entry("x", kind, payload).build();
    let u64s = |value: u64| value.to_le_bytes().to_vec();
    let raw = |bytes: Vec<u8>| Gguf::llama().raw_entry(bytes).build();
    vec![
        ("key length beyond the file", raw([u64s(1 << 40), vec![b'x'; 40]].concat()), "metadata key 10"),
        ("key length 2^64 - 1", raw([u64s(u64::MAX), vec![b'x'; 40]].concat()), "metadata key 10"),
        (
            "key longer than the format allows",
            raw([text("x".repeat(65_536)), U8.to_le_bytes().to_vec(), vec![0]].concat()),
            "metadata key 10",
        ),
        ("key that is not UTF-8", raw([text(b"\xff\xfe"), vec![0; 5]].concat()), "metadata key 10"),
        ("text that is not UTF-8", entry(TEXT, &text(b"\xff\xfe")), "x"),
        ("text length beyond the file", entry(TEXT, &u64s(1 << 50)), "x"),
        ("array of texts of length 2^62", entry(ARRAY, &array(TEXT, 1 << 62, &[])), "x"),
        ("array of numbers of length 2^62", entry(ARRAY, &array(U64, 1 << 62, &[])), "x"),
        ("text in an array beyond the file", entry(ARRAY, &array(TEXT, 1, &u64s(1 << 50))), "x"),
        ("array of arrays", entry(ARRAY, &array(ARRAY, 1, &array(U8, 1, &[1]))), "x"),
        ("array of an unknown type", entry(ARRAY, &array(77, 1, &[1; 8])), "x"),
        ("unknown value type", entry(13, &[0; 8]), "x"),
        ("bool that is neither 0 nor 1", entry(BOOL, &[2]), "x"),
        ("duplicate key", Gguf::llama().u32("x", 1).u32("x", 2).build(), "x"),
        ("one shard of several", Gguf::llama().u32("split.count", 3).build(), "split.count"),
        ("alignment 0", Gguf::llama().u32("general.alignment", 0).build(), "general.alignment"),
        ("alignment 3", Gguf::llama().u32("general.alignment", 3).build(), "general.alignment"),
        ("alignment 2^31", Gguf::llama().u32("general.alignment", 1 << 31).build(), "general.alignment"),
        ("alignment that is a text", Gguf::llama().text("general.alignment", "32").build(), "general.alignment"),
    ]
}

/// Damage to the tensor list and the data.
fn damaged_tensors() -> Vec<Case> {
    let file = |dimensions: &[u64], kind, offset| one_tensor(dimensions, kind, offset).build();
    let two = |second: u64| Gguf::llama().tensor("w", &[8], F32, 0).tensor("v", &[8], F32, second);
    let mut truncated = file(&[16], F32, 0);
    truncated.truncate(truncated.len() - 1);
    let long_name = [text("x".repeat(65_536)), vec![0; 40]].concat();
    vec![
        ("tensor name beyond the file", Gguf::llama().raw_tensor(vec![0xff; 64]).build(), "tensor name 0"),
        ("tensor name of 64 KiB", Gguf::llama().raw_tensor(long_name).build(), "tensor name 0"),
        ("dimension count 0", with_dimension_count(0).build(), "tensor w"),
        ("dimension count 5", with_dimension_count(5).build(), "tensor w"),
        ("dimension count 2^32 - 1", with_dimension_count(u32::MAX).build(), "tensor w"),
        ("dimension 0", file(&[16, 0], F32, 0), "tensor w"),
        ("negative dimension", file(&[u64::MAX, 1], F32, 0), "tensor w"),
        ("product of dimensions overflows", file(&[1 << 40, 1 << 40], F32, 0), "tensor w"),
        ("bytes overflow though the elements fit", file(&[1 << 62], F32, 0), "tensor w"),
        ("bytes of quantised blocks overflow", file(&[1 << 31, 1 << 31], Q8_0, 0), "tensor w"),
        ("half a block", file(&[16], Q4_0, 0), "tensor w"),
        ("rows of half a block", file(&[128, 2], Q4_K, 0), "tensor w"),
        ("unknown tensor type", file(&[16], 1000, 0), "tensor w"),
        ("tensor type that is not read", file(&[256], 10, 0), "tensor w"),
        ("misaligned offset", file(&[8], F32, 4), "tensor w"),
        ("offset beyond the end", file(&[8], F32, 1 << 20), "tensor w"),
        ("offset and size overflow", file(&[8], F32, u64::MAX - 31), "tensor w"),
        ("overlapping tensors", two(0).data([0; 64]).build(), "tensor v"),
        (
            "partly overlapping tensors",
            Gguf::llama().tensor("w", &[16], F32, 0).tensor("v", &[8], F32, 32).data([0; 64]).build(),
            "tensor v",
        ),
        (
            "duplicate tensor name",
            Gguf::llama().tensor("w", &[8], F32, 0).tensor("w", &[8], F32, 32).data([0; 64]).build(),
            "tensor w",
        ),
        ("truncated data", truncated, "tensor w"),
        ("no data at all", Gguf::llama().tensor("w", &[8], F32, 0).build(), "tensor w"),
        (
            "query rows that the heads do not divide",
            Gguf::llama().tensor("blk.0.attn_q.weight", &[4, 3], F32, 0).data([0; 64]).build(),
            "tensor blk.0.attn_q.weight",
        ),
        (
            "no heads",
            replaced("llama.attention.head_count", U32, &[0; 4])
                .tensor("blk.0.attn_q.weight", &[4, 4], F32, 0)
                .data([0; 64])
                .build(),
            "llama.attention.head_count",
        ),
    ]
}

/// Damage to the vocabulary and the special tokens.
fn damaged_vocabulary() -> Vec<Case> {
    let key = |name: &str, kind, payload: &[u8]| replaced(name, kind, payload).build();
    let tokens = "tokenizer.ggml.tokens";
    let types = "tokenizer.ggml.token_type";
    let merges = "tokenizer.ggml.merges";
    vec![
        ("architecture that is a number", key("general.architecture", U32, &[1; 4]), "general.architecture"),
        (
            "head count that is a text",
            key("llama.attention.head_count", TEXT, &text("2")),
            "llama.attention.head_count",
        ),
        ("tokens that are one text", key(tokens, TEXT, &text("a")), tokens),
        ("tokens that are numbers", key(tokens, ARRAY, &integers(&[1, 2, 3, 4])), tokens),
        ("token types that are texts", key(types, ARRAY, &texts(&["1"; 4])), types),
        ("fewer token types than tokens", key(types, ARRAY, &integers(&[3, 1])), types),
        ("unknown token type", key(types, ARRAY, &integers(&[3, 1, 1, 9])), types),
        ("token twice", key(tokens, ARRAY, &texts(&["<s>", "a", "b", "a"])), tokens),
        (
            "token that is not UTF-8",
            key(tokens, ARRAY, &array(TEXT, 4, &[text("<s>"), text("a"), text("b"), text(b"\xff")].concat())),
            tokens,
        ),
        ("no tokens", Gguf::llama().without(tokens).build(), tokens),
        (
            "more tokens than embedding rows",
            Gguf::llama().tensor("token_embd.weight", &[4, 3], F32, 0).data([0; 64]).build(),
            tokens,
        ),
        ("merge with a missing token", key(merges, ARRAY, &texts(&["a c"])), merges),
        ("merge into a missing token", key(merges, ARRAY, &texts(&["b a"])), merges),
        ("merge without a space", key(merges, ARRAY, &texts(&["ab"])), merges),
        ("no merges", Gguf::llama().without(merges).build(), merges),
    ]
}

/// Damage to what the tokenizer is built from.
fn damaged_tokenizer() -> Vec<Case> {
    let key = |name: &str, kind, payload: &[u8]| replaced(name, kind, payload).build();
    let tokens = "tokenizer.ggml.tokens";
    let spm = || Gguf::llama().without("tokenizer.ggml.model").text("tokenizer.ggml.model", "llama");
    vec![
        ("unknown pre-tokenizer", key("tokenizer.ggml.pre", TEXT, &text("nobody")), "tokenizer.ggml.pre"),
        ("unknown tokenizer model", key("tokenizer.ggml.model", TEXT, &text("t6")), "tokenizer.ggml.model"),
        ("no tokenizer model", Gguf::llama().without("tokenizer.ggml.model").build(), "tokenizer.ggml.model"),
        ("SentencePiece without scores", spm().build(), "tokenizer.ggml.scores"),
        (
            "fewer scores than tokens",
            spm().entry("tokenizer.ggml.scores", ARRAY, &floats(&[0.0])).build(),
            "tokenizer.ggml.scores",
        ),
        (
            "SentencePiece with a piece of 1 MiB",
            spm()
                .without(tokens)
                .entry(tokens, ARRAY, &texts(&["<s>", "a", "b", &"ab".repeat(1 << 19)]))
                .entry("tokenizer.ggml.scores", ARRAY, &floats(&[0.0; 4]))
                .build(),
            tokens,
        ),
        (
            "special token id that is a text",
            key("tokenizer.ggml.bos_token_id", TEXT, &text("0")),
            "tokenizer.ggml.bos_token_id",
        ),
        (
            "negative special token id",
            key("tokenizer.ggml.bos_token_id", I32, &(-2_i32).to_le_bytes()),
            "tokenizer.ggml.bos_token_id",
        ),
        (
            "template that is a number",
            Gguf::llama().u32("tokenizer.chat_template", 1).build(),
            "tokenizer.chat_template",
        ),
        (
            "BOS asked for and not there",
            Gguf::llama().without("tokenizer.ggml.bos_token_id").bool("tokenizer.ggml.add_bos_token", true).build(),
            "tokenizer.ggml.bos_token_id",
        ),
    ]
}

#[test]
fn every_malformed_file_is_refused_naming_file_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        damaged_preamble(),
        damaged_metadata(),
        damaged_tensors(),
        damaged_vocabulary(),
        damaged_tokenizer(),
        excessive(),
    ]
    .concat();
    let before = peak_memory();
    assert!(cases.len() >= 70, "{} cases", cases.len());
    for (name, bytes, field) in cases {
        let path = write(folder.path(), "model.gguf", &bytes);
        let start = Instant::now();
        let Err(error) = use_fully(&path) else { panic!("{name}: the file was accepted") };
        assert!(start.elapsed() < Duration::from_secs(2), "{name} took {:?}", start.elapsed());
        assert_eq!(error.file(), path, "{name}");
        assert!(error.field().contains(field), "{name}: {error}");
        assert!(!error.to_string().contains('\n'), "{name}: {error}");
    }
    let grown = peak_memory() - before;
    assert!(grown < 64 << 20, "the files took {grown} bytes");
}

/// Files that are large and hold what they announce, but more than any model needs.
fn excessive() -> Vec<Case> {
    let tokens = "tokenizer.ggml.tokens";
    let merges = "tokenizer.ggml.merges";
    let empty_texts = |count: u64| array(TEXT, count, &vec![0; 8 * count as usize]);
    let mut keys = Gguf::new();
    for number in 0..=1 << 16 {
        keys = keys.entry(&format!("{number}"), U8, &[0]);
    }
    let mut tensors = Gguf::new();
    for number in 0..=1 << 17 {
        tensors = tensors.tensor(&format!("{number}"), &[1], F32, 0);
    }
    let texts = |size: usize| (0..9).fold(Gguf::new(), |file, i| file.text(&format!("{i}"), &"x".repeat(size)));
    vec![
        ("too many keys", keys.build(), "metadata count"),
        ("too many tensors", tensors.build(), "tensor count"),
        ("one long text", Gguf::new().text("x", &"x".repeat(9 << 20)).build(), "x"),
        ("much text in all", texts(1 << 20).build(), "7"),
        (
            "too many tokens",
            Gguf::llama().without(tokens).entry(tokens, ARRAY, &empty_texts((1 << 19) + 1)).build(),
            tokens,
        ),
        (
            "too many merges",
            Gguf::llama().without(merges).entry(merges, ARRAY, &empty_texts((1 << 20) + 1)).build(),
            merges,
        ),
    ]
}

#[test]
fn the_undamaged_file_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let path = Gguf::llama().tensor("blk.0.attn_q.weight", &[4, 4], F32, 0).data([0; 64]).write(folder.path());
    use_fully(&path).unwrap();
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = one_tensor(&[16], F32, 0).build();
    for length in 0..bytes.len() {
        let path = write(folder.path(), "model.gguf", &bytes[..length]);
        let error = GgufFile::open(&path).expect_err("a part of a file is no file");
        assert!(!error.field().is_empty(), "{error}");
    }
}

#[test]
fn files_that_are_not_regular_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = GgufFile::open(folder.path()).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::NotAFile), "{error}");
    let error = GgufFile::open(folder.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::Io(_)), "{error}");
    let error = GgufFile::open("/dev/zero").unwrap_err();
    assert!(matches!(error.kind, ErrorKind::NotAFile), "{error}");
}

#[test]
fn i01_special_token_ids_beyond_the_vocabulary_are_refused_naming_the_key() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["bos", "eos", "eot", "unknown", "padding", "seperator", "fim_pre"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let file = |id| Gguf::llama().without(&key).u32(&key, id).write(folder.path());
        let error = GgufFile::open(file(4)).unwrap_err();
        assert_eq!(error.field(), key);
        assert!(matches!(error.kind, ErrorKind::OutOfRange { found: 4, high: 3, .. }), "{error}");
        GgufFile::open(file(3)).unwrap();
        GgufFile::open(file(u32::MAX)).expect("0xFFFFFFFF means none");
    }
}

#[test]
fn i10_shapes_whose_size_overflows_are_refused_for_every_type() {
    let folder = tempfile::tempdir().unwrap();
    for kind in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K] {
        for dimensions in [&[1 << 61][..], &[1 << 32, 1 << 32], &[256, 1 << 62], &[1 << 20; 4]] {
            let path = one_tensor(dimensions, kind, 0).write(folder.path());
            let error = GgufFile::open(path).unwrap_err();
            assert!(matches!(error.kind, ErrorKind::SizeOverflow(_)), "{error}");
        }
    }
}

mod random_damage {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn no_byte_makes_the_reader_panic(at in 0_usize..600, byte: u8, cut in 0_usize..600) {
            let folder = tempfile::tempdir().unwrap();
            let mut bytes = one_tensor(&[16], F32, 0).build();
            let length = bytes.len();
            bytes[at % length] = byte;
            bytes.truncate(length - (cut % 8) * (cut / 8) % length);
            let path = write(folder.path(), "model.gguf", &bytes);
            // Either answer is right; a panic or a hang is not.
            let _ = use_fully(&path);
        }
    }
}
