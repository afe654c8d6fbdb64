//! Log-probabilities from Python's matrices and to Python's arrays.

use numpy::PyArray1;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::token_ids;

/// A matrix that a sampler gave.
#[derive(Debug)]
pub(crate) struct LogprobMatrix {
    token_ids: Vec<i32>,
    values: Vec<f32>,
    ranks: Vec<i32>,
    columns: usize,
}

impl LogprobMatrix {
    /// Reads `(token_ids int32 [N, C], values float32 [N, C], ranks int32 [N])`; the core checks the lengths.
    pub(crate) fn read(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Self> {
        let wrong = |_| PyTypeError::new_err(format!("{field} must be a tuple of token_ids, values and ranks"));
        let (ids, values, ranks) = value
            .extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>)>()
            .map_err(|err: PyErr| wrong(err))?;
        let (token_ids_, columns) = matrix::<i32>(&ids, field)?;
        let (values, _) = matrix::<f32>(&values, field)?;
        Ok(Self { token_ids: token_ids_, values, ranks: token_ids(&ranks, field)?, columns })
    }

    pub(crate) fn as_core(&self) -> cbrs_core::LogprobMatrix<'_> {
        cbrs_core::LogprobMatrix {
            token_ids: &self.token_ids,
            values: &self.values,
            ranks: &self.ranks,
            columns: self.columns,
        }
    }
}

/// Reads a matrix row by row; returns its number of columns too.
fn matrix<T: Element>(value: &Bound<'_, PyAny>, field: &str) -> PyResult<(Vec<T>, usize)> {
    let buffer = PyBuffer::<T>::get(value)?;
    let [_, columns] = *buffer.shape() else {
        let dimensions = buffer.dimensions();
        return Err(PyTypeError::new_err(format!("{field} must have two dimensions, not {dimensions}")));
    };
    Ok((buffer.to_vec(value.py())?, columns))
}

/// Log-probabilities of a list of tokens: row `i` has the entries `start[i]:start[i + 1]`, the token itself first, then the most likely ids.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct Logprobs {
    inner: cbrs_core::LogprobRows,
}

impl Logprobs {
    /// Takes over rows, which may be none; `None` if nothing was asked for.
    pub(crate) fn wrap(py: Python<'_>, rows: Option<cbrs_core::LogprobRows>) -> PyResult<Option<Py<Self>>> {
        rows.map(|inner| Py::new(py, Self { inner })).transpose()
    }

    /// A copy of `rows`; `None` if there are none.
    pub(crate) fn of(py: Python<'_>, rows: &cbrs_core::LogprobRows) -> PyResult<Option<Py<Self>>> {
        if rows.is_empty() { Ok(None) } else { Py::new(py, Self { inner: rows.clone() }).map(Some) }
    }
}

#[pymethods]
impl Logprobs {
    /// int32 `[N+1]`: offsets.
    #[getter]
    fn start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.start)
    }

    /// int32: ids of all rows.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.token_ids)
    }

    /// float32: natural logarithms of their probabilities.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.values)
    }

    /// int32 `[N]`: rank of each row's token; 1 = the most likely.
    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.ranks)
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __repr__(&self) -> String {
        format!("Logprobs(num_tokens={})", self.inner.len())
    }
}
