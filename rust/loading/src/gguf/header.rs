//! Reads and checks the header of a GGUF file: metadata and the list of tensors.
//!
//! Invariants of a [`Header`] that was read:
//!
//! 1. Keys and tensor names are unique.
//! 2. Every tensor lies inside the file, starts at a multiple of the alignment and shares no byte
//!    with another one; its rows are whole numbers of blocks.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::reader::Reader;
use super::value::Value;
use crate::error::shown;
use crate::limits::{
    MAX_ALIGNMENT, MAX_GGUF_DIMENSIONS, MAX_KEY_BYTES, MAX_METADATA_BYTES, MAX_METADATA_KEYS, MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
};
use crate::{Encoding, ErrorKind, Result};

/// The fewest bytes of one metadata entry: length, one character, type, one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The fewest bytes of one tensor entry: length, one character, dimensions, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
const SPLIT_KEY: &str = "split.count";

/// Where a tensor is and what it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name.
    pub name: String,
    /// The dimensions, row-major: the last one is a row as it is stored (`[out, in]`).
    pub shape: Vec<usize>,
    /// How the numbers are stored.
    pub encoding: Encoding,
    /// Offset of the first byte in the file.
    pub(super) begin: usize,
    /// Bytes of the tensor.
    pub(super) bytes: usize,
}

/// What stands before the tensor data.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) tensor_index: HashMap<String, usize>,
}

/// A tensor entry whose place in the file is not checked yet.
struct Entry<'a> {
    name: &'a str,
    shape: Vec<u64>,
    encoding: Encoding,
    offset: u64,
    bytes: u64,
}

impl Header {
    /// Reads the header of `file`, whose content is `bytes`.
    pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        let (version, num_tensors, num_entries) = read_preamble(file, &mut reader)?;
        let metadata = read_metadata(file, &mut reader, num_entries)?;
        refuse_split(file, &metadata)?;
        let alignment = alignment(file, &metadata)?;
        let entries = read_entries(file, &mut reader, num_tensors)?;
        let data = (reader.position() as u64).next_multiple_of(alignment);
        let (tensors, tensor_index) = place(file, entries, data, bytes.len() as u64, alignment)?;
        Ok(Self { version, metadata, tensors, tensor_index })
    }
}

/// Reads magic, version and the two counts, and compares the counts with the length of the file.
fn read_preamble(file: &Path, reader: &mut Reader<'_>) -> Result<(u32, u64, u64)> {
    let magic = reader.magic().map_err(|kind| kind.at(file, "magic"))?;
    if magic != *b"GGUF" {
        return Err(ErrorKind::BadMagic { found: magic }.at(file, "magic"));
    }
    let version = reader.u32().map_err(|kind| kind.at(file, "version"))?;
    if matches!(version.swap_bytes(), 1..=3) {
        return Err(ErrorKind::BigEndian.at(file, "version"));
    }
    if !matches!(version, 2 | 3) {
        return Err(ErrorKind::UnsupportedVersion { found: version }.at(file, "version"));
    }
    let num_tensors = reader.u64().map_err(|kind| kind.at(file, "tensor count"))?;
    let num_entries = reader.u64().map_err(|kind| kind.at(file, "metadata count"))?;
    let check = |count: u64, least_bytes: u64, limit: u64, field: &str| {
        let limit = limit.min(reader.remaining() / least_bytes);
        ErrorKind::check_limit(count, limit).map_err(|kind| kind.at(file, field))
    };
    check(num_tensors, MIN_TENSOR_BYTES, MAX_TENSORS, "tensor count")?;
    check(num_entries, MIN_ENTRY_BYTES, MAX_METADATA_KEYS, "metadata count")?;
    Ok((version, num_tensors, num_entries))
}

fn read_metadata(file: &Path, reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    let mut kept_bytes = 0;
    for number in 0..count {
        let key = reader.name(MAX_KEY_BYTES).map_err(|kind| kind.at(file, format!("metadata key {number}")))?;
        kept_bytes += key.len() as u64;
        let value = Value::read(reader, MAX_METADATA_BYTES.saturating_sub(kept_bytes));
        let value = value.map_err(|kind| kind.at(file, key))?;
        if let Value::Text(text) = &value {
            kept_bytes += text.len() as u64;
        }
        ErrorKind::check_limit(kept_bytes, MAX_METADATA_BYTES).map_err(|kind| kind.at(file, key))?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(ErrorKind::Duplicate.at(file, key));
        }
    }
    Ok(metadata)
}

/// Refuses one part of a model that was split into several files.
fn refuse_split(file: &Path, metadata: &BTreeMap<String, Value>) -> Result<()> {
    let Some(value) = metadata.get(SPLIT_KEY) else { return Ok(()) };
    let expected = || ErrorKind::WrongType { expected: "an integer", found: value.type_name() };
    match value.as_integer().ok_or_else(expected) {
        Ok(0 | 1) => Ok(()),
        Ok(_) => {
            let what = "a model split into several GGUF files (merge them first)";
            Err(ErrorKind::Unsupported(what).at(file, SPLIT_KEY))
        }
        Err(kind) => Err(kind.at(file, SPLIT_KEY)),
    }
}

fn alignment(file: &Path, metadata: &BTreeMap<String, Value>) -> Result<u64> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let Value::Unsigned(found) = *value else {
        let kind = ErrorKind::WrongType { expected: "an unsigned integer", found: value.type_name() };
        return Err(kind.at(file, ALIGNMENT_KEY));
    };
    if !found.is_power_of_two() || found > MAX_ALIGNMENT {
        let kind = ErrorKind::BadAlignment { found, limit: MAX_ALIGNMENT };
        return Err(kind.at(file, ALIGNMENT_KEY));
    }
    Ok(found)
}

fn read_entries<'a>(file: &Path, reader: &mut Reader<'a>, count: u64) -> Result<Vec<Entry<'a>>> {
    let mut entries = Vec::new();
    for number in 0..count {
        let name = reader.name(MAX_TENSOR_NAME_BYTES).map_err(|kind| kind.at(file, format!("tensor name {number}")))?;
        let entry = read_entry(reader, name).map_err(|kind| kind.at(file, format!("tensor {name}")))?;
        entries.push(entry);
    }
    Ok(entries)
}

fn read_entry<'a>(reader: &mut Reader<'_>, name: &'a str) -> Result<Entry<'a>, ErrorKind> {
    let dimensions = reader.u32()?;
    if !(1..=MAX_GGUF_DIMENSIONS).contains(&dimensions) {
        let (found, high) = (dimensions.into(), MAX_GGUF_DIMENSIONS.into());
        return Err(ErrorKind::OutOfRange { found, low: 1, high });
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let size = reader.u64()?;
        // Sizes are signed in other readers, so the upper half of the range means "negative".
        if !(1..=i64::MAX as u64).contains(&size) {
            let high = i64::MAX.into();
            return Err(ErrorKind::OutOfRange { found: size.into(), low: 1, high });
        }
        shape.push(size);
    }
    // The file names the fastest dimension first.
    shape.reverse();
    let encoding = encoding_of(reader.u32()?)?;
    let offset = reader.u64()?;
    let bytes = encoding.byte_len(&shape)?;
    Ok(Entry { name, shape, encoding, offset, bytes })
}

/// Finds the place of every tensor in the file and checks that no two share a byte.
fn place(
    file: &Path,
    entries: Vec<Entry<'_>>,
    data: u64,
    file_bytes: u64,
    alignment: u64,
) -> Result<(Vec<TensorInfo>, HashMap<String, usize>)> {
    let available = file_bytes.saturating_sub(data);
    let mut tensors = Vec::new();
    let mut index = HashMap::new();
    for entry in entries {
        let name = entry.name;
        let info =
            place_one(entry, data, available, alignment).map_err(|kind| kind.at(file, format!("tensor {name}")))?;
        if index.insert(info.name.clone(), tensors.len()).is_some() {
            return Err(ErrorKind::Duplicate.at(file, format!("tensor {name}")));
        }
        tensors.push(info);
    }
    let mut by_place: Vec<&TensorInfo> = tensors.iter().collect();
    by_place.sort_by_key(|info| (info.begin, info.bytes));
    for pair in by_place.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if first.begin + first.bytes > second.begin {
            let kind = ErrorKind::Overlap {
                begin: second.begin as u64,
                end: (second.begin + second.bytes) as u64,
                other: shown(&first.name),
            };
            return Err(kind.at(file, format!("tensor {}", second.name)));
        }
    }
    Ok((tensors, index))
}

fn place_one(entry: Entry<'_>, data: u64, available: u64, alignment: u64) -> Result<TensorInfo, ErrorKind> {
    let Entry { name, shape, encoding, offset, bytes } = entry;
    if !offset.is_multiple_of(alignment) {
        return Err(ErrorKind::Misaligned { offset, alignment });
    }
    let end = offset.checked_add(bytes).ok_or(ErrorKind::SizeOverflow(vec![offset, bytes]))?;
    if end > available {
        return Err(ErrorKind::BeyondEnd { begin: offset, end, available });
    }
    Ok(TensorInfo {
        name: name.to_owned(),
        shape: shape.into_iter().map(|size| size as usize).collect(),
        encoding,
        begin: (data + offset) as usize,
        bytes: bytes as usize,
    })
}

/// Maps the number of a tensor type to its encoding.
fn encoding_of(id: u32) -> Result<Encoding, ErrorKind> {
    Ok(match id {
        0 => Encoding::F32,
        1 => Encoding::F16,
        2 => Encoding::Q4_0,
        3 => Encoding::Q4_1,
        6 => Encoding::Q5_0,
        7 => Encoding::Q5_1,
        8 => Encoding::Q8_0,
        12 => Encoding::Q4_K,
        13 => Encoding::Q5_K,
        14 => Encoding::Q6_K,
        30 => Encoding::BF16,
        other => {
            let name = unread_type(other).map_or_else(|| other.to_string(), str::to_owned);
            return Err(ErrorKind::UnsupportedTensorType { name });
        }
    })
}

/// The names of tensor types that the format defines and this reader does not decode.
fn unread_type(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
