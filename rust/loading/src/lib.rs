//! Reads model files: GGUF and safetensors, validated before anything is used.
//!
//! Opening a file maps it into memory and checks its whole header: every count, length, offset and
//! size is compared with the length of the file before it is used, with checked arithmetic. What an
//! open file then offers (tensors as numbers, metadata, the tokenizer, the chat template) can no
//! longer point outside the file.
//!
//! | looking for | go to |
//! | --- | --- |
//! | what can be wrong with a file | [`Error`], [`ErrorKind`] |
//! | the memory map | `mapped.rs` |
//! | limits of what a file may ask for | `limits.rs` |
//! | how weights are stored | [`Encoding`]; the formulas are in `blocks.rs` |
//! | reading weights as float32 or bfloat16 | `decode.rs` |
//! | GGUF files | [`gguf`]: header, known keys, row order, tokenizer |
//! | safetensors files and folders | [`safetensors`] |
//!
//! Invariants:
//!
//! 1. No allocation is sized by a number from a file that was not first compared with the length of
//!    that file; what is kept besides is bounded by the limits of `limits.rs`.
//! 2. Every failure is one [`Error`] that names the file and the field of the header or the tensor.
//! 3. Nothing from a file is executed, and no file is opened that the caller or a checked index did
//!    not name.
//! 4. An open file is immutable and shareable between threads; reading a tensor takes no lock.
//!
//! ```no_run
//! let file = cbrs_loading::gguf::GgufFile::open("model.gguf")?;
//! let embedding = file.tensor_f32("token_embd.weight")?;
//! let tokenizer = file.tokenizer_json()?;
//! # Ok::<(), cbrs_loading::Error>(())
//! ```

mod blocks;
mod decode;
mod encoding;
mod error;
pub mod gguf;
mod limits;
mod mapped;
pub mod safetensors;

pub use decode::Part;
pub use encoding::Encoding;
pub use error::{Error, ErrorKind, Result};
