//! `HttpServer` as a Python class; everything is done by `cbrs_server`.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use cbrs_server::{EngineHandle, Keyring, Limits, LogFormat, Server, ServerConfig, Settings};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::api_key::ApiKey;
use crate::log_writer::LogWriter;
use crate::text::{OutputProcessor, Tokenizer};

/// An OpenAI-compatible HTTP server in front of a scheduler, on threads of its own that never run Python.
///
/// Somebody has to step the scheduler of `processor`. `port` 0 is one that is free; the first of `served_model_names` stands in
/// answers. With `api_keys` all but `/health` and `/ready` needs one of them, with `open_metrics` not `/metrics` and `/stats` either; None lets
/// everybody do everything. On loopback the `Host` header has to be a name of it or one of `allowed_hosts`. `settings` is what `/version`
/// tells: JSON of the engine's settings, of what keys without all rights see of them, and of the server's. `limits_json` has the limits that
/// are not the default. `access_log` ("text" or "json") writes a line for each request to the standard error output, by `log_writer` if there
/// is one. Raises `ValueError` for an unusable limit or address, one that is not loopback without keys or `allow_public`, and unusable keys,
/// and `OSError` if the address cannot be had.
#[pyclass(frozen, module = "cbrs")]
#[derive(Debug)]
pub(crate) struct HttpServer {
    inner: Server,
}

#[pymethods]
impl HttpServer {
    #[new]
    #[pyo3(signature = (processor, tokenizer=None, *, host="127.0.0.1", port=0, served_model_names, worker_threads=None,
        allow_public=false, api_keys=None, open_metrics=false, allowed_hosts=None, settings=None, limits_json=None, access_log=None,
        log_writer=None))]
    #[allow(clippy::too_many_arguments)] // keyword arguments of Python
    fn new(
        py: Python<'_>,
        processor: &Bound<'_, OutputProcessor>,
        tokenizer: Option<&Bound<'_, Tokenizer>>,
        host: &str,
        port: u16,
        served_model_names: Vec<String>,
        worker_threads: Option<usize>,
        allow_public: bool,
        api_keys: Option<Vec<Py<ApiKey>>>,
        open_metrics: bool,
        allowed_hosts: Option<Vec<String>>,
        settings: Option<(String, String, String)>,
        limits_json: Option<&str>,
        access_log: Option<&str>,
        log_writer: Option<&Bound<'_, LogWriter>>,
    ) -> PyResult<Self> {
        let access_log = access_log.map(log_format).transpose()?;
        let host: IpAddr = if host == "localhost" { "127.0.0.1" } else { host }
            .parse()
            .map_err(|_| PyValueError::new_err(format!("host is {host:?}, but must be an IP address or localhost")))?;
        if served_model_names.is_empty() {
            return Err(PyValueError::new_err("served_model_names is empty; give at least one name"));
        }
        let limits = limits_json.map(Limits::from_json).transpose().map_err(PyValueError::new_err)?;
        let default = ServerConfig::default();
        let config = ServerConfig {
            host,
            port,
            allow_public,
            served_model_names,
            keys: api_keys.map(keyring).transpose()?,
            has_open_metrics: open_metrics,
            allowed_hosts: allowed_hosts.unwrap_or_default(),
            settings: settings.map(read_settings).unwrap_or_default(),
            access_log,
            log_writer: log_writer.map(|writer| Arc::clone(&writer.get().inner)),
            worker_threads: worker_threads.unwrap_or(default.worker_threads),
            limits: limits.unwrap_or_default(),
            ..default
        };
        let engine = engine(processor.get(), tokenizer.map(Bound::get));
        let inner = py.detach(|| Server::start(engine, config)).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => {
                PyValueError::new_err(format!("{error}; give api_keys, or permit it by allow_public"))
            }
            _ => error.into(),
        })?;
        Ok(Self { inner })
    }

    /// The address it listens on.
    #[getter]
    fn host(&self) -> String {
        self.inner.address().ip().to_string()
    }

    /// The port it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.inner.address().port()
    }

    /// Requests and responses under way, until the last byte is with the system.
    #[getter]
    fn num_active(&self) -> usize {
        self.inner.num_active()
    }

    /// Threads that serve connections.
    #[getter]
    fn worker_threads(&self) -> usize {
        self.inner.worker_threads()
    }

    /// The limits in effect, as JSON.
    #[getter]
    fn limits_json(&self) -> String {
        self.inner.limits().to_json()
    }

    /// Puts other keys in force for requests that come from now on; those under way go on. Raises `ValueError` for unusable keys, and then
    /// the old ones stay.
    fn set_api_keys(&self, api_keys: Vec<Py<ApiKey>>) -> PyResult<()> {
        self.inner.set_keys(keyring(api_keys)?);
        Ok(())
    }

    /// Replaces what `/version` tells; as the constructor's `settings`.
    fn set_settings(&self, settings: (String, String, String)) {
        self.inner.set_settings(read_settings(settings));
    }

    /// Refuses new requests from now on; `/ready` says so. What is under way goes on.
    fn drain(&self) {
        self.inner.drain();
    }

    /// Waits until nothing is under way, at most `timeout_s` seconds; returns whether that is so.
    fn wait_idle(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        Ok(py.detach(|| self.inner.wait_idle(timeout)))
    }

    /// Ends every request that is under way; streams end with an error event.
    fn cancel_all(&self, py: Python<'_>) {
        py.detach(|| self.inner.cancel_all());
    }

    /// Closes the socket and all connections and joins the threads. Closing twice does no harm.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// A time that Python gave under this name.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{name} is {value}, but must be a number of seconds")))
}

fn keyring(keys: Vec<Py<ApiKey>>) -> PyResult<Keyring> {
    Keyring::new(keys.into_iter().map(|key| key.get().inner.clone()).collect()).map_err(PyValueError::new_err)
}

fn read_settings((engine, engine_for_tenants, server): (String, String, String)) -> Settings {
    Settings { engine, engine_for_tenants, server }
}

fn log_format(name: &str) -> PyResult<LogFormat> {
    match name {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(PyValueError::new_err(format!("access_log is {name:?}, but must be \"text\", \"json\" or None"))),
    }
}

fn engine(processor: &OutputProcessor, tokenizer: Option<&Tokenizer>) -> EngineHandle {
    let scheduler = processor.scheduler().get();
    EngineHandle {
        processor: Arc::clone(processor.inner()),
        submitter: scheduler.submitter(),
        tokenizer: tokenizer.map(|tokenizer| tokenizer.inner().clone()),
        template: tokenizer.and_then(|tokenizer| tokenizer.template().cloned()),
        clock: scheduler.clock(),
    }
}
