//! Every way the kernels can refuse a call.

/// Result of a kernel call.
pub type Result<T> = std::result::Result<T, Error>;

/// A refused call; nothing was read from the caches and nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A dimension that must be at least 1 is 0.
    #[error("{dimension} must be at least 1")]
    ZeroDimension {
        /// Name of the dimension.
        dimension: &'static str,
    },
    /// The shape of a cache has more elements than can be addressed.
    #[error(
        "a cache of {num_blocks} blocks x {num_kv_heads} heads x {block_size} tokens x {head_dim} elements cannot be addressed"
    )]
    CacheTooLarge {
        /// Blocks in the cache.
        num_blocks: usize,
        /// KV heads.
        num_kv_heads: usize,
        /// Tokens in a block.
        block_size: usize,
        /// Elements in a head.
        head_dim: usize,
    },
    /// A weight matrix has more elements than can be addressed.
    #[error("a matrix of {out_features} x {in_features} elements cannot be addressed")]
    MatrixTooLarge {
        /// Output features.
        out_features: usize,
        /// Input features.
        in_features: usize,
    },
    /// The output features of a matrix are not parts of equal size.
    #[error("{out_features} output features are not {num_parts} parts of equal size")]
    Parts {
        /// Output features.
        out_features: usize,
        /// Parts asked for.
        num_parts: usize,
    },
    /// A gated product needs a matrix of two parts.
    #[error("a gated product needs a matrix of 2 parts, this one has {num_parts}")]
    Gate {
        /// Parts of the matrix.
        num_parts: usize,
    },
    /// A matrix was packed for another instruction set than the kernels use.
    #[error("the matrix is packed for {packed}, these kernels use {isa}")]
    PackedFor {
        /// Name of the instruction set that it is packed for.
        packed: &'static str,
        /// Name of the instruction set in use.
        isa: &'static str,
    },
    /// An array has the wrong number of elements.
    #[error("{argument} has {len} elements, expected {expected}")]
    Length {
        /// Name of the argument.
        argument: &'static str,
        /// Its elements.
        len: usize,
        /// Elements that the other arguments ask for.
        expected: usize,
    },
    /// Key and value cache hold different element types.
    #[error("key_cache and value_cache hold different element types")]
    CacheTypes,
    /// Query heads cannot be shared evenly among the KV heads.
    #[error("num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")]
    Heads {
        /// Query heads.
        num_heads: usize,
        /// KV heads.
        num_kv_heads: usize,
    },
    /// A slot lies outside the cache and is not -1.
    #[error("slot_mapping[{token}] is {slot}, the cache has slots 0..{num_slots} (-1: do not write)")]
    Slot {
        /// Index of the token.
        token: usize,
        /// Its slot.
        slot: i64,
        /// Slots in the cache.
        num_slots: usize,
    },
    /// The prefix sums of query tokens are not ascending from 0 to at most the number of tokens.
    #[error(
        "query_start[{index}] is {value}; it must start at 0, ascend, and end at or below the {num_tokens} tokens given"
    )]
    QueryStart {
        /// Index into `query_start`.
        index: usize,
        /// Value found.
        value: i32,
        /// Tokens in `query`.
        num_tokens: usize,
    },
    /// A context is shorter than the query tokens that belong to it.
    #[error("seq_lens[{sequence}] is {seq_len}, less than its {num_queries} query tokens")]
    SeqLen {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Context length found.
        seq_len: i32,
        /// Query tokens of the sequence.
        num_queries: usize,
    },
    /// A context does not fit the columns of the block tables.
    #[error("seq_lens[{sequence}] is {seq_len}: needs {needed} blocks, block_tables has {max_blocks} columns")]
    BlockTableWidth {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Context length.
        seq_len: usize,
        /// Blocks needed.
        needed: usize,
        /// Columns of the block tables.
        max_blocks: usize,
    },
    /// A row id lies outside the block tables.
    #[error("row_ids[{sequence}] is {row_id}, block_tables has rows 0..{num_rows}")]
    RowId {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Row id found.
        row_id: i32,
        /// Rows of the block tables.
        num_rows: usize,
    },
    /// A block id lies outside the cache.
    #[error("block_tables[{row_id}, {column}] is {block_id}, the cache has blocks 0..{num_blocks}")]
    BlockId {
        /// Row of the block tables.
        row_id: usize,
        /// Column of the block tables.
        column: usize,
        /// Block id found.
        block_id: i32,
        /// Blocks in the cache.
        num_blocks: usize,
    },
    /// An entry of an array of indices is out of range.
    #[error("{argument}[{index}] is {value}, expected 0..{limit}")]
    Index {
        /// Name of the argument.
        argument: &'static str,
        /// Index of the entry.
        index: usize,
        /// Value found.
        value: i64,
        /// First value that is too large.
        limit: usize,
    },
    /// A sampling parameter is out of range.
    #[error("{argument}[{index}] is {value}, but must be {expected}")]
    Value {
        /// Name of the argument.
        argument: &'static str,
        /// Its index.
        index: usize,
        /// The value.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// The place of some values is not inside their array.
    #[error("{argument}: the place of entry {index} is not inside the {len} values")]
    Range {
        /// Name of the argument.
        argument: &'static str,
        /// Row or sample whose values they are.
        index: usize,
        /// Values that there are.
        len: usize,
    },
    /// The factor on the scores is not a finite number.
    #[error("scale must be finite, got {scale}")]
    Scale {
        /// Value found.
        scale: f32,
    },
    /// A sliding window sees no key at all.
    #[error("sliding_window must be at least 1 or absent, got 0")]
    SlidingWindow,
    /// Two steps of one decoder at a time.
    #[error("another step of this decoder is running; it runs one at a time")]
    Busy,
    /// The number of threads is out of range.
    #[error("num_threads must be 1..={max}, got {num_threads}")]
    NumThreads {
        /// Value found.
        num_threads: usize,
        /// Largest value allowed.
        max: usize,
    },
    /// This machine cannot run the instruction set asked for.
    #[error("this CPU does not run {isa}")]
    Isa {
        /// Name of the instruction set.
        isa: &'static str,
    },
    /// The threads could not be started.
    #[error("could not start {num_threads} threads")]
    Threads {
        /// Threads asked for.
        num_threads: usize,
        /// Why the system refused.
        #[source]
        source: std::io::Error,
    },
    /// The process was forked after the threads were started; they do not exist in the child.
    #[error("these kernels belong to process {owner}; make new ones after fork")]
    Forked {
        /// Process that started the threads.
        owner: u32,
    },
}
