//! `SchedulerConfig` as a Python class: keyword-only, checked at construction, readable back.

use cbrs_core::Error;
use cbrs_core::policy::PolicyConfig;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{integer, token_ids};
use crate::errors::to_py;
use crate::parameters::read_seed;
use crate::policy::{self, GivenPolicy, config_error};

/// Limits and policy of one scheduler. Checked at construction; a wrong field raises `ValueError` naming it.
///
/// `max_model_len` is lowered to what the pool holds; read it back from here. `policy` is a built-in ("fcfs", "fair" or "static"), the path of
/// a `.toml` file, or a dict with the same keys; every one of them is a keyword too, which wins over the policy's value. `policy_settings`
/// tells all of them.
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

impl SchedulerConfig {
    fn rules(&self) -> &PolicyConfig {
        self.core.rules.as_ref().expect("a validated configuration has its rules")
    }
}

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (*, max_num_seqs, max_num_batched_tokens, num_blocks, max_model_len, block_size=None, vocab_size=None,
        eos_token_ids=None, enable_prefix_caching=true, queue_capacity=None, max_queued_tokens=None,
        max_prefill_chunk_tokens=None, policy=None, clock="monotonic", seed=None, **rules))]
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
        policy: Option<&Bound<'_, PyAny>>,
        clock: &str,
        seed: Option<&Bound<'_, PyAny>>,
        rules: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut given = GivenPolicy::read(policy)?;
        given.set_keywords("SchedulerConfig", rules)?;
        let (policy, rules) = given.finish()?;
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
            policy,
            rules: Some(rules),
            seed: seed.map(read_seed).transpose()?.unwrap_or_else(random_seed),
            hash_seed: random_seed(),
            ..defaults
        };
        let is_manual_clock = match clock {
            "monotonic" => false,
            "manual" => true,
            _ => return Err(PyValueError::new_err(format!("clock is {clock:?}; choose \"monotonic\" or \"manual\""))),
        };
        Ok(Self { core: core.validate().map_err(|error| config_error(&error))?, is_manual_clock })
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

    /// Name of the built-in that the policy started from.
    #[getter]
    fn policy(&self) -> &'static str {
        self.core.policy.name()
    }

    /// The whole policy in effect, as a new dict that `policy=` takes; of "static" only its name.
    #[getter]
    fn policy_settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        policy::settings(py, self.core.policy, self.rules())
    }

    #[getter]
    fn fairness(&self) -> &'static str {
        self.rules().fairness.name()
    }

    #[getter]
    fn order(&self) -> &'static str {
        self.rules().order.name()
    }

    #[getter]
    fn admission(&self) -> &'static str {
        self.rules().admission.name()
    }

    #[getter]
    fn victim(&self) -> &'static str {
        self.rules().victim.name()
    }

    #[getter]
    fn max_overtakes(&self) -> u8 {
        self.rules().max_overtakes
    }

    #[getter]
    fn max_preemptions(&self) -> u8 {
        self.rules().max_preemptions
    }

    #[getter]
    fn max_prefill_interval(&self) -> u32 {
        self.rules().max_prefill_interval
    }

    #[getter]
    fn max_batch_pause_steps(&self) -> u32 {
        self.rules().max_batch_pause_steps
    }

    #[getter]
    fn aging_s(&self) -> f64 {
        self.rules().aging_s
    }

    #[getter]
    fn aged_share(&self) -> f64 {
        self.rules().aged_share
    }

    #[getter]
    fn target_itl_ms(&self) -> Option<f64> {
        self.rules().target_itl_ms
    }

    #[getter]
    fn max_queue_s(&self) -> Option<f64> {
        self.rules().max_queue_s
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
