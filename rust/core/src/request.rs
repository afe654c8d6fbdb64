//! One submitted generation: what the user asks for, its identity, and how it can end.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

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

/// How the next token is drawn; handed to the sampler by row, never read by the scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingSpec {
    /// 0 = greedy.
    pub temperature: f32,
    /// Number of most likely ids kept; 0 or -1 = all.
    pub top_k: i32,
    /// Probability mass kept, in (0, 1].
    pub top_p: f32,
    /// Ids less likely than `min_p` times the most likely are dropped; in `[0, 1]`.
    pub min_p: f32,
    /// Key of the random numbers; absent = drawn from the scheduler's own seed and the order of arrival.
    pub seed: Option<u64>,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: None }
    }
}

impl SamplingSpec {
    fn validate(&self) -> Result<()> {
        let check = |name, value: f32, ok: bool, expected| {
            if value.is_finite() && ok {
                Ok(())
            } else {
                Err(Error::InvalidParameter { name, value: f64::from(value), expected })
            }
        };
        check("temperature", self.temperature, self.temperature >= 0.0, "finite and >= 0")?;
        check("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "in (0, 1]")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "in [0, 1]")?;
        if self.top_k < -1 {
            let value = f64::from(self.top_k);
            return Err(Error::InvalidParameter { name: "top_k", value, expected: ">= 1, or 0 or -1 for all" });
        }
        Ok(())
    }
}

/// Most stop token ids that one request may have.
pub const MAX_STOP_TOKEN_IDS: usize = 128;
/// Longest tenant name and cache salt, in bytes.
pub const MAX_LABEL_BYTES: usize = 256;

/// What a user asks for. Checked by `Submitter::submit`, in one place for every entrance.
///
/// ```
/// use cbrs_core::RequestSpec;
/// let spec = RequestSpec { max_tokens: Some(16), ..RequestSpec::new(vec![1, 2, 3]) };
/// assert_eq!(spec.prompt_token_ids.len(), 3);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestSpec {
    /// Prompt, at least one id.
    pub prompt_token_ids: Vec<i32>,
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
    /// How tokens are drawn.
    pub sampling: SamplingSpec,
}

impl RequestSpec {
    /// A request for `prompt_token_ids` with default parameters.
    pub fn new(prompt_token_ids: Vec<i32>) -> Self {
        Self { prompt_token_ids, ..Self::default() }
    }

    /// Checks everything that does not depend on load, and returns the effective `max_tokens`.
    ///
    /// # Errors
    /// `EmptyPrompt`, `TokenOutOfVocabulary`, `InvalidParameter`, `InvalidLength`, `TooManyEntries`, `PromptTooLong`.
    pub(crate) fn validate(&self, vocab_size: Option<u32>, max_model_len: usize) -> Result<u32> {
        if self.prompt_token_ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        check_ids("prompt_token_ids", &self.prompt_token_ids, vocab_size)?;
        check_ids("stop_token_ids", &self.stop_token_ids, vocab_size)?;
        if self.stop_token_ids.len() > MAX_STOP_TOKEN_IDS {
            let len = self.stop_token_ids.len();
            return Err(Error::TooManyEntries { name: "stop_token_ids", len, limit: MAX_STOP_TOKEN_IDS });
        }
        self.sampling.validate()?;
        check_label("tenant", self.tenant.as_deref())?;
        check_label("cache_salt", self.cache_salt.as_deref())?;
        self.effective_max_tokens(max_model_len)
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
        _ => Ok(()),
    }
}
