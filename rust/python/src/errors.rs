//! The exception classes, and the one match that turns each refusal of the core into its exception.

use std::path::Path;

use cbrs_core::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

create_exception!(cbrs.errors, CbrsError, PyException, "Base of every error that cbrs raises.");
create_exception!(
    cbrs.errors,
    OverloadedError,
    CbrsError,
    "The request was refused because of load, a rate or a deadline. `retry_after_s` says after how many seconds to try again \
     (None = that does not help: the deadline is too short whatever waits), `reason` what was short: \"queue\", \"rate\" or \"deadline\"."
);
create_exception!(cbrs.errors, DeadlineExceededError, CbrsError, "The deadline of a request passed before it ended.");
create_exception!(cbrs.errors, EngineClosedError, CbrsError, "The engine was closed, or belongs to another process.");
create_exception!(cbrs.errors, EngineDeadError, CbrsError, "The engine broke and cannot go on; create a new one.");
create_exception!(
    cbrs.errors,
    ModelLoadError,
    CbrsError,
    "A model cannot be loaded. `file` and `field` say what is wrong where."
);

/// Makes the exception class `cbrs.errors.<name>` with several bases, which `create_exception!` cannot.
fn class_with_bases(py: Python<'_>, name: &str, doc: &str, bases: &Bound<'_, PyTuple>) -> PyResult<Py<PyType>> {
    let namespace = PyDict::new(py);
    namespace.set_item("__module__", "cbrs.errors")?;
    namespace.set_item("__doc__", doc)?;
    let class = py.get_type::<PyType>().call1((name, bases, namespace))?;
    Ok(class.cast_into::<PyType>()?.unbind())
}

/// `InvalidRequestError(CbrsError, ValueError)`.
pub(crate) fn invalid_request_class(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "A request parameter is wrong. `param` names it (None = the request as a whole).";
    let make = || class_with_bases(py, "InvalidRequestError", doc, &cbrs_error_and_value_error(py)?);
    Ok(CLASS.get_or_try_init(py, make)?.bind(py).clone())
}

/// `PromptTooLongError(InvalidRequestError)`.
pub(crate) fn prompt_too_long_class(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "Prompt plus output exceed max_model_len.";
    let make = || class_with_bases(py, "PromptTooLongError", doc, &PyTuple::new(py, [invalid_request_class(py)?])?);
    Ok(CLASS.get_or_try_init(py, make)?.bind(py).clone())
}

/// `StepError(CbrsError, ValueError)`.
pub(crate) fn step_error_class(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "step() or fail() got the wrong result, or another step was running; nothing changed.";
    let make = || class_with_bases(py, "StepError", doc, &cbrs_error_and_value_error(py)?);
    Ok(CLASS.get_or_try_init(py, make)?.bind(py).clone())
}

fn cbrs_error_and_value_error(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, [py.get_type::<CbrsError>(), py.get_type::<PyValueError>()])
}

/// Turns a refusal into the exception that users catch.
pub(crate) fn to_py(error: &Error) -> PyErr {
    Python::attach(|py| to_py_attached(py, error).unwrap_or_else(|failure| failure))
}

fn to_py_attached(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let message = error.to_string();
    Ok(match error {
        Error::InvalidConfig { .. }
        | Error::InvalidNumber { .. }
        | Error::UnknownName { .. }
        | Error::UnknownPolicy { .. }
        | Error::OutOfMemory { .. } => PyValueError::new_err(message),
        Error::QueueFull { .. }
        | Error::QueuedTokensFull { .. }
        | Error::TenantQueueFull { .. }
        | Error::TenantOverRate { .. }
        | Error::TooManyTenants { .. }
        | Error::QueueTooLong { .. }
        | Error::DeadlineUnattainable { .. } => {
            let err = OverloadedError::new_err(message);
            let reason = match error {
                Error::TenantOverRate { .. } | Error::TooManyTenants { .. } => "rate",
                Error::DeadlineUnattainable { .. } => "deadline",
                _ => "queue",
            };
            err.value(py).setattr("retry_after_s", error.retry_after_s())?;
            err.value(py).setattr("reason", reason)?;
            err
        }
        Error::Closed => EngineClosedError::new_err(message),
        Error::WrongStep { .. }
        | Error::NoBatchInFlight { .. }
        | Error::MissingResult { .. }
        | Error::ResultLength { .. }
        | Error::ResultToken { .. }
        | Error::ResultTokenStart { .. } => PyErr::from_type(step_error_class(py)?, message),
        Error::PromptTooLong { .. } => with_param(py, PyErr::from_type(prompt_too_long_class(py)?, message), error)?,
        Error::EmptyPrompt
        | Error::TokenOutOfVocabulary { .. }
        | Error::InvalidParameter { .. }
        | Error::AboveCap { .. }
        | Error::InvalidLength { .. }
        | Error::TooManyEntries { .. }
        | Error::ListTooLong { .. }
        | Error::UnusableParameter { .. }
        | Error::Unsupported { .. }
        | Error::BlockNotHeld { .. }
        | Error::Tokenizer { .. }
        | Error::ChatTemplate { .. } => with_param(py, PyErr::from_type(invalid_request_class(py)?, message), error)?,
    })
}

fn with_param(py: Python<'_>, err: PyErr, error: &Error) -> PyResult<PyErr> {
    err.value(py).setattr("param", param(error))?;
    Ok(err)
}

/// Name of the parameter that an error is about.
fn param(error: &Error) -> Option<&'static str> {
    match *error {
        Error::EmptyPrompt | Error::PromptTooLong { .. } | Error::ListTooLong { .. } => Some("prompt"),
        Error::TokenOutOfVocabulary { field: name, .. }
        | Error::InvalidParameter { name, .. }
        | Error::AboveCap { name, .. }
        | Error::InvalidLength { name, .. }
        | Error::TooManyEntries { name, .. }
        | Error::UnusableParameter { name, .. }
        | Error::Unsupported { name } => Some(name),
        Error::ChatTemplate { .. } => Some("messages"),
        _ => None,
    }
}

/// An `InvalidRequestError` about this parameter.
pub(crate) fn invalid_request(param: &'static str, error: &Error) -> PyErr {
    let make = |py: Python<'_>| {
        let err = PyErr::from_type(invalid_request_class(py)?, error.to_string());
        err.value(py).setattr("param", param).map(|()| err)
    };
    Python::attach(|py| make(py).unwrap_or_else(|failure| failure))
}

/// A `StepError` with this message.
pub(crate) fn step_error(py: Python<'_>, message: &str) -> PyErr {
    step_error_class(py).map_or_else(|failure| failure, |class| PyErr::from_type(class, message.to_owned()))
}

/// A `ModelLoadError` that names the file and the field at fault.
pub(crate) fn model_load_error(message: String, file: &Path, field: &str) -> PyErr {
    Python::attach(|py| {
        let err = ModelLoadError::new_err(message);
        let value = err.value(py);
        let named = value.setattr("file", file.to_string_lossy()).and_then(|()| value.setattr("field", field));
        named.map_or_else(|failure| failure, |()| err)
    })
}
