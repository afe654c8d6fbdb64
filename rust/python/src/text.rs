//! Tokenizers, detokenizing and results as Python classes; every decision is made in `cbrs_text`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cbrs_core::Error;
use cbrs_text::{ChatRequest, ChatTemplate, StopStrings, TemplateLimits, TextStream};
use pyo3::prelude::*;

use crate::arrays::{integer, token_ids};
use crate::errors::to_py;

mod channel;
mod finished;
mod processor;

pub(crate) use channel::{OutputChannel, Update};
pub(crate) use finished::{FinishedChoice, FinishedRequest};
pub(crate) use processor::OutputProcessor;

/// Texts up to this many bytes are tokenized with the GIL (about 100 microseconds of work).
const MAX_BYTES_WITH_GIL: usize = 512;

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

impl Tokenizer {
    pub(crate) fn inner(&self) -> &cbrs_text::Tokenizer {
        &self.inner
    }

    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
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
    /// `tools` is a list of tool descriptions, `variables` a dict of what else the template reads, e.g. `enable_thinking`; both as they
    /// would stand in JSON. Raises `InvalidRequestError` if the tokenizer has no template, a message is incomplete, a variable has a name
    /// of the engine's, or the template refuses.
    #[pyo3(signature = (messages, add_generation_prompt=true, tools=None, variables=None))]
    fn apply_chat_template(
        &self,
        messages: &Bound<'_, PyAny>,
        add_generation_prompt: bool,
        tools: Option<&Bound<'_, PyAny>>,
        variables: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        let py = messages.py();
        let Some(template) = &self.template else {
            let message = "the model has no chat template; give a prompt instead of messages".to_owned();
            return Err(to_py(&Error::ChatTemplate { message }));
        };
        let messages = as_json(messages)?;
        let tools = tools.map(as_json).transpose()?;
        let variables = variables.map(as_json).transpose()?;
        py.detach(|| {
            let mut request = ChatRequest::from_json(&messages, tools.as_deref(), add_generation_prompt)?;
            if let Some(variables) = variables {
                request = request.with_variables_json(&variables)?;
            }
            template.render(&request)
        })
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

fn as_json(value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.py().import("json")?.call_method1("dumps", (value,))?.extract()
}

/// Turns token ids into text one at a time, up to a stop string.
///
/// The pieces joined are the text of all ids. `prompt_token_ids` make the text a continuation: a leading space stays, and
/// a character that the prompt left unfinished is completed. Stop strings are looked for after the first `min_tokens` tokens; the one
/// that ends the text belongs to it only with `include_stop_str_in_output`.
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
    #[pyo3(signature = (tokenizer, *, stop=Vec::new(), include_stop_str_in_output=false, min_tokens=0, skip_special_tokens=true,
        prompt_token_ids=None))]
    #[allow(clippy::needless_pass_by_value)] // what Python's list is read into
    fn new(
        tokenizer: &Bound<'_, Tokenizer>,
        stop: Vec<String>,
        include_stop_str_in_output: bool,
        min_tokens: u32,
        skip_special_tokens: bool,
        prompt_token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let stops = StopStrings::new(&stop).map_err(|error| to_py(&error))?;
        let mut stream = TextStream::new(tokenizer.get().inner.clone(), stops, skip_special_tokens)
            .keeping_stop(include_stop_str_in_output)
            .with_min_tokens(min_tokens);
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
