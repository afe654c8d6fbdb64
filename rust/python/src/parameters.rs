//! The parameters of a request, read from keyword arguments in one place for every entrance; the core checks them.

use std::sync::Arc;

use cbrs_core::policy::Class;
use cbrs_core::{Error, RequestSpec};
use cbrs_text::{StopStrings, TextSpec};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arrays::{integer, number, token_ids};
use crate::errors::{invalid_request, to_py};

/// Parameters that requests will have in a later version; giving one a value is an error until then.
const LATER: [&str; 2] = ["cache_key_extra", "draft_token_ids"];

/// Everything that a request says besides its prompt.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    /// Without the prompt.
    pub(crate) spec: RequestSpec,
    /// What concerns the text, which a scheduler never sees.
    pub(crate) text: TextSpec,
}

impl Parameters {
    /// Reads keyword arguments; None leaves a parameter at its default.
    ///
    /// # Errors
    /// `TypeError` for an unknown name or a value of the wrong kind; `InvalidRequestError` for one out of range and for parameters of
    /// later versions.
    pub(crate) fn read(function: &str, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut this = Self::default();
        for (key, value) in arguments.into_iter().flatten() {
            let key = key.cast::<PyString>()?;
            let name = key.to_str()?;
            let is_known = this.set(name, &value).map_err(|err| named(value.py(), name, err))?;
            let is_unset = value.is_none() && LATER.contains(&name);
            if !is_known && !is_unset {
                return Err(unknown(function, name));
            }
        }
        Ok(this)
    }

    /// Refuses what only a request with text can have.
    pub(crate) fn without_text(self) -> PyResult<RequestSpec> {
        let text = &self.text;
        let given = [
            ("stop", !text.stops.is_empty()),
            ("bad_words", !text.bad_words.is_empty()),
            ("include_stop_str_in_output", text.include_stop_str_in_output),
            ("skip_special_tokens", !text.skip_special_tokens),
            ("detokenize", !text.detokenize),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(PyTypeError::new_err(format!(
                "{name} is about text, which a scheduler never sees; use OutputProcessor or LLM"
            ))),
            None => Ok(self.spec),
        }
    }

    /// Sets one parameter; returns whether there is one of this name.
    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_set = self
            .set_end(name, value)
            .and_then(|is_set| if is_set { Ok(true) } else { self.set_sampling(name, value) })
            .and_then(|is_set| if is_set { Ok(true) } else { self.set_service(name, value) })
            .and_then(|is_set| if is_set { Ok(true) } else { self.set_text(name, value) });
        // None says nothing, and no parameter can be read from it: what fails is there.
        if value.is_none() && is_set.is_err() { Ok(true) } else { is_set }
    }

    /// Parameters about how many outputs there are and when they end.
    fn set_end(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let spec = &mut self.spec;
        match name {
            "n" => spec.n = count(value, "n", ">= 1")?,
            "max_tokens" => spec.max_tokens = Some(positive_max_tokens(value)?),
            "min_tokens" => spec.sampling.min_tokens = count(value, "min_tokens", ">= 0")?,
            "stop_token_ids" => spec.stop_token_ids = token_ids(value, "stop_token_ids")?,
            "ignore_eos" => spec.ignore_eos = value.extract()?,
            "truncate_prompt_tokens" => spec.truncate_prompt_tokens = Some(integer(value, "truncate_prompt_tokens")?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parameters about whom the request belongs to and how soon it is served.
    fn set_service(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let spec = &mut self.spec;
        match name {
            "tenant" => spec.tenant = Some(Arc::from(value.extract::<&str>()?)),
            "cache_salt" => spec.cache_salt = Some(Arc::from(value.extract::<&str>()?)),
            "priority" => {
                let class = Class::from_name(value.extract()?);
                spec.priority = Some(class.map_err(|error| invalid_request("priority", &error))?);
            }
            "ttft_deadline_ms" => spec.ttft_deadline_ms = Some(number(value, name)?),
            "deadline_ms" => spec.deadline_ms = Some(number(value, name)?),
            "target_itl_ms" => spec.target_itl_ms = Some(number(value, name)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parameters about the choice of tokens.
    fn set_sampling(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let sampling = &mut self.spec.sampling;
        match name {
            "temperature" => sampling.temperature = value.extract::<f64>()? as f32,
            "top_k" => sampling.top_k = top_k(value)?,
            "top_p" => sampling.top_p = value.extract::<f64>()? as f32,
            "min_p" => sampling.min_p = value.extract::<f64>()? as f32,
            "seed" => sampling.seed = Some(read_seed(value)?),
            "presence_penalty" => sampling.presence_penalty = value.extract::<f64>()? as f32,
            "frequency_penalty" => sampling.frequency_penalty = value.extract::<f64>()? as f32,
            "repetition_penalty" => sampling.repetition_penalty = value.extract::<f64>()? as f32,
            "logprobs" => sampling.logprobs = Some(count(value, "logprobs", "in 0..=20")?),
            "prompt_logprobs" => self.spec.prompt_logprobs = Some(count(value, "prompt_logprobs", "in 0..=20")?),
            "logit_bias" => self.spec.logit_bias = logit_bias(value)?,
            "bad_words_token_ids" => {
                self.spec.bad_words_token_ids =
                    value.try_iter()?.map(|word| token_ids(&word?, "bad_words")).collect::<PyResult<_>>()?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parameters about the text.
    fn set_text(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let text = &mut self.text;
        match name {
            "stop" => text.stops = StopStrings::new(&strings(value)?).map_err(|error| to_py(&error))?,
            "bad_words" => text.bad_words = strings(value)?,
            "include_stop_str_in_output" => text.include_stop_str_in_output = value.extract()?,
            "skip_special_tokens" => text.skip_special_tokens = value.extract()?,
            "detokenize" => text.detokenize = value.extract()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn unknown(function: &str, name: &str) -> PyErr {
    match LATER.iter().find(|&&later| later == name) {
        Some(&name) => to_py(&Error::Unsupported { name }),
        None => PyTypeError::new_err(format!("{function}() got an unexpected keyword argument '{name}'")),
    }
}

/// Names the parameter in a conversion's TypeError, which knows only the value.
fn named(py: Python<'_>, name: &str, err: PyErr) -> PyErr {
    if !err.get_type(py).is(py.get_type::<PyTypeError>()) {
        return err;
    }
    let message = err.value(py).to_string();
    if message.contains(name) { err } else { PyTypeError::new_err(format!("{name}: {message}")) }
}

/// Reads a number of something; what is below 0 or beyond 32 bits is out of range.
fn count(value: &Bound<'_, PyAny>, name: &'static str, expected: &'static str) -> PyResult<u32> {
    let number = integer(value, name)?;
    u32::try_from(number).map_err(|_| to_py(&Error::InvalidParameter { name, value: number as f64, expected }))
}

/// Reads `max_tokens`; what is below 1 is refused by the core, which knows 0 as such.
pub(crate) fn positive_max_tokens(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let value = integer(value, "max_tokens")?;
    u64::try_from(value)
        .map_err(|_| to_py(&Error::InvalidParameter { name: "max_tokens", value: value as f64, expected: ">= 1" }))
}

/// A `top_k` beyond int32 keeps everything, as one beyond the vocabulary does; one below -1 stays wrong.
fn top_k(value: &Bound<'_, PyAny>) -> PyResult<i32> {
    Ok(integer(value, "top_k")?.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32)
}

/// Reads `{id: bias}`.
fn logit_bias(value: &Bound<'_, PyAny>) -> PyResult<Vec<(i32, f32)>> {
    let bias = value.cast::<PyDict>().map_err(|_| PyTypeError::new_err("logit_bias must be a dict of id and bias"))?;
    let pair = |(position, (id, bias)): (usize, (Bound<'_, PyAny>, Bound<'_, PyAny>))| {
        let token = integer(&id, "logit_bias")?;
        let id = i32::try_from(token).map_err(|_| {
            to_py(&Error::TokenOutOfVocabulary { field: "logit_bias", position, token, vocab_size: 1 << 31 })
        })?;
        Ok((id, bias.extract::<f64>()? as f32))
    };
    bias.iter().enumerate().map(pair).collect()
}

/// Reads a string, or any iterable of strings.
fn strings(value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(vec![text.to_str()?.to_owned()]);
    }
    value.try_iter()?.map(|item| item?.extract()).collect()
}

/// Reads any 64-bit seed, signed or not.
pub(crate) fn read_seed(seed: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(seed) = seed.extract::<u64>() {
        return Ok(seed);
    }
    match seed.extract::<i64>() {
        Ok(seed) => Ok(seed as u64),
        Err(err) if err.is_instance_of::<PyOverflowError>(seed.py()) => {
            let value = seed.extract::<f64>().unwrap_or(f64::INFINITY);
            Err(to_py(&Error::InvalidParameter { name: "seed", value, expected: "an integer of 64 bits" }))
        }
        Err(err) => Err(err),
    }
}
