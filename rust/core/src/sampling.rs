//! How the tokens of a request are drawn: handed to the sampler by row, never read by the scheduler.

use crate::error::{Error, Result};

/// Most likely tokens that may be reported with each output or prompt token.
pub const MAX_LOGPROBS: u32 = 20;
/// Most entries of one request's `logit_bias`.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most token sequences that one request's `bad_words` may become.
pub const MAX_BAD_WORDS: usize = 1024;
/// Longest token sequence of a bad word.
pub const MAX_BAD_WORD_TOKENS: usize = 256;

/// Scalar sampling parameters of one request.
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
    /// Subtracted from the logit of every id that was generated before; in `[-2, 2]`.
    pub presence_penalty: f32,
    /// Subtracted once for each time that an id was generated before; in `[-2, 2]`.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of every id in prompt or output; above 0, 1 = none.
    pub repetition_penalty: f32,
    /// Output tokens before which neither EOS nor a stop id may come.
    pub min_tokens: u32,
    /// Most likely ids to report with each output token; 0 = the token itself only, absent = nothing.
    pub logprobs: Option<u32>,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            min_tokens: 0,
            logprobs: None,
        }
    }
}

impl SamplingSpec {
    /// Whether the sampler needs to know the tokens so far.
    pub fn has_penalty(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.has_repetition_penalty()
    }

    fn has_repetition_penalty(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() > 0.0
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let check = |name, value: f32, is_allowed: bool, expected| {
            if value.is_finite() && is_allowed {
                Ok(())
            } else {
                Err(Error::InvalidParameter { name, value: f64::from(value), expected })
            }
        };
        check("temperature", self.temperature, self.temperature >= 0.0, "finite and >= 0")?;
        check("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "in (0, 1]")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "in [0, 1]")?;
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check(name, value, (-2.0..=2.0).contains(&value), "in [-2, 2]")?;
        }
        check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "finite and > 0")?;
        if self.top_k < -1 {
            let value = f64::from(self.top_k);
            return Err(Error::InvalidParameter { name: "top_k", value, expected: ">= 1, or 0 or -1 for all" });
        }
        check_num_logprobs("logprobs", self.logprobs)
    }
}

pub(crate) fn check_num_logprobs(name: &'static str, count: Option<u32>) -> Result<()> {
    match count {
        Some(count) if count > MAX_LOGPROBS => {
            Err(Error::InvalidParameter { name, value: f64::from(count), expected: "in 0..=20" })
        }
        _ => Ok(()),
    }
}

/// Checks bias values; the ids are checked against the vocabulary elsewhere.
pub(crate) fn check_logit_bias(bias: &[(i32, f32)]) -> Result<()> {
    check_count("logit_bias", bias.len(), MAX_LOGIT_BIAS)?;
    // A NaN is outside every range.
    match bias.iter().find(|(_, value)| !(-100.0..=100.0).contains(value)) {
        Some(&(_, value)) => {
            Err(Error::InvalidParameter { name: "logit_bias", value: f64::from(value), expected: "in [-100, 100]" })
        }
        None => Ok(()),
    }
}

/// Checks the number and the lengths of bad words; the ids are checked against the vocabulary elsewhere.
pub(crate) fn check_bad_words(words: &[Vec<i32>]) -> Result<()> {
    check_count("bad_words", words.len(), MAX_BAD_WORDS)?;
    match words.iter().find(|word| word.is_empty() || word.len() > MAX_BAD_WORD_TOKENS) {
        Some(word) => {
            let len = word.len();
            Err(Error::InvalidLength { name: "bad_words", len, unit: "tokens", expected: "1 to 256" })
        }
        None => Ok(()),
    }
}

pub(crate) fn check_count(name: &'static str, len: usize, limit: usize) -> Result<()> {
    if len > limit { Err(Error::TooManyEntries { name, len, limit }) } else { Ok(()) }
}
