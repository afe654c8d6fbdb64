//! What a key gives a request, and what a request must not claim.

use cbrs_core::{RequestSpec, Submitter};

use super::keys::ApiKey;
use crate::error::ApiError;
use crate::wire::Common;

/// Puts the key's tenant and class in a request that names none.
///
/// # Errors
/// 403 names the field with which a request claims another tenant, or a class above the key's.
pub(crate) fn claim(
    caller: Option<&ApiKey>,
    spec: &mut RequestSpec,
    common: &Common,
    submitter: &Submitter,
) -> Result<(), ApiError> {
    let Some(key) = caller else { return Ok(()) };
    if let Some(own) = key.tenant() {
        let is_other = spec.tenant.as_ref().is_some_and(|tenant| tenant != own);
        if is_other && !key.is_admin() {
            let message = format!("tenant: the API key is for {own:?} only; leave tenant out");
            return Err(ApiError::forbidden("tenant", message));
        }
        spec.tenant.get_or_insert_with(|| own.clone());
    }
    let highest = key.max_priority();
    match spec.priority {
        // The most urgent class is the least.
        Some(class) if class < highest && !key.is_admin() => {
            let field = if common.priority.is_some() { "priority" } else { "service_tier" };
            let (class, highest) = (class.name(), highest.name());
            let message = format!("{field}: the API key may ask for {highest:?} at most, not for {class:?}");
            Err(ApiError::forbidden(field, message))
        }
        Some(_) => Ok(()),
        None => {
            let usual = key.priority().unwrap_or_else(|| submitter.default_class(spec.tenant.as_deref()));
            spec.priority = Some(if key.is_admin() { usual } else { usual.max(highest) });
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cbrs_core::policy::{Class, PolicyConfig, TenantLimits};
    use cbrs_core::{Scheduler, SchedulerConfig};
    use hyper::StatusCode;

    use super::*;

    /// An engine whose tenant "gold" is interactive if nothing else is said.
    fn engine() -> Scheduler {
        let gold = TenantLimits { priority: Some(Class::Interactive), ..TenantLimits::default() };
        let rules = Some(PolicyConfig { tenants: [(Arc::from("gold"), gold)].into(), ..PolicyConfig::fair() });
        Scheduler::new(SchedulerConfig { rules, ..SchedulerConfig::default() }).expect("it is valid")
    }

    type Claimed = Result<(Option<String>, Option<Class>), ApiError>;

    fn claimed(key: &ApiKey, tenant: Option<&str>, priority: Option<Class>) -> Claimed {
        let mut spec = RequestSpec { tenant: tenant.map(Arc::from), priority, ..RequestSpec::new(vec![1]) };
        claim(Some(key), &mut spec, &Common::default(), &engine().submitter())?;
        Ok((spec.tenant.map(|tenant| tenant.to_string()), spec.priority))
    }

    fn gold() -> ApiKey {
        ApiKey::new("gold-1", ApiKey::digest(b"x")).with_tenant("gold")
    }

    #[test]
    fn a_request_gets_the_tenant_and_the_class_of_its_key() {
        let at_most = |highest, usual| gold().with_priority(highest, usual);
        let own = |class| (Some("gold".to_owned()), Some(class));
        let get = |key: &ApiKey| claimed(key, None, None).expect("it claims nothing");
        assert_eq!(get(&gold()), own(Class::Interactive), "the tenant's own");
        assert_eq!(get(&at_most(Class::Standard, None)), own(Class::Standard), "no more than the key may have");
        assert_eq!(get(&at_most(Class::Interactive, Some(Class::Batch))), own(Class::Batch), "the key's own");
        assert_eq!(claimed(&gold(), Some("gold"), None).expect("it is its own"), own(Class::Interactive));
        let less = claimed(&at_most(Class::Standard, None), None, Some(Class::Batch)).expect("less may be asked for");
        assert_eq!(less, own(Class::Batch));
    }

    #[test]
    fn another_tenant_and_a_higher_class_are_refused_by_name() {
        let key = gold().with_priority(Class::Standard, None);
        for (tenant, priority) in [(Some("silver"), None), (Some(""), None), (None, Some(Class::Interactive))] {
            let error = claimed(&key, tenant, priority).expect_err("it is not the key's");
            assert_eq!(error.status, StatusCode::FORBIDDEN);
        }
    }

    #[test]
    fn all_rights_are_all_rights() {
        let key = gold().with_priority(Class::Batch, None).with_admin();
        let other = claimed(&key, Some("silver"), Some(Class::Interactive)).expect("it may do everything");
        assert_eq!(other, (Some("silver".to_owned()), Some(Class::Interactive)));
        let free = ApiKey::new("root", ApiKey::digest(b"y")).with_admin();
        assert_eq!(claimed(&free, None, None).expect("it claims nothing"), (None, Some(Class::Standard)));
    }
}
