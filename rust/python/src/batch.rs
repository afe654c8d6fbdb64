//! `Batch`, `StepOutput` and `StepResult` as Python classes: attributes are numpy arrays, made when they are first asked for.

use std::sync::Arc;

use cbrs_core::{Error, FinishReason};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::arrays::{Lent, token_ids};
use crate::errors::to_py;
use crate::logprobs::{LogprobMatrix, Logprobs};
use crate::row_tables::NewRowTables;
use crate::scheduler::Scheduler;

/// A lent array and the view of it, once somebody asked.
struct Array<T> {
    lent: Lent<T>,
    view: PyOnceLock<Py<PyArray1<T>>>,
}

impl<T: numpy::Element> Array<T> {
    fn new(array: &[T]) -> Self {
        Self { lent: Lent::new(array), view: PyOnceLock::new() }
    }

    fn get(&self, py: Python<'_>, owner: &Py<Scheduler>) -> Py<PyArray1<T>> {
        let make = || self.lent.view(owner.bind(py).clone().into_any()).unbind();
        self.view.get_or_init(py, make).clone_ref(py)
    }
}

/// What runs in one step, as flat arrays. `T` tokens, `S` sequences, `R` samples.
///
/// Arrays belong to the scheduler and stay valid until the `step` that commits this batch returns; do not write to them.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct Batch {
    owner: Py<Scheduler>,
    step_id: u64,
    num_seqs: usize,
    num_decodes: usize,
    num_tokens: usize,
    max_query_len: usize,
    max_seq_len: usize,
    token_ids: Array<i32>,
    positions: Array<i32>,
    slot_mapping: Array<i64>,
    query_start: Array<i32>,
    seq_lens: Array<i32>,
    row_ids: Array<i32>,
    request_ids: Array<u64>,
    choice_ids: Array<i32>,
    logits_index: Array<i32>,
    sample_index: Array<i32>,
    sample_rows: Array<i32>,
    sample_positions: Array<i32>,
    sample_choices: Array<i32>,
    prompt_logits_index: Vec<i32>,
    prompt_target_ids: Vec<i32>,
    prompt_rows: Vec<i32>,
    num_prompt_logprobs: Vec<i32>,
    has_sampling_extras: bool,
    new_rows: Vec<i32>,
    new_row_tables: Option<Py<NewRowTables>>,
    freed_rows: Vec<i32>,
    updates: [Vec<i32>; 4],
    block_tables: Lent<i32>,
    max_blocks: usize,
    temperature: Array<f32>,
    top_k: Array<i32>,
    top_p: Array<f32>,
    min_p: Array<f32>,
    seeds: Array<u64>,
    presence_penalty: Array<f32>,
    frequency_penalty: Array<f32>,
    repetition_penalty: Array<f32>,
    min_tokens: Array<i32>,
    num_logprobs: Array<i32>,
    outputs: Py<StepOutput>,
}

impl Batch {
    /// Describes the current batch of `core`, the scheduler inside `owner`.
    pub(crate) fn new(py: Python<'_>, core: &cbrs_core::Scheduler, owner: Py<Scheduler>) -> PyResult<Self> {
        let batch = core.batch();
        let sampling = core.sampling();
        let (block_tables, max_blocks) = core.block_tables();
        let updates = &batch.block_table_updates;
        Ok(Self {
            step_id: batch.step_id,
            num_seqs: batch.num_seqs(),
            num_decodes: batch.num_decodes,
            num_tokens: batch.num_tokens(),
            max_query_len: batch.max_query_len,
            max_seq_len: batch.max_seq_len,
            token_ids: Array::new(&batch.token_ids),
            positions: Array::new(&batch.positions),
            slot_mapping: Array::new(&batch.slot_mapping),
            query_start: Array::new(&batch.query_start),
            seq_lens: Array::new(&batch.seq_lens),
            row_ids: Array::new(&batch.row_ids),
            request_ids: Array::new(&batch.request_ids),
            choice_ids: Array::new(&batch.choice_ids),
            logits_index: Array::new(&batch.logits_index),
            sample_index: Array::new(&batch.sample_index),
            sample_rows: Array::new(&batch.sample_rows),
            sample_positions: Array::new(&batch.sample_positions),
            sample_choices: Array::new(&batch.sample_choices),
            prompt_logits_index: batch.prompt_logits_index.clone(),
            prompt_target_ids: batch.prompt_target_ids.clone(),
            prompt_rows: batch.prompt_rows.clone(),
            num_prompt_logprobs: batch.num_prompt_logprobs.clone(),
            has_sampling_extras: batch.has_sampling_extras,
            new_rows: batch.new_rows.clone(),
            new_row_tables: NewRowTables::of(py, batch)?,
            freed_rows: batch.freed_rows.clone(),
            updates: [updates.rows.clone(), updates.first_columns.clone(), updates.start.clone(), updates.ids.clone()],
            block_tables: Lent::new(block_tables),
            max_blocks,
            temperature: Array::new(&sampling.temperature),
            top_k: Array::new(&sampling.top_k),
            top_p: Array::new(&sampling.top_p),
            min_p: Array::new(&sampling.min_p),
            seeds: Array::new(&sampling.seeds),
            presence_penalty: Array::new(&sampling.presence_penalty),
            frequency_penalty: Array::new(&sampling.frequency_penalty),
            repetition_penalty: Array::new(&sampling.repetition_penalty),
            min_tokens: Array::new(&sampling.min_tokens),
            num_logprobs: Array::new(&sampling.num_logprobs),
            outputs: Py::new(py, StepOutput::new(py, core.output(), owner.clone_ref(py))?)?,
            owner,
        })
    }
}

#[pymethods]
impl Batch {
    /// Number of this step; the result must name it if it names one.
    #[getter]
    fn step_id(&self) -> u64 {
        self.step_id
    }

    /// Sequences in this batch; 0 = nothing to run.
    #[getter]
    fn num_seqs(&self) -> usize {
        self.num_seqs
    }

    /// Leading sequences with exactly one query token.
    #[getter]
    fn num_decodes(&self) -> usize {
        self.num_decodes
    }

    /// Query tokens in this batch.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Most query tokens of one sequence.
    #[getter]
    fn max_query_len(&self) -> usize {
        self.max_query_len
    }

    /// Longest context after this step.
    #[getter]
    fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// int32 `[T]`: tokens to run.
    #[getter]
    fn token_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.token_ids.get(py, &self.owner)
    }

    /// int32 `[T]`: position of each token in its sequence.
    #[getter]
    fn positions(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.positions.get(py, &self.owner)
    }

    /// int64 `[T]`: where K and V go, `block * block_size + offset`; -1 = do not write.
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> Py<PyArray1<i64>> {
        self.slot_mapping.get(py, &self.owner)
    }

    /// int32 `[S+1]`: prefix sums of query tokens per sequence.
    #[getter]
    fn query_start(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.query_start.get(py, &self.owner)
    }

    /// int32 `[S]`: context length after this step.
    #[getter]
    fn seq_lens(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.seq_lens.get(py, &self.owner)
    }

    /// int32 `[S]`: row of each sequence.
    #[getter]
    fn row_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.row_ids.get(py, &self.owner)
    }

    /// uint64 `[S]`: request of each sequence.
    #[getter]
    fn request_ids(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.request_ids.get(py, &self.owner)
    }

    /// int32 `[S]`: choice of each sequence within its request.
    #[getter]
    fn choice_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.choice_ids.get(py, &self.owner)
    }

    /// int32 `[L]`: indices into `T` whose logits are needed.
    #[getter]
    fn logits_index(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.logits_index.get(py, &self.owner)
    }

    /// int32 `[R]`: indices into `logits_index` that are sampled; the result has one token for each.
    #[getter]
    fn sample_index(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.sample_index.get(py, &self.owner)
    }

    /// int32 `[R]`: row of each sample.
    #[getter]
    fn sample_rows(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.sample_rows.get(py, &self.owner)
    }

    /// int32 `[R]`: index of the output token to be sampled, 0 for the first; the counter of its random number.
    #[getter]
    fn sample_positions(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.sample_positions.get(py, &self.owner)
    }

    /// int32 `[R]`: choice of each sample within its request.
    #[getter]
    fn sample_choices(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.sample_choices.get(py, &self.owner)
    }

    /// int32 `[P]`: indices into `logits_index` of the prompt tokens whose log-probabilities are wanted.
    #[getter]
    fn prompt_logits_index<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.prompt_logits_index)
    }

    /// int32 `[P]`: the token after each of them, whose log-probability it is.
    #[getter]
    fn prompt_target_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.prompt_target_ids)
    }

    /// int32 `[P]`: row of each of them.
    #[getter]
    fn prompt_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.prompt_rows)
    }

    /// int32 `[P]`: most likely ids wanted beside each of them.
    #[getter]
    fn num_prompt_logprobs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.num_prompt_logprobs)
    }

    /// Whether a sampled row has more parameters than temperature, top_k, top_p and min_p, or wants log-probabilities.
    #[getter]
    fn has_sampling_extras(&self) -> bool {
        self.has_sampling_extras
    }

    /// Ragged parameters of `new_rows`, handed over this once; None if none of them has any.
    #[getter]
    fn new_row_tables(&self, py: Python<'_>) -> Option<Py<NewRowTables>> {
        self.new_row_tables.as_ref().map(|tables| tables.clone_ref(py))
    }

    /// int32: rows that were given to a sequence by this plan (after `freed_rows`).
    #[getter]
    fn new_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.new_rows)
    }

    /// int32: rows that lost their sequence since the last plan.
    #[getter]
    fn freed_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.freed_rows)
    }

    /// int32 `[max_num_seqs, max_blocks]`, read-only: block ids by row; columns past a sequence's blocks are stale.
    #[getter]
    fn block_tables(&self, py: Python<'_>) -> Py<PyArray2<i32>> {
        self.block_tables.view_2d(self.max_blocks, self.owner.bind(py).clone().into_any()).unbind()
    }

    /// What changed in `block_tables` since the last plan, as int32 arrays `(rows [U], first_columns [U], start [U+1], ids)`:
    /// run `i` writes `ids[start[i]:start[i + 1]]` to row `rows[i]` from column `first_columns[i]`.
    #[getter]
    fn block_table_updates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.updates.each_ref().map(|array| PyArray1::from_slice(py, array)))
    }

    /// float32 `[max_num_seqs]`, by row; 0 = greedy.
    #[getter]
    fn temperature(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.temperature.get(py, &self.owner)
    }

    /// int32 `[max_num_seqs]`, by row; 0 or -1 = all.
    #[getter]
    fn top_k(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.top_k.get(py, &self.owner)
    }

    /// float32 `[max_num_seqs]`, by row.
    #[getter]
    fn top_p(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.top_p.get(py, &self.owner)
    }

    /// float32 `[max_num_seqs]`, by row.
    #[getter]
    fn min_p(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.min_p.get(py, &self.owner)
    }

    /// uint64 `[max_num_seqs]`, by row: key of the random numbers.
    #[getter]
    fn seeds(&self, py: Python<'_>) -> Py<PyArray1<u64>> {
        self.seeds.get(py, &self.owner)
    }

    /// float32 `[max_num_seqs]`, by row; 0 = none.
    #[getter]
    fn presence_penalty(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.presence_penalty.get(py, &self.owner)
    }

    /// float32 `[max_num_seqs]`, by row; 0 = none.
    #[getter]
    fn frequency_penalty(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.frequency_penalty.get(py, &self.owner)
    }

    /// float32 `[max_num_seqs]`, by row; 1 = none.
    #[getter]
    fn repetition_penalty(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.repetition_penalty.get(py, &self.owner)
    }

    /// int32 `[max_num_seqs]`, by row: output tokens before which `NewRowTables.banned_ids` must not come.
    #[getter]
    fn min_tokens(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.min_tokens.get(py, &self.owner)
    }

    /// int32 `[max_num_seqs]`, by row, read-only: most likely ids to report with each output token; -1 = nothing.
    #[getter]
    fn num_logprobs(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        let view = self.num_logprobs.get(py, &self.owner);
        // The scheduler itself reads it again, to check the result.
        view.bind(py).readwrite().make_nonwriteable();
        view
    }

    /// What the `step` that returned this batch has to tell.
    #[getter]
    fn outputs(&self, py: Python<'_>) -> Py<StepOutput> {
        self.outputs.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "Batch(step_id={}, num_seqs={}, num_decodes={}, num_tokens={})",
            self.step_id, self.num_seqs, self.num_decodes, self.num_tokens
        )
    }
}

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
    fn new(py: Python<'_>, output: &cbrs_core::StepOutput, owner: Py<Scheduler>) -> PyResult<Self> {
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

/// Sampled tokens of one batch, with what else may be said about them.
///
/// `logprobs` is `(token_ids int32 [R, 1 + K], values float32 [R, 1 + K], ranks int32 [R])`: the token itself, then the `K` most likely ids;
/// `prompt_logprobs` is the same for the `P` prompt tokens of the batch. `draft_token_ids` and `step_time_ns` are part of the contract but
/// not of this version.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct StepResult {
    step_id: u64,
    pub(crate) token_ids: Vec<i32>,
    token_start: Option<Vec<i32>>,
    row_error: Option<Vec<u8>>,
    logprobs: Option<LogprobMatrix>,
    prompt_logprobs: Option<LogprobMatrix>,
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
        let later = [("draft_token_ids", draft_token_ids), ("step_time_ns", step_time_ns)];
        if let Some(&(name, _)) = later.iter().find(|(_, value)| value.is_some()) {
            return Err(to_py(&Error::Unsupported { name }));
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

    fn __repr__(&self) -> String {
        format!("StepResult(step_id={}, num_tokens={})", self.step_id, self.token_ids.len())
    }
}

fn result_token_ids(value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    token_ids(value, "token_ids")
}

/// Any iterable of truth values or codes; what is no code of its own counts as 1.
fn codes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let code = |item: &Bound<'_, PyAny>| match item.extract::<u8>() {
        Ok(code) => Ok(code),
        Err(_) => item.is_truthy().map(u8::from),
    };
    value.try_iter()?.map(|item| code(&item?)).collect()
}
