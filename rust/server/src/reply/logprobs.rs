//! Log-probabilities in the three shapes that clients know: of chats, of completions, and of prompts.

use std::fmt::Write as _;

use cbrs_core::LogprobRows;
use cbrs_text::{TextOffsets, Tokenizer};

use super::write;

/// The text of each token alone.
#[derive(Debug, Clone)]
pub(crate) struct TokenTexts {
    tokenizer: Option<Tokenizer>,
}

impl TokenTexts {
    pub(crate) fn new(tokenizer: Option<Tokenizer>) -> Self {
        Self { tokenizer }
    }

    /// The text of a token and its bytes. Bytes that are no text are spelled out, as OpenAI does; without a tokenizer there is only the id.
    fn get(&self, id: i32) -> (String, Option<Vec<u8>>) {
        let Some(tokenizer) = &self.tokenizer else { return (format!("token_id:{id}"), None) };
        let mut bytes = Vec::new();
        tokenizer.push_token_bytes(id, &mut bytes);
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut text, byte| {
                write!(text, "\\x{byte:02x}").expect("a string takes everything");
                text
            }),
        };
        (text, Some(bytes))
    }

    /// Counts where tokens of the output begin in the text of a choice; absent without a text.
    pub(crate) fn offsets(&self) -> Option<TextOffsets> {
        self.tokenizer.clone().map(|tokenizer| TextOffsets::new(tokenizer, true))
    }

    fn text(&self, id: i32) -> String {
        self.get(id).0
    }

    /// Appends a token of a chat with the likely ones at its place.
    pub(crate) fn write_chat(&self, (ids, values): (&[i32], &[f32]), out: &mut Vec<u8>) {
        let (Some(&id), Some(&value)) = (ids.first(), values.first()) else { return out.extend_from_slice(b"null") };
        self.open_chat_token(id, value, out);
        out.extend_from_slice(b",\"top_logprobs\":");
        write::list(out, ids.iter().zip(values).skip(1), |out, (&id, &value)| {
            self.open_chat_token(id, value, out);
            out.push(b'}');
        });
        out.push(b'}');
    }

    fn open_chat_token(&self, id: i32, value: f32, out: &mut Vec<u8>) {
        let (text, bytes) = self.get(id);
        out.extend_from_slice(b"{\"token\":");
        write::string(out, &text);
        out.extend_from_slice(b",\"logprob\":");
        write::logprob(out, value);
        out.extend_from_slice(b",\"bytes\":");
        match bytes {
            Some(bytes) => write::list(out, bytes, write::integer),
            None => out.extend_from_slice(b"null"),
        }
    }

    /// Appends the log-probabilities of a prompt: `null` for its first token, then for each an object of itself and at most `count` likely ones, by
    /// id. There may be more in `rows`.
    pub(crate) fn write_prompt(&self, rows: &LogprobRows, count: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(b"[null");
        for row in 0..rows.len() {
            let (ids, values, rank) = rows.row(row);
            out.push(b',');
            out.push(b'{');
            for (place, (&id, &value)) in ids.iter().zip(values).take(count + 1).enumerate() {
                // The token itself comes first, and again if it is a likely one.
                if place > 0 && ids[0] == id {
                    continue;
                }
                if place > 0 {
                    out.push(b',');
                }
                write::string(out, &id.to_string());
                out.extend_from_slice(b":{\"logprob\":");
                write::logprob(out, value);
                out.extend_from_slice(b",\"rank\":");
                write::integer(out, if place == 0 { rank } else { place as i32 });
                out.extend_from_slice(b",\"decoded_token\":");
                write::string(out, &self.text(id));
                out.push(b'}');
            }
            out.push(b'}');
        }
        out.push(b']');
    }
}

/// The parallel arrays of a completion, while they grow.
#[derive(Debug, Default)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<u8>,
    values: Vec<u8>,
    top: Vec<u8>,
    offsets: Vec<u8>,
}

/// A token of a completion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) id: i32,
    /// Characters of the choice's text before it.
    pub(crate) offset: usize,
    /// Likely ids, itself first, and their values; absent for the first token of a prompt.
    pub(crate) row: Option<(&'a [i32], &'a [f32])>,
}

impl CompletionLogprobs {
    /// Adds a token and at most `count` likely ones.
    pub(crate) fn push(&mut self, texts: &TokenTexts, Token { id, offset, row }: Token<'_>, count: usize) {
        for array in [&mut self.tokens, &mut self.values, &mut self.top, &mut self.offsets] {
            if !array.is_empty() {
                array.push(b',');
            }
        }
        let text = texts.text(id);
        write::string(&mut self.tokens, &text);
        write::integer(&mut self.offsets, offset);
        match row {
            None => {
                self.values.extend_from_slice(b"null");
                self.top.extend_from_slice(b"null");
            }
            Some((ids, values)) => {
                write::logprob(&mut self.values, values.first().copied().unwrap_or(f32::NEG_INFINITY));
                let likely = || ids.iter().zip(values).skip(1).take(count);
                // The token itself belongs to the likely ones, whether it is one or not.
                let is_likely = likely().any(|(&likely, _)| likely == id);
                let own = ids.iter().zip(values).take(usize::from(!is_likely));
                self.top.push(b'{');
                for (place, (&id, &value)) in likely().chain(own).enumerate() {
                    if place > 0 {
                        self.top.push(b',');
                    }
                    write::string(&mut self.top, &texts.text(id));
                    self.top.push(b':');
                    write::logprob(&mut self.top, value);
                }
                self.top.push(b'}');
            }
        }
    }

    /// Appends the object, and begins a new one.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) {
        let arrays = [
            ("{\"tokens\":[", &mut self.tokens),
            ("],\"token_logprobs\":[", &mut self.values),
            ("],\"top_logprobs\":[", &mut self.top),
            ("],\"text_offset\":[", &mut self.offsets),
        ];
        for (name, array) in arrays {
            out.extend_from_slice(name.as_bytes());
            out.append(array);
        }
        out.extend_from_slice(b"]}");
    }
}
