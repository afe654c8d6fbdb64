//! Tokenizers, detokenizing and the output processor as Python classes; every decision is made in `cbrs_text`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cbrs_core::{Error, RequestSpec};
use cbrs_text::{ChatRequest, ChatTemplate, StopStrings, TemplateLimits, TextStream};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{integer, token_ids};
use crate::errors::to_py;
use crate::parameters::Parameters;
use crate::scheduler::Scheduler;

mod finished;
pub(crate) use finished::FinishedRequest;

/// Texts up to this many bytes are tokenized with the GIL (about 100 microseconds of work).
const MAX_BYTES_WITH_GIL: usize = 512;
/// Longest wait between two looks at pending signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Turns text into token ids and back, and messages into prompts.
///
/// Made from the text of a `tokenizer.json` and, for chats, the source of a Jinja template that may read `bos_token` and
/// `eos_token`. With `add_bos_token` the BOS token is put before every text that is encoded with special tokens.
/// Raises `InvalidRequestError` if one of them cannot be used.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct Tokenizer {
    inner: cbrs_text::Tokenizer,
    template: Option<ChatTemplate>,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (tokenizer_json, *, chat_template=None, bos_token=None, eos_token=None, add_bos_token=false))]
    fn new(
        py: Python<'_>,
        tokenizer_json: &str,
        chat_template: Option<&str>,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        add_bos_token: bool,
    ) -> PyResult<Self> {
        py.detach(|| {
            let mut inner = cbrs_text::Tokenizer::from_json(tokenizer_json)?;
            if add_bos_token {
                inner = inner.with_bos(bos_token.unwrap_or_default())?;
            }
            let compile = |source| ChatTemplate::new(source, bos_token, eos_token, TemplateLimits::default());
            Ok(Self { inner, template: chat_template.map(compile).transpose()? })
        })
        .map_err(|error: Error| to_py(&error))
    }

    /// Splits `text` into token ids. Special tokens written out in the text are always recognised; `add_special_tokens`
    /// adds those that the model wants around every text, such as BOS.
    #[pyo3(signature = (text, add_special_tokens=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Vec<i32>> {
        let encode = || self.inner.encode(text, add_special_tokens);
        let ids = if text.len() > MAX_BYTES_WITH_GIL { py.detach(encode) } else { encode() };
        ids.map_err(|error| to_py(&error))
    }

    /// The text of a whole sequence. Ids without a token add nothing; bytes that form no character become U+FFFD.
    #[pyo3(signature = (ids, skip_special_tokens=true))]
    fn decode(&self, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> PyResult<String> {
        let token_ids = token_ids(ids, "ids")?;
        Ok(ids.py().detach(|| self.inner.decode(&token_ids, skip_special_tokens)))
    }

    /// The prompt of a conversation: `messages` are dicts with a `role` and a `content`, both strings.
    ///
    /// Raises `InvalidRequestError` if the tokenizer has no template, a message is incomplete, or the template refuses.
    #[pyo3(signature = (messages, add_generation_prompt=true))]
    fn apply_chat_template(&self, messages: &Bound<'_, PyAny>, add_generation_prompt: bool) -> PyResult<String> {
        let py = messages.py();
        let Some(template) = &self.template else {
            let message = "the model has no chat template; give a prompt instead of messages".to_owned();
            return Err(to_py(&Error::ChatTemplate { message }));
        };
        let json: String = py.import("json")?.call_method1("dumps", (messages,))?.extract()?;
        py.detach(|| template.render(&ChatRequest::from_json(&json, None, add_generation_prompt)?))
            .map_err(|error| to_py(&error))
    }

    /// Number of token ids, added tokens included: the highest id plus one.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    /// Id of a token given by its exact text in the vocabulary; None if there is none.
    fn token_to_id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token)
    }

    /// Text of a token in the vocabulary (not what it decodes to); None if there is none.
    fn id_to_token(&self, token_id: i64) -> Option<String> {
        self.inner.id_to_token(i32::try_from(token_id).ok()?)
    }
}

/// Turns token ids into text one at a time, up to a stop string.
///
/// The pieces joined are the text of all ids. `prompt_token_ids` make the text a continuation: a leading space stays, and
/// a character that the prompt left unfinished is completed.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct IncrementalDetokenizer {
    stream: Mutex<TextStream>,
}

impl IncrementalDetokenizer {
    fn lock(&self) -> MutexGuard<'_, TextStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl IncrementalDetokenizer {
    #[new]
    #[pyo3(signature = (tokenizer, *, stop=Vec::new(), skip_special_tokens=true, prompt_token_ids=None))]
    #[allow(clippy::needless_pass_by_value)] // what Python's list is read into
    fn new(
        tokenizer: &Bound<'_, Tokenizer>,
        stop: Vec<String>,
        skip_special_tokens: bool,
        prompt_token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let stops = StopStrings::new(&stop).map_err(|error| to_py(&error))?;
        let mut stream = TextStream::new(tokenizer.get().inner.clone(), stops, skip_special_tokens);
        if let Some(ids) = prompt_token_ids {
            stream.prime(&token_ids(ids, "prompt_token_ids")?);
        }
        Ok(Self { stream: Mutex::new(stream) })
    }

    /// Reads the next token and returns the new text that may be shown: "" while a character, or what could become a stop
    /// string, is incomplete, and after a stop string.
    fn push(&self, token_id: &Bound<'_, PyAny>) -> PyResult<String> {
        let token_id = integer(token_id, "token_id")?;
        let mut stream = self.lock();
        stream.push(i32::try_from(token_id).unwrap_or(-1));
        Ok(stream.take_delta().to_owned())
    }

    /// Ends the text and returns the rest of it; bytes that form no character become U+FFFD.
    fn finish(&self) -> String {
        let mut stream = self.lock();
        stream.finish();
        stream.take_delta().to_owned()
    }

    /// The stop string that ended the text, if one did.
    #[getter]
    fn stopped(&self) -> Option<String> {
        self.lock().stopped().map(ToString::to_string)
    }
}

/// Submits requests to a scheduler and turns its outputs into results, on a thread of its own.
#[pyclass(frozen, module = "cbrs", weakref)]
#[derive(Debug)]
pub(crate) struct OutputProcessor {
    inner: cbrs_text::OutputProcessor,
    scheduler: Py<Scheduler>,
}

#[pymethods]
impl OutputProcessor {
    #[new]
    fn new(scheduler: Py<Scheduler>, tokenizer: Option<&Bound<'_, Tokenizer>>) -> PyResult<Self> {
        let tokenizer = tokenizer.map(|tokenizer| tokenizer.get().inner.clone());
        let inner = cbrs_text::OutputProcessor::new(scheduler.get().submitter(), tokenizer)?;
        scheduler.get().attach_sink(inner.sink())?;
        Ok(Self { inner, scheduler })
    }

    /// Queues a request and returns its id; `index` comes back with the result. Any thread; never waits for a step.
    ///
    /// The parameters are those of `SamplingParams`. Raises what `Scheduler.submit` raises, and `InvalidRequestError` for more than 16 stop
    /// strings or one that has not 1 to 256 characters; nothing is queued then.
    #[pyo3(signature = (prompt_token_ids, *, index, **parameters))]
    fn submit(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        index: u64,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let (mut spec, stops) = read_parameters("submit", parameters)?;
        spec.prompt_token_ids = token_ids(prompt_token_ids, "prompt_token_ids")?;
        let id = self.inner.submit(spec, &stops, index, self.scheduler.get().now_ns());
        id.map(cbrs_core::RequestId::as_u64).map_err(|error| to_py(&error))
    }

    /// As `submit`, for a text: it is tokenized, with special tokens, by this thread and without the GIL.
    #[pyo3(signature = (prompt, *, index, **parameters))]
    fn submit_text(
        &self,
        py: Python<'_>,
        prompt: &str,
        index: u64,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u64> {
        let (spec, stops) = read_parameters("submit_text", parameters)?;
        let now_ns = self.scheduler.get().now_ns();
        py.detach(|| self.inner.submit_text(prompt, spec, &stops, index, now_ns))
            .map(cbrs_core::RequestId::as_u64)
            .map_err(|error| to_py(&error))
    }

    /// Takes finished requests, in the order in which they finished; at most `max`, 0 = all. Never waits.
    #[pyo3(signature = (max=0))]
    fn take_finished(&self, max: usize) -> Vec<FinishedRequest> {
        wrap(self.inner.take_finished(max))
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
                return Ok(wrap(finished));
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

fn wrap(finished: Vec<cbrs_text::FinishedRequest>) -> Vec<FinishedRequest> {
    finished.into_iter().map(FinishedRequest::new).collect()
}

fn read_parameters(function: &str, parameters: Option<&Bound<'_, PyDict>>) -> PyResult<(RequestSpec, StopStrings)> {
    let Parameters { spec, text } = Parameters::read(function, parameters)?;
    let text = text.unwrap_or_default();
    Ok((spec, StopStrings::new(&text.stop).map_err(|error| to_py(&error))?))
}
