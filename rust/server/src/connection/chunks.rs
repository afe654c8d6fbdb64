//! Where a body in chunks ends: not to read it, which is hyper's affair, but to know what no longer belongs to it.
//!
//! A connection ends with such a body, so a mistake here cannot make a request of what is none.

/// How far a body in chunks has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunks {
    /// In the size of a chunk, of which so much was read.
    Size(u64),
    /// Behind the size.
    Extension(u64),
    /// At the line feed behind it.
    SizeEnd(u64),
    /// So many bytes of the chunk, or of its line end, are left.
    Data(u64),
    /// At the start of a line behind the last chunk.
    LineStart,
    /// In a trailer field.
    Trailer,
    /// At the line feed behind it.
    TrailerEnd,
    /// At the line feed of the last line.
    LastEnd,
    /// Behind the last byte.
    Done,
    /// Not in chunks, which hyper will find too: everything is its affair.
    Broken,
}

impl Default for Chunks {
    fn default() -> Self {
        Self::Size(0)
    }
}

impl Chunks {
    /// Takes bytes; returns how many of them belong to the body.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> usize {
        let mut count = 0;
        while count < bytes.len() {
            match self {
                Self::Done => return count,
                Self::Broken => return bytes.len(),
                Self::Data(num_left) => {
                    let rest = (bytes.len() - count) as u64;
                    let taken = rest.min(*num_left);
                    *num_left -= taken;
                    count += taken as usize;
                    if *num_left == 0 {
                        *self = Self::Size(0);
                    }
                }
                _ => {
                    *self = self.after(bytes[count]);
                    count += 1;
                }
            }
        }
        count
    }

    /// What comes behind a byte that is none of a chunk's.
    fn after(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Size(size), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = (byte as char).to_digit(16).unwrap_or_default();
                size.checked_mul(16).map_or(Self::Broken, |size| Self::Size(size + u64::from(digit)))
            }
            (Self::Size(size), b' ' | b'\t' | b';') => Self::Extension(size),
            (Self::Size(size) | Self::Extension(size), b'\r') => Self::SizeEnd(size),
            (Self::Extension(size), _) if byte != b'\n' => Self::Extension(size),
            (Self::SizeEnd(0) | Self::TrailerEnd, b'\n') => Self::LineStart,
            // The chunk and its line end.
            (Self::SizeEnd(size), b'\n') => size.checked_add(2).map_or(Self::Broken, Self::Data),
            (Self::LineStart, b'\r') => Self::LastEnd,
            (Self::Trailer, b'\r') => Self::TrailerEnd,
            (Self::LineStart | Self::Trailer, _) => Self::Trailer,
            (Self::LastEnd, b'\n') => Self::Done,
            _ => Self::Broken,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `bytes` belong to a body that begins with them, and how it stands then; the same however they come.
    fn passed(bytes: &str) -> (usize, Chunks) {
        let mut whole = Chunks::default();
        let count = whole.pass(bytes.as_bytes());
        for size in [1, 2, 3, 7] {
            let mut chunks = Chunks::default();
            let sum: usize = bytes.as_bytes().chunks(size).map(|part| chunks.pass(part)).sum();
            assert_eq!((sum, chunks), (count, whole), "in parts of {size}");
        }
        (count, whole)
    }

    #[test]
    fn a_body_ends_behind_its_last_line() {
        for body in [
            "0\r\n\r\n",
            "3\r\nabc\r\n0\r\n\r\n",
            "A;name=value\r\n0\r\n\r\n0\r\n\r\n\r\n00\r\n\r\n",
            "1 \r\na\r\n0\r\nname: value\r\nother: value\r\n\r\n",
        ] {
            assert_eq!(passed(body), (body.len(), Chunks::Done), "{body:?}");
            assert_eq!(passed(&format!("{body}GET / HTTP/1.1\r\n\r\n")), (body.len(), Chunks::Done), "{body:?}");
            let (count, state) = passed(&body[..body.len() - 1]);
            assert!(count == body.len() - 1 && state != Chunks::Done && state != Chunks::Broken, "{body:?}");
        }
    }

    #[test]
    fn what_is_no_body_in_chunks_is_hypers_affair() {
        for body in [
            "x\r\n",
            "3\nabc\r\n0\r\n\r\n",
            "10000000000000000\r\n",
            "ffffffffffffffff\r\n",
            "3;a\n",
            "0\r\r",
            "0\r\n\rx",
        ] {
            let more = format!("{body}0\r\n\r\nmore");
            assert_eq!(passed(&more), (more.len(), Chunks::Broken), "{body:?}");
        }
    }
}
