//! `PolicyConfig`: the policy as data. A built-in is a value of it under a name.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Nanoseconds of a millisecond.
pub(crate) const NS_PER_MS: f64 = 1e6;

/// How urgent a request is. Classes are served in this order (see `docs/scheduling.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Class {
    /// Somebody waits for each token.
    Interactive = 0,
    /// The usual one.
    #[default]
    Standard = 1,
    /// Takes what the others leave; may pause.
    Batch = 2,
}

impl Class {
    /// All classes, most urgent first.
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Standard, Self::Batch];

    /// Finds a class by name.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn from_name(name: &str) -> Result<Self> {
        find(
            "priority",
            name,
            &[("interactive", Self::Interactive), ("standard", Self::Standard), ("batch", Self::Batch)],
        )
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        ["interactive", "standard", "batch"][self as usize]
    }
}

/// Whether tenants of a class share it by weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fairness {
    /// All tenants stand in one line.
    #[default]
    Off,
    /// Least weighted service first.
    Weighted,
}

impl Fairness {
    /// Finds a value by name.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn from_name(name: &str) -> Result<Self> {
        find("fairness", name, &[("off", Self::Off), ("weighted", Self::Weighted)])
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        ["off", "weighted"][self as usize]
    }
}

/// Which request of a tenant (or of the one line) comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Order of arrival.
    #[default]
    Fcfs,
    /// Earliest deadline first; those without one after all others, in order of arrival.
    Edf,
}

impl Order {
    /// Finds a value by name.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn from_name(name: &str) -> Result<Self> {
        find("order", name, &[("fcfs", Self::Fcfs), ("edf", Self::Edf)])
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        ["fcfs", "edf"][self as usize]
    }
}

/// How much memory must be free before a request starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admission {
    /// What it needs now, and one block for each sequence that may grow.
    #[default]
    Prompt,
    /// What it needs now, and the estimated growth of all that runs up to its peak.
    Estimated,
    /// What all that runs may need at most: nothing is ever preempted for memory.
    Guaranteed,
}

impl Admission {
    /// Finds a value by name.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn from_name(name: &str) -> Result<Self> {
        let values = [("prompt", Self::Prompt), ("estimated", Self::Estimated), ("guaranteed", Self::Guaranteed)];
        find("admission", name, &values)
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        ["prompt", "estimated", "guaranteed"][self as usize]
    }
}

/// Who gives up row and blocks when others need them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Victim {
    /// The newest of the lowest class.
    #[default]
    Newest,
    /// Among lower classes and later arrivals, the one with the fewest tokens to compute again per block gained; ties: the newest.
    Cost,
}

impl Victim {
    /// Finds a value by name.
    ///
    /// # Errors
    /// `UnknownName`.
    pub fn from_name(name: &str) -> Result<Self> {
        find("victim", name, &[("newest", Self::Newest), ("cost", Self::Cost)])
    }

    /// The name that `from_name` reads.
    pub fn name(self) -> &'static str {
        ["newest", "cost"][self as usize]
    }
}

/// Defaults and limits of one class.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassLimits {
    /// Longest time between two tokens of a request that the step budget aims at.
    pub target_itl_ms: Option<f64>,
    /// Time until the first token after which a waiting request is dropped.
    pub ttft_deadline_ms: Option<f64>,
    /// Time until the end after which a request is ended.
    pub deadline_ms: Option<f64>,
    /// Cap on `max_tokens`.
    pub max_tokens: Option<u32>,
    /// Cap on running sequences.
    pub max_num_seqs: Option<usize>,
    /// Part of the queue's bounds that the class may fill, in (0, 1].
    pub queue_share: f64,
}

impl Default for ClassLimits {
    fn default() -> Self {
        Self {
            target_itl_ms: None,
            ttft_deadline_ms: None,
            deadline_ms: None,
            max_tokens: None,
            max_num_seqs: None,
            queue_share: 1.0,
        }
    }
}

/// Weight, defaults and limits of one tenant.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantLimits {
    /// Its share of a class relative to those of others, in `[0.001, 1000]`.
    pub weight: f64,
    /// Class of its requests that name none.
    pub priority: Option<Class>,
    /// Requests per minute that it may submit, in bursts of as many.
    pub requests_per_min: Option<f64>,
    /// Prompt and output tokens per minute, in bursts of as many.
    pub tokens_per_min: Option<f64>,
    /// Cap on `max_tokens`.
    pub max_tokens: Option<u32>,
    /// Cap on running sequences, in each class.
    pub max_num_seqs: Option<usize>,
    /// As in `ClassLimits`.
    pub target_itl_ms: Option<f64>,
    /// As in `ClassLimits`.
    pub ttft_deadline_ms: Option<f64>,
    /// As in `ClassLimits`.
    pub deadline_ms: Option<f64>,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            weight: 1.0,
            priority: None,
            requests_per_min: None,
            tokens_per_min: None,
            max_tokens: None,
            max_num_seqs: None,
            target_itl_ms: None,
            ttft_deadline_ms: None,
            deadline_ms: None,
        }
    }
}

/// The whole policy besides `static`, part by part.
///
/// ```
/// use cbrs_core::policy::{PolicyConfig, TenantLimits};
/// let mut policy = PolicyConfig::fair();
/// policy.tenants.insert("gold".into(), TenantLimits { weight: 4.0, ..TenantLimits::default() });
/// assert!(policy.validate().is_ok());
/// policy.aged_share = 2.0;
/// assert!(policy.validate().is_err());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyConfig {
    /// How tenants of a class share it.
    pub fairness: Fairness,
    /// Order within a tenant.
    pub order: Order,
    /// How much memory must be free before a request starts.
    pub admission: Admission,
    /// Who is displaced.
    pub victim: Victim,
    /// K: later arrivals of its class and tenant that may start before a request that lacks memory.
    pub max_overtakes: u8,
    /// Preemptions of one sequence after which it is a victim only for memory safety.
    pub max_preemptions: u8,
    /// m: in every so many steps the highest waiting class gets a chunk of a prompt, whatever the latency target.
    pub max_prefill_interval: u32,
    /// Longest pause of a batch decode, in steps.
    pub max_batch_pause_steps: u32,
    /// Seconds of waiting after which a request is aged.
    pub aging_s: f64,
    /// Part of admissions that the oldest aged request is owed, in (0, 1].
    pub aged_share: f64,
    /// Latency target of requests that have no nearer one.
    pub target_itl_ms: Option<f64>,
    /// Bound on the predicted time in the queue.
    pub max_queue_s: Option<f64>,
    /// By class.
    pub classes: [ClassLimits; 3],
    /// By name; the tenant of requests that name none is "".
    pub tenants: BTreeMap<Arc<str>, TenantLimits>,
    /// For tenants without an entry.
    pub default_tenant: TenantLimits,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self::fcfs()
    }
}

impl PolicyConfig {
    /// Classes in their order, and one line within each: nobody overtakes.
    pub fn fcfs() -> Self {
        Self {
            fairness: Fairness::Off,
            order: Order::Fcfs,
            admission: Admission::Prompt,
            victim: Victim::Newest,
            max_overtakes: 0,
            max_preemptions: 4,
            max_prefill_interval: 8,
            max_batch_pause_steps: 32,
            aging_s: 10.0,
            aged_share: 0.05,
            target_itl_ms: None,
            max_queue_s: None,
            classes: [ClassLimits::default(), ClassLimits::default(), ClassLimits::default()],
            tenants: BTreeMap::new(),
            default_tenant: TenantLimits::default(),
        }
    }

    /// Everything: weighted tenants, deadlines, admission by the estimated peak, victims by cost.
    pub fn fair() -> Self {
        let with_share = |queue_share| ClassLimits { queue_share, ..ClassLimits::default() };
        Self {
            fairness: Fairness::Weighted,
            order: Order::Edf,
            admission: Admission::Estimated,
            victim: Victim::Cost,
            max_overtakes: 16,
            classes: [with_share(1.0), with_share(0.95), with_share(0.8)],
            ..Self::fcfs()
        }
    }

    /// Limits of a tenant.
    pub fn tenant(&self, name: Option<&str>) -> &TenantLimits {
        self.tenants.get(name.unwrap_or("")).unwrap_or(&self.default_tenant)
    }

    /// Whether the tokens of each tenant have to be counted.
    pub(crate) fn counts_service(&self) -> bool {
        self.fairness == Fairness::Weighted || self.limits_token_rates()
    }

    /// Whether some tenant may have so many tokens a minute only.
    pub(crate) fn limits_token_rates(&self) -> bool {
        self.tenants.values().chain([&self.default_tenant]).any(|tenant| tenant.tokens_per_min.is_some())
    }

    /// Refuses what cannot follow on `current` while an engine runs; `counts_service`: it counts the tokens of tenants.
    ///
    /// # Errors
    /// `UnusableParameter` names the field.
    pub(crate) fn check_change(&self, current: &Self, counts_service: bool) -> Result<()> {
        let fixed =
            |name| Error::UnusableParameter { name, reason: "cannot change while the engine runs; start it again" };
        if self.fairness != current.fairness {
            return Err(fixed("fairness"));
        }
        if self.order != current.order {
            return Err(fixed("order"));
        }
        if self.admission != current.admission {
            return Err(fixed("admission"));
        }
        if self.limits_token_rates() && !counts_service {
            let (name, reason) =
                ("tokens_per_min", "needs an engine that was started with weights or a rate of tokens");
            return Err(Error::UnusableParameter { name, reason });
        }
        Ok(())
    }

    /// Admissions of others after which the oldest aged request is next.
    pub(crate) fn aged_interval(&self) -> u32 {
        (1.0 / self.aged_share).round() as u32
    }

    /// Checks every field.
    ///
    /// # Errors
    /// `InvalidNumber` or `InvalidConfig` names the field.
    pub fn validate(&self) -> Result<()> {
        in_range("aging_s", self.aging_s, 0.0, 1e6)?;
        in_range("aged_share", self.aged_share, 0.001, 1.0)?;
        count("max_prefill_interval", self.max_prefill_interval as usize, 1, 1 << 20)?;
        count("max_batch_pause_steps", self.max_batch_pause_steps as usize, 1, 1 << 20)?;
        optional("target_itl_ms", self.target_itl_ms)?;
        if let Some(seconds) = self.max_queue_s {
            in_range("max_queue_s", seconds, 0.001, 1e6)?;
        }
        for class in &self.classes {
            in_range("queue_share", class.queue_share, 0.001, 1.0)?;
            times(class.target_itl_ms, class.ttft_deadline_ms, class.deadline_ms)?;
            caps(class.max_tokens, class.max_num_seqs)?;
        }
        let tenants = || self.tenants.values().chain([&self.default_tenant]);
        if self.fairness == Fairness::Off && tenants().any(|tenant| tenant.max_num_seqs.is_some()) {
            let (name, reason) = ("max_num_seqs", "of a tenant needs fairness = \"weighted\": one line has one bound");
            return Err(Error::UnusableParameter { name, reason });
        }
        if self.fairness == Fairness::Off && tenants().any(|tenant| (tenant.weight - 1.0).abs() > 0.0) {
            let (name, reason) = ("weight", "of a tenant needs fairness = \"weighted\": one line has no shares");
            return Err(Error::UnusableParameter { name, reason });
        }
        tenants().try_for_each(check_tenant)
    }
}

fn check_tenant(tenant: &TenantLimits) -> Result<()> {
    in_range("weight", tenant.weight, 0.001, 1000.0)?;
    for (name, rate) in [("requests_per_min", tenant.requests_per_min), ("tokens_per_min", tenant.tokens_per_min)] {
        if let Some(rate) = rate {
            in_range(name, rate, 0.001, 1e12)?;
        }
    }
    times(tenant.target_itl_ms, tenant.ttft_deadline_ms, tenant.deadline_ms)?;
    caps(tenant.max_tokens, tenant.max_num_seqs)
}

fn times(target_itl_ms: Option<f64>, ttft_deadline_ms: Option<f64>, deadline_ms: Option<f64>) -> Result<()> {
    optional("target_itl_ms", target_itl_ms)?;
    optional("ttft_deadline_ms", ttft_deadline_ms)?;
    optional("deadline_ms", deadline_ms)
}

fn caps(max_tokens: Option<u32>, max_num_seqs: Option<usize>) -> Result<()> {
    count("max_tokens", max_tokens.map_or(1, |count| count as usize), 1, 1 << 28)?;
    count("max_num_seqs", max_num_seqs.unwrap_or(1), 1, 1 << 20)
}

fn optional(name: &'static str, value: Option<f64>) -> Result<()> {
    value.map_or(Ok(()), |value| check_time_ms(name, value))
}

/// A time in milliseconds: from a microsecond to twelve days.
pub(crate) fn check_time_ms(name: &'static str, value: f64) -> Result<()> {
    in_range(name, value, 0.001, 1e9)
}

fn in_range(name: &'static str, value: f64, min: f64, max: f64) -> Result<()> {
    // Not a number is in no range.
    if (min..=max).contains(&value) { Ok(()) } else { Err(Error::InvalidNumber { name, value, min, max }) }
}

fn count(field: &'static str, value: usize, min: usize, max: usize) -> Result<()> {
    in_range(field, value as f64, min as f64, max as f64)
}

fn find<T: Copy>(what: &'static str, name: &str, values: &[(&'static str, T)]) -> Result<T> {
    let found = values.iter().find(|(known, _)| *known == name);
    found.map(|&(_, value)| value).ok_or_else(|| Error::UnknownName {
        what,
        name: name.to_owned(),
        expected: values.iter().map(|(known, _)| format!("{known:?}")).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for class in Class::ALL {
            assert_eq!(Class::from_name(class.name()), Ok(class));
        }
        for admission in [Admission::Prompt, Admission::Estimated, Admission::Guaranteed] {
            assert_eq!(Admission::from_name(admission.name()), Ok(admission));
        }
        assert_eq!(Fairness::from_name(Fairness::Weighted.name()), Ok(Fairness::Weighted));
        assert_eq!(Order::from_name(Order::Edf.name()), Ok(Order::Edf));
        assert_eq!(Victim::from_name(Victim::Cost.name()), Ok(Victim::Cost));
        let message = Victim::from_name("oldest").expect_err("there is none").to_string();
        assert!(message.contains("victim") && message.contains("\"newest\", \"cost\""), "{message}");
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name() {
        let refused = |change: fn(&mut PolicyConfig)| {
            let mut policy = PolicyConfig::fair();
            change(&mut policy);
            policy.validate().expect_err("it is out of range").to_string()
        };
        assert!(refused(|policy| policy.aging_s = f64::NAN).starts_with("aging_s"));
        assert!(refused(|policy| policy.aged_share = 0.0).starts_with("aged_share"));
        assert!(refused(|policy| policy.target_itl_ms = Some(0.0)).starts_with("target_itl_ms"));
        assert!(refused(|policy| policy.classes[2].queue_share = 1.5).starts_with("queue_share"));
        assert!(refused(|policy| policy.default_tenant.weight = -1.0).starts_with("weight"));
        assert!(refused(|policy| policy.classes[0].max_num_seqs = Some(0)).starts_with("max_num_seqs"));
    }
}
