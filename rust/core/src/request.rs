//! One submitted generation: what the user asks for, its identity, and how it can end.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::overload::terms::cap_max_tokens;
use crate::policy::Class;
use crate::policy::config::check_time_ms;
use crate::sampling::{SamplingSpec, check_bad_words, check_count, check_logit_bias, check_num_logprobs};

/// Identity of a request: `generation << 32 | slot` in the fixed request table.
///
/// A slot is reused with a new generation, so a stale id names nothing. Generations start at 1: 0 is never an id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// Builds the id of `generation` in `slot`.
    pub fn new(generation: u32, slot: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// Reads an id back from its number; any number is safe, one that was never given out names nothing.
    pub fn from_u64(id: u64) -> Self {
        Self(id)
    }

    /// The id as a number, as it stands in the flat arrays.
    pub fn as_u64(self) -> u64 {
        self.0
    }

    /// Slot in the request table.
    pub fn slot(self) -> u32 {
        self.0 as u32
    }

    /// How many requests have lived in that slot, this one included.
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({}v{})", self.slot(), self.generation())
    }
}

/// How a choice ended; the codes stand in `StepOutput::finish_reasons`, where 0 means "not finished".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FinishReason {
    /// An EOS token, a stop token or a stop string.
    Stop = 1,
    /// `max_tokens` or the context length was reached.
    Length = 2,
    /// The caller cancelled it, or the engine was closed.
    Cancelled = 3,
    /// The step that computed it failed.
    Error = 4,
}

impl FinishReason {
    /// All of them, by code.
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Cancelled, Self::Error];

    /// Reads a code of `StepOutput::finish_reasons`; 0 and unknown codes give `None`.
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Stop),
            2 => Some(Self::Length),
            3 => Some(Self::Cancelled),
            4 => Some(Self::Error),
            _ => None,
        }
    }

    /// The name used in results: `stop`, `length`, `cancelled` or `error`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Error => "error",
        }
    }
}

/// Most stop token ids that one request may have.
pub const MAX_STOP_TOKEN_IDS: usize = 128;
/// Most choices of one request.
pub const MAX_CHOICES: u32 = 128;
/// Longest tenant name and cache salt, in bytes.
pub const MAX_LABEL_BYTES: usize = 256;

/// What a user asks for. Checked by `Submitter::submit`, in one place for every entrance.
///
/// ```
/// use cbrs_core::RequestSpec;
/// let spec = RequestSpec { max_tokens: Some(16), ..RequestSpec::new(vec![1, 2, 3]) };
/// assert_eq!(spec.prompt_token_ids.len(), 3);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSpec {
    /// Prompt, at least one id.
    pub prompt_token_ids: Vec<i32>,
    /// Prompt tokens to keep, the last ones; -1 = as many as leave room for the output.
    pub truncate_prompt_tokens: Option<i64>,
    /// Outputs to generate, each with its own tokens and end.
    pub n: u32,
    /// Output tokens at most; absent = what fits the context.
    pub max_tokens: Option<u64>,
    /// Ids that end the output besides EOS.
    pub stop_token_ids: Vec<i32>,
    /// Do not end at an EOS id.
    pub ignore_eos: bool,
    /// Whom the request belongs to; prefix blocks are never shared between tenants.
    pub tenant: Option<Arc<str>>,
    /// Extra separation of the prefix cache; requests share blocks only with the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// How urgent it is; absent = the tenant's class, or `Standard`.
    pub priority: Option<Class>,
    /// Milliseconds from its submission after which it is dropped if it still waits.
    pub ttft_deadline_ms: Option<f64>,
    /// Milliseconds from its submission after which it is ended, running or not.
    pub deadline_ms: Option<f64>,
    /// Longest time between two of its tokens, in milliseconds, that the budget of a step aims at.
    pub target_itl_ms: Option<f64>,
    /// How tokens are drawn.
    pub sampling: SamplingSpec,
    /// Added to the logits of these ids; in `[-100, 100]`. The last value of an id counts.
    pub logit_bias: Vec<(i32, f32)>,
    /// Token sequences that must not be generated.
    pub bad_words_token_ids: Vec<Vec<i32>>,
    /// Most likely ids to report with each prompt token but the first; 0 = the token itself only, absent = nothing.
    pub prompt_logprobs: Option<u32>,
}

impl Default for RequestSpec {
    fn default() -> Self {
        Self {
            prompt_token_ids: Vec::new(),
            truncate_prompt_tokens: None,
            n: 1,
            max_tokens: None,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            tenant: None,
            cache_salt: None,
            priority: None,
            ttft_deadline_ms: None,
            deadline_ms: None,
            target_itl_ms: None,
            sampling: SamplingSpec::default(),
            logit_bias: Vec::new(),
            bad_words_token_ids: Vec::new(),
            prompt_logprobs: None,
        }
    }
}

impl RequestSpec {
    /// A request for `prompt_token_ids` with default parameters.
    pub fn new(prompt_token_ids: Vec<i32>) -> Self {
        Self { prompt_token_ids, ..Self::default() }
    }

    /// Shortens the prompt as `truncate_prompt_tokens` says; afterwards that is absent.
    ///
    /// # Errors
    /// `InvalidParameter` for 0 and below -1.
    pub fn truncate_prompt(&mut self, max_model_len: usize) -> Result<()> {
        let room = max_model_len.saturating_sub(usize::try_from(self.max_tokens.unwrap_or(1)).unwrap_or(usize::MAX));
        let num_kept = match self.truncate_prompt_tokens.take() {
            None => return Ok(()),
            Some(-1) => room.max(1),
            Some(count @ 1..) => usize::try_from(count).unwrap_or(usize::MAX),
            Some(count) => {
                let (name, value) = ("truncate_prompt_tokens", count as f64);
                return Err(Error::InvalidParameter { name, value, expected: ">= 1, or -1 for what fits" });
            }
        };
        let num_dropped = self.prompt_token_ids.len().saturating_sub(num_kept);
        self.prompt_token_ids.drain(..num_dropped);
        Ok(())
    }

    /// Checks everything that does not depend on load, and returns the effective `max_tokens`, at most `cap` (whose owner is named with it).
    ///
    /// # Errors
    /// `EmptyPrompt`, `TokenOutOfVocabulary`, `InvalidParameter`, `InvalidLength`, `TooManyEntries`, `UnusableParameter`, `PromptTooLong`,
    /// `AboveCap`.
    pub(crate) fn validate(
        &self,
        vocab_size: Option<u32>,
        max_model_len: usize,
        cap: Option<(u32, &'static str)>,
    ) -> Result<u32> {
        if self.prompt_token_ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if self.n == 0 || self.n > MAX_CHOICES {
            return Err(Error::InvalidParameter { name: "n", value: f64::from(self.n), expected: "in 1..=128" });
        }
        check_ids("prompt_token_ids", &self.prompt_token_ids, vocab_size)?;
        check_count("stop_token_ids", self.stop_token_ids.len(), MAX_STOP_TOKEN_IDS)?;
        check_ids("stop_token_ids", &self.stop_token_ids, vocab_size)?;
        check_logit_bias(&self.logit_bias)?;
        let bias_ids: Vec<i32> = self.logit_bias.iter().map(|&(id, _)| id).collect();
        check_ids("logit_bias", &bias_ids, vocab_size)?;
        check_bad_words(&self.bad_words_token_ids)?;
        for word in &self.bad_words_token_ids {
            check_ids("bad_words", word, vocab_size)?;
        }
        self.sampling.validate()?;
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs)?;
        check_label("tenant", self.tenant.as_deref())?;
        check_label("cache_salt", self.cache_salt.as_deref())?;
        let times = [
            ("ttft_deadline_ms", self.ttft_deadline_ms),
            ("deadline_ms", self.deadline_ms),
            ("target_itl_ms", self.target_itl_ms),
        ];
        for (name, time) in times {
            if let Some(value) = time.filter(|&time| check_time_ms(name, time).is_err()) {
                return Err(Error::InvalidParameter { name, value, expected: "between 0.001 and 1e9" });
            }
        }
        let max_tokens = cap_max_tokens(self.max_tokens, self.effective_max_tokens(max_model_len)?, cap)?;
        let min_tokens = self.sampling.min_tokens;
        if min_tokens > max_tokens {
            let value = f64::from(min_tokens);
            return Err(Error::InvalidParameter { name: "min_tokens", value, expected: "at most max_tokens" });
        }
        Ok(max_tokens)
    }

    fn effective_max_tokens(&self, max_model_len: usize) -> Result<u32> {
        let num_prompt_tokens = self.prompt_token_ids.len();
        if self.max_tokens == Some(0) {
            return Err(Error::InvalidParameter { name: "max_tokens", value: 0.0, expected: ">= 1" });
        }
        let wanted = self.max_tokens.unwrap_or(1);
        let room = max_model_len.saturating_sub(num_prompt_tokens) as u64;
        if wanted > room {
            return Err(Error::PromptTooLong { num_prompt_tokens, max_tokens: wanted, max_model_len });
        }
        Ok(self.max_tokens.unwrap_or(room) as u32)
    }
}

fn check_ids(field: &'static str, ids: &[i32], vocab_size: Option<u32>) -> Result<()> {
    let limit = vocab_size.map_or(1 << 31, i64::from);
    // One branch-free pass decides; the position is looked for only when there is something to report.
    let worst = ids.iter().fold(0u32, |worst, &id| worst.max(id as u32));
    if i64::from(worst) < limit {
        return Ok(());
    }
    match ids.iter().position(|&id| i64::from(id) < 0 || i64::from(id) >= limit) {
        Some(position) => {
            let token = i64::from(ids[position]);
            Err(Error::TokenOutOfVocabulary { field, position, token, vocab_size: limit })
        }
        None => Ok(()),
    }
}

fn check_label(name: &'static str, label: Option<&str>) -> Result<()> {
    match label {
        Some(text) if text.is_empty() || text.len() > MAX_LABEL_BYTES => {
            Err(Error::InvalidLength { name, len: text.len(), unit: "bytes", expected: "1 to 256" })
        }
        Some(text) if text.chars().any(char::is_control) => {
            Err(Error::UnusableParameter { name, reason: "has a control character; leave it out" })
        }
        _ => Ok(()),
    }
}
