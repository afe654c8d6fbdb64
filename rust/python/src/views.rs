//! Views of lent arrays, kept from step to step: in steady decode no array object is made.
//!
//! The arrays of a batch are the same memory every other step, and mostly as long as before. A view is handed out again if the array
//! still has the address and the length that it shows; else a new one is made, and the old one goes on showing what it showed to
//! whoever holds it. So a batch holds views of its own lengths for ever.

use std::sync::PoisonError;

use cbrs_core::{Batch, Scheduler, StepOutput};
use numpy::{Element, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::memory::{MAX_LENT_UPDATES, Memory, lend, lend_2d};

/// Sets of event arrays that take turns; another that comes (one grew) takes the place of the one that was seen first.
const NUM_OUTPUT_SETS: usize = 2;

/// What is needed to lend arrays.
pub(crate) struct Lender<'a, 'py> {
    pub(crate) memory: &'a Bound<'py, Memory>,
    /// Views that are handed out no more. Dropping one may run Python code, so it waits until the core's lock is free.
    pub(crate) outdated: &'a mut Vec<Py<PyAny>>,
}

/// A lent array and the last view of it.
pub(crate) struct Lent<T> {
    address: usize,
    len: usize,
    view: Option<Py<PyArray1<T>>>,
}

impl<T> Default for Lent<T> {
    fn default() -> Self {
        Self { address: 0, len: 0, view: None }
    }
}

impl<T: Element> Lent<T> {
    /// A view of `array`, which the core never reallocates.
    #[inline]
    pub(crate) fn get(&mut self, array: &[T], lender: &mut Lender<'_, '_>) -> Py<PyArray1<T>> {
        match &self.view {
            Some(view) if self.len == array.len() && self.address == array.as_ptr().addr() => {
                view.clone_ref(lender.memory.py())
            }
            _ => self.renew(array, lender),
        }
    }

    #[cold]
    #[inline(never)]
    fn renew(&mut self, array: &[T], lender: &mut Lender<'_, '_>) -> Py<PyArray1<T>> {
        let view = lend(array, lender.memory);
        (self.address, self.len) = (array.as_ptr().addr(), array.len());
        let outdated = self.view.replace(view.clone_ref(lender.memory.py()));
        lender.outdated.extend(outdated.map(Py::into_any));
        view
    }
}

/// Views of one set of batch arrays.
#[derive(Default)]
pub(crate) struct BatchViews {
    pub(crate) token_ids: Lent<i32>,
    pub(crate) positions: Lent<i32>,
    pub(crate) slot_mapping: Lent<i64>,
    pub(crate) query_start: Lent<i32>,
    pub(crate) seq_lens: Lent<i32>,
    pub(crate) row_ids: Lent<i32>,
    pub(crate) request_ids: Lent<u64>,
    pub(crate) choice_ids: Lent<i32>,
    pub(crate) logits_index: Lent<i32>,
    pub(crate) sample_index: Lent<i32>,
    pub(crate) sample_rows: Lent<i32>,
    pub(crate) sample_positions: Lent<i32>,
    pub(crate) sample_choices: Lent<i32>,
    /// By number of updates.
    updates: Vec<Option<Py<PyTuple>>>,
}

/// Views of one set of event arrays.
#[derive(Default)]
pub(crate) struct OutputViews {
    pub(crate) request_ids: Lent<u64>,
    pub(crate) choice_ids: Lent<i32>,
    pub(crate) token_ids: Lent<i32>,
    pub(crate) finish_reasons: Lent<u8>,
    pub(crate) stop_ids: Lent<i32>,
    pub(crate) started_request_ids: Lent<u64>,
    pub(crate) started_num_cached_tokens: Lent<i32>,
}

/// Views of the arrays by row, whose length never changes.
pub(crate) struct RowViews {
    pub(crate) block_tables: Py<PyArray2<i32>>,
    pub(crate) temperature: Py<PyArray1<f32>>,
    pub(crate) top_k: Py<PyArray1<i32>>,
    pub(crate) top_p: Py<PyArray1<f32>>,
    pub(crate) min_p: Py<PyArray1<f32>>,
    pub(crate) seeds: Py<PyArray1<u64>>,
    pub(crate) presence_penalty: Py<PyArray1<f32>>,
    pub(crate) frequency_penalty: Py<PyArray1<f32>>,
    pub(crate) repetition_penalty: Py<PyArray1<f32>>,
    pub(crate) min_tokens: Py<PyArray1<i32>>,
    pub(crate) num_logprobs: Py<PyArray1<i32>>,
}

impl RowViews {
    fn new(core: &Scheduler, memory: &Bound<'_, Memory>) -> Self {
        let (block_tables, max_blocks) = core.block_tables();
        let sampling = core.sampling();
        Self {
            block_tables: lend_2d(block_tables, max_blocks, memory),
            temperature: lend(&sampling.temperature, memory),
            top_k: lend(&sampling.top_k, memory),
            top_p: lend(&sampling.top_p, memory),
            min_p: lend(&sampling.min_p, memory),
            seeds: lend(&sampling.seeds, memory),
            presence_penalty: lend(&sampling.presence_penalty, memory),
            frequency_penalty: lend(&sampling.frequency_penalty, memory),
            repetition_penalty: lend(&sampling.repetition_penalty, memory),
            min_tokens: lend(&sampling.min_tokens, memory),
            num_logprobs: lend(&sampling.num_logprobs, memory),
        }
    }
}

/// Arrays without elements, for what a step has nothing of.
pub(crate) struct EmptyArrays {
    pub(crate) int32: Py<PyArray1<i32>>,
    pub(crate) uint64: Py<PyArray1<u64>>,
}

/// `array` as an array of its own: `empty` if it has no elements, else a copy.
pub(crate) fn copied<T: Element>(py: Python<'_>, array: &[T], empty: &Py<PyArray1<T>>) -> Py<PyArray1<T>> {
    if array.is_empty() { empty.clone_ref(py) } else { PyArray1::from_slice(py, array).unbind() }
}

/// All views that a scheduler keeps.
pub(crate) struct Views {
    rows: RowViews,
    empty: EmptyArrays,
    batches: [(usize, BatchViews); 2],
    outputs: [(usize, OutputViews); NUM_OUTPUT_SETS],
    next_output: usize,
}

/// What changed in the block tables: in lent memory, or, if there is too much for it, copied.
pub(crate) enum Updates {
    /// So many of one block each, in the memory of a set of batch arrays.
    Lent {
        set: usize,
        num_updates: usize,
    },
    Copied([Py<PyArray1<i32>>; 4]),
}

impl Views {
    pub(crate) fn new(memory: &Bound<'_, Memory>) -> Self {
        let py = memory.py();
        // Nobody else knows of it yet.
        let core = memory.get().core.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            rows: RowViews::new(&core, memory),
            empty: EmptyArrays {
                int32: PyArray1::from_slice(py, &[]).unbind(),
                uint64: PyArray1::from_slice(py, &[]).unbind(),
            },
            batches: Default::default(),
            outputs: Default::default(),
            next_output: 0,
        }
    }

    /// Number of the set of arrays that `batch` is: its address tells.
    pub(crate) fn batch_set(&mut self, batch: &Batch) -> usize {
        let address = std::ptr::from_ref(batch).addr();
        let known = self.batches.iter().position(|(known, _)| *known == address);
        known.unwrap_or_else(|| {
            let unused = usize::from(self.batches[0].0 != 0);
            self.batches[unused].0 = address;
            unused
        })
    }

    /// What the arrays of a batch whose set is `set` are taken from.
    pub(crate) fn of_batch(&mut self, set: usize) -> (&RowViews, &EmptyArrays, &mut BatchViews) {
        (&self.rows, &self.empty, &mut self.batches[set].1)
    }

    /// What the arrays of `output` are taken from.
    pub(crate) fn of_output(&mut self, output: &StepOutput) -> (&EmptyArrays, &mut OutputViews) {
        let address = output.request_ids.as_ptr().addr();
        let known = self.outputs.iter().position(|(known, _)| *known == address);
        let set = known.unwrap_or_else(|| {
            let oldest = self.next_output;
            self.next_output = (oldest + 1) % NUM_OUTPUT_SETS;
            self.outputs[oldest].0 = address;
            oldest
        });
        (&self.empty, &mut self.outputs[set].1)
    }

    /// Takes the changes of the block tables of a batch whose set is `set`.
    pub(crate) fn take_updates(memory: &Bound<'_, Memory>, set: usize, batch: &Batch) -> Updates {
        let updates = &batch.block_table_updates;
        let num_updates = updates.rows.len();
        if num_updates <= MAX_LENT_UPDATES && updates.ids.len() == num_updates {
            memory.get().write_updates(set, updates);
            return Updates::Lent { set, num_updates };
        }
        let arrays = [&updates.rows, &updates.first_columns, &updates.start, &updates.ids];
        Updates::Copied(arrays.map(|array| PyArray1::from_slice(memory.py(), array).unbind()))
    }

    /// The tuple of `updates`. Without the core's lock: making a tuple may run Python code (the garbage collector).
    pub(crate) fn updates(&mut self, memory: &Bound<'_, Memory>, updates: Updates) -> PyResult<Py<PyTuple>> {
        let py = memory.py();
        let (set, num_updates) = match updates {
            Updates::Copied(arrays) => return Ok(PyTuple::new(py, arrays)?.unbind()),
            Updates::Lent { set, num_updates } => (set, num_updates),
        };
        let known = &mut self.batches[set].1.updates;
        if known.len() <= num_updates {
            known.resize_with(num_updates + 1, || None);
        }
        if let Some(tuple) = &known[num_updates] {
            return Ok(tuple.clone_ref(py));
        }
        let tuple = PyTuple::new(py, Memory::lend_updates(memory, set, num_updates))?.unbind();
        known[num_updates] = Some(tuple.clone_ref(py));
        Ok(tuple)
    }
}
