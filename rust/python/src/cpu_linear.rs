//! Python face of packed weights and of products with them.

use std::sync::Arc;

use cbrs_cpu::{Kernels, LinearArgs, PackedMatrix, Then, WeightType, WeightsRef};
use numpy::ndarray::{Ix1, Ix2};
use numpy::{PyArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::cpu_arrays::{check_shape, disjoint, not_contiguous, read, slice, span, value_error, write};

/// Weights of a linear layer in the order in which the CPU kernels read them; made by `CpuKernels.pack`.
#[pyclass(frozen, module = "cbrs._core")]
#[derive(Debug)]
pub(crate) struct PackedLinear {
    matrix: Arc<PackedMatrix>,
}

impl PackedLinear {
    pub(crate) fn matrix(&self) -> &Arc<PackedMatrix> {
        &self.matrix
    }
}

#[pymethods]
impl PackedLinear {
    /// Outputs of a product.
    #[getter]
    fn out_features(&self) -> usize {
        self.matrix.out_features()
    }

    /// Inputs of a product.
    #[getter]
    fn in_features(&self) -> usize {
        self.matrix.in_features()
    }

    /// Bytes of memory.
    #[getter]
    fn num_bytes(&self) -> usize {
        self.matrix.num_bytes()
    }

    /// Write the weights of some output features, such as the embeddings of tokens: fills float32 `out` `[len(ids),
    /// in_features]` for int32 `ids`. Raises ValueError for a bad shape, dtype or id.
    fn rows(&self, out: &Bound<'_, PyAny>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = read::<i32, Ix1>(ids, "ids")?;
        let mut out = write::<f32, Ix2>(out, "out")?;
        check_shape("out", out.shape(), &[ids.len(), self.matrix.in_features()])?;
        let ids = slice(&ids, "ids")?;
        let out = out.as_slice_mut().map_err(|_| not_contiguous("out"))?;
        for (id, row) in ids.iter().zip(out.chunks_exact_mut(self.matrix.in_features())) {
            let feature = usize::try_from(*id).unwrap_or(usize::MAX);
            self.matrix.read_feature(feature, row).map_err(value_error)?;
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        let dtype = match self.matrix.weight_type() {
            WeightType::F32 => "float32",
            WeightType::Bf16 => "bfloat16",
            WeightType::Int8 => "int8",
        };
        format!("PackedLinear({} x {}, {dtype})", self.matrix.out_features(), self.matrix.in_features())
    }
}

/// Packs a float32 matrix, or one of bf16 bits, perhaps rounded to int8.
pub(crate) fn pack(
    py: Python<'_>,
    kernels: &Kernels,
    weight: &Bound<'_, PyAny>,
    num_parts: usize,
    int8: bool,
) -> PyResult<PackedLinear> {
    let run = |weights: WeightsRef<'_>, shape: &[usize]| {
        let pack = if int8 { Kernels::pack_int8 } else { Kernels::pack };
        let packed = py.detach(|| pack(kernels, weights, shape[0], shape[1], num_parts));
        Ok(PackedLinear { matrix: Arc::new(packed.map_err(value_error)?) })
    };
    if weight.is_instance_of::<PyArray<u16, Ix2>>() {
        let weight = read::<u16, Ix2>(weight, "weight")?;
        run(WeightsRef::Bf16(slice(&weight, "weight")?), weight.shape())
    } else {
        let weight = read::<f32, Ix2>(weight, "weight")?;
        run(WeightsRef::F32(slice(&weight, "weight")?), weight.shape())
    }
}

/// Fills `out` with a product, or adds it.
pub(crate) fn linear(
    py: Python<'_>,
    kernels: &Kernels,
    out: &Bound<'_, PyAny>,
    input: &Bound<'_, PyAny>,
    weight: &PackedLinear,
    bias: Option<&Bound<'_, PyAny>>,
    add: bool,
) -> PyResult<()> {
    let matrix = weight.matrix();
    let input = read::<f32, Ix2>(input, "input")?;
    let bias = bias.map(|bias| read::<f32, Ix1>(bias, "bias")).transpose()?;
    let mut out = write::<f32, Ix2>(out, "out")?;
    let num_rows = input.shape()[0];
    check_shape("input", input.shape(), &[num_rows, matrix.in_features()])?;
    check_shape("out", out.shape(), &[num_rows, matrix.out_features()])?;
    let args = LinearArgs {
        out: out.as_slice_mut().map_err(|_| not_contiguous("out"))?,
        input: slice(&input, "input")?,
        num_rows,
        matrix,
        bias: bias.as_ref().map(|bias| slice(bias, "bias")).transpose()?,
        then: if add { Then::Add } else { Then::Store },
    };
    let bias = args.bias.map(|bias| ("bias", span(bias)));
    let inputs: Vec<_> = [("input", span(args.input))].into_iter().chain(bias).collect();
    disjoint(&[("out", span(args.out))], &inputs)?;
    py.detach(|| kernels.linear(args)).map_err(value_error)
}
