//! Every way a model file can be refused, as facts with the numbers and the limits.
//!
//! Invariants:
//!
//! 1. An [`Error`] always names the file and a field: a part of the header, a metadata key, or a
//!    tensor.
//! 2. The message is one line, whatever bytes the file holds: names taken from a file are escaped
//!    and shortened before they are stored here.

use std::io;
use std::path::{Path, PathBuf};

/// The result of reading a model file.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How much of a name from a file is repeated in a message, in characters.
const MAX_SHOWN_CHARS: usize = 120;

/// Says which file and which field of it was refused, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {field}: {kind}", file.display())]
pub struct Error {
    /// The file that was read.
    pub file: PathBuf,
    /// The header field, metadata key or tensor that was refused.
    pub field: String,
    /// Why.
    #[source]
    pub kind: ErrorKind,
}

impl Error {
    /// Returns the file that was read.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the header field, metadata key or tensor that was refused.
    pub fn field(&self) -> &str {
        &self.field
    }
}

/// Why a field was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The path is a folder, a device or a pipe.
    #[error("is not a regular file")]
    NotAFile,
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// The header asks for more bytes than the file has.
    #[error("needs {needed} bytes, the file has {available} left")]
    Truncated {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that are left.
        available: u64,
    },
    /// The file does not start with the bytes of its format.
    #[error("is not a GGUF file: it starts with {found:02x?}, not with \"GGUF\"")]
    BadMagic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The file was written for a big-endian machine.
    #[error("is a big-endian GGUF file; only little-endian ones are read")]
    BigEndian,
    /// The version of the format is not read.
    #[error("version {found} is not supported (2 and 3 are)")]
    UnsupportedVersion {
        /// The version of the file.
        found: u32,
    },
    /// A count or a length is above a limit of this reader.
    #[error("{found} is above the limit of {limit}")]
    AboveLimit {
        /// The number in the file.
        found: u64,
        /// The largest number that is accepted.
        limit: u64,
    },
    /// A number is outside its range.
    #[error("{found} is not in {low}..={high}")]
    OutOfRange {
        /// The number in the file.
        found: i128,
        /// The smallest legal number.
        low: i128,
        /// The largest legal number.
        high: i128,
    },
    /// The value has another type than this key must have.
    #[error("must be {expected}, is {found}")]
    WrongType {
        /// What the key must be.
        expected: &'static str,
        /// What the file holds.
        found: &'static str,
    },
    /// A metadata value has a type number that the format does not define.
    #[error("unknown value type {found}")]
    UnknownValueType {
        /// The type number in the file.
        found: u32,
    },
    /// An array of arrays.
    #[error("arrays of arrays are not supported")]
    NestedArray,
    /// A tensor is stored in a way that is not read.
    #[error("tensor type {name} is not supported")]
    UnsupportedTensorType {
        /// The name of the type, or its number.
        name: String,
    },
    /// The bytes are not UTF-8.
    #[error("is not valid UTF-8")]
    NotUtf8,
    /// The same key, tensor or token twice.
    #[error("occurs twice")]
    Duplicate,
    /// The same tensor in two files of one checkpoint.
    #[error("is in two files: {first} and {second}")]
    InTwoFiles {
        /// The first file.
        first: String,
        /// The second file.
        second: String,
    },
    /// A product or a sum does not fit into 64 bits.
    #[error("the size overflows: {0:?}")]
    SizeOverflow(Vec<u64>),
    /// A row does not hold a whole number of blocks (or bytes).
    #[error("{elements} elements are not a whole number of {unit} of {size}")]
    PartialUnit {
        /// The number of elements.
        elements: u64,
        /// What they have to fill: blocks or bytes.
        unit: &'static str,
        /// The elements (or bits) of one unit.
        size: u64,
    },
    /// The alignment is no power of two, or too large.
    #[error("alignment {found} is not a power of two in 1..={limit}")]
    BadAlignment {
        /// The alignment in the file.
        found: u64,
        /// The largest alignment that is accepted.
        limit: u64,
    },
    /// An offset is not a multiple of the alignment.
    #[error("offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The offset in the file.
        offset: u64,
        /// The alignment of the file.
        alignment: u64,
    },
    /// Two tensors share bytes.
    #[error("bytes {begin}..{end} overlap tensor {other}")]
    Overlap {
        /// First byte of this tensor.
        begin: u64,
        /// Byte after the last one of this tensor.
        end: u64,
        /// The other tensor.
        other: String,
    },
    /// A tensor ends after the file does.
    #[error("bytes {begin}..{end} are not within the {available} bytes of data")]
    BeyondEnd {
        /// First byte of this tensor.
        begin: u64,
        /// Byte after the last one of this tensor.
        end: u64,
        /// Bytes of tensor data in the file.
        available: u64,
    },
    /// Bytes between, before or after the tensors belong to none.
    #[error("bytes {begin}..{end} of the data belong to no tensor")]
    Hole {
        /// First byte.
        begin: u64,
        /// Byte after the last one.
        end: u64,
    },
    /// Shape and data disagree.
    #[error("the shape needs {expected} bytes, the offsets span {found}")]
    SizeMismatch {
        /// Bytes that shape and type need.
        expected: u64,
        /// Bytes that the offsets span.
        found: u64,
    },
    /// Two lists that belong together have different lengths.
    #[error("has {found} entries, there are {expected} {of}")]
    LengthMismatch {
        /// Entries in the file.
        found: u64,
        /// Entries that are needed.
        expected: u64,
        /// What they have to match.
        of: &'static str,
    },
    /// Something that is needed is not there.
    #[error("is missing")]
    Missing,
    /// A name that this reader does not know.
    #[error("unknown {what} {found:?}")]
    UnknownName {
        /// What the name stands for.
        what: &'static str,
        /// The name in the file.
        found: String,
    },
    /// The file asks for something that is not built.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// A JSON text that cannot be read.
    #[error("bad JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An index names a file that is not a plain name inside its folder.
    #[error("{found:?} is not the name of a .safetensors file in the same folder")]
    UnsafePath {
        /// The name in the index.
        found: String,
    },
    /// A symbolic link leads out of the folder of the checkpoint.
    #[error("is a link to {}, outside the folder of the checkpoint", target.display())]
    LinkOutside {
        /// Where the link leads.
        target: PathBuf,
    },
    /// A merge rule uses or makes a token that the vocabulary lacks.
    #[error("rule {index} needs token {token:?}, which is not in the vocabulary")]
    MergeWithoutToken {
        /// The number of the rule, from 0.
        index: u64,
        /// The missing token.
        token: String,
    },
    /// A merge rule is not two parts separated by one space.
    #[error("rule {index} is not two tokens separated by a space")]
    BadMerge {
        /// The number of the rule, from 0.
        index: u64,
    },
}

impl ErrorKind {
    /// Refuses a number above `limit`.
    pub(crate) fn check_limit(found: u64, limit: u64) -> Result<(), Self> {
        if found > limit { Err(Self::AboveLimit { found, limit }) } else { Ok(()) }
    }

    /// Makes the error of `field` in `file` out of this reason.
    pub(crate) fn at(self, file: &Path, field: impl AsRef<str>) -> Error {
        Error { file: file.to_path_buf(), field: shown(field.as_ref()), kind: self }
    }
}

/// Escapes and shortens a name from a file, so that it fits into a one-line message.
pub(crate) fn shown(name: &str) -> String {
    let mut text = String::new();
    for character in name.chars().take(MAX_SHOWN_CHARS) {
        if character.is_control() {
            text.extend(character.escape_default());
        } else {
            text.push(character);
        }
    }
    if name.chars().nth(MAX_SHOWN_CHARS).is_some() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_short_line_whatever_the_name_holds() {
        let name = format!("a\nb\u{0}{}", "x".repeat(10_000));
        let message = ErrorKind::Missing.at(Path::new("m.gguf"), name).to_string();
        assert!(!message.contains('\n'), "{message}");
        assert!(message.chars().count() < 200, "{message}");
        assert!(message.starts_with("m.gguf: a\\nb\\u{0}"), "{message}");
    }
}
