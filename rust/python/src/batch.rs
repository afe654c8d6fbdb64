//! `Batch` as a Python class: scalars and numpy arrays, all there when it is made.
//!
//! An array is a field that the interpreter reads without a call. What the core lends comes from the views that the scheduler keeps
//! (`views.rs`); what may grow is copied, and mostly there is nothing of it.

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::row_tables::NewRowTables;
use crate::step_output::StepOutput;
use crate::views::{Lender, Updates, Views, copied};

/// What runs in one step, as flat arrays. `T` tokens, `S` sequences, `R` samples.
///
/// Arrays belong to the scheduler and stay valid until the `step` that commits this batch returns; do not write to them. A later batch may
/// hold the same array objects, with what is true then.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct Batch {
    step_id: u64,
    num_seqs: usize,
    num_decodes: usize,
    num_tokens: usize,
    max_query_len: usize,
    max_seq_len: usize,
    has_sampling_extras: bool,
    /// int32 `[T]`: tokens to run.
    #[pyo3(get)]
    token_ids: Py<PyArray1<i32>>,
    /// int32 `[T]`: position of each token in its sequence.
    #[pyo3(get)]
    positions: Py<PyArray1<i32>>,
    /// int64 `[T]`: where K and V go, `block * block_size + offset`; -1 = do not write.
    #[pyo3(get)]
    slot_mapping: Py<PyArray1<i64>>,
    /// int32 `[S+1]`: prefix sums of query tokens per sequence.
    #[pyo3(get)]
    query_start: Py<PyArray1<i32>>,
    /// int32 `[S]`: context length after this step.
    #[pyo3(get)]
    seq_lens: Py<PyArray1<i32>>,
    /// int32 `[S]`: row of each sequence.
    #[pyo3(get)]
    row_ids: Py<PyArray1<i32>>,
    /// uint64 `[S]`: request of each sequence.
    #[pyo3(get)]
    request_ids: Py<PyArray1<u64>>,
    /// int32 `[S]`: choice of each sequence within its request.
    #[pyo3(get)]
    choice_ids: Py<PyArray1<i32>>,
    /// int32 `[L]`: indices into `T` whose logits are needed.
    #[pyo3(get)]
    logits_index: Py<PyArray1<i32>>,
    /// int32 `[R]`: indices into `logits_index` that are sampled; the result has one token for each.
    #[pyo3(get)]
    sample_index: Py<PyArray1<i32>>,
    /// int32 `[R]`: row of each sample.
    #[pyo3(get)]
    sample_rows: Py<PyArray1<i32>>,
    /// int32 `[R]`: index of the output token to be sampled, 0 for the first; the counter of its random number.
    #[pyo3(get)]
    sample_positions: Py<PyArray1<i32>>,
    /// int32 `[R]`: choice of each sample within its request.
    #[pyo3(get)]
    sample_choices: Py<PyArray1<i32>>,
    /// int32 `[P]`: indices into `logits_index` of the prompt tokens whose log-probabilities are wanted.
    #[pyo3(get)]
    prompt_logits_index: Py<PyArray1<i32>>,
    /// int32 `[P]`: the token after each of them, whose log-probability it is.
    #[pyo3(get)]
    prompt_target_ids: Py<PyArray1<i32>>,
    /// int32 `[P]`: row of each of them.
    #[pyo3(get)]
    prompt_rows: Py<PyArray1<i32>>,
    /// int32 `[P]`: most likely ids wanted beside each of them.
    #[pyo3(get)]
    num_prompt_logprobs: Py<PyArray1<i32>>,
    /// Ragged parameters of `new_rows`, handed over this once; None if none of them has any.
    #[pyo3(get)]
    new_row_tables: Py<PyAny>,
    /// int32: rows that were given to a sequence by this plan (after `freed_rows`).
    #[pyo3(get)]
    new_rows: Py<PyArray1<i32>>,
    /// int32: rows that lost their sequence since the last plan.
    #[pyo3(get)]
    freed_rows: Py<PyArray1<i32>>,
    /// int32 `[max_num_seqs, max_blocks]`, read-only: block ids by row; columns past a sequence's blocks are stale.
    #[pyo3(get)]
    block_tables: Py<PyArray2<i32>>,
    /// What changed in `block_tables` since the last plan, as int32 arrays `(rows [U], first_columns [U], start [U+1], ids)`:
    /// run `i` writes `ids[start[i]:start[i + 1]]` to row `rows[i]` from column `first_columns[i]`.
    #[pyo3(get)]
    block_table_updates: Py<PyTuple>,
    /// float32 `[max_num_seqs]`, by row; 0 = greedy.
    #[pyo3(get)]
    temperature: Py<PyArray1<f32>>,
    /// int32 `[max_num_seqs]`, by row; 0 or -1 = all.
    #[pyo3(get)]
    top_k: Py<PyArray1<i32>>,
    /// float32 `[max_num_seqs]`, by row.
    #[pyo3(get)]
    top_p: Py<PyArray1<f32>>,
    /// float32 `[max_num_seqs]`, by row.
    #[pyo3(get)]
    min_p: Py<PyArray1<f32>>,
    /// uint64 `[max_num_seqs]`, by row: key of the random numbers.
    #[pyo3(get)]
    seeds: Py<PyArray1<u64>>,
    /// float32 `[max_num_seqs]`, by row; 0 = none.
    #[pyo3(get)]
    presence_penalty: Py<PyArray1<f32>>,
    /// float32 `[max_num_seqs]`, by row; 0 = none.
    #[pyo3(get)]
    frequency_penalty: Py<PyArray1<f32>>,
    /// float32 `[max_num_seqs]`, by row; 1 = none.
    #[pyo3(get)]
    repetition_penalty: Py<PyArray1<f32>>,
    /// int32 `[max_num_seqs]`, by row: output tokens before which `NewRowTables.banned_ids` must not come.
    #[pyo3(get)]
    min_tokens: Py<PyArray1<i32>>,
    /// int32 `[max_num_seqs]`, by row: most likely ids to report with each output token; -1 = nothing.
    #[pyo3(get)]
    num_logprobs: Py<PyArray1<i32>>,
    /// What the `step` that returned this batch has to tell.
    #[pyo3(get)]
    outputs: Py<StepOutput>,
}

impl Batch {
    /// Describes the current batch of `core`, whose arrays stand in the lender's memory. `block_table_updates` is still to be set.
    pub(crate) fn new(
        core: &cbrs_core::Scheduler,
        views: &mut Views,
        lender: &mut Lender<'_, '_>,
    ) -> PyResult<(Self, Updates)> {
        let py = lender.memory.py();
        let batch = core.batch();
        let outputs = Py::new(py, StepOutput::new(core.output(), views, lender)?)?;
        let set = views.batch_set(batch);
        let updates = Views::take_updates(lender.memory, set, batch);
        let (rows, empty, lent) = views.of_batch(set);
        let copied = |array: &[i32]| copied(py, array, &empty.int32);
        let this = Self {
            step_id: batch.step_id,
            num_seqs: batch.num_seqs(),
            num_decodes: batch.num_decodes,
            num_tokens: batch.num_tokens(),
            max_query_len: batch.max_query_len,
            max_seq_len: batch.max_seq_len,
            has_sampling_extras: batch.has_sampling_extras,
            token_ids: lent.token_ids.get(&batch.token_ids, lender),
            positions: lent.positions.get(&batch.positions, lender),
            slot_mapping: lent.slot_mapping.get(&batch.slot_mapping, lender),
            query_start: lent.query_start.get(&batch.query_start, lender),
            seq_lens: lent.seq_lens.get(&batch.seq_lens, lender),
            row_ids: lent.row_ids.get(&batch.row_ids, lender),
            request_ids: lent.request_ids.get(&batch.request_ids, lender),
            choice_ids: lent.choice_ids.get(&batch.choice_ids, lender),
            logits_index: lent.logits_index.get(&batch.logits_index, lender),
            sample_index: lent.sample_index.get(&batch.sample_index, lender),
            sample_rows: lent.sample_rows.get(&batch.sample_rows, lender),
            sample_positions: lent.sample_positions.get(&batch.sample_positions, lender),
            sample_choices: lent.sample_choices.get(&batch.sample_choices, lender),
            prompt_logits_index: copied(&batch.prompt_logits_index),
            prompt_target_ids: copied(&batch.prompt_target_ids),
            prompt_rows: copied(&batch.prompt_rows),
            num_prompt_logprobs: copied(&batch.num_prompt_logprobs),
            new_row_tables: NewRowTables::of(py, batch)?.map_or_else(|| py.None(), Py::into_any),
            new_rows: copied(&batch.new_rows),
            freed_rows: copied(&batch.freed_rows),
            block_tables: rows.block_tables.clone_ref(py),
            block_table_updates: PyTuple::empty(py).unbind(),
            temperature: rows.temperature.clone_ref(py),
            top_k: rows.top_k.clone_ref(py),
            top_p: rows.top_p.clone_ref(py),
            min_p: rows.min_p.clone_ref(py),
            seeds: rows.seeds.clone_ref(py),
            presence_penalty: rows.presence_penalty.clone_ref(py),
            frequency_penalty: rows.frequency_penalty.clone_ref(py),
            repetition_penalty: rows.repetition_penalty.clone_ref(py),
            min_tokens: rows.min_tokens.clone_ref(py),
            num_logprobs: rows.num_logprobs.clone_ref(py),
            outputs,
        };
        Ok((this, updates))
    }

    pub(crate) fn set_block_table_updates(&mut self, updates: Py<PyTuple>) {
        self.block_table_updates = updates;
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

    /// Whether a sampled row has more parameters than temperature, top_k, top_p and min_p, or wants log-probabilities.
    #[getter]
    fn has_sampling_extras(&self) -> bool {
        self.has_sampling_extras
    }

    fn __repr__(&self) -> String {
        format!(
            "Batch(step_id={}, num_seqs={}, num_decodes={}, num_tokens={})",
            self.step_id, self.num_seqs, self.num_decodes, self.num_tokens
        )
    }
}
