//! The element types of safetensors files.

use crate::{Encoding, ErrorKind};

/// The type of the elements of a tensor: its name and size in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtype {
    name: &'static str,
    bits: u64,
}

/// Every type that the format defines.
const DTYPES: [Dtype; 22] = [
    Dtype { name: "BOOL", bits: 8 },
    Dtype { name: "F4", bits: 4 },
    Dtype { name: "F6_E2M3", bits: 6 },
    Dtype { name: "F6_E3M2", bits: 6 },
    Dtype { name: "U8", bits: 8 },
    Dtype { name: "I8", bits: 8 },
    Dtype { name: "F8_E5M2", bits: 8 },
    Dtype { name: "F8_E4M3", bits: 8 },
    Dtype { name: "F8_E8M0", bits: 8 },
    Dtype { name: "F8_E4M3FNUZ", bits: 8 },
    Dtype { name: "F8_E5M2FNUZ", bits: 8 },
    Dtype { name: "I16", bits: 16 },
    Dtype { name: "U16", bits: 16 },
    Dtype { name: "F16", bits: 16 },
    Dtype { name: "BF16", bits: 16 },
    Dtype { name: "I32", bits: 32 },
    Dtype { name: "U32", bits: 32 },
    Dtype { name: "F32", bits: 32 },
    Dtype { name: "F64", bits: 64 },
    Dtype { name: "I64", bits: 64 },
    Dtype { name: "U64", bits: 64 },
    Dtype { name: "C64", bits: 64 },
];

impl Dtype {
    /// Finds a type by its name in the file.
    pub(super) fn by_name(name: &str) -> Option<Self> {
        DTYPES.into_iter().find(|dtype| dtype.name == name)
    }

    /// Returns the name of the type in the file.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the encoding, for the types that are decoded.
    pub(super) fn encoding(self) -> Option<Encoding> {
        match self.name {
            "F32" => Some(Encoding::F32),
            "F16" => Some(Encoding::F16),
            "BF16" => Some(Encoding::BF16),
            _ => None,
        }
    }

    /// Returns the bytes of `elements` numbers that came from `shape`.
    ///
    /// # Errors
    /// `SizeOverflow`; `PartialUnit` when numbers smaller than a byte do not fill the last one.
    pub(super) fn byte_len(self, elements: u64, shape: &[u64]) -> Result<u64, ErrorKind> {
        let bits = elements
            .checked_mul(self.bits)
            .filter(|&bits| isize::try_from(bits).is_ok())
            .ok_or_else(|| ErrorKind::SizeOverflow(shape.to_vec()))?;
        if !bits.is_multiple_of(8) {
            return Err(ErrorKind::PartialUnit { elements, unit: "bytes", size: self.bits });
        }
        Ok(bits / 8)
    }
}
