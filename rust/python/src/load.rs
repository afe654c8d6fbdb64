//! The load generator for Python: a configuration in, figures out, both as plain objects.

use cbrs_loadgen::{Config, Error, Progress, run};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::CbrsError;

fn to_py(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Client(_) => CbrsError::new_err(message),
        _ => PyValueError::new_err(message),
    }
}

/// Sends a load to a server and measures it. `config` has the fields of `cbrs_loadgen::Config`; the result
/// has those of its `Report`.
///
/// `on_progress` is called about twice a second, with a dict of `elapsed_s` (None during the warm-up),
/// `num_started`, `num_succeeded`, `num_failed`, `num_tokens` and `num_requests` (None if the duration decides);
/// what it raises ends the run and is raised here. Runs without the GIL; signals are handled as often.
///
/// Raises ValueError for a configuration, an address or a file that cannot be used. What goes wrong with single
/// requests is counted in the result.
#[pyfunction]
#[pyo3(signature = (config, on_progress=None))]
pub(crate) fn run_load<'py>(
    py: Python<'py>,
    config: &Bound<'py, PyDict>,
    on_progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let json = py.import("json")?;
    let text: String = json.call_method1("dumps", (config,))?.extract()?;
    let config = Config::from_json(&text).map_err(|error| to_py(&error))?;
    let on_progress = on_progress.map(Bound::unbind);
    let mut raised = None;
    let result = py.detach(|| {
        run(&config, |progress| {
            raised = Python::attach(|py| tell(py, on_progress.as_ref(), progress)).err();
            raised.is_none()
        })
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let report = result.map_err(|error| to_py(&error))?;
    json.call_method1("loads", (report.to_json(),))
}

fn tell(py: Python<'_>, on_progress: Option<&Py<PyAny>>, progress: &Progress) -> PyResult<()> {
    py.check_signals()?;
    let Some(on_progress) = on_progress else { return Ok(()) };
    let told = PyDict::new(py);
    told.set_item("elapsed_s", progress.elapsed_s)?;
    told.set_item("num_started", progress.num_started)?;
    told.set_item("num_succeeded", progress.num_succeeded)?;
    told.set_item("num_failed", progress.num_failed)?;
    told.set_item("num_tokens", progress.num_tokens)?;
    told.set_item("num_requests", progress.num_requests)?;
    on_progress.call1(py, (told,)).map(drop)
}
