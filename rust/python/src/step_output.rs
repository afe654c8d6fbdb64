//! `StepOutput` as a Python class: numpy arrays, all there when it is made (as in `batch.rs`).

use std::sync::Arc;

use cbrs_core::FinishReason;
use numpy::{Element, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::logprobs::Logprobs;
use crate::views::{Lender, Views, copied};

/// Tokens and ends of one step, as flat arrays with one entry per event. Valid as long as its batch.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct StepOutput {
    step_id: u64,
    time_ns: u64,
    num_events: usize,
    /// uint64 `[E]`: request of each event.
    #[pyo3(get)]
    request_ids: Py<PyArray1<u64>>,
    /// int32 `[E]`: choice of each event within its request.
    #[pyo3(get)]
    choice_ids: Py<PyArray1<i32>>,
    /// int32 `[E]`: new token; -1 = the event brings none.
    #[pyo3(get)]
    token_ids: Py<PyArray1<i32>>,
    /// uint8 `[E]`: 0 = goes on, else `STOP`, `LENGTH`, `CANCELLED` or `ERROR`.
    #[pyo3(get)]
    finish_reasons: Py<PyArray1<u8>>,
    /// int32 `[E]`: stop token id that ended the choice; -1 = none.
    #[pyo3(get)]
    stop_ids: Py<PyArray1<i32>>,
    /// int32 `[Q]`: indices of the events whose tokens have log-probabilities, ascending.
    #[pyo3(get)]
    logprob_events: Py<PyArray1<i32>>,
    /// `Q` rows of log-probabilities; None without any.
    #[pyo3(get)]
    logprobs: Py<PyAny>,
    /// uint64 `[P]`: requests that the rows of `prompt_logprobs` belong to.
    #[pyo3(get)]
    prompt_logprob_requests: Py<PyArray1<u64>>,
    /// int32 `[P]`: position of each row's token in the prompt, 1 or more.
    #[pyo3(get)]
    prompt_logprob_positions: Py<PyArray1<i32>>,
    /// `P` rows of log-probabilities of prompt tokens; None without any.
    #[pyo3(get)]
    prompt_logprobs: Py<PyAny>,
    /// uint64 `[A]`: requests admitted for the first time by this plan.
    #[pyo3(get)]
    started_request_ids: Py<PyArray1<u64>>,
    /// int32 `[A]`: prompt tokens that each of them found in the prefix cache.
    #[pyo3(get)]
    started_num_cached_tokens: Py<PyArray1<i32>>,
    details: Vec<(u32, Arc<str>)>,
}

impl StepOutput {
    /// Describes `output`, whose arrays stand in the lender's memory.
    pub(crate) fn new(
        output: &cbrs_core::StepOutput,
        views: &mut Views,
        lender: &mut Lender<'_, '_>,
    ) -> PyResult<Self> {
        let py = lender.memory.py();
        let (empty, lent) = views.of_output(output);
        let logprobs = |rows| Ok::<_, PyErr>(Logprobs::of(py, rows)?.map_or_else(|| py.None(), Py::into_any));
        Ok(Self {
            step_id: output.step_id,
            time_ns: output.time_ns,
            num_events: output.len(),
            request_ids: lent.request_ids.get(&output.request_ids, lender),
            choice_ids: lent.choice_ids.get(&output.choice_ids, lender),
            token_ids: lent.token_ids.get(&output.token_ids, lender),
            finish_reasons: lent.finish_reasons.get(&output.finish_reasons, lender),
            stop_ids: lent.stop_ids.get(&output.stop_ids, lender),
            logprob_events: copied(py, &output.logprob_events, &empty.int32),
            logprobs: logprobs(&output.logprobs)?,
            prompt_logprob_requests: copied(py, &output.prompt_logprob_requests, &empty.uint64),
            prompt_logprob_positions: copied(py, &output.prompt_logprob_positions, &empty.int32),
            prompt_logprobs: logprobs(&output.prompt_logprobs)?,
            started_request_ids: lent.started_request_ids.get(&output.started_request_ids, lender),
            started_num_cached_tokens: lent.started_num_cached_tokens.get(&output.started_num_cached_tokens, lender),
            details: output.details.clone(),
        })
    }

    fn entry<T: Element + Copy>(&self, py: Python<'_>, array: &Py<PyArray1<T>>, index: usize) -> PyResult<T> {
        let found = if index < self.num_events { array.bind(py).get_owned(index) } else { None };
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

    fn __len__(&self) -> usize {
        self.num_events
    }

    fn __repr__(&self) -> String {
        format!("StepOutput(step_id={}, events={})", self.step_id, self.num_events)
    }
}
