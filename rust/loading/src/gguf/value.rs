//! Metadata values.
//!
//! Scalars are kept by value. Arrays stay in the memory map: a [`Array`] only says where its
//! elements are, because the token lists of a model are larger than all the rest of its header.
//!
//! Invariant: the range of an [`Array`] was walked once when the file was opened; it holds exactly
//! `len` elements of its type.

use std::ops::Range;

use super::reader::Reader;
use crate::ErrorKind;

/// The type of a value in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_id(id: u32) -> Result<Self, ErrorKind> {
        Ok(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            found => return Err(ErrorKind::UnknownValueType { found }),
        })
    }

    /// The bytes of one value; the fewest for the types without a fixed size.
    fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
            Self::Array => 12,
        }
    }
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A floating-point number of either width.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// Many values of one type.
    Array(Array),
}

impl Value {
    /// Reads the type of a value and the value; a text may have `max_text_bytes`.
    pub(super) fn read(reader: &mut Reader<'_>, max_text_bytes: u64) -> Result<Self, ErrorKind> {
        match ValueType::from_id(reader.u32()?)? {
            ValueType::Array => Array::read(reader).map(Self::Array),
            ValueType::Text => {
                let text = reader.text()?;
                ErrorKind::check_limit(text.len() as u64, max_text_bytes)?;
                Ok(Self::Text(text.to_owned()))
            }
            scalar => Self::read_scalar(reader, scalar),
        }
    }

    fn read_scalar(reader: &mut Reader<'_>, kind: ValueType) -> Result<Self, ErrorKind> {
        let stored = reader.take(kind.bytes())?;
        let mut bytes = [0; 8];
        bytes[..stored.len()].copy_from_slice(stored);
        let bits = u64::from_le_bytes(bytes);
        Ok(match kind {
            ValueType::I8 => Self::Signed(bits as i8 as i64),
            ValueType::I16 => Self::Signed(bits as i16 as i64),
            ValueType::I32 => Self::Signed(bits as i32 as i64),
            ValueType::I64 => Self::Signed(bits as i64),
            ValueType::F32 => Self::Float(f64::from(f32::from_bits(bits as u32))),
            ValueType::F64 => Self::Float(f64::from_bits(bits)),
            ValueType::Bool if bits > 1 => {
                return Err(ErrorKind::OutOfRange { found: bits.into(), low: 0, high: 1 });
            }
            ValueType::Bool => Self::Bool(bits == 1),
            _ => Self::Unsigned(bits),
        })
    }

    /// Returns what the value is, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Text(_) => "a string",
            Self::Array(array) => array.type_name(),
        }
    }

    /// Returns the value as an integer, `None` for other types.
    pub fn as_integer(&self) -> Option<i128> {
        match self {
            Self::Unsigned(value) => Some((*value).into()),
            Self::Signed(value) => Some((*value).into()),
            _ => None,
        }
    }
}

/// An array of values; its elements are read through [`super::GgufFile::elements`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub(super) element: ValueType,
    pub(super) len: usize,
    pub(super) range: Range<usize>,
}

impl Array {
    fn read(reader: &mut Reader<'_>) -> Result<Self, ErrorKind> {
        let element = ValueType::from_id(reader.u32()?)?;
        let len = reader.u64()?;
        if element == ValueType::Array {
            return Err(ErrorKind::NestedArray);
        }
        // Refused before it is walked: a length that cannot fit would otherwise cost a long loop.
        let least = len.saturating_mul(element.bytes());
        if least > reader.remaining() {
            return Err(ErrorKind::Truncated { needed: least, available: reader.remaining() });
        }
        let begin = reader.position();
        if element == ValueType::Text {
            for _ in 0..len {
                let length = reader.u64()?;
                reader.take(length)?;
            }
        } else {
            reader.take(least)?;
        }
        Ok(Self { element, len: len as usize, range: begin..reader.position() })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Says whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Says whether the elements are texts.
    pub fn is_text(&self) -> bool {
        self.element == ValueType::Text
    }

    /// Says whether the elements are integers.
    pub fn is_integer(&self) -> bool {
        !matches!(self.element, ValueType::Text | ValueType::F32 | ValueType::F64 | ValueType::Bool | ValueType::Array)
    }

    /// Says whether the elements are floating-point numbers.
    pub fn is_float(&self) -> bool {
        matches!(self.element, ValueType::F32 | ValueType::F64)
    }

    fn type_name(&self) -> &'static str {
        match self.element {
            ValueType::Text => "an array of strings",
            ValueType::Bool => "an array of bools",
            _ if self.is_float() => "an array of floats",
            _ => "an array of integers",
        }
    }

    /// Returns the elements, read from the bytes of the whole file.
    pub(super) fn texts<'a>(&self, file: &'a [u8]) -> impl Iterator<Item = Result<&'a str, ErrorKind>> + use<'a> {
        let mut reader = Reader::new(&file[self.range.clone()]);
        let len = if self.is_text() { self.len } else { 0 };
        (0..len).map(move |_| reader.text())
    }

    /// Returns the elements of an array of numbers or truth values.
    pub(super) fn scalars<'a>(&self, file: &'a [u8]) -> impl Iterator<Item = Result<Value, ErrorKind>> + use<'a> {
        let mut reader = Reader::new(&file[self.range.clone()]);
        let element = self.element;
        let len = if self.is_text() { 0 } else { self.len };
        (0..len).map(move |_| Value::read_scalar(&mut reader, element))
    }
}
