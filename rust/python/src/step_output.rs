//! `StepOutput` as a Python class: attributes are numpy arrays, made when they are first asked for.

use std::sync::Arc;

use cbrs_core::FinishReason;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::arrays::Array;
use crate::logprobs::Logprobs;
use crate::scheduler::Scheduler;

/// Tokens and ends of one step, as flat arrays with one entry per event. Valid as long as its batch.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct StepOutput {
    owner: Py<Scheduler>,
    step_id: u64,
    time_ns: u64,
    request_ids: Array<u64>,
    choice_ids: Array<i32>,
    token_ids: Array<i32>,
    finish_reasons: Array<u8>,
    stop_ids: Array<i32>,
    started_request_ids: Array<u64>,
    started_num_cached_tokens: Array<i32>,
    details: Vec<(u32, Arc<str>)>,
    logprob_events: Vec<i32>,
    logprobs: Option<Py<Logprobs>>,
    prompt_logprob_requests: Vec<u64>,
    prompt_logprob_positions: Vec<i32>,
    prompt_logprobs: Option<Py<Logprobs>>,
}

impl StepOutput {
    pub(crate) fn new(py: Python<'_>, output: &cbrs_core::StepOutput, owner: Py<Scheduler>) -> PyResult<Self> {
        Ok(Self {
            owner,
            step_id: output.step_id,
            time_ns: output.time_ns,
            request_ids: Array::new(&output.request_ids),
            choice_ids: Array::new(&output.choice_ids),
            token_ids: Array::new(&output.token_ids),
            finish_reasons: Array::new(&output.finish_reasons),
            stop_ids: Array::new(&output.stop_ids),
            started_request_ids: Array::new(&output.started_request_ids),
            started_num_cached_tokens: Array::new(&output.started_num_cached_tokens),
            details: output.details.clone(),
            logprob_events: output.logprob_events.clone(),
            logprobs: Logprobs::of(py, &output.logprobs)?,
            prompt_logprob_requests: output.prompt_logprob_requests.clone(),
            prompt_logprob_positions: output.prompt_logprob_positions.clone(),
            prompt_logprobs: Logprobs::of(py, &output.prompt_logprobs)?,
        })
    }

    fn entry<T: numpy::Element + Copy>(&self, py: Python<'_>, array: &Array<T>, index: usize) -> PyResult<T> {
        let view = array.get(py, &self.owner);
        let found = view.bind(py).readonly().as_array().get(index).copied();
        found.ok_or_else(|| PyIndexError::new_err(format!("there is no event {index}")))
    }

    fn detail(&self, index: usize) -> Option<&str> {
        let found = self.details.iter().find(|(event, _)| *event as usize == index);
        found.map(|(_, detail)| &**detail)
    }

    fn finish(&self, py: Python<'_>, index: usize) -> PyResult<Option<FinishReason>> {
        Ok(FinishReason::from_code(self.entry(py, &self.finish_reasons, index)?))
    }
}

#[pymethods]
impl StepOutput {
    /// Code in `finish_reasons`: an EOS token, a stop token or `finish()`.
    #[classattr]
    const STOP: u8 = FinishReason::Stop as u8;
    /// Code in `finish_reasons`: `max_tokens` or the context.
    #[classattr]
    const LENGTH: u8 = FinishReason::Length as u8;
    /// Code in `finish_reasons`: `cancel()` or `close()`.
    #[classattr]
    const CANCELLED: u8 = FinishReason::Cancelled as u8;
    /// Code in `finish_reasons`: a failed step.
    #[classattr]
    const ERROR: u8 = FinishReason::Error as u8;

    #[getter]
    fn step_id(&self) -> u64 {
        self.step_id
    }

    /// Time of the step on the scheduler's clock.
    #[getter]
    fn time_ns(&self) -> u64 {
        self.time_ns
    }

    /// uint64 `[E]`: request of each event.
    #[getter]
    fn request_ids(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.request_ids.get(py, &self.owner)
    }

    /// int32 `[E]`: choice of each event within its request.
    #[getter]
    fn choice_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.choice_ids.get(py, &self.owner)
    }

    /// int32 `[E]`: new token; -1 = the event brings none.
    #[getter]
    fn token_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.token_ids.get(py, &self.owner)
    }

    /// uint8 `[E]`: 0 = goes on, else `STOP`, `LENGTH`, `CANCELLED` or `ERROR`.
    #[getter]
    fn finish_reasons(&self, py: Python<'_>) -> Py<PyArray1<u8>> {
        self.finish_reasons.get(py, &self.owner)
    }

    /// int32 `[E]`: stop token id that ended the choice; -1 = none.
    #[getter]
    fn stop_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.stop_ids.get(py, &self.owner)
    }

    /// int32 `[Q]`: indices of the events whose tokens have log-probabilities, ascending.
    #[getter]
    fn logprob_events<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.logprob_events)
    }

    /// `Q` rows of log-probabilities; None without any.
    #[getter]
    fn logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
    }

    /// uint64 `[P]`: requests that the rows of `prompt_logprobs` belong to.
    #[getter]
    fn prompt_logprob_requests<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.prompt_logprob_requests)
    }

    /// int32 `[P]`: position of each row's token in the prompt, 1 or more.
    #[getter]
    fn prompt_logprob_positions<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.prompt_logprob_positions)
    }

    /// `P` rows of log-probabilities of prompt tokens; None without any.
    #[getter]
    fn prompt_logprobs(&self, py: Python<'_>) -> Option<Py<Logprobs>> {
        self.prompt_logprobs.as_ref().map(|logprobs| logprobs.clone_ref(py))
    }

    /// uint64 `[A]`: requests admitted for the first time by this plan.
    #[getter]
    fn started_request_ids(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.started_request_ids.get(py, &self.owner)
    }

    /// int32 `[A]`: prompt tokens that each of them found in the prefix cache.
    #[getter]
    fn started_num_cached_tokens(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.started_num_cached_tokens.get(py, &self.owner)
    }

    /// How event `index` ended its choice: `stop`, `length`, `cancelled`, `error`, or None if it goes on.
    fn finish_reason(&self, py: Python<'_>, index: usize) -> PyResult<Option<&'static str>> {
        Ok(self.finish(py, index)?.map(FinishReason::as_str))
    }

    /// The stop token id, or the stop string given to `finish()`, that ended event `index`'s choice; None for EOS and other ends.
    fn stop_reason(&self, py: Python<'_>, index: usize) -> PyResult<Option<Py<PyAny>>> {
        if self.finish(py, index)? != Some(FinishReason::Stop) {
            return Ok(None);
        }
        if let Some(text) = self.detail(index) {
            return Ok(Some(text.into_pyobject(py)?.into_any().unbind()));
        }
        let stop_id = self.entry(py, &self.stop_ids, index)?;
        Ok(if stop_id < 0 { None } else { Some(stop_id.into_pyobject(py)?.into_any().unbind()) })
    }

    /// Why event `index` ended with `error`; None for other events.
    fn error(&self, py: Python<'_>, index: usize) -> PyResult<Option<&str>> {
        Ok(if self.finish(py, index)? == Some(FinishReason::Error) { self.detail(index) } else { None })
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.request_ids.get(py, &self.owner).bind(py).len().unwrap_or(0)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("StepOutput(step_id={}, events={})", self.step_id, self.__len__(py))
    }
}
