//! `OutputChannel` and `Update` as Python classes.

use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::finished::{seconds, stop_reason};
use crate::logprobs::Logprobs;

/// Output as it comes, for one reader such as an event loop.
///
/// Pass it to `OutputProcessor.submit`; its `fileno()` is readable while there is something to `take()`. A reader that is slow costs the
/// memory of what it has not taken, and nobody's time. Dropping a channel closes it.
#[pyclass(frozen, module = "cbrs", weakref)]
#[derive(Debug)]
pub(crate) struct OutputChannel {
    inner: cbrs_text::OutputChannel,
}

impl OutputChannel {
    pub(super) fn inner(&self) -> &cbrs_text::OutputChannel {
        &self.inner
    }
}

#[pymethods]
impl OutputChannel {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { inner: cbrs_text::OutputChannel::new()? })
    }

    /// The file descriptor to wait for; it stays the channel's: do not read or close it.
    ///
    /// Raises `ValueError` after `close` and in a forked child.
    fn fileno(&self) -> PyResult<i32> {
        self.inner.fileno().ok_or_else(|| PyValueError::new_err("the channel is closed"))
    }

    /// Takes all updates in the order in which they came; [] if there are none. Never waits.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<Update>> {
        self.inner.take().into_iter().map(|update| Update::new(py, update)).collect()
    }

    /// Drops what was not taken and cancels the requests that would have sent more. Closing twice does no harm.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }

    /// Whether nothing will come any more: it was closed, or this is a forked child.
    #[getter]
    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }
}

/// What is new about one choice of a request. Times are seconds on the scheduler's clock.
///
/// The updates of a choice joined are what its `FinishedChoice` would say.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct Update {
    inner: cbrs_text::Update,
    logprobs: Option<Py<Logprobs>>,
    prompt_logprobs: Option<Py<Logprobs>>,
}

impl Update {
    fn new(py: Python<'_>, mut inner: cbrs_text::Update) -> PyResult<Self> {
        let logprobs = Logprobs::wrap(py, inner.logprobs.take().map(|rows| *rows))?;
        let prompt_logprobs = Logprobs::wrap(py, inner.prompt_logprobs.take().map(|rows| *rows))?;
        Ok(Self { inner, logprobs, prompt_logprobs })
    }
}

#[pymethods]
impl Update {
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

    /// Number of the choice.
    #[getter]
    fn choice(&self) -> u32 {
        self.inner.choice
    }

    /// New text: "" while a character, or what could become a stop string, is incomplete.
    #[getter]
    fn text(&self) -> &str {
        &self.inner.text
    }

    /// New tokens; [] if the choice has only ended.
    #[getter]
    fn token_ids(&self) -> Vec<i32> {
        self.inner.token_ids.to_vec()
    }

    /// One row for each of `token_ids`; None without `logprobs`.
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
    }

    /// "stop", "length", "cancelled" or "error"; None while the choice goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.inner.end.as_ref().map(|end| end.finish_reason.as_str())
    }

    /// The stop token id or stop string that ended the choice; None for EOS and other ends.
    #[getter]
    fn stop_reason(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        stop_reason(py, self.inner.end.as_ref().and_then(|end| end.stop_reason.as_ref()))
    }

    /// Why the choice failed; None unless `finish_reason` is "error".
    #[getter]
    fn error(&self) -> Option<&str> {
        self.inner.end.as_ref().and_then(|end| end.error.as_deref())
    }

    /// The prompt, int32, with the request's first update; otherwise None.
    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<i32>>> {
        self.inner.prompt_token_ids.as_deref().map(|ids| PyArray1::from_slice(py, ids))
    }

    /// One row for each prompt token but the first, with the request's first update; None without `prompt_logprobs`.
    #[getter]
    fn prompt_logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.prompt_logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
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

    /// When this came.
    #[getter]
    fn time_s(&self) -> f64 {
        seconds(self.inner.time_ns)
    }

    /// Whether this is the last update of its request.
    #[getter]
    fn is_last(&self) -> bool {
        self.inner.is_last
    }

    fn __repr__(&self) -> String {
        let cbrs_text::Update { index, choice, text, is_last, .. } = &self.inner;
        format!("Update(index={index}, choice={choice}, text={text:?}, is_last={is_last})")
    }
}
