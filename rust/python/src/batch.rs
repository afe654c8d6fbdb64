//! `Batch` as a Python class: attributes are numpy arrays, made when they are first asked for.

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{Array, Lent};
use crate::row_tables::NewRowTables;
use crate::scheduler::Scheduler;
use crate::step_output::StepOutput;

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

    /// int32 `[max_num_seqs]`, by row: most likely ids to report with each output token; -1 = nothing.
    #[getter]
    fn num_logprobs(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.num_logprobs.get(py, &self.owner)
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
