//! Random batches over a paged cache, for the tests of the kernels.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "shared by several test crates, none of which uses all of it"
)]

use cbrs_cpu::{AttentionArgs, BatchIndex, CacheLayout, CacheRef, Error, Kernels, bf16, int8};

/// A small generator (xorshift), so that a failing case can be repeated from its seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 11) as usize % limit
    }

    /// A number in -1..1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub num_kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub block_size: usize,
}

impl Shape {
    pub fn num_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }
}

/// Element types of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F32,
    Bf16,
    Int8,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];
}

/// A cache of one type.
#[derive(Debug)]
pub enum Cache {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Int8(Vec<i8>),
}

impl Cache {
    /// Converts a cache of `layout`; what is NaN stays NaN.
    pub fn new(kind: Kind, numbers: &[f32], layout: &CacheLayout) -> Self {
        match kind {
            Kind::F32 => Self::F32(numbers.to_vec()),
            Kind::Bf16 => Self::Bf16(numbers.iter().map(|x| bf16::from_f32(*x)).collect()),
            Kind::Int8 => {
                let mut cache = vec![-1; layout.num_int8_elements()];
                let head_dim = layout.head_dim();
                for (index, row) in numbers.chunks_exact(head_dim).enumerate() {
                    let (run, offset) = (index / layout.block_size(), index % layout.block_size());
                    let (block, head) = (run / layout.num_kv_heads(), run % layout.num_kv_heads());
                    let [start, scale] = layout.int8_offsets(block, head, offset);
                    let bits = int8::quantize(row, &mut cache[start..start + head_dim]);
                    cache[scale..scale + 2].copy_from_slice(&int8::scale_bytes(bits));
                }
                Self::Int8(cache)
            }
        }
    }

    pub fn get(&self) -> CacheRef<'_> {
        match self {
            Self::F32(data) => CacheRef::F32(data),
            Self::Bf16(data) => CacheRef::Bf16(data),
            Self::Int8(data) => CacheRef::Int8(data),
        }
    }
}

/// Queries, keys and values of every position of one sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub len: usize,
}

impl Sequence {
    pub fn random(shape: Shape, len: usize, random: &mut Random) -> Self {
        let kv_len = len * shape.num_kv_heads * shape.head_dim;
        Self {
            query: random.numbers(kv_len * shape.group),
            key: random.numbers(kv_len),
            value: random.numbers(kv_len),
            len,
        }
    }
}

/// A batch: of each sequence the positions `start..end`, over a cache that holds `0..end` and NaN elsewhere.
#[derive(Debug, Clone)]
pub struct Batch {
    pub shape: Shape,
    pub layout: CacheLayout,
    pub num_tokens: usize,
    pub query: Vec<f32>,
    pub key_cache: Vec<f32>,
    pub value_cache: Vec<f32>,
    pub block_tables: Vec<i32>,
    pub max_blocks: usize,
    pub row_ids: Vec<i32>,
    pub query_start: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub sliding_window: Option<usize>,
}

impl Batch {
    /// `parts`: sequence, first and last position (exclusive) to compute. Blocks and rows are dealt at random.
    pub fn new(shape: Shape, parts: &[(&Sequence, usize, usize)], random: &mut Random) -> Self {
        let blocks_of = |end: usize| end.div_ceil(shape.block_size);
        let used: usize = parts.iter().map(|part| blocks_of(part.2)).sum();
        let num_blocks = used + 3;
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        random.shuffle(&mut free);
        // The highest id is in use, so that an index that is one short shows up.
        if let Some(at) = free.iter().position(|id| *id as usize == num_blocks - 1) {
            free.swap(at, num_blocks - 1);
        }
        let max_blocks = parts.iter().map(|part| blocks_of(part.2)).max().unwrap_or(0) + 1;
        let num_rows = parts.len() + 2;
        let mut rows: Vec<i32> = (0..num_rows as i32).collect();
        random.shuffle(&mut rows);
        let layout = CacheLayout::new(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim).expect("small");
        let mut batch = Self {
            shape,
            layout,
            num_tokens: 0,
            query: Vec::new(),
            key_cache: vec![f32::NAN; layout.num_elements()],
            value_cache: vec![f32::NAN; layout.num_elements()],
            block_tables: vec![-1; num_rows * max_blocks],
            max_blocks,
            row_ids: rows[..parts.len()].to_vec(),
            query_start: vec![0],
            seq_lens: Vec::new(),
            sliding_window: None,
        };
        for (index, &(sequence, start, end)) in parts.iter().enumerate() {
            let row = batch.row_ids[index] as usize * max_blocks;
            for column in 0..blocks_of(end) {
                batch.block_tables[row + column] = free.pop().expect("counted");
            }
            batch.fill(sequence, end, row);
            let token_len = shape.num_heads() * shape.head_dim;
            let query = &sequence.query[start * token_len..end * token_len];
            batch.query.extend_from_slice(query);
            batch.num_tokens += end - start;
            batch.query_start.push(batch.num_tokens as i32);
            batch.seq_lens.push(end as i32);
        }
        batch
    }

    fn fill(&mut self, sequence: &Sequence, end: usize, row: usize) {
        let Shape { num_kv_heads, head_dim, block_size, .. } = self.shape;
        for (position, head) in (0..end).flat_map(|p| (0..num_kv_heads).map(move |h| (p, h))) {
            let block = self.block_tables[row + position / block_size] as usize;
            let to = self.layout.row_offset(block, head, position % block_size);
            let from = (position * num_kv_heads + head) * head_dim;
            self.key_cache[to..to + head_dim].copy_from_slice(&sequence.key[from..from + head_dim]);
            self.value_cache[to..to + head_dim].copy_from_slice(&sequence.value[from..from + head_dim]);
        }
    }

    /// Lends the arguments of a call to `run`; returns the output, which starts out as NaN.
    pub fn call(
        &self,
        kind: Kind,
        run: impl FnOnce(AttentionArgs<'_>) -> Result<(), Error>,
    ) -> Result<Vec<f32>, Error> {
        let mut out = vec![f32::NAN; self.query.len()];
        let caches = [&self.key_cache, &self.value_cache].map(|cache| Cache::new(kind, cache, &self.layout));
        run(AttentionArgs {
            out: &mut out,
            query: &self.query,
            key_cache: caches[0].get(),
            value_cache: caches[1].get(),
            layout: self.layout,
            num_heads: self.shape.num_heads(),
            index: BatchIndex {
                block_tables: &self.block_tables,
                max_blocks: self.max_blocks,
                row_ids: &self.row_ids,
                query_start: &self.query_start,
                seq_lens: &self.seq_lens,
            },
            scale: (self.shape.head_dim as f32).sqrt().recip(),
            sliding_window: self.sliding_window,
        })?;
        Ok(out)
    }

    /// Output of the fast kernels.
    pub fn attend(&self, kernels: &Kernels) -> Vec<f32> {
        self.attend_over(Kind::F32, kernels)
    }

    /// The same over a cache of this type.
    pub fn attend_over(&self, kind: Kind, kernels: &Kernels) -> Vec<f32> {
        self.call(kind, |args| kernels.paged_attention(args)).expect("valid batch")
    }
}

pub fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}
