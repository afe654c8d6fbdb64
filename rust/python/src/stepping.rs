//! One call of `Scheduler.step`: the result read, the core's step with or without the GIL, the batch described.
//!
//! Nothing that can run Python code (reading any sequence, making a tuple or an exception, dropping a view) happens under the core's
//! lock: that code might need the lock.

use std::sync::MutexGuard;
use std::time::Instant;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{copy_int32, token_ids};
use crate::batch::Batch;
use crate::errors::{step_error, to_py};
use crate::memory::Memory;
use crate::scheduler::Scheduler;
use crate::step_result::StepResult;
use crate::views::{Lender, Views};

/// Steps estimated above this many elementary operations (about 100 microseconds) run without the GIL.
const MAX_WORK_WITH_GIL: usize = 4096;

/// What the one thread in `step` works with.
pub(crate) struct StepState {
    pub(crate) views: Views,
    /// Tokens of the result: a copy, as a long step runs while other threads may write to the caller's array.
    pub(crate) tokens: Vec<i32>,
    outdated: Vec<Py<PyAny>>,
    /// When a step that found nothing to do has something to do by itself.
    pub(crate) next_timer_ns: Option<u64>,
}

impl StepState {
    pub(crate) fn new(views: Views) -> Self {
        Self { views, tokens: Vec::new(), outdated: Vec::new(), next_timer_ns: None }
    }
}

/// The result given to one call of `step`.
pub(crate) enum GivenResult<'py> {
    None,
    /// Tokens only, which stand in `StepState::tokens`.
    Tokens,
    Full(Bound<'py, StepResult>),
}

impl<'py> GivenResult<'py> {
    pub(crate) fn read(result: Option<&Bound<'py, PyAny>>, tokens: &mut Vec<i32>) -> PyResult<Self> {
        let Some(result) = result else { return Ok(Self::None) };
        if copy_int32(result, tokens) {
            return Ok(Self::Tokens);
        }
        if let Ok(result) = result.cast::<StepResult>() {
            return Ok(Self::Full(result.clone()));
        }
        *tokens = sampled_tokens(result)?;
        Ok(Self::Tokens)
    }

    fn as_core<'a>(&'a self, tokens: &'a [i32]) -> Option<cbrs_core::StepResult<'a>> {
        match self {
            Self::None => None,
            Self::Tokens => Some(cbrs_core::StepResult { token_ids: tokens, ..Default::default() }),
            Self::Full(result) => Some(result.get().as_core()),
        }
    }
}

/// Reads the tokens given as a step's result; one that is no int32 is a wrong result.
fn sampled_tokens(result: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    let py = result.py();
    token_ids(result, "result").map_err(|err| {
        let is_wrong = err.is_instance_of::<PyValueError>(py);
        if is_wrong { step_error(py, &err.value(py).to_string()) } else { err }
    })
}

impl Scheduler {
    /// Runs one step of the core. `None` if the caller wants to wait for something to run or to tell, and there is nothing: then
    /// `state.next_timer_ns` is when there will be, unless somebody calls for it before.
    pub(crate) fn run_step(
        &self,
        memory: &Bound<'_, Memory>,
        given: &GivenResult<'_>,
        state: &mut StepState,
        is_waiting: bool,
    ) -> PyResult<Option<Batch>> {
        let core = self.step_core(memory.py(), given.as_core(&state.tokens).as_ref())?;
        if is_waiting && core.batch().num_seqs() == 0 && core.output().is_empty() {
            state.next_timer_ns = core.next_timer_ns();
            return Ok(None);
        }
        Self::hand_over(memory, core, state).map(Some)
    }

    /// Runs one step with the GIL, and gives the nanoseconds of its commit, of its plan, and of the rest of the call: reading the result and
    /// describing the batch, which is dropped.
    pub(crate) fn time_step(&self, memory: &Bound<'_, Memory>, result: &Bound<'_, PyAny>) -> PyResult<[u64; 3]> {
        let called = Instant::now();
        let mut state = self.begin_step(memory.py())?;
        let given = GivenResult::read(Some(result), &mut state.tokens)?;
        let mut core = self.lock()?;
        let began = Instant::now();
        let mut committed = began;
        let stepped =
            core.step_in_parts(given.as_core(&state.tokens).as_ref(), self.now_ns(), || committed = Instant::now());
        let planned = Instant::now();
        if let Err(error) = stepped {
            drop(core);
            return Err(to_py(&error));
        }
        let batch = Self::hand_over(memory, core, &mut state)?;
        let handed_over = Instant::now();
        drop(batch);
        let rest = (began - called) + (handed_over - planned);
        Ok([committed - began, planned - committed, rest].map(|part| part.as_nanos() as u64))
    }

    /// Describes the core's batch to Python.
    fn hand_over(
        memory: &Bound<'_, Memory>,
        core: MutexGuard<'_, cbrs_core::Scheduler>,
        state: &mut StepState,
    ) -> PyResult<Batch> {
        let mut lender = Lender { memory, outdated: &mut state.outdated };
        let described = Batch::new(&core, &mut state.views, &mut lender);
        drop(core);
        state.outdated.clear();
        let (mut batch, updates) = described?;
        batch.set_block_table_updates(state.views.updates(memory, updates)?);
        Ok(batch)
    }

    /// Steps the core, without the GIL if that may take long, and returns it locked.
    fn step_core(
        &self,
        py: Python<'_>,
        result: Option<&cbrs_core::StepResult<'_>>,
    ) -> PyResult<MutexGuard<'_, cbrs_core::Scheduler>> {
        let mut core = self.lock()?;
        let stepped = if core.estimated_work() <= MAX_WORK_WITH_GIL {
            core.step(result, self.now_ns())
        } else {
            drop(core);
            let stepped = py.detach(|| self.core().lock().ok().map(|mut core| core.step(result, self.now_ns())));
            core = self.lock()?;
            // None: it is poisoned, as `lock` has just found.
            stepped.unwrap_or(Ok(()))
        };
        match stepped {
            Ok(()) => Ok(core),
            Err(error) => {
                drop(core);
                Err(to_py(&error))
            }
        }
    }
}
