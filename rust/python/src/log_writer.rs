//! `LogWriter` as a Python class; everything is done by `cbrs_server`.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::server::seconds;

/// Writes lines to the process's standard error output on a thread of its own: nobody who logs waits for a reader of the log.
///
/// While 1 MiB is pending, further texts are dropped and counted. The output is the one of the moment at which this is made. Raises `OSError`
/// if the system has no file or thread to give.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct LogWriter {
    pub(crate) inner: Arc<cbrs_server::LogWriter>,
}

#[pymethods]
impl LogWriter {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { inner: Arc::new(cbrs_server::LogWriter::to_stderr()?) })
    }

    /// Appends a text, which should end a line; never waits.
    fn write(&self, text: &str) {
        self.inner.write(text);
    }

    /// Waits until what was appended before is written, at most `timeout_s` seconds; returns whether that is so.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        Ok(py.detach(|| self.inner.flush(timeout)))
    }

    /// Texts that were dropped because nobody read them fast enough.
    #[getter]
    fn num_dropped(&self) -> u64 {
        self.inner.num_dropped()
    }
}
