//! Writes small GGUF and safetensors files, right and wrong ones.

// Every test file uses its own part of this module.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const FLOAT: u32 = 6;
pub const BOOL: u32 = 7;
pub const TEXT: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

pub const F32: u32 = 0;
pub const Q4_0: u32 = 2;
pub const Q4_1: u32 = 3;
pub const Q5_0: u32 = 6;
pub const Q5_1: u32 = 7;
pub const Q8_0: u32 = 8;
pub const Q4_K: u32 = 12;
pub const Q5_K: u32 = 13;
pub const Q6_K: u32 = 14;
pub const F16: u32 = 1;
pub const BF16: u32 = 30;

/// A length and the bytes.
pub fn text(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// The payload of an array value.
pub fn array(element: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &len.to_le_bytes(), elements].concat()
}

/// The payload of an array of texts.
pub fn texts(items: &[&str]) -> Vec<u8> {
    let elements: Vec<u8> = items.iter().flat_map(text).collect();
    array(TEXT, items.len() as u64, &elements)
}

/// The payload of an array of `i32`.
pub fn integers(items: &[i32]) -> Vec<u8> {
    let elements: Vec<u8> = items.iter().flat_map(|item| item.to_le_bytes()).collect();
    array(I32, items.len() as u64, &elements)
}

/// The payload of an array of `f32`.
pub fn floats(items: &[f32]) -> Vec<u8> {
    let elements: Vec<u8> = items.iter().flat_map(|item| item.to_le_bytes()).collect();
    array(FLOAT, items.len() as u64, &elements)
}

/// A GGUF file that is being put together; every number can be made wrong.
#[derive(Clone)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: [u8; 4],
    pub num_tensors: Option<u64>,
    pub num_entries: Option<u64>,
    pub alignment: usize,
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

impl Gguf {
    pub fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3_u32.to_le_bytes(),
            num_tensors: None,
            num_entries: None,
            alignment: 32,
            entries: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
        }
    }

    /// A small file of the llama architecture with a byte-level vocabulary.
    pub fn llama() -> Self {
        Self::new()
            .text("general.architecture", "llama")
            .u32("llama.block_count", 1)
            .u32("llama.attention.head_count", 2)
            .u32("llama.attention.head_count_kv", 1)
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .entry("tokenizer.ggml.tokens", ARRAY, &texts(&["<s>", "a", "b", "ab"]))
            .entry("tokenizer.ggml.token_type", ARRAY, &integers(&[3, 1, 1, 1]))
            .entry("tokenizer.ggml.merges", ARRAY, &texts(&["a b"]))
            .u32("tokenizer.ggml.bos_token_id", 0)
    }

    pub fn entry(mut self, key: &str, kind: u32, payload: &[u8]) -> Self {
        self.entries.push([text(key), kind.to_le_bytes().to_vec(), payload.to_vec()].concat());
        self
    }

    /// Puts bytes where an entry would be.
    pub fn raw_entry(mut self, bytes: Vec<u8>) -> Self {
        self.entries.push(bytes);
        self
    }

    /// Takes the entries of `key` out again.
    pub fn without(mut self, key: &str) -> Self {
        self.entries.retain(|entry| !entry.starts_with(&text(key)));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, TEXT, &text(value))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, U32, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.entry(key, BOOL, &[u8::from(value)])
    }

    /// Adds an entry of the tensor list; the first dimension is the fastest one.
    pub fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Self {
        let mut entry = text(name);
        entry.extend((dimensions.len() as u32).to_le_bytes());
        entry.extend(dimensions.iter().flat_map(|size| size.to_le_bytes()));
        entry.extend(kind.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    /// Puts bytes where a tensor entry would be.
    pub fn raw_tensor(mut self, bytes: Vec<u8>) -> Self {
        self.tensors.push(bytes);
        self
    }

    pub fn data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.data = data.into();
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let num_tensors = self.num_tensors.unwrap_or(self.tensors.len() as u64);
        let num_entries = self.num_entries.unwrap_or(self.entries.len() as u64);
        let mut bytes = [&self.magic[..], &self.version].concat();
        bytes.extend(num_tensors.to_le_bytes());
        bytes.extend(num_entries.to_le_bytes());
        bytes.extend(self.entries.iter().chain(&self.tensors).flatten());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// Writes the file into `folder`.
    pub fn write(&self, folder: &Path) -> PathBuf {
        write(folder, "model.gguf", &self.build())
    }
}

/// The bytes of a safetensors file with this header and `data` zero bytes.
pub fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [text(header), vec![0; data]].concat()
}

pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The most memory that this process ever held, in bytes.
pub fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let kibibytes: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kibibytes * 1024
}
