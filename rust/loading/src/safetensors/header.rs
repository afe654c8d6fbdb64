//! Reads and checks the JSON header of a safetensors file.
//!
//! Invariants of a header that was read: names are unique; the tensors fill the data exactly, without
//! overlap, hole or rest; shape, type and bytes of each agree.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::dtype::Dtype;
use crate::encoding::checked_product;
use crate::error::shown;
use crate::limits::{MAX_DIMENSIONS, MAX_JSON_BYTES, MAX_TENSORS};
use crate::{ErrorKind, Result};

const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// Where a tensor is and what it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name.
    pub name: String,
    /// The dimensions, row-major.
    pub shape: Vec<usize>,
    /// The type of the elements.
    pub dtype: Dtype,
    /// Offset of the first byte in the file.
    pub(super) begin: usize,
    /// Bytes of the tensor.
    pub(super) bytes: usize,
}

/// One tensor as the header writes it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A JSON object whose keys are unique; the values are not looked into yet.
///
/// Reading the values as raw text first bounds the work for deeply nested ones and lets every error
/// name its key.
pub(super) struct UniqueKeys<'a>(pub(super) BTreeMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for UniqueKeys<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = BTreeMap<String, &'de RawValue>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut keys = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let name = shown(&key);
                    if keys.insert(key, map.next_value()?).is_some() {
                        return Err(M::Error::custom(format!("key {name:?} occurs twice")));
                    }
                    if keys.len() as u64 > MAX_TENSORS {
                        return Err(M::Error::custom(format!("more than {MAX_TENSORS} keys")));
                    }
                }
                Ok(keys)
            }
        }

        deserializer.deserialize_map(Keys).map(Self)
    }
}

/// Reads the header of `file`, whose content is `bytes`; returns the tensors in the order of the data.
pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Vec<TensorInfo>> {
    let at = |kind: ErrorKind| kind.at(file, "header");
    let length = header_length(bytes).map_err(|kind| kind.at(file, "header length"))?;
    let (header, data) = bytes[LENGTH_BYTES as usize..].split_at(length as usize);
    let header = std::str::from_utf8(header).map_err(|_| at(ErrorKind::NotUtf8))?;
    let entries: UniqueKeys<'_> = serde_json::from_str(header).map_err(|error| at(error.into()))?;
    let mut tensors = Vec::new();
    for (name, entry) in entries.0 {
        if name == METADATA {
            serde_json::from_str::<BTreeMap<String, String>>(entry.get())
                .map_err(|error| ErrorKind::from(error).at(file, METADATA))?;
            continue;
        }
        let field = format!("tensor {name}");
        let info = read_entry(name, entry, data.len() as u64).map_err(|kind| kind.at(file, field))?;
        tensors.push(info);
    }
    tensors.sort_by_key(|info| (info.begin, info.bytes));
    check_cover(file, &tensors, data.len() as u64)?;
    let data_begin = bytes.len() - data.len();
    for info in &mut tensors {
        info.begin += data_begin;
    }
    Ok(tensors)
}

fn header_length(bytes: &[u8]) -> Result<u64, ErrorKind> {
    let available = bytes.len() as u64;
    let Some(stored) = bytes.first_chunk::<8>() else {
        return Err(ErrorKind::Truncated { needed: LENGTH_BYTES, available });
    };
    let needed = u64::from_le_bytes(*stored);
    let available = available - LENGTH_BYTES;
    if needed > available {
        return Err(ErrorKind::Truncated { needed, available });
    }
    if needed > MAX_JSON_BYTES {
        return Err(ErrorKind::AboveLimit { found: needed, limit: MAX_JSON_BYTES });
    }
    Ok(needed)
}

/// Reads one tensor; `begin` is still relative to the data.
fn read_entry(name: String, entry: &RawValue, available: u64) -> Result<TensorInfo, ErrorKind> {
    let Entry { dtype, shape, data_offsets: (begin, end) } = serde_json::from_str(entry.get())?;
    let dtype = Dtype::by_name(&dtype).ok_or_else(|| ErrorKind::UnknownName { what: "dtype", found: shown(&dtype) })?;
    if shape.len() > MAX_DIMENSIONS {
        let (found, limit) = (shape.len() as u64, MAX_DIMENSIONS as u64);
        return Err(ErrorKind::AboveLimit { found, limit });
    }
    let elements = checked_product(&shape).ok_or_else(|| ErrorKind::SizeOverflow(shape.clone()))?;
    let expected = dtype.byte_len(elements, &shape)?;
    if begin > end || end > available {
        return Err(ErrorKind::BeyondEnd { begin, end, available });
    }
    if end - begin != expected {
        return Err(ErrorKind::SizeMismatch { expected, found: end - begin });
    }
    let shape = shape.into_iter().map(|size| size as usize).collect();
    Ok(TensorInfo { name, shape, dtype, begin: begin as usize, bytes: expected as usize })
}

/// Checks that the tensors, sorted by place, follow one another from the first to the last byte.
fn check_cover(file: &Path, tensors: &[TensorInfo], data: u64) -> Result<()> {
    let mut end = 0;
    let mut last = "";
    for info in tensors {
        let begin = info.begin as u64;
        let field = || format!("tensor {}", info.name);
        if begin > end {
            return Err(ErrorKind::Hole { begin: end, end: begin }.at(file, field()));
        }
        if begin < end {
            let (end, other) = (begin + info.bytes as u64, shown(last));
            return Err(ErrorKind::Overlap { begin, end, other }.at(file, field()));
        }
        end = begin + info.bytes as u64;
        last = &info.name;
    }
    if end < data {
        return Err(ErrorKind::Hole { begin: end, end: data }.at(file, "data"));
    }
    Ok(())
}
