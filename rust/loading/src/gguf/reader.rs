//! A cursor over the header of a GGUF file.
//!
//! Invariant: nothing is read, skipped or allocated that does not lie inside the bytes; lengths from
//! the file stay `u64` until they were compared with what is left.

use crate::ErrorKind;

/// Reads little-endian values one after the other.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    /// Starts at the first byte.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Returns the offset of the next byte.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Returns how many bytes are left.
    pub(super) fn remaining(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    /// Takes the next `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Result<&'a [u8], ErrorKind> {
        let available = self.remaining();
        if count > available {
            return Err(ErrorKind::Truncated { needed: count, available });
        }
        let end = self.position + count as usize;
        let taken = &self.bytes[self.position..end];
        self.position = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ErrorKind> {
        let taken = self.take(N as u64)?;
        Ok(taken.try_into().expect("take returns exactly the bytes asked for"))
    }

    /// Reads the four bytes that name the format.
    pub(super) fn magic(&mut self) -> Result<[u8; 4], ErrorKind> {
        self.array()
    }

    /// Reads a `u32`.
    pub(super) fn u32(&mut self) -> Result<u32, ErrorKind> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a `u64`.
    pub(super) fn u64(&mut self) -> Result<u64, ErrorKind> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a length and that many bytes of UTF-8.
    pub(super) fn text(&mut self) -> Result<&'a str, ErrorKind> {
        let length = self.u64()?;
        std::str::from_utf8(self.take(length)?).map_err(|_| ErrorKind::NotUtf8)
    }

    /// Reads a key or a tensor name of 1 to `limit` bytes.
    pub(super) fn name(&mut self, limit: u64) -> Result<&'a str, ErrorKind> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        if !(1..=limit).contains(&length) {
            return Err(ErrorKind::OutOfRange { found: length.into(), low: 1, high: limit.into() });
        }
        std::str::from_utf8(bytes).map_err(|_| ErrorKind::NotUtf8)
    }
}
