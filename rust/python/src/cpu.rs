//! Python face of the CPU kernels: checks array types, borrows their memory and calls `cbrs_cpu` without the GIL.
//!
//! Every refusal is a `ValueError` that names the argument. Arrays are borrowed for the duration of a call;
//! an array that another call is writing is refused, not waited for.

use std::collections::BTreeMap;

use cbrs_cpu::{AttentionArgs, BatchIndex, Isa, Kernels, WriteArgs};
use numpy::PyUntypedArrayMethods;
use numpy::ndarray::{Ix1, Ix2, Ix3};
use pyo3::prelude::*;

use crate::cpu_arrays::{
    ReadCache, WriteCache, at_least_1, check_shape, disjoint, layout, not_contiguous, read, slice, span, span_mut,
    span_ref, value_error, write,
};
use crate::cpu_linear::{self, PackedLinear};
use crate::cpu_sampling;

/// Matrix products, KV write, paged attention and sampling on the CPU, on threads that sleep while there is no work.
///
/// Caches are C-contiguous arrays `[num_blocks, num_kv_heads, block_size, head_dim]` of float32, or of uint16
/// that holds bf16 bits, or `[num_blocks, num_kv_heads, block_size, head_dim + 2]` of int8: in each block and head the
/// numbers of all its tokens, then a bf16 factor for each token. Methods may be called from any thread; the GIL is released while they work.
#[pyclass(frozen, module = "cbrs._core")]
#[derive(Debug)]
pub(crate) struct CpuKernels {
    kernels: Kernels,
}

impl CpuKernels {
    pub(crate) fn get(&self) -> &Kernels {
        &self.kernels
    }
}

#[pymethods]
impl CpuKernels {
    /// Start `num_threads - 1` threads; the calling thread is the other one.
    #[new]
    fn new(num_threads: i64) -> PyResult<Self> {
        let kernels = Kernels::new(at_least_1(num_threads, "num_threads")?).map_err(value_error)?;
        Ok(Self { kernels })
    }

    /// Threads that work on a call, the calling one included.
    #[getter]
    fn num_threads(&self) -> usize {
        self.kernels.num_threads()
    }

    /// Pack weights `[out_features, in_features]`, float32 or uint16 that holds bf16 bits, in the order that `linear` reads.
    ///
    /// `num_parts=2` is for gate and up projection in one matrix. With `int8` the weights are rounded to 8-bit integers, with
    /// a bf16 scale for each group of 32 inputs of an output; a product then rounds its input in the same way. The array is
    /// not kept. Raises ValueError for a bad shape or dtype.
    #[pyo3(signature = (weight, num_parts=1, int8=false))]
    fn pack(&self, py: Python<'_>, weight: &Bound<'_, PyAny>, num_parts: i64, int8: bool) -> PyResult<PackedLinear> {
        cpu_linear::pack(py, &self.kernels, weight, at_least_1(num_parts, "num_parts")?, int8)
    }

    /// Multiply float32 `input` `[num_rows, in_features]` with packed weights; fills `out` `[num_rows, out_features]`.
    ///
    /// `bias` is float32 `[out_features]`; with `add` the product is added to what `out` holds. Each row's result depends
    /// on that row only, bit for bit. Raises ValueError for a bad shape or dtype, before anything is written.
    #[pyo3(signature = (out, input, weight, bias=None, add=false))]
    fn linear(
        &self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        weight: &PackedLinear,
        bias: Option<&Bound<'_, PyAny>>,
        add: bool,
    ) -> PyResult<()> {
        cpu_linear::linear(py, &self.kernels, out, input, weight, bias, add)
    }

    /// Measure what the machine can do at most with these threads: floating-point operations, and bytes read, a second.
    ///
    /// Takes 512 MiB of memory and some tens of milliseconds per repetition; each figure is the median.
    fn measure_rates(&self, py: Python<'_>, repeat: usize) -> PyResult<(f64, f64)> {
        let rates = py.detach(|| self.kernels.measure_rates(repeat)).map_err(value_error)?;
        Ok((rates.flops, rates.read_bytes))
    }

    /// Write keys and values to their slots of the caches.
    ///
    /// `key` and `value` are float32 `[num_tokens, num_kv_heads, head_dim]`; `slot_mapping` is int64
    /// `[num_tokens]`, `block * block_size + offset`, or -1 for a token that is not written. Both caches are written.
    /// Raises ValueError for a bad shape, dtype or slot, before anything is written.
    fn write_kv(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        key_cache: &Bound<'_, PyAny>,
        value_cache: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let key = read::<f32, Ix3>(key, "key")?;
        let value = read::<f32, Ix3>(value, "value")?;
        let slot_mapping = read::<i64, Ix1>(slot_mapping, "slot_mapping")?;
        cbrs_core::fault::point("kernels: write_kv");
        let mut key_cache = WriteCache::new(key_cache, "key_cache")?;
        let mut value_cache = WriteCache::new(value_cache, "value_cache")?;
        let layout = layout(key_cache.shape(), value_cache.shape())?;
        let expected = [slot_mapping.len(), layout.num_kv_heads(), layout.head_dim()];
        check_shape("key", key.shape(), &expected)?;
        check_shape("value", value.shape(), &expected)?;
        let args = WriteArgs {
            key: slice(&key, "key")?,
            value: slice(&value, "value")?,
            key_cache: key_cache.slice("key_cache")?,
            value_cache: value_cache.slice("value_cache")?,
            layout,
            slot_mapping: slice(&slot_mapping, "slot_mapping")?,
        };
        let written = [("key_cache", span_mut(&args.key_cache)), ("value_cache", span_mut(&args.value_cache))];
        disjoint(&written, &[("key", span(args.key)), ("value", span(args.value))])?;
        py.detach(|| self.kernels.write_kv(args)).map_err(value_error)
    }

    /// Attend causally over the paged caches, the whole batch in one call; fills `out`.
    ///
    /// `out` and `query` are float32 `[num_tokens, num_heads, head_dim]`. The tokens of sequence `s` are
    /// `query_start[s]` to `query_start[s + 1]` (int32 `[num_seqs + 1]`), the last ones of its context of `seq_lens[s]`
    /// tokens (int32 `[num_seqs]`). Its blocks are row `row_ids[s]` of `block_tables` (int32
    /// `[max_num_seqs, max_blocks]`). With `sliding_window=w` the query at position `i` sees the keys `j` with
    /// `i - w < j <= i`. Rows of `out` behind the last query become zero. Raises ValueError for a bad shape,
    /// dtype or index, before anything is read or written.
    #[pyo3(signature = (out, query, key_cache, value_cache, block_tables, row_ids, query_start, seq_lens, scale, sliding_window=None))]
    #[allow(clippy::too_many_arguments, reason = "the array contract of the batch")]
    fn paged_attention(
        &self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        query: &Bound<'_, PyAny>,
        key_cache: &Bound<'_, PyAny>,
        value_cache: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        row_ids: &Bound<'_, PyAny>,
        query_start: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        scale: f32,
        sliding_window: Option<i64>,
    ) -> PyResult<()> {
        let sliding_window = sliding_window.map(|window| at_least_1(window, "sliding_window")).transpose()?;
        let mut out = write::<f32, Ix3>(out, "out")?;
        cbrs_core::fault::point("kernels: attention");
        let query = read::<f32, Ix3>(query, "query")?;
        let key_cache = ReadCache::new(key_cache, "key_cache")?;
        let value_cache = ReadCache::new(value_cache, "value_cache")?;
        let block_tables = read::<i32, Ix2>(block_tables, "block_tables")?;
        let row_ids = read::<i32, Ix1>(row_ids, "row_ids")?;
        let query_start = read::<i32, Ix1>(query_start, "query_start")?;
        let seq_lens = read::<i32, Ix1>(seq_lens, "seq_lens")?;
        let layout = layout(key_cache.shape(), value_cache.shape())?;
        let num_heads = query.shape()[1];
        let expected = [query.shape()[0], num_heads, layout.head_dim()];
        check_shape("query", query.shape(), &expected)?;
        check_shape("out", out.shape(), &expected)?;
        let args = AttentionArgs {
            out: out.as_slice_mut().map_err(|_| not_contiguous("out"))?,
            query: slice(&query, "query")?,
            key_cache: key_cache.slice("key_cache")?,
            value_cache: value_cache.slice("value_cache")?,
            layout,
            num_heads,
            index: BatchIndex {
                block_tables: slice(&block_tables, "block_tables")?,
                max_blocks: block_tables.shape()[1],
                row_ids: slice(&row_ids, "row_ids")?,
                query_start: slice(&query_start, "query_start")?,
                seq_lens: slice(&seq_lens, "seq_lens")?,
            },
            scale,
            sliding_window,
        };
        let read = [
            ("query", span(args.query)),
            ("key_cache", span_ref(&args.key_cache)),
            ("value_cache", span_ref(&args.value_cache)),
        ];
        disjoint(&[("out", span(args.out))], &read)?;
        py.detach(|| self.kernels.paged_attention(args)).map_err(value_error)
    }

    /// Draw a token for each of `R` samples; return int32 tokens `[R]` and uint8 errors `[R]`.
    ///
    /// `logits` is float32 `[num_logits, padded_vocab]`, of which ids below `vocab_size` count; `logits_index` and `rows` are
    /// int32 `[R]`, `uniform` float64 `[R]` in [0, 1). The rest is by row (`[max_num_seqs]`): `parameters` is `(temperature,
    /// top_k, top_p, min_p)`; `penalties` is `(presence, frequency, repetition, history_ids, start, length, num_prompt)`, where
    /// the history of row `r` is `history_ids[start[r]:start[r] + length[r]]`, the first `num_prompt[r]` of it the prompt's;
    /// `bias` is `(ids, values, start, length)` likewise. `bans` is `(start [R+1], ids)`, by sample. Starts and lengths are
    /// int64. Errors are 0, 1 (unusable logits) or 2 (every token excluded). Raises ValueError for a bad shape, dtype or index.
    #[pyo3(signature = (logits, vocab_size, logits_index, rows, uniform, parameters, penalties=None, bias=None, bans=None))]
    #[allow(clippy::too_many_arguments, reason = "the array contract of the batch")]
    fn sample<'py>(
        &self,
        py: Python<'py>,
        logits: &Bound<'py, PyAny>,
        vocab_size: i64,
        logits_index: &Bound<'py, PyAny>,
        rows: Bound<'py, PyAny>,
        uniform: Bound<'py, PyAny>,
        parameters: cpu_sampling::ParameterArrays<'py>,
        penalties: Option<cpu_sampling::PenaltyArrays<'py>>,
        bias: Option<cpu_sampling::BiasArrays<'py>>,
        bans: Option<cpu_sampling::BanArrays<'py>>,
    ) -> PyResult<cpu_sampling::Samples<'py>> {
        let logits = cpu_sampling::Logits::new(logits, logits_index, vocab_size)?;
        cbrs_core::fault::point("kernels: sample");
        let sampling = cpu_sampling::Sampling { rows, uniform, parameters, penalties, bias, bans };
        cpu_sampling::sample(py, &self.kernels, &logits, &sampling)
    }

    /// Say how likely the tokens `targets` are, and which ids are the most likely.
    ///
    /// `logits`, `vocab_size` and `logits_index` are as for `sample`; `targets` and `num_logprobs` are int32 `[N]`, the latter
    /// how many most likely ids each row wants (-1 = the row is left out). Returns int32 ids and float32 log-probabilities
    /// `[N, 1 + K]` (the token itself, then the most likely ids; `K` is the largest of `num_logprobs`) and int32 ranks `[N]`.
    /// Raises ValueError for a bad shape, dtype or index.
    fn logprobs<'py>(
        &self,
        py: Python<'py>,
        logits: &Bound<'py, PyAny>,
        vocab_size: i64,
        logits_index: &Bound<'py, PyAny>,
        targets: &Bound<'py, PyAny>,
        num_logprobs: &Bound<'py, PyAny>,
    ) -> PyResult<cpu_sampling::LogprobMatrix<'py>> {
        let logits = cpu_sampling::Logits::new(logits, logits_index, vocab_size)?;
        cpu_sampling::logprobs(py, &self.kernels, &logits, targets, num_logprobs)
    }

    fn __repr__(&self) -> String {
        let (num_threads, isa) = (self.num_threads(), self.kernels.isa().name());
        format!("CpuKernels(num_threads={num_threads}, isa={isa:?})")
    }
}

/// Return which instruction sets this CPU has (of those with a kernel), the kernel chosen for heads of 64, and what multiplies int8 weights.
#[pyfunction]
pub(crate) fn cpu_features() -> BTreeMap<&'static str, FeatureValue> {
    let available = Isa::ALL.into_iter().map(|isa| (isa.name(), FeatureValue::Flag(isa.is_available())));
    let chosen = [
        ("isa", FeatureValue::Name(Isa::detect().name())),
        ("kernel", FeatureValue::Name(cbrs_cpu::dispatch::kernel_name(64))),
        ("int8", FeatureValue::Name(cbrs_cpu::dispatch::int8_name())),
    ];
    available.chain(chosen).collect()
}

/// Value of an entry of [`cpu_features`].
#[derive(Debug, IntoPyObject)]
pub(crate) enum FeatureValue {
    Flag(bool),
    Name(&'static str),
}
