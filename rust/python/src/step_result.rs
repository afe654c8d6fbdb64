//! `StepResult` as a Python class: what a model run gives back.

use cbrs_core::Error;
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{integer, token_ids};
use crate::errors::to_py;
use crate::logprobs::LogprobMatrix;

/// Sampled tokens of one batch, with what else may be said about them.
///
/// `logprobs` is `(token_ids int32 [R, 1 + K], values float32 [R, 1 + K], ranks int32 [R])`: the token itself, then the `K` most likely ids;
/// `prompt_logprobs` is the same for the `P` prompt tokens of the batch. `step_time_ns` is how long the step took, in nanoseconds; without it,
/// the time from the `step` call that planned it to the one that commits it counts. `draft_token_ids` is part of the contract but not of
/// this version.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct StepResult {
    step_id: u64,
    pub(crate) token_ids: Vec<i32>,
    token_start: Option<Vec<i32>>,
    row_error: Option<Vec<u8>>,
    logprobs: Option<LogprobMatrix>,
    prompt_logprobs: Option<LogprobMatrix>,
    step_time_ns: Option<u64>,
}

impl StepResult {
    pub(crate) fn as_core(&self) -> cbrs_core::StepResult<'_> {
        cbrs_core::StepResult {
            step_id: Some(self.step_id),
            token_ids: &self.token_ids,
            token_start: self.token_start.as_deref(),
            row_error: self.row_error.as_deref(),
            logprobs: self.logprobs.as_ref().map(LogprobMatrix::as_core),
            prompt_logprobs: self.prompt_logprobs.as_ref().map(LogprobMatrix::as_core),
            step_time_ns: self.step_time_ns,
        }
    }
}

#[pymethods]
impl StepResult {
    #[new]
    #[pyo3(signature = (step_id, token_ids, token_start=None, row_error=None, logprobs=None, prompt_logprobs=None,
        draft_token_ids=None, step_time_ns=None))]
    #[allow(clippy::too_many_arguments)] // the fields of the contract
    fn new(
        step_id: u64,
        #[pyo3(from_py_with = result_token_ids)] token_ids: Vec<i32>,
        token_start: Option<&Bound<'_, PyAny>>,
        row_error: Option<&Bound<'_, PyAny>>,
        logprobs: Option<&Bound<'_, PyAny>>,
        prompt_logprobs: Option<&Bound<'_, PyAny>>,
        draft_token_ids: Option<&Bound<'_, PyAny>>,
        step_time_ns: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        if draft_token_ids.is_some() {
            return Err(to_py(&Error::Unsupported { name: "draft_token_ids" }));
        }
        let token_start = token_start.map(|start| self::token_ids(start, "token_start")).transpose()?;
        Ok(Self {
            step_id,
            token_ids,
            token_start,
            row_error: row_error.map(codes).transpose()?,
            logprobs: logprobs.map(|matrix| LogprobMatrix::read(matrix, "logprobs")).transpose()?,
            prompt_logprobs: prompt_logprobs
                .map(|matrix| LogprobMatrix::read(matrix, "prompt_logprobs"))
                .transpose()?,
            step_time_ns: step_time_ns.map(nanoseconds).transpose()?,
        })
    }

    #[getter]
    fn step_id(&self) -> u64 {
        self.step_id
    }

    /// int32 `[R]`.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.token_ids)
    }

    /// How long the step took; None = the scheduler's clock says so.
    #[getter]
    fn step_time_ns(&self) -> Option<u64> {
        self.step_time_ns
    }

    fn __repr__(&self) -> String {
        format!("StepResult(step_id={}, num_tokens={})", self.step_id, self.token_ids.len())
    }
}

fn result_token_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    token_ids(value, "token_ids")
}

fn nanoseconds(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let time = integer(value, "step_time_ns")?;
    let (name, value, expected) = ("step_time_ns", time as f64, ">= 0");
    u64::try_from(time).map_err(|_| to_py(&Error::InvalidParameter { name, value, expected }))
}

/// Any iterable of truth values or codes; what is no code of its own counts as 1.
fn codes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let code = |item: &Bound<'_, PyAny>| match item.extract::<u8>() {
        Ok(code) => Ok(code),
        Err(_) => item.is_truthy().map(u8::from),
    };
    value.try_iter()?.map(|item| code(&item?)).collect()
}
