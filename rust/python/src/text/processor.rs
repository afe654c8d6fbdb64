//! `OutputProcessor` as a Python class.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cbrs_text::Recipient;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{FinishedRequest, OutputChannel, Tokenizer};
use crate::arrays::token_ids;
use crate::errors::to_py;
use crate::parameters::Parameters;
use crate::scheduler::Scheduler;

/// Longest wait between two looks at pending signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Submits requests to a scheduler and turns its outputs into results, on a thread of its own.
#[pyclass(frozen, module = "cbrs", weakref)]
#[derive(Debug)]
pub(crate) struct OutputProcessor {
    inner: Arc<cbrs_text::OutputProcessor>,
    scheduler: Py<Scheduler>,
}

impl OutputProcessor {
    pub(crate) fn inner(&self) -> &Arc<cbrs_text::OutputProcessor> {
        &self.inner
    }

    pub(crate) fn scheduler(&self) -> &Py<Scheduler> {
        &self.scheduler
    }
}

#[pymethods]
impl OutputProcessor {
    #[new]
    fn new(scheduler: Py<Scheduler>, tokenizer: Option<&Bound<'_, Tokenizer>>) -> PyResult<Self> {
        let tokenizer = tokenizer.map(|tokenizer| tokenizer.get().inner.clone());
        let inner = cbrs_text::OutputProcessor::new(scheduler.get().submitter(), tokenizer)?;
        scheduler.get().attach_sink(inner.sink())?;
        Ok(Self { inner: Arc::new(inner), scheduler })
    }

    /// Queues a request and returns its id; `index` comes back with the result. Any thread; never waits for a step.
    ///
    /// With a `channel` its output goes there as it comes, otherwise it is kept as one `FinishedRequest`. The parameters are those of
    /// `SamplingParams`. Raises what `Scheduler.submit` raises, `InvalidRequestError` for text parameters out of bounds or without the
    /// tokenizer that they need, and `EngineClosedError` for a closed channel; nothing is queued then.
    #[pyo3(signature = (prompt_token_ids, *, index, channel=None, **parameters))]
    fn submit(
        &self,
        py: Python<'_>,
        prompt_token_ids: &Bound<'_, PyAny>,
        index: u64,
        channel: Option<&Bound<'_, OutputChannel>>,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let Parameters { mut spec, text } = Parameters::read("submit", parameters)?;
        spec.prompt_token_ids = token_ids(prompt_token_ids, "prompt_token_ids")?;
        let recipient = recipient(index, channel);
        let now_ns = self.scheduler.get().now_ns();
        let submit = || self.inner.submit(spec, &text, recipient, now_ns);
        // Bad words are tokenized here.
        let id = if text.bad_words.is_empty() { submit() } else { py.detach(submit) };
        id.map(cbrs_core::RequestId::as_u64).map_err(|error| to_py(&error))
    }

    /// As `submit`, for a text: it is tokenized, with special tokens, by this thread and without the GIL.
    #[pyo3(signature = (prompt, *, index, channel=None, **parameters))]
    fn submit_text(
        &self,
        py: Python<'_>,
        prompt: &str,
        index: u64,
        channel: Option<&Bound<'_, OutputChannel>>,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let Parameters { spec, text } = Parameters::read("submit_text", parameters)?;
        let now_ns = self.scheduler.get().now_ns();
        let recipient = recipient(index, channel);
        py.detach(|| self.inner.submit_text(prompt, spec, &text, recipient, now_ns))
            .map(cbrs_core::RequestId::as_u64)
            .map_err(|error| to_py(&error))
    }

    /// Takes finished requests, in the order in which they finished; at most `max`, 0 = all. Never waits.
    #[pyo3(signature = (max=0))]
    fn take_finished(&self, py: Python<'_>, max: usize) -> PyResult<Vec<FinishedRequest>> {
        wrap(py, self.inner.take_finished(max))
    }

    /// Takes all finished requests, waiting for the first one up to `timeout_s` seconds or until `close`.
    fn wait_finished(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Vec<FinishedRequest>> {
        if timeout_s.is_nan() {
            return Err(PyValueError::new_err("timeout_s is NaN, but must be a number of seconds"));
        }
        let start = Instant::now();
        loop {
            let left = timeout_s - start.elapsed().as_secs_f64();
            let wait =
                Duration::try_from_secs_f64(left.max(0.0)).map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
            let finished = py.detach(|| self.inner.wait_finished(wait, 0));
            if !finished.is_empty() || left <= 0.0 || self.inner.is_closed() {
                return wrap(py, finished);
            }
            py.check_signals()?;
        }
    }

    /// Requests that are submitted and not finished.
    #[getter]
    fn num_live(&self) -> usize {
        self.inner.num_live()
    }

    /// Reads what the engine has already told, ends what is still live as cancelled, and ends the thread. Results stay.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

fn recipient<'a>(index: u64, channel: Option<&'a Bound<'_, OutputChannel>>) -> Recipient<'a> {
    Recipient { index, channel: channel.map(|channel| channel.get().inner()), is_whole: false }
}

fn wrap(py: Python<'_>, finished: Vec<cbrs_text::FinishedRequest>) -> PyResult<Vec<FinishedRequest>> {
    finished.into_iter().map(|request| FinishedRequest::new(py, request)).collect()
}
