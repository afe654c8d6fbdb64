//! safetensors files and folders of them.
//!
//! | file | owns |
//! | --- | --- |
//! | `dtype.rs` | the element types |
//! | `header.rs` | the JSON header, checked against the file |
//! | `checkpoint.rs` | a model of one or several files; which files a folder may name |

mod checkpoint;
mod dtype;
mod header;

use std::collections::HashMap;
use std::path::Path;

use crate::decode::{Element, Part, RowOrder, decode};
use crate::mapped::MappedFile;
use crate::{Error, ErrorKind, Result};

pub use checkpoint::Checkpoint;
pub use dtype::Dtype;
pub use header::TensorInfo;

/// An open safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    map: MappedFile,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

impl SafetensorsFile {
    /// Opens `path` and checks its whole header.
    ///
    /// # Errors
    /// Whatever is wrong with the file; the error names the field.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let map = MappedFile::open(path.as_ref())?;
        let tensors = header::read(map.path(), map.bytes())?;
        let index = tensors.iter().map(|info| info.name.clone()).zip(0..).collect();
        Ok(Self { map, tensors, index })
    }

    /// Returns the path that the file was opened with.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// Returns the tensors, in the order of the data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns one tensor.
    ///
    /// # Errors
    /// `Missing`.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        let index = self.index.get(name);
        index.map(|&index| &self.tensors[index]).ok_or_else(|| self.error(name, ErrorKind::Missing))
    }

    /// Decodes a tensor of type F32, F16 or BF16 to float32.
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>> {
        self.decode_tensor(name, None)
    }

    /// Decodes a tensor of type F32, F16 or BF16 to the bits of bfloat16, rounded to nearest, ties to
    /// even.
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    pub fn tensor_bf16(&self, name: &str) -> Result<Vec<u16>> {
        self.decode_tensor(name, None)
    }

    /// Decodes a part of a tensor as [`Self::tensor_f32`] does the whole; the rest of the file is not read.
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_f32(&self, name: &str, part: &Part) -> Result<Vec<f32>> {
        self.decode_tensor(name, Some(part))
    }

    /// Decodes a part of a tensor as [`Self::tensor_bf16`] does the whole; the rest of the file is not read.
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_bf16(&self, name: &str, part: &Part) -> Result<Vec<u16>> {
        self.decode_tensor(name, Some(part))
    }

    fn decode_tensor<T: Element>(&self, name: &str, part: Option<&Part>) -> Result<Vec<T>> {
        let info = self.tensor(name)?;
        let encoding = info.dtype.encoding().ok_or_else(|| {
            let kind = ErrorKind::UnsupportedTensorType { name: info.dtype.name().to_owned() };
            self.error(name, kind)
        })?;
        let bytes = &self.map.bytes()[info.begin..info.begin + info.bytes];
        let row = info.shape.last().copied().unwrap_or(1);
        Ok(decode(encoding, bytes, &info.shape, row, RowOrder::AsStored, part))
    }

    fn error(&self, tensor: &str, kind: ErrorKind) -> Error {
        kind.at(self.path(), format!("tensor {tensor}"))
    }
}
