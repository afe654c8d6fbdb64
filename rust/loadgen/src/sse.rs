//! Server-sent events out of bytes that are cut anywhere.
//!
//! Only `data` counts here: other fields and comments are skipped. Lines may end in LF, CRLF or CR.

use memchr::memchr2;

/// Bytes of one event at most; a server that sends more is broken.
pub const MAX_EVENT_BYTES: usize = 8 << 20;

/// An event was longer than [`MAX_EVENT_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// Finds the events of one stream; each byte is looked at once, however the stream is cut.
#[derive(Debug, Default)]
pub struct SseParser {
    /// The start of a line whose end has not come.
    line: Vec<u8>,
    /// The data lines of the event so far, joined by LF.
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was a CR: an LF that comes next belongs to it.
    after_cr: bool,
}

impl SseParser {
    /// Makes the parser ready for the next stream; keeps its memory.
    pub fn reset(&mut self) {
        self.line.clear();
        self.data.clear();
        self.has_data = false;
        self.after_cr = false;
    }

    /// Takes the next bytes and calls `on_event` with the data of each event that they complete.
    ///
    /// # Errors
    /// [`EventTooLong`]; the stream cannot be read on.
    pub fn feed(&mut self, mut bytes: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        while let Some(&first) = bytes.first() {
            if std::mem::take(&mut self.after_cr) && first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = memchr2(b'\n', b'\r', bytes) else {
                self.check(bytes.len())?;
                self.line.extend_from_slice(bytes);
                break;
            };
            self.after_cr = bytes[end] == b'\r';
            self.check(end)?;
            if self.line.is_empty() {
                self.take_line(&bytes[..end], &mut on_event);
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&bytes[..end]);
                self.take_line(&line, &mut on_event);
                line.clear();
                self.line = line;
            }
            bytes = &bytes[end + 1..];
        }
        Ok(())
    }

    fn check(&self, num_more: usize) -> Result<(), EventTooLong> {
        let total = self.line.len() + self.data.len() + num_more;
        if total > MAX_EVENT_BYTES { Err(EventTooLong) } else { Ok(()) }
    }

    fn take_line(&mut self, line: &[u8], on_event: &mut impl FnMut(&[u8])) {
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                on_event(&self.data);
                self.data.clear();
            }
            return;
        }
        let Some(rest) = line.strip_prefix(b"data") else { return };
        let value = match rest.split_first() {
            None => rest,
            Some((b':', value)) => value.strip_prefix(b" ").unwrap_or(value),
            Some(_) => return,
        };
        if std::mem::replace(&mut self.has_data, true) {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        b": ping\n\ndata: one\n\nevent: x\r\ndata:two\r\nid: 3\r\n\r\ndata: a\rdata:  b\r\rdata\n\ndatum: no\n\n\ndata: [DONE]\n\n";
    const EVENTS: [&str; 5] = ["one", "two", "a\n b", "", "[DONE]"];

    fn events_of(pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser
                .feed(piece, |data| events.push(String::from_utf8_lossy(data).into_owned()))
                .expect("events are short");
        }
        events
    }

    #[test]
    fn finds_the_same_events_wherever_the_stream_is_cut() {
        assert_eq!(events_of(&[STREAM]), EVENTS);
        for first in 0..=STREAM.len() {
            for second in first..=STREAM.len() {
                let pieces = [&STREAM[..first], &STREAM[first..second], &STREAM[second..]];
                assert_eq!(events_of(&pieces), EVENTS, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn finds_the_same_events_byte_by_byte() {
        let bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(events_of(&bytes), EVENTS);
    }

    #[test]
    fn an_event_without_its_blank_line_is_not_delivered() {
        assert!(events_of(&[b"data: half\n"]).is_empty());
    }

    #[test]
    fn refuses_an_endless_event() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; MAX_EVENT_BYTES / 2];
        assert_eq!(parser.feed(b"data: ", |_| ()), Ok(()));
        assert_eq!(parser.feed(&piece, |_| ()), Ok(()));
        assert_eq!(parser.feed(&piece, |_| ()), Err(EventTooLong));
    }

    #[test]
    fn reset_forgets_half_an_event() {
        let mut parser = SseParser::default();
        parser.feed(b"data: old\ndata: ha", |_| ()).expect("short");
        parser.reset();
        let mut events = Vec::new();
        parser.feed(b"data: new\n\n", |data| events.push(data.to_vec())).expect("short");
        assert_eq!(events, [b"new"]);
    }
}
