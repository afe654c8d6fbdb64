//! `Scheduler` as a Python class: locks, the GIL, the clock and waiting; every decision is the core's.
//!
//! 1. Submitting, cancelling and reading statistics never take the lock that a step holds.
//! 2. A short step keeps the GIL; a long one, and every wait, gives it up. Nobody waits for the GIL while holding the lock.
//! 3. After a panic in the core every call that needs the lock raises `EngineDeadError`, and closes the queue to new requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use cbrs_core::{Error, Figure, OutputSink, RequestId, RequestSpec, Submitter};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arrays::{integer, token_ids};
use crate::batch::Batch;
use crate::config::SchedulerConfig;
use crate::errors::{EngineDeadError, step_error, to_py};
use crate::memory::Memory;
use crate::parameters::{Parameters, positive_max_tokens};
use crate::policy::{self, GivenPolicy, config_error};
use crate::stepping::{GivenResult, StepState};
use crate::views::Views;

/// Longest wait between two looks at pending signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Decides which tokens of which requests run together, once per iteration.
///
/// `submit`, `cancel`, `finish`, `pause`, `resume`, `close` and `stats` may be called from any thread, `step` and `fail` from one at a time.
#[pyclass(frozen, module = "cbrs", weakref)]
pub(crate) struct Scheduler {
    memory: Py<Memory>,
    /// Held by the thread in `step`; no other waits for it.
    stepping: Mutex<StepState>,
    submitter: Submitter,
    config: Py<SchedulerConfig>,
    clock: Arc<Clock>,
}

enum Clock {
    Monotonic(Instant),
    Manual(AtomicU64),
}

impl Clock {
    fn now_ns(&self) -> u64 {
        match self {
            Self::Monotonic(start) => start.elapsed().as_nanos() as u64,
            Self::Manual(time) => time.load(Ordering::Acquire),
        }
    }
}

impl Drop for Scheduler {
    /// Nobody will step again, even if arrays that live on keep the core.
    fn drop(&mut self) {
        self.submitter.close();
    }
}

impl Scheduler {
    /// The face towards other threads.
    pub(crate) fn submitter(&self) -> Submitter {
        self.submitter.clone()
    }

    /// Time on the scheduler's clock.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// The clock, for threads that know no Python.
    pub(crate) fn clock(&self) -> cbrs_server::Clock {
        let clock = Arc::clone(&self.clock);
        Arc::new(move || clock.now_ns())
    }

    /// How long a step may wait for news if the core has something to do by itself at `timer_ns`. A manual clock stands still meanwhile.
    fn longest_wait(&self, timer_ns: Option<u64>) -> Duration {
        match (&*self.clock, timer_ns) {
            (Clock::Monotonic(_), Some(timer_ns)) => {
                SIGNAL_INTERVAL.min(Duration::from_nanos(timer_ns.saturating_sub(self.now_ns())))
            }
            _ => SIGNAL_INTERVAL,
        }
    }

    /// Sends what later steps have to tell to `sink` as well.
    pub(crate) fn attach_sink(&self, sink: Box<dyn OutputSink>) -> PyResult<()> {
        self.lock()?.set_output_sink(Some(sink));
        Ok(())
    }

    pub(crate) fn core(&self) -> &Mutex<cbrs_core::Scheduler> {
        &self.memory.get().core
    }

    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, cbrs_core::Scheduler>> {
        self.core().lock().map_err(|_| self.died())
    }

    /// A panic in the core left it in an unknown state: nothing may wait for it any more.
    fn died(&self) -> PyErr {
        self.submitter.close();
        EngineDeadError::new_err("the scheduler broke in an earlier call; create a new one")
    }

    pub(crate) fn begin_step(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, StepState>> {
        match self.stepping.try_lock() {
            Ok(state) => Ok(state),
            // The core's own lock tells of a panic.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(step_error(py, "another thread is in step(); one thread at a time may drive a scheduler"))
            }
        }
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    fn new(py: Python<'_>, config: Py<SchedulerConfig>) -> PyResult<Self> {
        let core = cbrs_core::Scheduler::new(config.get().core.clone()).map_err(|error| to_py(&error))?;
        let clock = if config.get().is_manual_clock {
            Clock::Manual(AtomicU64::new(0))
        } else {
            Clock::Monotonic(Instant::now())
        };
        let submitter = core.submitter();
        let memory = Bound::new(py, Memory::new(core))?;
        let views = Views::new(&memory);
        Ok(Self {
            memory: memory.unbind(),
            stepping: Mutex::new(StepState::new(views)),
            submitter,
            config,
            clock: Arc::new(clock),
        })
    }

    /// The effective configuration.
    #[getter]
    fn config(&self, py: Python<'_>) -> Py<SchedulerConfig> {
        self.config.clone_ref(py)
    }

    /// Queues a request and returns its id. Any thread; never waits.
    ///
    /// `prompt_token_ids` is an int32 array (fastest) or any sequence of integers; the other parameters are those of `SamplingParams` that do
    /// not concern text, and `bad_words_token_ids`. An absent `max_tokens` means what fits `max_model_len`.
    /// Raises `InvalidRequestError`, `PromptTooLongError`, `OverloadedError` or `EngineClosedError`; nothing is queued then.
    #[pyo3(signature = (prompt_token_ids, max_tokens=None, stop_token_ids=None, ignore_eos=false, tenant=None, cache_salt=None,
        **parameters))]
    #[allow(clippy::too_many_arguments)] // those that may be given by position
    fn submit(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        ignore_eos: bool,
        tenant: Option<&str>,
        cache_salt: Option<&str>,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let spec = RequestSpec {
            prompt_token_ids: token_ids(prompt_token_ids, "prompt_token_ids")?,
            max_tokens: max_tokens.map(positive_max_tokens).transpose()?,
            stop_token_ids: stop_token_ids.map(|ids| token_ids(ids, "stop_token_ids")).transpose()?.unwrap_or_default(),
            ignore_eos,
            tenant: tenant.map(Arc::from),
            cache_salt: cache_salt.map(Arc::from),
            ..Parameters::read("submit", parameters)?.without_text()?
        };
        let id = self.submitter.submit_at(spec, self.now_ns()).map_err(|error| to_py(&error))?;
        Ok(id.as_u64())
    }

    /// Commits the result of the last batch and plans the next, in one call.
    ///
    /// `result` is an int32 array (or sequence) with one token per entry of the last batch's `sample_index`, or a `StepResult`; None if that
    /// batch had no samples. Returns the new batch, with `num_seqs == 0` if nothing can run. With `block=True` it then waits until
    /// there is something to run or to report, such as a deadline that passes; signals are handled at least every 100 ms.
    ///
    /// Raises `StepError` if the result does not fit the batch in flight (nothing changed), `EngineClosedError` after `close()`.
    #[pyo3(signature = (result=None, block=false))]
    fn step(slf: &Bound<'_, Self>, result: Option<&Bound<'_, PyAny>>, block: bool) -> PyResult<Batch> {
        let py = slf.py();
        let this = slf.get();
        let mut state = this.begin_step(py)?;
        let mut given = GivenResult::read(result, &mut state.tokens)?;
        loop {
            if let Some(batch) = this.run_step(this.memory.bind(py), &given, &mut state, block)? {
                return Ok(batch);
            }
            let longest_wait = this.longest_wait(state.next_timer_ns);
            py.detach(|| this.submitter.wait_for_news(longest_wait));
            py.check_signals()?;
            given = GivenResult::None;
        }
    }

    /// For benchmarks: steps as `step(result)` does, with the GIL and without giving the batch, and returns the nanoseconds of commit, plan and
    /// hand-over.
    fn _time_step(slf: &Bound<'_, Self>, result: &Bound<'_, PyAny>) -> PyResult<[u64; 3]> {
        slf.get().time_step(slf.get().memory.bind(slf.py()), result)
    }

    /// Fails what the batch in flight touched: those requests end with `message` as their error, and nothing of the step is kept.
    ///
    /// Raises `StepError` if `step_id` is not the batch in flight.
    fn fail(&self, step_id: &Bound<'_, PyAny>, message: &str) -> PyResult<()> {
        let step_id = number(step_id, "step_id")?.unwrap_or(u64::MAX);
        self.lock()?.fail(step_id, message).map_err(|error| to_py(&error))
    }

    /// Asks for the end of a request; its last event is `cancelled` unless it ends otherwise first. Any thread; O(1).
    ///
    /// Returns whether this was the first cancel of a live request; any other number does nothing.
    fn cancel(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let id = number(request_id, "request_id")?.map(RequestId::from_u64);
        Ok(id.is_some_and(|id| self.submitter.cancel(id)))
    }

    /// Ends a choice as `stop` after its first `num_tokens` output tokens, e.g. at a stop string; later tokens are dropped. Any thread.
    ///
    /// Returns whether the request was live; any other number does nothing.
    #[pyo3(signature = (request_id, choice, num_tokens, stop_reason=None))]
    fn finish(
        &self,
        request_id: &Bound<'_, PyAny>,
        choice: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        stop_reason: Option<&Bound<'_, PyString>>,
    ) -> PyResult<bool> {
        let stop_reason = stop_reason.map(|text| text.to_str().map(Arc::from)).transpose()?;
        let id = number(request_id, "request_id")?.map(RequestId::from_u64);
        // A choice that does not exist names nothing; more tokens than there are means all of them.
        let choice = i32::try_from(integer(choice, "choice")?).unwrap_or(i32::MAX);
        let num_tokens = integer(num_tokens, "num_tokens")?;
        if num_tokens < 0 {
            let value = num_tokens as f64;
            return Err(to_py(&Error::InvalidParameter { name: "num_tokens", value, expected: ">= 0" }));
        }
        let num_tokens = u32::try_from(num_tokens).unwrap_or(u32::MAX);
        Ok(id.is_some_and(|id| self.submitter.finish(id, choice, num_tokens, stop_reason)))
    }

    /// Sets the time of the following steps; only with `clock="manual"`.
    fn set_time_ns(&self, time_ns: u64) -> PyResult<()> {
        match &*self.clock {
            Clock::Manual(time) => {
                time.store(time_ns, Ordering::Release);
                Ok(())
            }
            Clock::Monotonic(_) => Err(PyValueError::new_err("set_time_ns needs SchedulerConfig(clock=\"manual\")")),
        }
    }

    /// Time on the scheduler's clock: nanoseconds since its construction, or what `set_time_ns` said.
    fn time_ns(&self) -> u64 {
        self.now_ns()
    }

    /// Refuses further requests; the next `step` ends every live one as `cancelled`, later ones raise `EngineClosedError`.
    fn close(&self) {
        self.submitter.close();
    }

    /// Starts no request any more; what has started goes on, with all its choices. Requests are still accepted, and wait.
    ///
    /// When it returns, `stats()` tells of every request that could start before: `num_running` is 0 once all of them have ended.
    fn pause(&self, py: Python<'_>) {
        self.submitter.pause();
        // A plan that is being made may not know of it yet. What broke in an earlier call starts nothing either.
        py.detach(|| drop(self.core().lock()));
    }

    /// Lets requests start again after `pause()`.
    fn resume(&self) {
        self.submitter.resume();
    }

    /// Whether `pause()` was called, and `resume()` not since.
    fn is_paused(&self) -> bool {
        self.submitter.is_paused()
    }

    /// The whole policy in force, as a new dict that `policy=` takes; of "static" only its name.
    #[getter]
    fn policy_settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        policy::settings(py, self.config.get().core.policy, &self.submitter.policy())
    }

    /// Replaces the policy; `policy` and `rules` as in `SchedulerConfig`. Any thread; never waits for a step.
    ///
    /// Class, deadlines, caps, rates and bounds of the queue hold for requests that come from now on; weights and bounds on what runs hold
    /// for all from the next step on. `fairness`, `order` and `admission` cannot change, nor anything of "static". An error
    /// (`ValueError`, `EngineClosedError`) names the setting, and then everything stays as it was.
    #[pyo3(signature = (policy=None, **rules))]
    fn set_policy(&self, policy: Option<&Bound<'_, PyAny>>, rules: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        let mut given = GivenPolicy::read(policy)?;
        given.set_keywords("set_policy", rules)?;
        self.submitter.set_policy(given.finish_change()?).map_err(|error| config_error(&error))
    }

    /// Counters and gauges by name. Never waits for a step.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, figure) in self.submitter.stats().entries() {
            match figure {
                Figure::Count(count) => dict.set_item(name, count)?,
                Figure::Measure(measure) => dict.set_item(name, measure)?,
            }
        }
        Ok(dict)
    }

    /// Forgets every cached prefix; running sequences go on, but publish nothing more.
    fn reset_prefix_cache(&self) -> PyResult<()> {
        self.lock()?.reset_prefix_cache();
        Ok(())
    }

    /// Checks every invariant of scheduler and block pool; a broken one raises `PanicException`. For tests: O(blocks + requests).
    fn check_invariants(&self) -> PyResult<()> {
        self.lock()?.check_invariants();
        Ok(())
    }
}

/// Reads a number that stands for something; `None` if no such thing can have it.
fn number(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<u64>> {
    if let Ok(number) = value.extract::<u64>() {
        return Ok(Some(number));
    }
    integer(value, name).map(|_| None)
}
