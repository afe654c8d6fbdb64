//! Python face of the CPU kernels: checks array types, borrows their memory and calls `cbrs_cpu` without the GIL.
//!
//! Every refusal is a `ValueError` that names the argument. Arrays are borrowed for the duration of a call;
//! an array that another call is writing is refused, not waited for.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;

use cbrs_cpu::{AttentionArgs, BatchIndex, CacheLayout, CacheMut, CacheRef, Isa, Kernels, WriteArgs};
use numpy::ndarray::{Dimension, Ix1, Ix2, Ix3, Ix4};
use numpy::{Element, PyArray, PyArrayMethods, PyReadonlyArray, PyReadwriteArray};
use numpy::{PyUntypedArrayMethods, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu_sampling;

/// KV write, paged attention and sampling on the CPU, with threads of their own that sleep while there is no work.
///
/// Caches are C-contiguous arrays `[num_blocks, num_kv_heads, block_size, head_dim]` of float32, or of uint16
/// that holds bf16 bits. Methods may be called from any thread; the GIL is released while they work.
#[pyclass(frozen, module = "cbrs._core")]
#[derive(Debug)]
pub(crate) struct CpuKernels {
    kernels: Kernels,
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

/// Return which instruction sets this CPU has (of those with a kernel), and the kernel chosen for heads of 64.
#[pyfunction]
pub(crate) fn cpu_features() -> BTreeMap<&'static str, FeatureValue> {
    let available = Isa::ALL.into_iter().map(|isa| (isa.name(), FeatureValue::Flag(isa.is_available())));
    let chosen = [
        ("isa", FeatureValue::Name(Isa::detect().name())),
        ("kernel", FeatureValue::Name(cbrs_cpu::dispatch::kernel_name(64))),
    ];
    available.chain(chosen).collect()
}

/// Value of an entry of [`cpu_features`].
#[derive(Debug, IntoPyObject)]
pub(crate) enum FeatureValue {
    Flag(bool),
    Name(&'static str),
}

/// A cache to read: float32, or bf16 bits.
enum ReadCache<'py> {
    F32(PyReadonlyArray<'py, f32, Ix4>),
    Bf16(PyReadonlyArray<'py, u16, Ix4>),
}

impl<'py> ReadCache<'py> {
    fn new(array: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if array.is_instance_of::<PyArray<u16, Ix4>>() {
            read(array, name).map(Self::Bf16)
        } else {
            read(array, name).map(Self::F32)
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::F32(array) => array.shape(),
            Self::Bf16(array) => array.shape(),
        }
    }

    fn slice(&self, name: &str) -> PyResult<CacheRef<'_>> {
        Ok(match self {
            Self::F32(array) => CacheRef::F32(slice(array, name)?),
            Self::Bf16(array) => CacheRef::Bf16(slice(array, name)?),
        })
    }
}

/// A cache to write: float32, or bf16 bits.
enum WriteCache<'py> {
    F32(PyReadwriteArray<'py, f32, Ix4>),
    Bf16(PyReadwriteArray<'py, u16, Ix4>),
}

impl<'py> WriteCache<'py> {
    fn new(array: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if array.is_instance_of::<PyArray<u16, Ix4>>() {
            write(array, name).map(Self::Bf16)
        } else {
            write(array, name).map(Self::F32)
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::F32(array) => array.shape(),
            Self::Bf16(array) => array.shape(),
        }
    }

    fn slice(&mut self, name: &str) -> PyResult<CacheMut<'_>> {
        let refuse = |_| not_contiguous(name);
        Ok(match self {
            Self::F32(array) => CacheMut::F32(array.as_slice_mut().map_err(refuse)?),
            Self::Bf16(array) => CacheMut::Bf16(array.as_slice_mut().map_err(refuse)?),
        })
    }
}

pub(crate) fn value_error(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn at_least_1(value: i64, name: &str) -> PyResult<usize> {
    let size = usize::try_from(value).ok().filter(|size| *size > 0);
    size.ok_or_else(|| PyValueError::new_err(format!("{name} must be at least 1, got {value}")))
}

fn not_contiguous(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name} must be C-contiguous"))
}

fn cast<'a, 'py, T: Element, D: Dimension>(
    array: &'a Bound<'py, PyAny>,
    name: &str,
) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
    array.cast::<PyArray<T, D>>().map_err(|_| {
        let got = array.repr().map_or_else(|_| "an object".to_owned(), |text| text.to_string());
        let got: String = got.chars().take(60).collect();
        let (wanted, ndim) = (dtype::<T>(array.py()), D::NDIM.unwrap_or_default());
        PyValueError::new_err(format!("{name} must be a {ndim}-dimensional numpy array of {wanted}, got {got}"))
    })
}

pub(crate) fn read<'py, T: Element, D: Dimension>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadonlyArray<'py, T, D>> {
    let array = cast::<T, D>(array, name)?;
    array.try_readonly().map_err(|error| value_error(format!("{name}: {error}")))
}

fn write<'py, T: Element, D: Dimension>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let array = cast::<T, D>(array, name)?;
    if !array.is_c_contiguous() {
        return Err(not_contiguous(name));
    }
    array.try_readwrite().map_err(|error| value_error(format!("{name}: {error}")))
}

pub(crate) fn slice<'a, T: Element, D: Dimension>(
    array: &'a PyReadonlyArray<'_, T, D>,
    name: &str,
) -> PyResult<&'a [T]> {
    // `as_slice` takes Fortran's order as well.
    let slice = array.is_c_contiguous().then(|| array.as_slice().ok()).flatten();
    slice.ok_or_else(|| not_contiguous(name))
}

fn layout(key_cache: &[usize], value_cache: &[usize]) -> PyResult<CacheLayout> {
    check_shape("value_cache", value_cache, key_cache)?;
    let [num_blocks, num_kv_heads, block_size, head_dim] = *key_cache else {
        return Err(PyValueError::new_err("key_cache must have 4 dimensions"));
    };
    CacheLayout::new(num_blocks, num_kv_heads, block_size, head_dim).map_err(value_error)
}

fn check_shape(name: &str, shape: &[usize], expected: &[usize]) -> PyResult<()> {
    if shape == expected {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{name} has shape {shape:?}, expected {expected:?}")))
}

/// Name of an argument and the addresses it covers.
type Named<'a> = (&'a str, Range<usize>);

fn span<T>(data: &[T]) -> Range<usize> {
    let range = data.as_ptr_range();
    range.start.addr()..range.end.addr()
}

fn span_ref(cache: &CacheRef<'_>) -> Range<usize> {
    match cache {
        CacheRef::F32(data) => span(data),
        CacheRef::Bf16(data) => span(data),
    }
}

fn span_mut(cache: &CacheMut<'_>) -> Range<usize> {
    match cache {
        CacheMut::F32(data) => span(data),
        CacheMut::Bf16(data) => span(data),
    }
}

/// Refuses written memory that another array shares: numpy cannot tell for views of tensors.
fn disjoint(written: &[Named], read: &[Named]) -> PyResult<()> {
    for (index, (name, span)) in written.iter().enumerate() {
        for (other_name, other) in written[index + 1..].iter().chain(read) {
            if span.start < other.end && other.start < span.end {
                let message = format!("{name} and {other_name} share memory");
                return Err(PyValueError::new_err(message));
            }
        }
    }
    Ok(())
}
