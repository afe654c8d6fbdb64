//! The result of one request as Python objects.

use cbrs_text::StopReason;
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::logprobs::Logprobs;

/// The result of one request. Times are seconds on the scheduler's clock.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct FinishedRequest {
    /// Without what stands in the other fields.
    inner: cbrs_text::FinishedRequest,
    outputs: Vec<Py<FinishedChoice>>,
    prompt_logprobs: Option<Py<Logprobs>>,
}

impl FinishedRequest {
    pub(super) fn new(py: Python<'_>, mut inner: cbrs_text::FinishedRequest) -> PyResult<Self> {
        let outputs = std::mem::take(&mut inner.outputs);
        let outputs = outputs.into_iter().map(|output| FinishedChoice::wrap(py, output)).collect::<PyResult<_>>()?;
        let prompt_logprobs = Logprobs::wrap(py, inner.prompt_logprobs.take())?;
        Ok(Self { inner, outputs, prompt_logprobs })
    }
}

pub(super) fn seconds(time_ns: u64) -> f64 {
    time_ns as f64 / 1e9
}

/// The id or string that ended an output, as Python's int or str.
pub(super) fn stop_reason(py: Python<'_>, reason: Option<&StopReason>) -> PyResult<Option<Py<PyAny>>> {
    Ok(match reason {
        None => None,
        Some(StopReason::Token(id)) => Some(id.into_pyobject(py)?.into_any().unbind()),
        Some(StopReason::Text(text)) => Some((&**text).into_pyobject(py)?.into_any().unbind()),
    })
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

    /// The prompt as it was run, int32.
    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.inner.prompt_token_ids)
    }

    /// The outputs, by choice.
    #[getter]
    fn outputs(&self, py: Python<'_>) -> Vec<Py<FinishedChoice>> {
        self.outputs.iter().map(|output| output.clone_ref(py)).collect()
    }

    /// One row for each prompt token but the first; None without `prompt_logprobs`, or if the prompt was not read to its end.
    #[getter]
    fn prompt_logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.prompt_logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
    }

    /// Why the first failed choice failed; None if none did.
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

    /// When the first token of any choice came; None without one.
    #[getter]
    fn first_token_time_s(&self) -> Option<f64> {
        self.inner.first_token_ns.map(seconds)
    }

    /// When the request ended.
    #[getter]
    fn finished_time_s(&self) -> f64 {
        seconds(self.inner.finished_ns)
    }

    fn __repr__(&self) -> String {
        format!("FinishedRequest(index={}, num_outputs={})", self.inner.index, self.outputs.len())
    }
}

/// One output of a request. Times are seconds on the scheduler's clock.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct FinishedChoice {
    /// Without log-probabilities.
    inner: cbrs_text::FinishedChoice,
    logprobs: Option<Py<Logprobs>>,
}

impl FinishedChoice {
    fn wrap(py: Python<'_>, mut inner: cbrs_text::FinishedChoice) -> PyResult<Py<Self>> {
        let logprobs = Logprobs::wrap(py, inner.logprobs.take())?;
        Py::new(py, Self { inner, logprobs })
    }
}

#[pymethods]
impl FinishedChoice {
    /// Number of the choice.
    #[getter]
    fn index(&self) -> u32 {
        self.inner.index
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
        stop_reason(py, self.inner.stop_reason.as_ref())
    }

    /// Why the output failed; None unless `finish_reason` is "error".
    #[getter]
    fn error(&self) -> Option<&str> {
        self.inner.error.as_deref()
    }

    /// When the first token came; None without one.
    #[getter]
    fn first_token_time_s(&self) -> Option<f64> {
        self.inner.first_token_ns.map(seconds)
    }

    /// Seconds between one output token and the next, float32; one fewer than tokens.
    #[getter]
    fn inter_token_latencies_s<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        PyArray1::from_slice(py, &self.inner.inter_token_latencies_s)
    }

    /// One row for each of `token_ids`; None without `num_logprobs`.
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
    }

    /// Sum of the tokens' own log-probabilities; None without `num_logprobs`.
    #[getter]
    fn cumulative_logprob(&self) -> Option<f64> {
        self.inner.cumulative_logprob
    }

    /// Most likely ids that were asked for with each token; None = nothing was.
    #[getter]
    fn num_logprobs(&self) -> Option<u32> {
        self.inner.num_logprobs
    }

    fn __repr__(&self) -> String {
        let inner = &self.inner;
        let reason = inner.finish_reason.as_str();
        let num_tokens = inner.token_ids.len();
        format!("FinishedChoice(index={}, finish_reason={reason:?}, num_tokens={num_tokens})", inner.index)
    }
}
