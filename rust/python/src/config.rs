//! `SchedulerConfig` as a Python class: keyword-only, checked at construction, readable back.

use cbrs_core::{Error, Policy};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{integer, token_ids};
use crate::errors::to_py;
use crate::parameters::read_seed;

/// Limits and policy of one scheduler. Checked at construction; a wrong field raises `ValueError` naming it.
///
/// `max_model_len` is lowered to what the pool holds; read it back from here.
#[pyclass(frozen, module = "cbrs")]
pub(crate) struct SchedulerConfig {
    pub(crate) core: cbrs_core::SchedulerConfig,
    pub(crate) is_manual_clock: bool,
}

fn size(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<usize> {
    let value = integer(value, field)?;
    usize::try_from(value).map_err(|_| to_py(&Error::InvalidConfig { field, value, expected: "positive" }))
}

fn optional_size(value: Option<&Bound<'_, PyAny>>, field: &'static str) -> PyResult<Option<usize>> {
    value.map(|value| size(value, field)).transpose()
}

/// A vocabulary size; the core checks it, as far as it can be expressed.
fn vocabulary(size: usize) -> PyResult<u32> {
    let too_large = |_| {
        let value = i64::try_from(size).unwrap_or(i64::MAX);
        to_py(&Error::InvalidConfig { field: "vocab_size", value, expected: "in 1..=2147483648" })
    };
    u32::try_from(size).map_err(too_large)
}

/// A number from the operating system's randomness, by way of the standard library's hash keys.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u8)
}

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (*, max_num_seqs, max_num_batched_tokens, num_blocks, max_model_len, block_size=None, vocab_size=None,
        eos_token_ids=None, enable_prefix_caching=true, queue_capacity=None, max_queued_tokens=None,
        max_prefill_chunk_tokens=None, policy="fcfs", clock="monotonic", seed=None))]
    #[allow(clippy::too_many_arguments)] // the keyword arguments of the Python class
    fn new(
        max_num_seqs: &Bound<'_, PyAny>,
        max_num_batched_tokens: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        max_model_len: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        vocab_size: Option<&Bound<'_, PyAny>>,
        eos_token_ids: Option<&Bound<'_, PyAny>>,
        enable_prefix_caching: bool,
        queue_capacity: Option<&Bound<'_, PyAny>>,
        max_queued_tokens: Option<&Bound<'_, PyAny>>,
        max_prefill_chunk_tokens: Option<&Bound<'_, PyAny>>,
        policy: &str,
        clock: &str,
        seed: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let defaults = cbrs_core::SchedulerConfig::default();
        let vocab_size = optional_size(vocab_size, "vocab_size")?;
        let core = cbrs_core::SchedulerConfig {
            max_num_seqs: size(max_num_seqs, "max_num_seqs")?,
            max_num_batched_tokens: size(max_num_batched_tokens, "max_num_batched_tokens")?,
            num_blocks: size(num_blocks, "num_blocks")?,
            max_model_len: size(max_model_len, "max_model_len")?,
            block_size: optional_size(block_size, "block_size")?.unwrap_or(defaults.block_size),
            vocab_size: vocab_size.map(vocabulary).transpose()?,
            eos_token_ids: eos_token_ids.map(|ids| token_ids(ids, "eos_token_ids")).transpose()?.unwrap_or_default(),
            enable_prefix_caching,
            queue_capacity: optional_size(queue_capacity, "queue_capacity")?.unwrap_or(defaults.queue_capacity),
            max_queued_tokens: optional_size(max_queued_tokens, "max_queued_tokens")?.map(|size| size as u64),
            max_prefill_chunk_tokens: optional_size(max_prefill_chunk_tokens, "max_prefill_chunk_tokens")?,
            policy: Policy::from_name(policy).map_err(|error| to_py(&error))?,
            seed: seed.map(read_seed).transpose()?.unwrap_or_else(random_seed),
            hash_seed: random_seed(),
            ..defaults
        };
        let is_manual_clock = match clock {
            "monotonic" => false,
            "manual" => true,
            _ => return Err(PyValueError::new_err(format!("clock is {clock:?}; choose \"monotonic\" or \"manual\""))),
        };
        Ok(Self { core: core.validate().map_err(|error| to_py(&error))?, is_manual_clock })
    }

    #[getter]
    fn max_num_seqs(&self) -> usize {
        self.core.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> usize {
        self.core.max_num_batched_tokens
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.core.num_blocks
    }

    /// Effective limit on prompt plus output, in tokens.
    #[getter]
    fn max_model_len(&self) -> usize {
        self.core.max_model_len
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.core.block_size
    }

    #[getter]
    fn vocab_size(&self) -> Option<u32> {
        self.core.vocab_size
    }

    #[getter]
    fn eos_token_ids(&self) -> Vec<i32> {
        self.core.eos_token_ids.clone()
    }

    #[getter]
    fn enable_prefix_caching(&self) -> bool {
        self.core.enable_prefix_caching
    }

    #[getter]
    fn queue_capacity(&self) -> usize {
        self.core.queue_capacity
    }

    #[getter]
    fn max_queued_tokens(&self) -> Option<u64> {
        self.core.max_queued_tokens
    }

    #[getter]
    fn max_prefill_chunk_tokens(&self) -> Option<usize> {
        self.core.max_prefill_chunk_tokens
    }

    #[getter]
    fn policy(&self) -> &'static str {
        self.core.policy.name()
    }

    #[getter]
    fn clock(&self) -> &'static str {
        if self.is_manual_clock { "manual" } else { "monotonic" }
    }

    /// Source of the seeds of requests that have none.
    #[getter]
    fn seed(&self) -> u64 {
        self.core.seed
    }

    fn __repr__(&self) -> String {
        let config = &self.core;
        format!(
            "SchedulerConfig(max_num_seqs={}, max_num_batched_tokens={}, num_blocks={}, max_model_len={}, block_size={}, policy={:?})",
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.num_blocks,
            config.max_model_len,
            config.block_size,
            config.policy.name()
        )
    }
}
