//! Limits and policy of one scheduler, checked once at construction.

use crate::error::{Error, Result};
use crate::policy::PolicyConfig;
use crate::request::MAX_STOP_TOKEN_IDS;

/// Rows of logits that one step computes at most for prompt log-probabilities: with a vocabulary of 2^17 ids they are 256 MiB in fp32.
pub const MAX_PROMPT_LOGITS: usize = 512;

/// Which requests run together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Continuous batching, first come first served: decodes first, then prefills and admissions in order of arrival.
    #[default]
    Fcfs,
    /// Continuous batching with classes, weighted tenants, deadlines, and admission by the estimated peak (`PolicyConfig::fair`).
    Fair,
    /// A batch that runs until its slowest member ends; for comparison.
    Static,
}

impl Policy {
    /// Finds a built-in policy by name.
    ///
    /// # Errors
    /// `UnknownPolicy`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "fcfs" => Ok(Self::Fcfs),
            "fair" => Ok(Self::Fair),
            "static" => Ok(Self::Static),
            _ => Err(Error::UnknownPolicy { name: name.to_owned() }),
        }
    }

    /// What the name stands for, part by part.
    pub fn rules(self) -> PolicyConfig {
        match self {
            Self::Fcfs | Self::Static => PolicyConfig::fcfs(),
            Self::Fair => PolicyConfig::fair(),
        }
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Fair => "fair",
            Self::Static => "static",
        }
    }
}

/// Limits and policy of one scheduler.
///
/// ```
/// use cbrs_core::SchedulerConfig;
/// let config = SchedulerConfig {
///     max_num_seqs: 8,
///     max_num_batched_tokens: 256,
///     num_blocks: 128,
///     max_model_len: 1024,
///     ..SchedulerConfig::default()
/// };
/// assert_eq!(config.validate().unwrap().max_model_len, 1024);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerConfig {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Token budget of one step; may be below `max_num_seqs` (decodes then take turns).
    pub max_num_batched_tokens: usize,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Prompt plus output at most; lowered to what the pool holds.
    pub max_model_len: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of valid token ids; absent = any non-negative int32.
    pub vocab_size: Option<u32>,
    /// Ids that end the output as `stop` unless the request ignores them.
    pub eos_token_ids: Vec<i32>,
    /// Reuse computed blocks between requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Requests that may wait; one more is refused.
    pub queue_capacity: usize,
    /// Prompt tokens that may wait in total; absent = no bound besides the requests' (2^39 in any case).
    pub max_queued_tokens: Option<u64>,
    /// Prompt tokens of one sequence in one step; absent = the token budget.
    pub max_prefill_chunk_tokens: Option<usize>,
    /// Which requests run together.
    pub policy: Policy,
    /// The policy part by part; absent = as its name says.
    pub rules: Option<PolicyConfig>,
    /// Source of the seeds of requests that have none; the same seed and order of arrival give the same seeds.
    pub seed: u64,
    /// Key of the prefix hash. Hits are verified by content, so it never changes a result.
    pub hash_seed: u64,
    /// Rows of logits that one step may compute for prompt log-probabilities; chunks are shortened to that.
    #[doc(hidden)]
    pub max_prompt_logits: usize,
    /// For tests: give all blocks the same hash, so that only the comparison of contents tells them apart.
    #[doc(hidden)]
    pub collide_hashes: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            num_blocks: 1024,
            max_model_len: 2048,
            block_size: 16,
            vocab_size: None,
            eos_token_ids: Vec::new(),
            enable_prefix_caching: true,
            queue_capacity: 65_536,
            max_queued_tokens: None,
            max_prefill_chunk_tokens: None,
            policy: Policy::Fcfs,
            rules: None,
            seed: 0,
            hash_seed: 0,
            max_prompt_logits: MAX_PROMPT_LOGITS,
            collide_hashes: false,
        }
    }
}

impl SchedulerConfig {
    /// Checks every field and lowers `max_model_len` to what the pool holds.
    ///
    /// # Errors
    /// `InvalidConfig` or `InvalidNumber` names the field, `TokenOutOfVocabulary` an EOS id.
    pub fn validate(mut self) -> Result<Self> {
        check("max_num_seqs", self.max_num_seqs, 1, 1 << 20, "in 1..=1048576")?;
        check("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 24, "in 1..=16777216")?;
        check("num_blocks", self.num_blocks, 1, 1 << 28, "in 1..=268435456")?;
        check("block_size", self.block_size, 1, 4096, "in 1..=4096")?;
        check(
            "max_model_len",
            self.max_model_len,
            2,
            1 << 28,
            "in 2..=268435456 (a prompt token and an output token)",
        )?;
        check("max_prompt_logits", self.max_prompt_logits, 1, MAX_PROMPT_LOGITS, "in 1..=512")?;
        check("queue_capacity", self.queue_capacity, 1, 1 << 24, "in 1..=16777216")?;
        if let Some(chunk) = self.max_prefill_chunk_tokens {
            check("max_prefill_chunk_tokens", chunk, 1, 1 << 24, "in 1..=16777216")?;
        }
        if let Some(vocab_size) = self.vocab_size {
            check("vocab_size", vocab_size as usize, 1, 1 << 31, "in 1..=2147483648")?;
        }
        if self.max_queued_tokens == Some(0) {
            return Err(Error::InvalidConfig { field: "max_queued_tokens", value: 0, expected: ">= 1" });
        }
        if self.eos_token_ids.len() > MAX_STOP_TOKEN_IDS {
            let len = self.eos_token_ids.len();
            return Err(Error::TooManyEntries { name: "eos_token_ids", len, limit: MAX_STOP_TOKEN_IDS });
        }
        let limit = self.vocab_size.map_or(1 << 31, i64::from);
        for (position, &token) in self.eos_token_ids.iter().enumerate() {
            let token = i64::from(token);
            if token < 0 || token >= limit {
                return Err(Error::TokenOutOfVocabulary { field: "eos_token_ids", position, token, vocab_size: limit });
            }
        }
        if self.max_num_seqs * self.block_size > 1 << 31 {
            let expected = "at most 2^31 / max_num_seqs";
            return Err(Error::InvalidConfig { field: "block_size", value: self.block_size as i64, expected });
        }
        let pool_tokens = self.num_blocks * self.block_size;
        if pool_tokens < 2 {
            let value = self.num_blocks as i64;
            return Err(Error::InvalidConfig { field: "num_blocks", value, expected: "enough for two tokens" });
        }
        self.max_model_len = self.max_model_len.min(pool_tokens);
        let rules = self.rules.take().unwrap_or_else(|| self.policy.rules());
        rules.validate()?;
        self.rules = Some(rules);
        Ok(self)
    }

    /// The policy part by part; only of a validated configuration.
    pub(crate) fn rules(&self) -> &PolicyConfig {
        self.rules.as_ref().expect("a validated configuration has its rules")
    }

    /// Columns of the block table: blocks of the longest sequence.
    pub fn max_blocks_per_seq(&self) -> usize {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// Most tokens of one sequence in one step.
    pub(crate) fn max_chunk_tokens(&self) -> usize {
        self.max_prefill_chunk_tokens.unwrap_or(usize::MAX).min(self.max_num_batched_tokens)
    }
}

fn check(field: &'static str, value: usize, min: usize, max: usize, expected: &'static str) -> Result<()> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(Error::InvalidConfig { field, value: i64::try_from(value).unwrap_or(i64::MAX), expected })
    }
}
