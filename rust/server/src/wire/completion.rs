//! `POST /v1/completions`.

use cbrs_core::Error;

use super::common::{Common, body};
use super::fields::Prompt;
use super::params::token_ids;
use crate::config::Limits;
use crate::error::ApiError;

body! {
    /// A body of `/v1/completions`.
    CompletionBody {
        prompt: Prompt,
        echo: Option<bool>,
        logprobs: Option<u32>,
        best_of: Option<u32>,
        suffix: Option<String>,
    }
}

/// A completion as it was asked for.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) common: Common,
    pub(crate) prompt: Prompt,
    pub(crate) echo: bool,
    pub(crate) logprobs: Option<u32>,
}

impl CompletionBody {
    /// Checks what completions alone have.
    pub(crate) fn check(mut self, limits: &Limits) -> Result<Completion, ApiError> {
        let common = self.take_common();
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "a suffix is"));
        }
        let n = common.n.unwrap_or(1);
        if let Some(best_of) = self.best_of.filter(|&best_of| best_of != n) {
            let message = format!("best_of is {best_of} and n is {n}; only best_of = n is supported by this version");
            return Err(ApiError::invalid("best_of", message));
        }
        if let Some(count) = self.logprobs.filter(|&count| count > limits.max_completion_logprobs) {
            let message = format!("logprobs is {count}, but at most {} are allowed", limits.max_completion_logprobs);
            return Err(ApiError::invalid("logprobs", message));
        }
        if self.prompt.len() == 0 {
            return Err(Error::EmptyPrompt.into());
        }
        let echo = self.echo.unwrap_or_default();
        Ok(Completion { common, prompt: self.prompt, echo, logprobs: self.logprobs })
    }
}

impl Prompt {
    /// The ids of a prompt that is given as ids.
    pub(crate) fn ids(lists: &[Vec<i64>]) -> Result<Vec<Vec<i32>>, ApiError> {
        lists.iter().map(|list| token_ids("prompt", list)).collect()
    }
}
