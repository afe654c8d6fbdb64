//! From a body's parameters to those of the core, which checks them; here is only what the wire itself limits.

use std::sync::Arc;

use cbrs_core::policy::Class;
use cbrs_core::{Error, RequestSpec, SamplingSpec};
use cbrs_text::{StopStrings, TextSpec};

use super::common::{Common, ServiceTier};
use crate::config::Limits;
use crate::error::ApiError;

/// OpenAI's bounds on `metadata`: pairs, characters of a key, characters of a value.
const METADATA: (usize, usize, usize) = (16, 64, 512);
const MAX_TEMPERATURE: f64 = 2.0;

impl Common {
    /// The parameters of a request with `num_prompts` prompts, without a prompt.
    pub(crate) fn take_specs(
        &mut self,
        num_prompts: usize,
        limits: &Limits,
    ) -> Result<(RequestSpec, TextSpec), ApiError> {
        self.check(num_prompts, limits)?;
        let stops = self.stop.take().unwrap_or_default().0;
        let text = TextSpec::with_stops(StopStrings::new(&stops)?);
        let bias = self.logit_bias.take().unwrap_or_default().0;
        let stop_token_ids = self.stop_token_ids.take().unwrap_or_default();
        let spec = RequestSpec {
            prompt_token_ids: Vec::new(),
            truncate_prompt_tokens: self.truncate_prompt_tokens,
            n: self.n.unwrap_or(1),
            max_tokens: self.max_tokens,
            stop_token_ids: token_ids("stop_token_ids", &stop_token_ids)?,
            ignore_eos: self.ignore_eos,
            tenant: self.tenant.take().map(Arc::from),
            cache_salt: self.cache_salt.take().map(Arc::from),
            priority: self.class()?,
            ttft_deadline_ms: self.ttft_deadline_ms,
            deadline_ms: self.deadline_ms,
            target_itl_ms: self.target_itl_ms,
            sampling: self.sampling(),
            logit_bias: bias
                .iter()
                .enumerate()
                .map(|(at, &(id, bias))| Ok((token_id("logit_bias", at, id)?, bias as f32)))
                .collect::<Result<_, ApiError>>()?,
            bad_words_token_ids: Vec::new(),
            prompt_logprobs: self.prompt_logprobs,
        };
        Ok((spec, text))
    }

    fn sampling(&self) -> SamplingSpec {
        let default = SamplingSpec::default();
        let or = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
        SamplingSpec {
            temperature: or(self.temperature, default.temperature),
            // What is beyond the range of ids keeps all of them.
            top_k: self.top_k.map_or(default.top_k, |k| k.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32),
            top_p: or(self.top_p, default.top_p),
            min_p: or(self.min_p, default.min_p),
            seed: self.seed.map(|seed| seed as u64),
            presence_penalty: or(self.presence_penalty, default.presence_penalty),
            frequency_penalty: or(self.frequency_penalty, default.frequency_penalty),
            repetition_penalty: or(self.repetition_penalty, default.repetition_penalty),
            min_tokens: self.min_tokens.unwrap_or_default(),
            logprobs: None,
        }
    }

    fn check(&self, num_prompts: usize, limits: &Limits) -> Result<(), ApiError> {
        if let Some(value) = self.temperature.filter(|&value| value > MAX_TEMPERATURE) {
            return Err(Error::InvalidParameter { name: "temperature", value, expected: "in [0, 2]" }.into());
        }
        let num_stops = self.stop.as_ref().map_or(0, |stops| stops.0.len());
        if num_stops > limits.max_stops {
            return Err(Error::TooManyEntries { name: "stop", len: num_stops, limit: limits.max_stops }.into());
        }
        if num_prompts > limits.max_choices {
            return Err(Error::TooManyEntries { name: "prompt", len: num_prompts, limit: limits.max_choices }.into());
        }
        // One prompt with too many choices is refused by the core.
        let num_choices = num_prompts * self.n.unwrap_or(1) as usize;
        if num_prompts > 1 && num_choices > limits.max_choices {
            let limit = limits.max_choices;
            let message = format!("n times the number of prompts is {num_choices}, but at most {limit} are allowed");
            return Err(ApiError::invalid("n", message));
        }
        self.check_stream_options()?;
        self.check_metadata()
    }

    fn check_stream_options(&self) -> Result<(), ApiError> {
        let Some(options) = self.stream_options else { return Ok(()) };
        if !self.stream {
            return Err(ApiError::invalid("stream_options", "stream_options needs \"stream\": true"));
        }
        if options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported("stream_options.include_obfuscation", "obfuscation is"));
        }
        Ok(())
    }

    fn check_metadata(&self) -> Result<(), ApiError> {
        let Some(metadata) = &self.metadata else { return Ok(()) };
        let (max_pairs, max_key, max_value) = METADATA;
        let is_long =
            |(key, value): (&String, &String)| key.chars().count() > max_key || value.chars().count() > max_value;
        if metadata.len() > max_pairs || metadata.iter().any(is_long) {
            let message = format!(
                "metadata may have {max_pairs} pairs, keys of {max_key} characters and values of {max_value} characters"
            );
            return Err(ApiError::invalid("metadata", message));
        }
        Ok(())
    }

    fn class(&self) -> Result<Option<Class>, ApiError> {
        let named = self.priority.as_deref().map(Class::from_name).transpose()?;
        let tier = match self.service_tier {
            None | Some(ServiceTier::Auto) => None,
            Some(ServiceTier::Priority) => Some(Class::Interactive),
            Some(ServiceTier::Default) => Some(Class::Standard),
            Some(ServiceTier::Flex) => Some(Class::Batch),
        };
        match (named, tier) {
            (Some(named), Some(tier)) if named != tier => {
                let message = "service_tier and priority ask for different classes; give one of them";
                Err(ApiError::invalid("service_tier", message))
            }
            _ => Ok(named.or(tier)),
        }
    }
}

/// Ids as the core has them.
pub(super) fn token_ids(field: &'static str, ids: &[i64]) -> Result<Vec<i32>, ApiError> {
    ids.iter().enumerate().map(|(position, &id)| token_id(field, position, id)).collect()
}

fn token_id(field: &'static str, position: usize, token: i64) -> Result<i32, ApiError> {
    let refused = || Error::TokenOutOfVocabulary { field, position, token, vocab_size: 1 << 31 };
    i32::try_from(token).map_err(|_| refused().into())
}
