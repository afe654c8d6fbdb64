//! GGUF and safetensors files for Python.
//!
//! Opening, decoding and building a tokenizer run without the GIL: they wait for the disk, and other
//! engines of the process go on meanwhile. Decoded tensors are handed over without a copy.

use std::path::PathBuf;

use cbrs_loading::gguf::{GgufFile as RustGgufFile, Value};
use cbrs_loading::safetensors::Checkpoint;
use cbrs_loading::{Error, Part};
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::errors::model_load_error;

/// Arrays longer than this (token lists, scores, merges) stay out of `GgufFile.metadata`.
const MAX_METADATA_ELEMENTS: usize = 1024;

fn to_py(error: &Error) -> PyErr {
    model_load_error(error.to_string(), error.file(), error.field())
}

/// Decodes a tensor, or a part of it, to the type that `dtype` names, without the GIL, and gives it its shape.
fn decoded<'py>(
    py: Python<'py>,
    dtype: &str,
    shape: &[usize],
    part: Option<(usize, usize, usize)>,
    to_f32: impl FnOnce(Option<&Part>) -> Result<Vec<f32>, Error> + Send,
    to_bf16: impl FnOnce(Option<&Part>) -> Result<Vec<u16>, Error> + Send,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let mut shape = shape.to_vec();
    let part = part.map(|(dimension, start, end)| Part { dimension, range: start..end });
    if let Some(part) = &part {
        if !part.is_of(&shape) {
            let message =
                format!("part ({}, {}, {}) is outside {shape:?}", part.dimension, part.range.start, part.range.end);
            return Err(PyValueError::new_err(message));
        }
        shape[part.dimension] = part.range.len();
    }
    let part = part.as_ref();
    match dtype {
        "float32" => array(py, py.detach(|| to_f32(part)).map_err(|error| to_py(&error))?, &shape),
        "bfloat16" => array(py, py.detach(|| to_bf16(part)).map_err(|error| to_py(&error))?, &shape),
        other => {
            let message = format!("dtype must be \"float32\" or \"bfloat16\", is {other:?}");
            Err(PyValueError::new_err(message))
        }
    }
}

/// Hands the numbers to numpy and gives them their shape.
fn array<'py, T: Element>(py: Python<'py>, values: Vec<T>, shape: &[usize]) -> PyResult<Bound<'py, PyUntypedArray>> {
    let flat = PyArray1::from_vec(py, values);
    Ok(flat.reshape(shape)?.into_any().cast_into::<PyUntypedArray>()?)
}

/// A validated, memory-mapped GGUF file. Every error is a ModelLoadError with `file` and `field`.
#[pyclass(frozen, module = "cbrs._core")]
pub(crate) struct GgufFile(RustGgufFile);

#[pymethods]
impl GgufFile {
    /// Opens `path` and checks its whole header.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        cbrs_core::fault::point("load");
        py.detach(|| RustGgufFile::open(path)).map(Self).map_err(|error| to_py(&error))
    }

    /// All metadata by key, without arrays of more than 1,024 elements.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metadata = PyDict::new(py);
        for (key, value) in self.0.metadata() {
            if let Value::Array(array) = value {
                if array.len() <= MAX_METADATA_ELEMENTS {
                    let elements = self.0.elements(key, array).map_err(|error| to_py(&error))?;
                    let elements: Vec<_> = elements.iter().map(|value| scalar(py, value)).collect::<PyResult<_>>()?;
                    metadata.set_item(key, PyList::new(py, elements)?)?;
                }
            } else {
                metadata.set_item(key, scalar(py, value)?)?;
            }
        }
        Ok(metadata)
    }

    /// The names of all tensors, in the order of the file.
    #[getter]
    fn tensor_names(&self) -> Vec<&str> {
        self.0.tensors().iter().map(|info| info.name.as_str()).collect()
    }

    /// The shape of a tensor, row-major: `[out, in]`.
    fn tensor_shape<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
        let info = self.0.tensor(name).map_err(|error| to_py(&error))?;
        PyTuple::new(py, &info.shape)
    }

    /// How a tensor is stored, for example `"Q4_1"`.
    fn tensor_type(&self, name: &str) -> PyResult<&'static str> {
        let info = self.0.tensor(name).map_err(|error| to_py(&error))?;
        Ok(info.encoding.name())
    }

    /// A tensor as float32, or as the bits of bfloat16 in uint16 (rounded to nearest even). Query and
    /// key rows of the llama architecture come in the order of Hugging Face models.
    ///
    /// `part` is (dimension, begin, end): only these indices of it are read, of a vector or a matrix. `ValueError` if they are outside.
    #[pyo3(signature = (name, dtype="float32", part=None))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        dtype: &str,
        part: Option<(usize, usize, usize)>,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let shape = &self.0.tensor(name).map_err(|error| to_py(&error))?.shape;
        let to_f32 = |part: Option<&Part>| match part {
            None => self.0.tensor_f32(name),
            Some(part) => self.0.part_f32(name, part),
        };
        let to_bf16 = |part: Option<&Part>| match part {
            None => self.0.tensor_bf16(name),
            Some(part) => self.0.part_bf16(name, part),
        };
        decoded(py, dtype, shape, part, to_f32, to_bf16)
    }

    /// The tokenizer of the file as the text of a Hugging Face `tokenizer.json`.
    fn tokenizer_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.0.tokenizer_json()).map_err(|error| to_py(&error))
    }

    /// The chat template, None without one.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        self.0.chat_template()
    }

    /// Ids of the special tokens that the file names: `bos`, `eos`, `eot`, `eom`, `unk`, `sep`, `pad`,
    /// `cls`, `mask`.
    #[getter]
    fn special_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let ids = PyDict::new(py);
        for (name, id) in self.0.special_token_ids() {
            ids.set_item(name, id)?;
        }
        Ok(ids)
    }

    /// Whether prompts start with the BOS token.
    #[getter]
    fn add_bos_token(&self) -> bool {
        self.0.add_bos_token()
    }

    fn __repr__(&self) -> String {
        format!("GgufFile({}, {} tensors)", self.0.path().display(), self.0.tensors().len())
    }
}

fn scalar<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Unsigned(value) => value.into_pyobject(py)?.into_any(),
        Value::Signed(value) => value.into_pyobject(py)?.into_any(),
        Value::Float(value) => value.into_pyobject(py)?.into_any(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Text(value) => value.into_pyobject(py)?.into_any(),
        // Arrays hold no arrays: the file would not have opened.
        Value::Array(_) => py.None().into_bound(py),
    })
}

/// A validated, memory-mapped model of one or several safetensors files. Every error is a
/// ModelLoadError with `file` and `field`.
#[pyclass(frozen, module = "cbrs._core")]
pub(crate) struct SafetensorsCheckpoint(Checkpoint);

#[pymethods]
impl SafetensorsCheckpoint {
    /// Opens a folder (`model.safetensors`, or the files that its index names) or one file.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Checkpoint::open(path)).map(Self).map_err(|error| to_py(&error))
    }

    /// The names of all tensors, sorted.
    #[getter]
    fn tensor_names(&self) -> Vec<&str> {
        self.0.tensor_names().collect()
    }

    /// The shape of a tensor.
    fn tensor_shape<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
        let info = self.0.tensor(name).map_err(|error| to_py(&error))?;
        PyTuple::new(py, &info.shape)
    }

    /// The stored type of a tensor, for example `"BF16"`.
    fn tensor_dtype(&self, name: &str) -> PyResult<&'static str> {
        let info = self.0.tensor(name).map_err(|error| to_py(&error))?;
        Ok(info.dtype.name())
    }

    /// A tensor of type F32, F16 or BF16 as float32, or as the bits of bfloat16 in uint16 (rounded to
    /// nearest even).
    ///
    /// `part` is (dimension, begin, end): only these indices of it are read, of a vector or a matrix. `ValueError` if they are outside.
    #[pyo3(signature = (name, dtype="float32", part=None))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        dtype: &str,
        part: Option<(usize, usize, usize)>,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let shape = &self.0.tensor(name).map_err(|error| to_py(&error))?.shape;
        let to_f32 = |part: Option<&Part>| match part {
            None => self.0.tensor_f32(name),
            Some(part) => self.0.part_f32(name, part),
        };
        let to_bf16 = |part: Option<&Part>| match part {
            None => self.0.tensor_bf16(name),
            Some(part) => self.0.part_bf16(name, part),
        };
        decoded(py, dtype, shape, part, to_f32, to_bf16)
    }

    fn __repr__(&self) -> String {
        let count = self.0.tensor_names().count();
        format!("SafetensorsCheckpoint({}, {count} tensors)", self.0.path().display())
    }
}
