//! `ApiKey` as a Python class. Python never hands over a secret, only its digest.

use cbrs_core::policy::Class;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::to_py;

/// An API key of `HttpServer`: its name, the SHA-256 of its secret (32 bytes), and what it may do.
///
/// Its requests are those of `tenant` (None: of the tenant that they name), of class `priority` if they name none (None: as the
/// policy says) and at most of class `max_priority`. `is_admin` may claim any tenant and class, and sees, cancels and reads the requests
/// of all. Raises `ValueError` for a digest of another size and an unknown class.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct ApiKey {
    pub(crate) inner: cbrs_server::ApiKey,
}

#[pymethods]
impl ApiKey {
    #[new]
    #[pyo3(signature = (name, digest, *, tenant=None, max_priority="interactive", priority=None, is_admin=false))]
    fn new(
        name: &str,
        digest: &[u8],
        tenant: Option<&str>,
        max_priority: &str,
        priority: Option<&str>,
        is_admin: bool,
    ) -> PyResult<Self> {
        let class = |name: &str| Class::from_name(name).map_err(|error| to_py(&error));
        let len = digest.len();
        let digest: [u8; 32] = digest
            .try_into()
            .map_err(|_| PyValueError::new_err(format!("digest has {len} bytes, but a SHA-256 has 32")))?;
        let mut inner = cbrs_server::ApiKey::new(name, digest)
            .with_priority(class(max_priority)?, priority.map(class).transpose()?);
        if let Some(tenant) = tenant {
            inner = inner.with_tenant(tenant);
        }
        Ok(Self { inner: if is_admin { inner.with_admin() } else { inner } })
    }

    /// What it is called where it is shown.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// Whose requests its requests are; None = whose they say.
    #[getter]
    fn tenant(&self) -> Option<&str> {
        self.inner.tenant().map(|tenant| &**tenant)
    }

    /// The most urgent class that it may ask for.
    #[getter]
    fn max_priority(&self) -> &'static str {
        self.inner.max_priority().name()
    }

    /// Class of its requests that name none; None = as the policy says.
    #[getter]
    fn priority(&self) -> Option<&'static str> {
        self.inner.priority().map(Class::name)
    }

    /// Whether it may do everything.
    #[getter]
    fn is_admin(&self) -> bool {
        self.inner.is_admin()
    }

    fn __repr__(&self) -> String {
        format!("ApiKey(name={:?})", self.inner.name())
    }
}
