//! API keys, and how one is found.
//!
//! What is presented is hashed, and its digest compared with that of each key, in the same time whatever they are: neither how much of a
//! guess is right nor which key it is can be told from the time. (The time depends on the length of what was presented, which is no secret.)

use std::fmt;
use std::sync::Arc;

use cbrs_core::policy::Class;
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

/// An API key, as its digest, and what it may do.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    name: Arc<str>,
    digest: [u8; 32],
    tenant: Option<Arc<str>>,
    max_priority: Class,
    priority: Option<Class>,
    is_admin: bool,
}

impl ApiKey {
    /// A key for any tenant and class, known by a name that is shown, and by the SHA-256 of its secret.
    pub fn new(name: &str, digest: [u8; 32]) -> Self {
        let (tenant, max_priority, priority) = (None, Class::Interactive, None);
        Self { name: Arc::from(name), digest, tenant, max_priority, priority, is_admin: false }
    }

    /// The digest of a secret.
    pub fn digest(secret: &[u8]) -> [u8; 32] {
        Sha256::digest(secret).into()
    }

    /// The same for the requests of one tenant only.
    #[must_use]
    pub fn with_tenant(self, tenant: &str) -> Self {
        Self { tenant: Some(Arc::from(tenant)), ..self }
    }

    /// The same with the most urgent class that it may ask for, and the class of its requests that name none.
    #[must_use]
    pub fn with_priority(self, max_priority: Class, priority: Option<Class>) -> Self {
        Self { max_priority, priority, ..self }
    }

    /// The same with all rights: it may claim any tenant and class, and sees, cancels and reads the requests of all.
    #[must_use]
    pub fn with_admin(self) -> Self {
        Self { is_admin: true, ..self }
    }

    /// What it is called where it is shown.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whose requests its requests are; none = whose they say.
    pub fn tenant(&self) -> Option<&Arc<str>> {
        self.tenant.as_ref()
    }

    /// The most urgent class that it may ask for.
    pub fn max_priority(&self) -> Class {
        self.max_priority
    }

    /// Class of its requests that name none, if that is not the tenant's.
    pub fn priority(&self) -> Option<Class> {
        self.priority
    }

    /// Whether it may do everything.
    pub fn is_admin(&self) -> bool {
        self.is_admin
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("name", &self.name).field("tenant", &self.tenant).finish_non_exhaustive()
    }
}

/// All keys of a server.
///
/// ```
/// use cbrs_server::{ApiKey, Keyring};
/// let alice = ApiKey::new("alice", ApiKey::digest(b"sk-alice"));
/// let keys = Keyring::new(vec![alice]).unwrap();
/// assert_eq!(keys.find(b"sk-alice").unwrap().name(), "alice");
/// assert!(keys.find(b"sk-alicf").is_none());
/// ```
#[derive(Debug, Clone)]
pub struct Keyring {
    keys: Arc<[Arc<ApiKey>]>,
}

impl Keyring {
    /// Makes a ring of these keys.
    ///
    /// # Errors
    /// What is wrong with them: there are none, a name is empty or comes twice, or a secret comes twice.
    pub fn new(keys: Vec<ApiKey>) -> Result<Self, String> {
        if keys.is_empty() {
            return Err("there is no API key; give at least one".to_owned());
        }
        for (index, key) in keys.iter().enumerate() {
            if key.name.is_empty() {
                return Err("an API key has an empty name".to_owned());
            }
            for other in &keys[..index] {
                if other.name == key.name {
                    return Err(format!("two API keys are called {:?}; give each a name of its own", key.name));
                }
                if other.digest == key.digest {
                    let (one, two) = (&other.name, &key.name);
                    return Err(format!("the API keys {one:?} and {two:?} have the same secret; give each its own"));
                }
            }
        }
        Ok(Self { keys: keys.into_iter().map(Arc::new).collect() })
    }

    /// Finds the key with this secret. All keys are compared, each in the same time.
    pub fn find(&self, secret: &[u8]) -> Option<&Arc<ApiKey>> {
        let digest = ApiKey::digest(secret);
        let mut found = u64::MAX;
        for (index, key) in self.keys.iter().enumerate() {
            found.conditional_assign(&(index as u64), key.digest.ct_eq(&digest));
        }
        self.keys.get(usize::try_from(found).unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, secret: &str) -> ApiKey {
        ApiKey::new(name, ApiKey::digest(secret.as_bytes()))
    }

    #[test]
    fn a_key_is_found_by_its_whole_secret_only() {
        let keys = Keyring::new(vec![key("a", "secret-a"), key("b", "secret-b"), key("c", "secret-c")]);
        let keys = keys.expect("they differ");
        for (secret, name) in [("secret-a", "a"), ("secret-b", "b"), ("secret-c", "c")] {
            assert_eq!(keys.find(secret.as_bytes()).expect("it is there").name(), name);
        }
        for secret in ["", "secret-", "secret-d", "secret-a ", "Secret-a", "secret-aa"] {
            assert!(keys.find(secret.as_bytes()).is_none(), "{secret}");
        }
        assert!(keys.find(&ApiKey::digest(b"secret-a")).is_none(), "a digest is no secret");
    }

    #[test]
    fn names_and_secrets_come_once() {
        let refused = |keys| Keyring::new(keys).expect_err("it is not unique");
        assert!(refused(vec![]).contains("no API key"));
        assert!(refused(vec![key("", "x")]).contains("empty name"));
        assert!(refused(vec![key("a", "x"), key("a", "y")]).contains("two API keys are called \"a\""));
        let same = refused(vec![key("a", "swordfish"), key("b", "swordfish")]);
        assert!(same.contains("same secret") && !same.contains("swordfish"), "{same}");
    }

    #[test]
    fn nothing_of_a_secret_is_shown() {
        let key = key("a", "swordfish").with_tenant("gold");
        let shown = format!("{key:?}");
        assert!(shown.contains("gold") && !shown.contains("digest") && !shown.contains("swordfish"), "{shown}");
    }
}
