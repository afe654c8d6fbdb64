//! The limits of this reader, all in one place.
//!
//! Sizes are compared with the file first; these limits bound what a file of any size can make this
//! crate allocate: a refused file costs at most about 64 MiB. Each is far above what real models need
//! (the figures in brackets), and a file above one is refused with the number and the limit.

/// Tensors of one file or index (a mixture-of-experts model of 671 billion parameters: 91,991).
pub(crate) const MAX_TENSORS: u64 = 1 << 17;
/// Bytes of a tensor name (below 100).
pub(crate) const MAX_TENSOR_NAME_BYTES: u64 = 1 << 10;
/// Dimensions of a tensor in a GGUF file; the format allows no more.
pub(crate) const MAX_GGUF_DIMENSIONS: u32 = 4;
/// Dimensions of a tensor in a safetensors file (4).
pub(crate) const MAX_DIMENSIONS: usize = 8;
/// Alignment of the tensors in a GGUF file (32).
pub(crate) const MAX_ALIGNMENT: u64 = 1 << 16;
/// Metadata keys of a GGUF file (about 50).
pub(crate) const MAX_METADATA_KEYS: u64 = 1 << 16;
/// Bytes of a metadata key; the format allows no more.
pub(crate) const MAX_KEY_BYTES: u64 = u16::MAX as u64;
/// Bytes of all keys and single texts of the metadata together (chat templates: 20 KiB).
pub(crate) const MAX_METADATA_BYTES: u64 = 8 << 20;
/// Tokens of a vocabulary (262,208).
pub(crate) const MAX_TOKENS: u64 = 1 << 19;
/// Merges, stored or rebuilt (580,604).
pub(crate) const MAX_MERGES: u64 = 1 << 20;
/// Bytes of a SentencePiece piece; the work for a piece grows with the square of its length (48).
pub(crate) const MAX_PIECE_BYTES: u64 = 1 << 10;
/// Bytes of a JSON header or index (9 MiB).
pub(crate) const MAX_JSON_BYTES: u64 = 16 << 20;
