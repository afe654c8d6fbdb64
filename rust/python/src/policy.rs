//! The policy from Python: a name, a TOML file or a dict, and keywords that win over it; read into the core's `PolicyConfig`, and back.
//!
//! Decides which keys there are and of what kind their values are; the ranges are the core's. `settings` lists every key: what it does not
//! list is unknown.

use std::path::Path;
use std::sync::Arc;

use cbrs_core::policy::{Admission, Class, ClassLimits, Fairness, Order, PolicyConfig, TenantLimits, Victim};
use cbrs_core::{Error, Policy};
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyMapping, PyString};

use crate::arrays::{integer, number, wrong_type};
use crate::errors::to_py;

/// A built-in policy and what was changed of it.
pub(crate) struct GivenPolicy {
    base: Policy,
    rules: PolicyConfig,
    /// Names of the rules that were given a value.
    given: Vec<String>,
}

impl GivenPolicy {
    /// Reads the name of a built-in, the path of a `.toml` file, or a dict; None is "fcfs".
    pub(crate) fn read(policy: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(policy) = policy else { return Ok(Self::built_in(Policy::Fcfs)) };
        if policy.is_instance_of::<PyDict>() {
            return Self::from_table(policy);
        }
        let path = policy.py().import("os")?.call_method1("fspath", (policy,)).map_err(|_| {
            wrong_type("policy", "the name of a built-in policy, the path of a .toml file, or a dict", policy)
        })?;
        let path: String = path.extract().map_err(|_| wrong_type("policy", "a string or a path", policy))?;
        if Path::new(&path).extension().is_some_and(|extension| extension == "toml") {
            let table = load_toml(policy.py(), &path)?;
            return Self::from_table(&table).map_err(|err| prefixed(policy.py(), &format!("{path}: "), err));
        }
        Policy::from_name(&path).map(Self::built_in).map_err(|error| match error {
            Error::UnknownPolicy { .. } => {
                PyValueError::new_err(format!("{error}, or the path of a file that ends in .toml"))
            }
            _ => to_py(&error),
        })
    }

    fn built_in(base: Policy) -> Self {
        Self { base, rules: base.rules(), given: Vec::new() }
    }

    /// A table changes the built-in that its key `policy` names; without one, "fair".
    fn from_table(table: &Bound<'_, PyAny>) -> PyResult<Self> {
        let entries = entries(table, "policy")?;
        let base = match entries.iter().find(|(key, _)| key == "policy") {
            Some((key, name)) => Policy::from_name(&string(key, name)?).map_err(|error| to_py(&error))?,
            None => Policy::Fair,
        };
        let mut this = Self::built_in(base);
        for (key, value) in entries.iter().filter(|(key, _)| key != "policy") {
            if !this.set(key, value)? {
                let known = settings(table.py(), Policy::Fair, &this.rules)?;
                return Err(unknown_key(key, key, &known));
            }
        }
        Ok(this)
    }

    /// Reads keyword arguments, which win over what was read before; None leaves that in place.
    pub(crate) fn set_keywords(&mut self, function: &str, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        for (key, value) in keywords.into_iter().flatten() {
            let name = key.cast::<PyString>()?.to_str()?;
            let is_known = value.is_none() && settings(value.py(), Policy::Fair, &self.rules)?.contains(name)?;
            if !is_known && !self.set(name, &value)? {
                let message = format!("{function}() got an unexpected keyword argument '{name}'");
                return Err(PyTypeError::new_err(message));
            }
        }
        Ok(())
    }

    /// The rules that an engine is to have while it runs.
    pub(crate) fn finish_change(self) -> PyResult<PolicyConfig> {
        if self.base == Policy::Static {
            let message = "policy is \"static\", which an engine cannot get while it runs; start it again";
            return Err(PyValueError::new_err(message));
        }
        Ok(self.rules)
    }

    /// What the core is to be made with.
    pub(crate) fn finish(self) -> PyResult<(Policy, PolicyConfig)> {
        match self.given.first() {
            Some(name) if self.base == Policy::Static => Err(PyValueError::new_err(format!(
                "policy \"static\" has no rules, but {name} was given; leave it unset, or choose \"fcfs\" or \"fair\""
            ))),
            _ => Ok((self.base, self.rules)),
        }
    }

    /// Sets one rule; returns whether there is one of this name.
    fn set(&mut self, key: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let rules = &mut self.rules;
        match key {
            "fairness" => rules.fairness = named(key, value, Fairness::from_name)?,
            "order" => rules.order = named(key, value, Order::from_name)?,
            "admission" => rules.admission = named(key, value, Admission::from_name)?,
            "victim" => rules.victim = named(key, value, Victim::from_name)?,
            "max_overtakes" => rules.max_overtakes = count("max_overtakes", value, "in 0..=255")?,
            "max_preemptions" => rules.max_preemptions = count("max_preemptions", value, "in 0..=255")?,
            "max_prefill_interval" => {
                rules.max_prefill_interval = count("max_prefill_interval", value, "in 1..=1048576")?;
            }
            "max_batch_pause_steps" => {
                rules.max_batch_pause_steps = count("max_batch_pause_steps", value, "in 1..=1048576")?;
            }
            "aging_s" => rules.aging_s = number(value, key)?,
            "aged_share" => rules.aged_share = number(value, key)?,
            "target_itl_ms" => rules.target_itl_ms = optional(value, |value| number(value, key))?,
            "max_queue_s" => rules.max_queue_s = optional(value, |value| number(value, key))?,
            "classes" => read_classes(value, &mut rules.classes)?,
            "tenants" => read_tenants(value, rules)?,
            "default_tenant" => read_tenant(key, value, &mut rules.default_tenant)?,
            _ => return Ok(false),
        }
        self.given.push(key.to_owned());
        Ok(true)
    }
}

fn read_classes(value: &Bound<'_, PyAny>, classes: &mut [ClassLimits; 3]) -> PyResult<()> {
    let py = value.py();
    for (name, table) in entries(value, "classes")? {
        let place = format!("classes.{name}");
        let Ok(class) = Class::from_name(&name) else {
            let known = PyDict::new(py);
            Class::ALL.iter().try_for_each(|class| known.set_item(class.name(), py.None()))?;
            return Err(unknown_key(&name, &place, &known));
        };
        let limits = &mut classes[class as usize];
        let known = || class_settings(py, &ClassLimits::default());
        read_table(&place, &table, known, |key, value| set_class(limits, key, value))?;
        let mut alone = PolicyConfig::fair();
        alone.classes[0] = limits.clone();
        check(py, &place, &alone)?;
    }
    Ok(())
}

fn read_tenants(value: &Bound<'_, PyAny>, rules: &mut PolicyConfig) -> PyResult<()> {
    for (name, table) in entries(value, "tenants")? {
        let shown = if name.is_empty() { "\"\"" } else { &name };
        let limits = rules.tenants.entry(Arc::from(name.as_str())).or_default();
        read_tenant(&format!("tenants.{shown}"), &table, limits)?;
    }
    Ok(())
}

fn read_tenant(place: &str, table: &Bound<'_, PyAny>, limits: &mut TenantLimits) -> PyResult<()> {
    let py = table.py();
    let known = || tenant_settings(py, &TenantLimits::default());
    read_table(place, table, known, |key, value| set_tenant(limits, key, value))?;
    check(py, place, &PolicyConfig { default_tenant: limits.clone(), ..PolicyConfig::fair() })
}

/// The core's check of what stands at `place`, in a policy that is valid otherwise.
fn check(py: Python<'_>, place: &str, alone: &PolicyConfig) -> PyResult<()> {
    alone.validate().map_err(|error| prefixed(py, &format!("{place}."), config_error(&error)))
}

/// A refusal of the core that is about a setting: always a plain `ValueError`.
pub(crate) fn config_error(error: &Error) -> PyErr {
    match error {
        Error::UnusableParameter { .. } => PyValueError::new_err(error.to_string()),
        _ => to_py(error),
    }
}

fn set_class(limits: &mut ClassLimits, key: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match key {
        "target_itl_ms" => limits.target_itl_ms = optional(value, |value| number(value, key))?,
        "ttft_deadline_ms" => limits.ttft_deadline_ms = optional(value, |value| number(value, key))?,
        "deadline_ms" => limits.deadline_ms = optional(value, |value| number(value, key))?,
        "max_tokens" => limits.max_tokens = optional(value, |value| count("max_tokens", value, MAX_TOKENS))?,
        "max_num_seqs" => limits.max_num_seqs = optional(value, |value| count("max_num_seqs", value, MAX_NUM_SEQS))?,
        "queue_share" => limits.queue_share = number(value, key)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn set_tenant(limits: &mut TenantLimits, key: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match key {
        "weight" => limits.weight = number(value, key)?,
        "priority" => limits.priority = optional(value, |value| named(key, value, Class::from_name))?,
        "requests_per_min" => limits.requests_per_min = optional(value, |value| number(value, key))?,
        "tokens_per_min" => limits.tokens_per_min = optional(value, |value| number(value, key))?,
        "max_tokens" => limits.max_tokens = optional(value, |value| count("max_tokens", value, MAX_TOKENS))?,
        "max_num_seqs" => limits.max_num_seqs = optional(value, |value| count("max_num_seqs", value, MAX_NUM_SEQS))?,
        "target_itl_ms" => limits.target_itl_ms = optional(value, |value| number(value, key))?,
        "ttft_deadline_ms" => limits.ttft_deadline_ms = optional(value, |value| number(value, key))?,
        "deadline_ms" => limits.deadline_ms = optional(value, |value| number(value, key))?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// What a count beyond its type is told; within it, the core checks.
const MAX_TOKENS: &str = "in 1..=268435456";
const MAX_NUM_SEQS: &str = "in 1..=1048576";

/// The whole policy as a dict that `policy=` takes. `static` has no rules.
pub(crate) fn settings<'py>(py: Python<'py>, base: Policy, rules: &PolicyConfig) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("policy", base.name())?;
    if base == Policy::Static {
        return Ok(dict);
    }
    dict.set_item("fairness", rules.fairness.name())?;
    dict.set_item("order", rules.order.name())?;
    dict.set_item("admission", rules.admission.name())?;
    dict.set_item("victim", rules.victim.name())?;
    dict.set_item("max_overtakes", rules.max_overtakes)?;
    dict.set_item("max_preemptions", rules.max_preemptions)?;
    dict.set_item("max_prefill_interval", rules.max_prefill_interval)?;
    dict.set_item("max_batch_pause_steps", rules.max_batch_pause_steps)?;
    dict.set_item("aging_s", rules.aging_s)?;
    dict.set_item("aged_share", rules.aged_share)?;
    dict.set_item("target_itl_ms", rules.target_itl_ms)?;
    dict.set_item("max_queue_s", rules.max_queue_s)?;
    let classes = PyDict::new(py);
    for class in Class::ALL {
        classes.set_item(class.name(), class_settings(py, &rules.classes[class as usize])?)?;
    }
    dict.set_item("classes", classes)?;
    let tenants = PyDict::new(py);
    for (name, limits) in &rules.tenants {
        tenants.set_item(&**name, tenant_settings(py, limits)?)?;
    }
    dict.set_item("tenants", tenants)?;
    dict.set_item("default_tenant", tenant_settings(py, &rules.default_tenant)?)?;
    Ok(dict)
}

fn class_settings<'py>(py: Python<'py>, limits: &ClassLimits) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("target_itl_ms", limits.target_itl_ms)?;
    dict.set_item("ttft_deadline_ms", limits.ttft_deadline_ms)?;
    dict.set_item("deadline_ms", limits.deadline_ms)?;
    dict.set_item("max_tokens", limits.max_tokens)?;
    dict.set_item("max_num_seqs", limits.max_num_seqs)?;
    dict.set_item("queue_share", limits.queue_share)?;
    Ok(dict)
}

fn tenant_settings<'py>(py: Python<'py>, limits: &TenantLimits) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("weight", limits.weight)?;
    dict.set_item("priority", limits.priority.map(Class::name))?;
    dict.set_item("requests_per_min", limits.requests_per_min)?;
    dict.set_item("tokens_per_min", limits.tokens_per_min)?;
    dict.set_item("max_tokens", limits.max_tokens)?;
    dict.set_item("max_num_seqs", limits.max_num_seqs)?;
    dict.set_item("target_itl_ms", limits.target_itl_ms)?;
    dict.set_item("ttft_deadline_ms", limits.ttft_deadline_ms)?;
    dict.set_item("deadline_ms", limits.deadline_ms)?;
    Ok(dict)
}

/// Reads a table whose keys `set` knows; `known` lists them.
fn read_table<'py>(
    place: &str,
    table: &Bound<'py, PyAny>,
    known: impl Fn() -> PyResult<Bound<'py, PyDict>>,
    mut set: impl FnMut(&str, &Bound<'py, PyAny>) -> PyResult<bool>,
) -> PyResult<()> {
    for (key, value) in entries(table, place)? {
        let is_known = set(&key, &value).map_err(|err| prefixed(table.py(), &format!("{place}."), err))?;
        if !is_known {
            return Err(unknown_key(&key, &format!("{place}.{key}"), &known()?));
        }
    }
    Ok(())
}

/// The entries of a dict, or another mapping, with strings as keys.
fn entries<'py>(table: &Bound<'py, PyAny>, place: &str) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
    let table = table.cast::<PyMapping>().map_err(|_| wrong_type(place, "a dict", table))?;
    let entry = |item: Bound<'py, PyAny>| {
        let (key, value): (Bound<'py, PyAny>, Bound<'py, PyAny>) = item.extract()?;
        let name = key.cast::<PyString>().map_err(|_| wrong_type(&format!("a key of {place}"), "a string", &key))?;
        Ok((name.to_str()?.to_owned(), value))
    };
    table.items()?.iter().map(entry).collect()
}

/// Names the keys that come nearest, or all that there are.
fn unknown_key(key: &str, place: &str, known: &Bound<'_, PyDict>) -> PyErr {
    let nearest = || -> PyResult<(&str, Vec<String>)> {
        let difflib = known.py().import("difflib")?;
        let near: Vec<String> = difflib.call_method1("get_close_matches", (key, known.keys(), 3, 0.5))?.extract()?;
        if near.is_empty() { Ok(("there are", known.keys().extract()?)) } else { Ok(("did you mean", near)) }
    };
    match nearest() {
        Ok((intro, names)) => {
            let end = if intro == "did you mean" { "?" } else { "" };
            PyValueError::new_err(format!("{place} is no setting of the policy; {intro} {}{end}", names.join(", ")))
        }
        Err(failure) => failure,
    }
}

/// The same `ValueError` or `TypeError` with the place before its message; anything else stays as it is.
fn prefixed(py: Python<'_>, prefix: &str, err: PyErr) -> PyErr {
    let message = || format!("{prefix}{}", err.value(py));
    if err.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(message())
    } else if err.is_instance_of::<PyValueError>(py) {
        PyValueError::new_err(message())
    } else {
        err
    }
}

fn load_toml<'py>(py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyAny>> {
    let load = || {
        let file = py.import("io")?.call_method1("open", (path, "rb"))?;
        let table = py.import("tomllib")?.call_method1("load", (&file,));
        file.call_method0("close")?;
        table
    };
    load().map_err(|err| {
        let is_file_error = err.is_instance_of::<PyOSError>(py) || err.is_instance_of::<PyValueError>(py);
        if is_file_error {
            PyValueError::new_err(format!("the policy cannot be read from {path}: {}", err.value(py)))
        } else {
            err
        }
    })
}

/// Reads a value that may be absent.
fn optional<T>(value: &Bound<'_, PyAny>, read: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>) -> PyResult<Option<T>> {
    if value.is_none() { Ok(None) } else { read(value).map(Some) }
}

fn string(key: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(key, "a string", value))?;
    Ok(text.to_str()?.to_owned())
}

/// Reads the name of one of several values.
fn named<T>(key: &str, value: &Bound<'_, PyAny>, from_name: impl Fn(&str) -> Result<T, Error>) -> PyResult<T> {
    from_name(&string(key, value)?).map_err(|error| match error {
        Error::UnknownName { name, expected, .. } => {
            PyValueError::new_err(format!("{key} is {name:?}; choose one of {expected}"))
        }
        _ => to_py(&error),
    })
}

fn count<T: TryFrom<i64>>(name: &'static str, value: &Bound<'_, PyAny>, expected: &'static str) -> PyResult<T> {
    if value.is_instance_of::<PyBool>() {
        return Err(wrong_type(name, "an integer", value));
    }
    let value = integer(value, name)?;
    T::try_from(value).map_err(|_| to_py(&Error::InvalidConfig { field: name, value, expected }))
}
