//! `NewRowTables` as a Python class.

use numpy::PyArray1;
use pyo3::prelude::*;

/// Ragged sampling parameters of the rows that a plan gave out, aligned with `Batch.new_rows` (`N` rows).
///
/// Each table is offsets `[N+1]` and the values of all rows. A resumed sequence has a new row and brings its history.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct NewRowTables {
    inner: cbrs_core::NewRowTables,
}

impl NewRowTables {
    /// The tables of a batch; `None` if they say nothing.
    pub(crate) fn of(py: Python<'_>, batch: &cbrs_core::Batch) -> PyResult<Option<Py<Self>>> {
        let tables = &batch.new_row_tables;
        let is_empty = tables.history_ids.is_empty()
            && tables.bias_ids.is_empty()
            && tables.banned_ids.is_empty()
            && tables.bad_word_ids.is_empty();
        if is_empty { Ok(None) } else { Py::new(py, Self { inner: tables.clone() }).map(Some) }
    }
}

#[pymethods]
impl NewRowTables {
    /// int32 `[N+1]`: offsets into `history_ids`.
    #[getter]
    fn history_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.history_start)
    }

    /// int32: prompt and generated tokens known by now; of rows with a penalty or bad words only.
    #[getter]
    fn history_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.history_ids)
    }

    /// int32 `[N]`: how many of a row's history are the prompt's.
    #[getter]
    fn history_num_prompt<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.history_num_prompt)
    }

    /// int32 `[N+1]`: offsets into `bias_ids` and `bias_values`.
    #[getter]
    fn bias_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.bias_start)
    }

    /// int32: ids whose logits are changed; an id that comes twice counts with its last value.
    #[getter]
    fn bias_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.bias_ids)
    }

    /// float32: what is added to them.
    #[getter]
    fn bias_values<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.bias_values)
    }

    /// int32 `[N+1]`: offsets into `banned_ids`.
    #[getter]
    fn banned_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.banned_start)
    }

    /// int32: ids that must not come before `Batch.min_tokens` output tokens.
    #[getter]
    fn banned_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.banned_ids)
    }

    /// int32 `[N+1]`: offsets into the words, which `bad_word_start` describes.
    #[getter]
    fn bad_words_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.bad_words_start)
    }

    /// int32 `[W+1]`: offsets of each word into `bad_word_ids`.
    #[getter]
    fn bad_word_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.bad_word_start)
    }

    /// int32: tokens of all bad words.
    #[getter]
    fn bad_word_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.bad_word_ids)
    }

    fn __len__(&self) -> usize {
        self.inner.history_num_prompt.len()
    }
}
