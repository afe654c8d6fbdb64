//! Python face of whole decoder steps on the CPU.

use std::sync::Arc;

use cbrs_cpu::decoder::{DecoderParts, DecoderShape, Layer, Linear, Rotary};
use cbrs_cpu::{Activation, BatchIndex, Decoder, StepArgs};
use numpy::PyUntypedArrayMethods;
use numpy::ndarray::{Ix1, Ix2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu::CpuKernels;
use crate::cpu_arrays::{
    WriteCache, at_least_1, check_shape, disjoint, layout, not_contiguous, read, slice, span, span_mut, value_error,
    write,
};
use crate::cpu_linear::PackedLinear;

/// A weight matrix and its bias, float32 `[out_features]` or None.
type LinearParts<'py> = (PyRef<'py, PackedLinear>, Option<Bound<'py, PyAny>>);

/// One layer of a `CpuDecoder`: its weights, norms (float32), and kind of positions.
#[pyclass(frozen, module = "cbrs._core")]
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    layer: Layer,
}

#[pymethods]
impl DecoderLayer {
    /// Collect the parts of a layer; `CpuDecoder` checks that they fit together.
    ///
    /// `qkv`, `out`, `gate_up` (packed in two parts) and `down` are pairs of weights and bias. `head_norms` are the norms of
    /// query and key heads. `rotary` is an index into the decoder's kinds; None leaves queries and keys as they are.
    #[new]
    #[pyo3(signature = (*, qkv, out, gate_up, down, attention_norm, mlp_norm, after_attention=None, after_mlp=None,
        head_norms=None, rotary=None, sliding_window=None))]
    #[allow(clippy::too_many_arguments, reason = "the parts of a layer")]
    fn new(
        qkv: LinearParts<'_>,
        out: LinearParts<'_>,
        gate_up: LinearParts<'_>,
        down: LinearParts<'_>,
        attention_norm: &Bound<'_, PyAny>,
        mlp_norm: &Bound<'_, PyAny>,
        after_attention: Option<&Bound<'_, PyAny>>,
        after_mlp: Option<&Bound<'_, PyAny>>,
        head_norms: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        rotary: Option<usize>,
        sliding_window: Option<i64>,
    ) -> PyResult<Self> {
        let linear = |(weight, bias): LinearParts<'_>, name: &str| {
            let bias = bias.map(|bias| vector(&bias, name)).transpose()?;
            Ok::<_, PyErr>(Linear { matrix: Arc::clone(weight.matrix()), bias })
        };
        let head_norms =
            head_norms.map(|(query, key)| Ok::<_, PyErr>([vector(&query, "q_norm")?, vector(&key, "k_norm")?]));
        let layer = Layer {
            attention_norm: vector(attention_norm, "attention_norm")?,
            mlp_norm: vector(mlp_norm, "mlp_norm")?,
            after_attention: after_attention.map(|norm| vector(norm, "after_attention")).transpose()?,
            after_mlp: after_mlp.map(|norm| vector(norm, "after_mlp")).transpose()?,
            head_norms: head_norms.transpose()?,
            qkv: linear(qkv, "the bias of qkv")?,
            out: linear(out, "the bias of out")?,
            gate_up: linear(gate_up, "the bias of gate_up")?,
            down: linear(down, "the bias of down")?,
            rotary,
            sliding_window: sliding_window.map(|window| at_least_1(window, "sliding_window")).transpose()?,
        };
        Ok(Self { layer })
    }
}

/// A decoder model with its KV cache: a batch's tokens to logits in one call, on the threads of `kernels`.
///
/// Weights and caches may be float32, bf16 or int8; everything between is float32, but for the rounded inputs of
/// int8 products. A token's result depends on its own
/// sequence only, bit for bit. One call runs at a time.
#[pyclass(frozen, module = "cbrs._core")]
#[derive(Debug)]
pub(crate) struct CpuDecoder {
    kernels: Py<CpuKernels>,
    decoder: Decoder,
    /// Of each layer, as `write_kv` takes them.
    key_caches: Vec<Py<PyAny>>,
    value_caches: Vec<Py<PyAny>>,
}

#[pymethods]
impl CpuDecoder {
    /// Check that the parts fit together, and keep them.
    ///
    /// `embedding` and `head` are `[vocab_size, hidden_size]` and may be the same object. `rotaries` are pairs of inverse
    /// frequencies (float32, at most half a head) and magnitude. `activation` is "silu" or "gelu_tanh". The caches are
    /// one array a layer. Raises ValueError naming the part that does not fit.
    #[new]
    #[pyo3(signature = (kernels, *, embedding, head, final_norm, layers, rotaries, key_caches, value_caches, num_heads,
        num_kv_heads, head_dim, attention_scale, norm_eps, embedding_scale, activation))]
    #[allow(clippy::too_many_arguments, reason = "the parts of a model")]
    fn new(
        py: Python<'_>,
        kernels: Py<CpuKernels>,
        embedding: &PackedLinear,
        head: &PackedLinear,
        final_norm: &Bound<'_, PyAny>,
        layers: Vec<PyRef<'_, DecoderLayer>>,
        rotaries: Vec<(Bound<'_, PyAny>, f32)>,
        key_caches: Vec<Py<PyAny>>,
        value_caches: Vec<Py<PyAny>>,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        attention_scale: f32,
        norm_eps: f32,
        embedding_scale: f32,
        activation: &str,
    ) -> PyResult<Self> {
        let activation = match activation {
            "silu" => Activation::Silu,
            "gelu_tanh" => Activation::GeluTanh,
            other => return Err(PyValueError::new_err(format!("activation {other:?} is neither silu nor gelu_tanh"))),
        };
        let rotaries = rotaries.into_iter().map(|(frequencies, magnitude)| {
            let inverse_frequencies = vector(&frequencies, "inverse frequencies")?;
            Ok(Rotary { inverse_frequencies, magnitude })
        });
        let shape =
            DecoderShape { num_heads, num_kv_heads, head_dim, attention_scale, norm_eps, embedding_scale, activation };
        let decoder = Decoder::new(DecoderParts {
            shape,
            embedding: Arc::clone(embedding.matrix()),
            head: Arc::clone(head.matrix()),
            final_norm: vector(final_norm, "final_norm")?,
            layers: layers.into_iter().map(|layer| layer.layer.clone()).collect(),
            rotaries: rotaries.collect::<PyResult<_>>()?,
        });
        let this = Self { kernels, decoder: decoder.map_err(value_error)?, key_caches, value_caches };
        let mut caches = this.borrow_caches(py)?;
        let spans: Vec<_> = caches
            .iter_mut()
            .map(|cache| Ok(("a cache", span_mut(&cache.slice("a cache")?))))
            .collect::<PyResult<_>>()?;
        disjoint(&spans, &[])?;
        drop(caches);
        Ok(this)
    }

    /// Bytes of all packed weights.
    #[getter]
    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    /// Run a batch; fills float32 `logits` `[len(logits_index), vocab_size]`.
    ///
    /// The other arrays are those of a `Batch`: int32 `token_ids`, `positions` `[T]`, `logits_index`; int64 `slot_mapping`
    /// `[T]`; int32 `block_tables`, `row_ids`, `query_start`, `seq_lens`. Raises ValueError for a bad shape, dtype or index,
    /// before anything is written.
    #[allow(clippy::too_many_arguments, reason = "the array contract of the batch")]
    fn forward(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        logits_index: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        row_ids: &Bound<'_, PyAny>,
        query_start: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let token_ids = read::<i32, Ix1>(token_ids, "token_ids")?;
        let positions = read::<i32, Ix1>(positions, "positions")?;
        let logits_index = read::<i32, Ix1>(logits_index, "logits_index")?;
        let slot_mapping = read::<i64, Ix1>(slot_mapping, "slot_mapping")?;
        let block_tables = read::<i32, Ix2>(block_tables, "block_tables")?;
        let row_ids = read::<i32, Ix1>(row_ids, "row_ids")?;
        let query_start = read::<i32, Ix1>(query_start, "query_start")?;
        let seq_lens = read::<i32, Ix1>(seq_lens, "seq_lens")?;
        let mut logits = write::<f32, Ix2>(logits, "logits")?;
        cbrs_core::fault::point("kernels: write_kv");
        let mut caches = self.borrow_caches(py)?;
        cbrs_core::fault::point("kernels: attention");
        let layout = layout(caches[0].shape(), caches[1].shape())?;
        check_shape("logits", logits.shape(), &[logits_index.len(), self.decoder.vocab_size()])?;
        let mut slices = caches.iter_mut().map(|cache| cache.slice("a cache"));
        let mut pairs = Vec::with_capacity(self.decoder.num_layers());
        while let (Some(key), Some(value)) = (slices.next(), slices.next()) {
            pairs.push([key?, value?]);
        }
        let args = StepArgs {
            logits: logits.as_slice_mut().map_err(|_| not_contiguous("logits"))?,
            caches: pairs,
            layout,
            token_ids: slice(&token_ids, "token_ids")?,
            positions: slice(&positions, "positions")?,
            logits_index: slice(&logits_index, "logits_index")?,
            slot_mapping: slice(&slot_mapping, "slot_mapping")?,
            index: BatchIndex {
                block_tables: slice(&block_tables, "block_tables")?,
                max_blocks: block_tables.shape()[1],
                row_ids: slice(&row_ids, "row_ids")?,
                query_start: slice(&query_start, "query_start")?,
                seq_lens: slice(&seq_lens, "seq_lens")?,
            },
        };
        let mut written = vec![("logits", span(args.logits))];
        written.extend(args.caches.iter().flatten().map(|cache| ("a cache", span_mut(cache))));
        let read = [
            ("token_ids", span(args.token_ids)),
            ("positions", span(args.positions)),
            ("logits_index", span(args.logits_index)),
            ("slot_mapping", span(args.slot_mapping)),
            ("block_tables", span(args.index.block_tables)),
            ("row_ids", span(args.index.row_ids)),
            ("query_start", span(args.index.query_start)),
            ("seq_lens", span(args.index.seq_lens)),
        ];
        for index in 0..written.len() {
            // The caches among each other were compared at construction.
            let others = if index == 0 { &written[1..] } else { &[] };
            disjoint(&written[index..=index], others)?;
            disjoint(&written[index..=index], &read)?;
        }
        let kernels = self.kernels.get();
        py.detach(|| kernels.get().decode(&self.decoder, args)).map_err(value_error)
    }

    /// Return where the time of the steps since the last call went: steps, then seconds of linear layers, of attention,
    /// and of norms, rotary positions, embeddings and KV writes.
    fn take_times(&self) -> (u64, f64, f64, f64) {
        let times = self.decoder.take_times();
        (times.steps, times.linears.as_secs_f64(), times.attention.as_secs_f64(), times.tokens.as_secs_f64())
    }
}

impl CpuDecoder {
    /// Borrows all caches: key and value of the first layer, then of the next.
    fn borrow_caches<'py>(&self, py: Python<'py>) -> PyResult<Vec<WriteCache<'py>>> {
        let num_layers = self.decoder.num_layers();
        check_shape("key_caches", &[self.key_caches.len()], &[num_layers])?;
        check_shape("value_caches", &[self.value_caches.len()], &[num_layers])?;
        let pairs = self.key_caches.iter().zip(&self.value_caches).flat_map(|(key, value)| [key, value]);
        pairs.map(|cache| WriteCache::new(cache.bind(py), "a cache")).collect()
    }
}

/// Copies a float32 vector.
fn vector(array: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<f32>> {
    let array = read::<f32, Ix1>(array, name)?;
    Ok(slice(&array, name)?.to_vec())
}
