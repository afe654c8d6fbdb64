//! GGUF files: weights, metadata and tokenizer in one file.
//!
//! | file | owns |
//! | --- | --- |
//! | `reader.rs` | the cursor over the header |
//! | `value.rs` | metadata values |
//! | `header.rs` | metadata and tensor list, checked against the file |
//! | `checks.rs` | types and ranges of the keys that this crate uses |
//! | `rows.rs` | the order in which query and key rows are stored |
//! | `tokenizer/` | the tokenizer as a Hugging Face `tokenizer.json` |
//!
//! Invariants: those of the crate and of `header.rs`; in addition the known keys have their types and
//! every special token id is inside the vocabulary (`checks.rs`).

mod checks;
mod header;
mod reader;
mod rows;
mod tokenizer;
mod value;

use std::collections::BTreeMap;
use std::path::Path;

use crate::decode::{Element, Part, decode};
use crate::mapped::MappedFile;
use crate::{Error, ErrorKind, Result};
use header::Header;

pub use header::TensorInfo;
pub use value::{Array, Value};

/// An open GGUF file.
///
/// ```no_run
/// use cbrs_loading::gguf::GgufFile;
///
/// let file = GgufFile::open("model.gguf")?;
/// for tensor in file.tensors() {
///     println!("{} {} {:?}", tensor.name, tensor.encoding.name(), tensor.shape);
/// }
/// # Ok::<(), cbrs_loading::Error>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    map: MappedFile,
    header: Header,
}

impl GgufFile {
    /// Opens `path` and checks its whole header.
    ///
    /// # Errors
    /// Whatever is wrong with the file; the error names the field.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let map = MappedFile::open(path.as_ref())?;
        let header = Header::read(map.path(), map.bytes())?;
        let file = Self { map, header };
        checks::check(&file)?;
        Ok(file)
    }

    /// Returns the path that the file was opened with.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// Returns the version of the format.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Returns all metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.header.metadata
    }

    /// Returns the value of one key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(key)
    }

    /// Returns the elements of an array of this file.
    ///
    /// # Errors
    /// `NotUtf8`, `OutOfRange` (a bool that is neither 0 nor 1), with `key` as the field.
    pub fn elements(&self, key: &str, array: &Array) -> Result<Vec<Value>> {
        let bytes = self.map.bytes();
        let texts = array.texts(bytes).map(|text| text.map(|text| Value::Text(text.to_owned())));
        texts.chain(array.scalars(bytes)).collect::<Result<_, ErrorKind>>().map_err(|kind| self.error(key, kind))
    }

    /// Returns the tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// Returns one tensor.
    ///
    /// # Errors
    /// `Missing`.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        let index = self.header.tensor_index.get(name);
        index
            .map(|&index| &self.header.tensors[index])
            .ok_or_else(|| self.error(&format!("tensor {name}"), ErrorKind::Missing))
    }

    /// Decodes a tensor to float32, rows in the order that Hugging Face uses.
    ///
    /// # Errors
    /// `Missing`; and what [`Self::tensor_bf16`] lists.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>> {
        self.decode_tensor(name, None)
    }

    /// Decodes a tensor to the bits of bfloat16, rounded to nearest, ties to even.
    ///
    /// # Errors
    /// `Missing`; for query and key projections of the llama architecture also what is wrong with the
    /// head counts in the metadata, because the order of the rows depends on them.
    pub fn tensor_bf16(&self, name: &str) -> Result<Vec<u16>> {
        self.decode_tensor(name, None)
    }

    /// Decodes a part of a tensor as [`Self::tensor_f32`] does the whole; the rest of the file is not read.
    ///
    /// # Errors
    /// `Missing`; and what [`Self::tensor_bf16`] lists.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_f32(&self, name: &str, part: &Part) -> Result<Vec<f32>> {
        self.decode_tensor(name, Some(part))
    }

    /// Decodes a part of a tensor as [`Self::tensor_bf16`] does the whole; the rest of the file is not read.
    ///
    /// # Errors
    /// `Missing`; and what [`Self::tensor_bf16`] lists.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_bf16(&self, name: &str, part: &Part) -> Result<Vec<u16>> {
        self.decode_tensor(name, Some(part))
    }

    fn decode_tensor<T: Element>(&self, name: &str, part: Option<&Part>) -> Result<Vec<T>> {
        let info = self.tensor(name)?;
        let order = rows::order(self, info)?;
        let bytes = &self.map.bytes()[info.begin..info.begin + info.bytes];
        let row = rows::row_elements(info, order);
        Ok(decode(info.encoding, bytes, &info.shape, row, order, part))
    }

    /// Returns the tokenizer as the text of a Hugging Face `tokenizer.json`.
    ///
    /// # Errors
    /// `Missing`, `UnknownName` (tokenizer model or pre-tokenizer), and what is wrong with tokens,
    /// types, scores or merges.
    pub fn tokenizer_json(&self) -> Result<String> {
        tokenizer::tokenizer_json(self)
    }

    /// Returns the chat template, if the file has one.
    pub fn chat_template(&self) -> Option<&str> {
        match self.value(tokenizer::CHAT_TEMPLATE_KEY) {
            Some(Value::Text(template)) => Some(template),
            _ => None,
        }
    }

    /// Returns the special tokens that the file names, as (`bos`, `eos`, `eot`, `eom`, `unk`, `sep`,
    /// `pad`, `cls`, `mask`; id). An id of 0xFFFFFFFF means "none" and is left out.
    pub fn special_token_ids(&self) -> Vec<(&'static str, u32)> {
        tokenizer::special_token_ids(self)
    }

    /// Says whether a prompt starts with the BOS token.
    pub fn add_bos_token(&self) -> bool {
        tokenizer::adds_bos(self)
    }

    fn error(&self, field: &str, kind: ErrorKind) -> Error {
        kind.at(self.path(), field)
    }
}
