//! What clients send: OpenAI's fields and the engine's own, with the limits that only the wire has.
//!
//! Every field works or is refused by name, and so is every field that is not known. `null` is as good as absent.

mod chat;
mod common;
mod completion;
mod depth;
mod fields;
mod json;
mod messages;
mod params;
#[cfg(test)]
mod tests;
mod tokenize;

pub(crate) use chat::ChatBody;
pub(crate) use common::Common;
pub(crate) use completion::CompletionBody;
pub(crate) use depth::check_depth;
pub(crate) use fields::Prompt;
pub(crate) use json::parse;
pub(crate) use messages::num_bytes;
pub(crate) use tokenize::{DetokenizeBody, TokenizeBody, TokenizeSource};
