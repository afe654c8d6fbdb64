//! The result of one request as a Python object.

use cbrs_text::StopReason;
use numpy::PyArray1;
use pyo3::prelude::*;

/// The result of one request. Times are seconds on the scheduler's clock.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct FinishedRequest {
    inner: cbrs_text::FinishedRequest,
}

impl FinishedRequest {
    pub(super) fn new(inner: cbrs_text::FinishedRequest) -> Self {
        Self { inner }
    }
}

fn seconds(time_ns: u64) -> f64 {
    time_ns as f64 / 1e9
}

#[pymethods]
impl FinishedRequest {
    /// Id that the scheduler gave.
    #[getter]
    fn request_id(&self) -> u64 {
        self.inner.request_id
    }

    /// Number given at submission.
    #[getter]
    fn index(&self) -> u64 {
        self.inner.index
    }

    /// The prompt, int32.
    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.prompt_token_ids)
    }

    /// The output with the token that ended it, int32.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.token_ids)
    }

    /// The output as text: up to the stop string, without EOS or a stop token.
    #[getter]
    fn text(&self) -> &str {
        &self.inner.text
    }

    /// "stop", "length", "cancelled" or "error".
    #[getter]
    fn finish_reason(&self) -> &'static str {
        self.inner.finish_reason.as_str()
    }

    /// The stop token id or stop string that ended the output; None for EOS and other ends.
    #[getter]
    fn stop_reason(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match &self.inner.stop_reason {
            None => None,
            Some(StopReason::Token(id)) => Some(id.into_pyobject(py)?.into_any().unbind()),
            Some(StopReason::Text(text)) => Some((&**text).into_pyobject(py)?.into_any().unbind()),
        })
    }

    /// Why the request failed; None unless `finish_reason` is "error".
    #[getter]
    fn error(&self) -> Option<&str> {
        self.inner.error.as_deref()
    }

    /// Prompt tokens found in the prefix cache at the first admission.
    #[getter]
    fn num_cached_tokens(&self) -> usize {
        self.inner.num_cached_tokens
    }

    /// When the request was submitted.
    #[getter]
    fn arrival_time_s(&self) -> f64 {
        seconds(self.inner.arrival_ns)
    }

    /// When the request was first planned; None if it ended while it waited.
    #[getter]
    fn first_scheduled_time_s(&self) -> Option<f64> {
        self.inner.first_scheduled_ns.map(seconds)
    }

    /// When the first token came; None without one.
    #[getter]
    fn first_token_time_s(&self) -> Option<f64> {
        self.inner.first_token_ns.map(seconds)
    }

    /// When the request ended.
    #[getter]
    fn finished_time_s(&self) -> f64 {
        seconds(self.inner.finished_ns)
    }

    /// Seconds between one output token and the next, float32; one fewer than tokens.
    #[getter]
    fn inter_token_latencies_s<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.inter_token_latencies_s)
    }

    fn __repr__(&self) -> String {
        let inner = &self.inner;
        let reason = inner.finish_reason.as_str();
        format!(
            "FinishedRequest(index={}, finish_reason={reason:?}, num_tokens={})",
            inner.index,
            inner.token_ids.len()
        )
    }
}
