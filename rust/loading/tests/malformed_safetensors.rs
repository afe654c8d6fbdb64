//! Every malformed safetensors file, index or folder gives one error that names the file and the
//! field, at once and within bounded memory.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use cbrs_loading::ErrorKind;
use cbrs_loading::safetensors::{Checkpoint, SafetensorsFile};
use support::*;

/// A header with one tensor `w`.
fn one(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
}

fn length(length: u64) -> Vec<u8> {
    [&length.to_le_bytes()[..], b"{}"].concat()
}

/// Name, bytes, the field that the error has to name.
fn damaged() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let file = |header: &str| safetensors(header, 8);
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let entry =
        |begin: u64, end: u64| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin);
    let two = |a: (u64, u64), b: (u64, u64)| file(&format!(r#"{{"a":{},"b":{}}}"#, entry(a.0, a.1), entry(b.0, b.1)));
    vec![
        ("empty", Vec::new(), "file"),
        ("seven bytes", vec![0; 7], "header length"),
        ("header length 0", length(0), "header"),
        ("header longer than the file", length(100), "header length"),
        ("header length 2^64 - 1", length(u64::MAX), "header length"),
        ("header over the limit", safetensors(&" ".repeat((16 << 20) + 1), 0), "header length"),
        ("header that is not UTF-8", [text(b"{\"\xff\":1}"), vec![0; 8]].concat(), "header"),
        ("header that is not JSON", file("{w"), "header"),
        ("header that is a list", file("[1,2]"), "header"),
        ("text after the header", file("{}{}"), "header"),
        ("deep JSON in a tensor", file(&format!(r#"{{"w":{}}}"#, deep(100_000))), "tensor w"),
        ("deep JSON in the metadata", file(&format!(r#"{{"__metadata__":{}}}"#, deep(100_000))), "__metadata__"),
        ("deep JSON as the header", file(&deep(100_000)), "header"),
        ("metadata that is no map of texts", file(r#"{"__metadata__":{"a":1}}"#), "__metadata__"),
        ("duplicate tensor", file(&format!(r#"{{"w":{0},"w":{0}}}"#, entry(0, 8))), "header"),
        (
            "duplicate field of a tensor",
            file(r#"{"w":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#),
            "tensor w",
        ),
        ("tensor without a shape", file(r#"{"w":{"dtype":"U8","data_offsets":[0,8]}}"#), "tensor w"),
        ("tensor that is null", file(r#"{"w":null}"#), "tensor w"),
        ("unknown dtype", file(&one("F33", "[2]", 0, 8)), "tensor w"),
        ("negative dimension", file(&one("F32", "[-2]", 0, 8)), "tensor w"),
        ("dimension that is a float", file(&one("F32", "[2.0]", 0, 8)), "tensor w"),
        ("dimension over 64 bits", file(&one("F32", "[18446744073709551616]", 0, 8)), "tensor w"),
        ("too many dimensions", file(&one("F32", "[1,1,1,1,1,1,1,1,2]", 0, 8)), "tensor w"),
        ("product of dimensions overflows", file(&one("U8", "[4294967296,4294967296]", 0, 8)), "tensor w"),
        ("overflow hidden by a zero", file(&one("U8", "[4294967296,4294967296,0]", 0, 0)), "tensor w"),
        ("bits overflow though the elements fit", file(&one("F64", "[4611686018427387904]", 0, 8)), "tensor w"),
        ("shape and offsets disagree", file(&one("F32", "[3]", 0, 8)), "tensor w"),
        ("begin after end", file(&one("F32", "[2]", 8, 0)), "tensor w"),
        ("three offsets", file(r#"{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8,8]}}"#), "tensor w"),
        ("offset beyond the end", file(&one("F32", "[4]", 0, 16)), "tensor w"),
        ("huge offsets", file(&one("U8", "[8]", u64::MAX - 8, u64::MAX)), "tensor w"),
        ("overlap", two((0, 8), (4, 8)), "tensor b"),
        ("hole", two((0, 2), (4, 8)), "tensor b"),
        ("hole at the start", file(&one("U8", "[4]", 4, 8)), "tensor w"),
        ("trailing bytes", file(&one("U8", "[4]", 0, 4)), "data"),
        ("half a byte", file(&one("F4", "[3]", 0, 2)), "tensor w"),
        ("six-bit numbers that leave bits over", file(&one("F6_E2M3", "[3]", 0, 3)), "tensor w"),
    ]
}

#[test]
fn every_malformed_file_is_refused_naming_file_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let before = peak_memory();
    let cases = damaged();
    assert!(cases.len() >= 30, "{} cases", cases.len());
    for (name, bytes, field) in cases {
        let path = write(folder.path(), "model.safetensors", &bytes);
        let start = Instant::now();
        let Err(error) = SafetensorsFile::open(&path) else { panic!("{name}: accepted") };
        assert!(start.elapsed() < Duration::from_secs(2), "{name} took {:?}", start.elapsed());
        assert_eq!(error.file(), path, "{name}");
        assert_eq!(error.field(), field, "{name}: {error}");
        assert!(!error.to_string().contains('\n'), "{name}: {error}");
    }
    let grown = peak_memory() - before;
    assert!(grown < 64 << 20, "the files took {grown} bytes");
}

#[test]
fn i10_sizes_in_bits_never_wrap() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, shape) in [
        ("F4", "[9223372036854775808,2]"),
        ("F6_E3M2", "[6148914691236517206]"),
        ("F4", "[4611686018427387905]"),
        ("F64", "[2305843009213693952]"),
    ] {
        let bytes = safetensors(&one(dtype, shape, 0, 8), 8);
        let path = write(folder.path(), "model.safetensors", &bytes);
        let error = SafetensorsFile::open(path).unwrap_err();
        assert!(matches!(error.kind, ErrorKind::SizeOverflow(_)), "{dtype} {shape}: {error}");
    }
}

#[test]
fn an_undecoded_type_is_an_error_of_that_tensor_only() {
    let folder = tempfile::tempdir().unwrap();
    let header = r#"{"i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},
        "w":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    let path = write(folder.path(), "model.safetensors", &safetensors(header, 12));
    let file = SafetensorsFile::open(path).unwrap();
    let error = file.tensor_f32("i").unwrap_err();
    assert_eq!(error.field(), "tensor i");
    assert!(error.to_string().contains("I64"), "{error}");
    assert_eq!(file.tensor_f32("w").unwrap(), [0.0]);
}

/// A folder with an index and the shards `a.safetensors` (tensor `a`) and `b.safetensors` (`b`).
fn sharded(folder: &Path, index: &str) {
    for name in ["a", "b"] {
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}}}"#);
        write(folder, &format!("{name}.safetensors"), &safetensors(&header, 8));
    }
    write(folder, "model.safetensors.index.json", index.as_bytes());
}

fn weight_map(a: &str, b: &str) -> String {
    format!(r#"{{"metadata":{{}},"weight_map":{{"a":"{a}","b":"{b}"}}}}"#)
}

#[test]
fn a_sharded_checkpoint_finds_each_tensor_in_its_file() {
    let folder = tempfile::tempdir().unwrap();
    sharded(folder.path(), &weight_map("a.safetensors", "b.safetensors"));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.tensor("b").unwrap().shape, [8]);
    assert_eq!(checkpoint.tensor("c").unwrap_err().field(), "tensor c");
}

#[test]
fn malformed_indexes_are_refused() {
    let index = "model.safetensors.index.json";
    let cases = [
        ("missing shard", weight_map("a.safetensors", "c.safetensors"), "c.safetensors", "file"),
        ("parent folder", weight_map("a.safetensors", "../b.safetensors"), index, "weight_map"),
        ("absolute path", weight_map("a.safetensors", "/b.safetensors"), index, "weight_map"),
        ("subfolder", weight_map("a.safetensors", "x/b.safetensors"), index, "weight_map"),
        ("dot and slash", weight_map("a.safetensors", "./b.safetensors"), index, "weight_map"),
        ("parent itself", weight_map("a.safetensors", ".."), index, "weight_map"),
        ("empty name", weight_map("a.safetensors", ""), index, "weight_map"),
        ("a pickle", weight_map("a.safetensors", "b.bin"), index, "weight_map"),
        ("shard without the tensor", weight_map("a.safetensors", "a.safetensors"), "a.safetensors", "tensor b"),
        ("tensors swapped", weight_map("b.safetensors", "a.safetensors"), "b.safetensors", "tensor a"),
        ("tensor twice", r#"{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}"#.into(), index, "weight_map"),
        ("no weight map", "{}".into(), index, "weight_map"),
        ("map of numbers", r#"{"weight_map":{"a":1}}"#.into(), index, "weight_map"),
        ("not JSON", "{".into(), index, "weight_map"),
        ("deep JSON", format!(r#"{{"metadata":{}1}}"#, "[".repeat(100_000)), index, "weight_map"),
        ("empty index", String::new(), index, "file"),
    ];
    for (name, text, file, field) in cases {
        let folder = tempfile::tempdir().unwrap();
        sharded(folder.path(), &text);
        let Err(error) = Checkpoint::open(folder.path()) else { panic!("{name}: accepted") };
        assert_eq!(error.file(), folder.path().join(file), "{name}: {error}");
        assert_eq!(error.field(), field, "{name}: {error}");
    }
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    sharded(folder.path(), &weight_map("a.safetensors", "b.safetensors"));
    fs::copy(folder.path().join("a.safetensors"), folder.path().join("b.safetensors")).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.field(), "tensor a");
    assert!(matches!(error.kind, ErrorKind::InTwoFiles { .. }), "{error}");
}

#[test]
fn links_out_of_the_folder_are_refused() {
    let outside = tempfile::tempdir().unwrap();
    for linked in ["b.safetensors", "model.safetensors.index.json"] {
        let folder = tempfile::tempdir().unwrap();
        sharded(folder.path(), &weight_map("a.safetensors", "b.safetensors"));
        let (inner, outer) = (folder.path().join(linked), outside.path().join(linked));
        fs::rename(&inner, &outer).unwrap();
        std::os::unix::fs::symlink(&outer, &inner).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert_eq!(error.file(), inner);
        assert!(matches!(error.kind, ErrorKind::LinkOutside { .. }), "{error}");
    }
}

#[test]
fn links_of_the_hub_cache_into_its_blobs_are_followed() {
    let repository = tempfile::tempdir().unwrap();
    let (snapshot, blobs) = (repository.path().join("snapshots/1"), repository.path().join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    sharded(&blobs, &weight_map("a.safetensors", "b.safetensors"));
    for name in ["a.safetensors", "b.safetensors", "model.safetensors.index.json"] {
        let target = Path::new("../../blobs").join(name);
        std::os::unix::fs::symlink(target, snapshot.join(name)).unwrap();
    }
    assert_eq!(Checkpoint::open(&snapshot).unwrap().tensor_names().count(), 2);
}

#[test]
fn a_folder_without_weights_names_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "pytorch_model.bin", b"never opened");
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.file(), folder.path());
    assert!(error.field().contains("model.safetensors"), "{error}");
}
