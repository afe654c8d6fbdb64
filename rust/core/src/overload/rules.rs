//! `DoorRules`: the policy in force and what the door has worked out of it. Replaced as a whole, so that whoever reads it once sees one policy.

use crate::admission::AdmissionGate;
use crate::policy::PolicyConfig;

#[derive(Debug)]
pub(crate) struct DoorRules {
    pub(crate) policy: PolicyConfig,
    /// Parts of the bounds by class.
    pub(super) max_requests: [usize; 3],
    pub(super) max_tokens: [u64; 3],
    pub(super) max_queue_us: [Option<f64>; 3],
}

impl DoorRules {
    pub(super) fn new(policy: PolicyConfig, bounds: &AdmissionGate) -> Self {
        let shares: [f64; 3] = std::array::from_fn(|class| policy.classes[class].queue_share);
        Self {
            max_requests: shares.map(|share| ((bounds.max_requests() as f64 * share) as usize).max(1)),
            max_tokens: shares.map(|share| part_of_tokens(bounds.max_tokens(), share)),
            max_queue_us: shares.map(|share| policy.max_queue_s.map(|seconds| seconds * share * 1e6)),
            policy,
        }
    }

    /// Whether some tenant has rates.
    pub(super) fn has_rates(&self) -> bool {
        let policy = &self.policy;
        let mut tenants = policy.tenants.values().chain([&policy.default_tenant]);
        tenants.any(|limits| limits.requests_per_min.is_some() || limits.tokens_per_min.is_some())
    }
}

/// A part of a bound on tokens; the whole one exactly.
fn part_of_tokens(max_tokens: u64, share: f64) -> u64 {
    if share >= 1.0 { max_tokens } else { ((max_tokens as f64 * share) as u64).max(1) }
}
