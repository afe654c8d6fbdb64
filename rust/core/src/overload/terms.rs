//! `Terms`: what a request gets where it asks for nothing: from its tenant, its class, or the engine.

use crate::error::{Error, Result};
use crate::policy::config::NS_PER_MS;
use crate::policy::{Class, PolicyConfig, TenantLimits};
use crate::request::RequestSpec;

/// Class, caps and times of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Terms<'a> {
    pub(crate) class: Class,
    pub(crate) limits: &'a TenantLimits,
    ttft_deadline_ns: Option<u64>,
    deadline_ns: Option<u64>,
    target_itl_ns: Option<u64>,
}

/// The times of an accepted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_field_names, reason = "the unit")]
pub(crate) struct Times {
    pub(crate) arrival_ns: u64,
    /// When it is dropped if it still waits.
    pub(crate) ttft_deadline_ns: Option<u64>,
    /// When it is ended, running or not.
    pub(crate) deadline_ns: Option<u64>,
    /// Longest time between two of its tokens that a step's budget aims at.
    pub(crate) target_itl_ns: Option<u64>,
}

impl<'a> Terms<'a> {
    /// Looks up what holds for a request: its own wish, else its tenant's, else its class's (else, for latency, the engine's).
    pub(crate) fn new(rules: &'a PolicyConfig, spec: &RequestSpec) -> Self {
        let limits = rules.tenant(spec.tenant.as_deref());
        let class = spec.priority.or(limits.priority).unwrap_or_default();
        let defaults = &rules.classes[class as usize];
        let ns = |times: [Option<f64>; 3]| times.into_iter().flatten().next().map(ns_of_ms);
        Self {
            class,
            limits,
            ttft_deadline_ns: ns([spec.ttft_deadline_ms, limits.ttft_deadline_ms, defaults.ttft_deadline_ms]),
            deadline_ns: ns([spec.deadline_ms, limits.deadline_ms, defaults.deadline_ms]),
            target_itl_ns: ns([
                spec.target_itl_ms,
                limits.target_itl_ms,
                defaults.target_itl_ms.or(rules.target_itl_ms),
            ]),
        }
    }

    /// Cap on `max_tokens`, and whose it is.
    pub(crate) fn max_tokens_cap(&self, rules: &PolicyConfig) -> Option<(u32, &'static str)> {
        let of_class = rules.classes[self.class as usize].max_tokens.map(|cap| (cap, "class"));
        let of_tenant = self.limits.max_tokens.map(|cap| (cap, "tenant"));
        [of_tenant, of_class].into_iter().flatten().min_by_key(|&(cap, _)| cap)
    }

    /// Nanoseconds until the first token has to come.
    pub(crate) fn first_token_deadline_ns(&self) -> Option<u64> {
        [self.ttft_deadline_ns, self.deadline_ns].into_iter().flatten().min()
    }

    /// Nanoseconds until the last token has to come.
    pub(crate) fn last_token_deadline_ns(&self) -> Option<u64> {
        self.deadline_ns
    }

    /// The times of a request that arrives now.
    pub(crate) fn times(&self, now_ns: u64) -> Times {
        let at = |ns: Option<u64>| ns.map(|ns| now_ns.saturating_add(ns));
        Times {
            arrival_ns: now_ns,
            ttft_deadline_ns: at(self.ttft_deadline_ns),
            deadline_ns: at(self.deadline_ns),
            target_itl_ns: self.target_itl_ns,
        }
    }
}

/// Applies a cap to what was asked for: an absent `max_tokens` becomes the cap, one above it is refused.
pub(crate) fn cap_max_tokens(asked: Option<u64>, room: u32, cap: Option<(u32, &'static str)>) -> Result<u32> {
    match (asked, cap) {
        (Some(value), Some((cap, of))) if value > u64::from(cap) => {
            Err(Error::AboveCap { name: "max_tokens", value, cap, of })
        }
        (None, Some((cap, _))) => Ok(room.min(cap)),
        _ => Ok(room),
    }
}

/// A time that a request or a policy may have, at least a nanosecond.
fn ns_of_ms(ms: f64) -> u64 {
    ((ms * NS_PER_MS) as u64).max(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn rules() -> PolicyConfig {
        let mut rules = PolicyConfig { target_itl_ms: Some(80.0), ..PolicyConfig::fair() };
        let batch = &mut rules.classes[Class::Batch as usize];
        batch.max_tokens = Some(100);
        batch.deadline_ms = Some(9000.0);
        batch.ttft_deadline_ms = Some(4000.0);
        let gold = TenantLimits {
            priority: Some(Class::Batch),
            max_tokens: Some(50),
            ttft_deadline_ms: Some(3000.0),
            target_itl_ms: Some(40.0),
            ..TenantLimits::default()
        };
        rules.tenants.insert("gold".into(), gold);
        rules.default_tenant.max_tokens = Some(700);
        rules
    }

    #[test]
    fn a_wish_goes_before_tenant_class_and_engine() {
        let rules = rules();
        let mut spec = RequestSpec { tenant: Some("gold".into()), ..RequestSpec::new(vec![1]) };
        let terms = Terms::new(&rules, &spec);
        assert_eq!(terms.class, Class::Batch);
        assert_eq!(terms.max_tokens_cap(&rules), Some((50, "tenant")));
        let expected = Times {
            arrival_ns: 5,
            ttft_deadline_ns: Some(3_000_000_005),
            deadline_ns: Some(9_000_000_005),
            target_itl_ns: Some(40_000_000),
        };
        assert_eq!(terms.times(5), expected);
        assert_eq!(terms.first_token_deadline_ns(), Some(3_000_000_000));
        spec.deadline_ms = Some(0.5);
        spec.target_itl_ms = Some(1e-9);
        let terms = Terms::new(&rules, &spec);
        assert_eq!(terms.first_token_deadline_ns(), Some(500_000));
        assert_eq!(terms.last_token_deadline_ns(), Some(500_000));
        assert_eq!(terms.times(0).target_itl_ns, Some(1));
        spec.priority = Some(Class::Interactive);
        let terms = Terms::new(&rules, &spec);
        assert_eq!((terms.class, terms.max_tokens_cap(&rules)), (Class::Interactive, Some((50, "tenant"))));
    }

    #[test]
    fn strangers_get_the_defaults() {
        let rules = rules();
        let mut spec = RequestSpec::new(vec![1]);
        let terms = Terms::new(&rules, &spec);
        assert_eq!((terms.class, terms.first_token_deadline_ns()), (Class::Standard, None));
        assert_eq!(terms.times(0).target_itl_ns, Some(80_000_000), "the engine's");
        assert_eq!(terms.max_tokens_cap(&rules), Some((700, "tenant")));
        spec.priority = Some(Class::Batch);
        assert_eq!(Terms::new(&rules, &spec).max_tokens_cap(&rules), Some((100, "class")));
    }

    #[test]
    fn an_absent_max_tokens_becomes_the_cap_and_a_larger_one_is_refused() {
        assert_eq!(cap_max_tokens(None, 500, Some((100, "class"))), Ok(100));
        assert_eq!(cap_max_tokens(None, 50, Some((100, "class"))), Ok(50));
        assert_eq!(cap_max_tokens(Some(100), 100, Some((100, "class"))), Ok(100));
        assert_eq!(cap_max_tokens(Some(101), 101, None), Ok(101));
        let refused = cap_max_tokens(Some(101), 101, Some((100, "tenant"))).expect_err("it is above the cap");
        assert_eq!(refused, Error::AboveCap { name: "max_tokens", value: 101, cap: 100, of: "tenant" });
        assert!(refused.to_string().contains("max_tokens is 101, but the cap of the request's tenant is 100"));
    }
}
