//! Everything that turns text into token ids and token ids into text.
//!
//! A request passes the modules in this order:
//!
//! | step | module |
//! | --- | --- |
//! | messages to a prompt | [`template`] |
//! | prompt to ids, on the caller's thread | [`tokenizer`] |
//! | submission, and results as they come or at the end | [`fanout`] |
//! | one step's tokens to text, on the consumer thread | [`stream`]: `detokenize`, then [`stop`] |
//!
//! Invariants of the crate:
//!
//! 1. It decides nothing about scheduling: a stop string becomes a `finish` on the engine's control path.
//! 2. The text of a request is a function of its token ids and stop strings; neither timing nor the size of steps enter.
//! 3. Input from outside (files, templates, messages) ends in an error, never in a panic, unbounded work or memory.

mod byte_level;
mod detokenize;
pub mod fanout;
mod gpt2_split;
mod merges;
mod offsets;
mod pieces;
pub mod stop;
pub mod stream;
mod strftime;
pub mod template;
mod template_source;
mod text_spec;
mod tojson;
pub mod tokenizer;

pub use fanout::{
    End, FinishedChoice, FinishedRequest, OutputChannel, OutputProcessor, Prepared, Recipient, StopReason, Timings,
    TokenIds, Update,
};
pub use offsets::TextOffsets;
pub use stop::StopStrings;
pub use stream::TextStream;
pub use template::{ChatRequest, ChatTemplate, TemplateLimits};
pub use text_spec::TextSpec;
pub use tokenizer::Tokenizer;
