//! The only PyO3 code of cbrs: classes, exceptions and array hand-over; no logic.

mod api_key;
mod arrays;
mod batch;
mod config;
mod cpu;
mod cpu_arrays;
mod cpu_decoder;
mod cpu_linear;
mod cpu_sampling;
mod errors;
mod load;
mod loading;
mod log_writer;
mod logprobs;
mod memory;
mod parameters;
mod policy;
mod row_tables;
mod scheduler;
mod server;
mod step_output;
mod step_result;
mod stepping;
mod text;
mod views;

use pyo3::prelude::*;

/// Makes the next passage of a point (see `cbrs_core::fault`) panic; for tests, absent from release builds.
#[cfg(debug_assertions)]
#[pyfunction]
fn arm_panic(point: &str) {
    cbrs_core::fault::arm(point);
}

/// Native module of cbrs; import it through the package.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::api_key::ApiKey;
    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::config::SchedulerConfig;
    #[pymodule_export]
    use crate::cpu::{CpuKernels, cpu_features};
    #[pymodule_export]
    use crate::cpu_decoder::{CpuDecoder, DecoderLayer};
    #[pymodule_export]
    use crate::cpu_linear::PackedLinear;
    #[pymodule_export]
    use crate::errors::{
        CbrsError, DeadlineExceededError, EngineClosedError, EngineDeadError, ModelLoadError, OverloadedError,
    };
    #[pymodule_export]
    use crate::load::run_load;
    #[pymodule_export]
    use crate::loading::{GgufFile, SafetensorsCheckpoint};
    #[pymodule_export]
    use crate::log_writer::LogWriter;
    #[pymodule_export]
    use crate::logprobs::Logprobs;
    #[pymodule_export]
    use crate::row_tables::NewRowTables;
    #[pymodule_export]
    use crate::scheduler::Scheduler;
    #[pymodule_export]
    use crate::server::HttpServer;
    #[pymodule_export]
    use crate::step_output::StepOutput;
    #[pymodule_export]
    use crate::step_result::StepResult;
    #[pymodule_export]
    use crate::text::{
        FinishedChoice, FinishedRequest, IncrementalDetokenizer, OutputChannel, OutputProcessor, Tokenizer, Update,
    };

    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        // Not by `add`, which would make it a public name.
        #[cfg(debug_assertions)]
        pyo3::types::PyAnyMethods::setattr(&**module, "_arm_panic", pyo3::wrap_pyfunction!(super::arm_panic, module)?)?;
        module.add("InvalidRequestError", crate::errors::invalid_request_class(py)?)?;
        module.add("PromptTooLongError", crate::errors::prompt_too_long_class(py)?)?;
        module.add("StepError", crate::errors::step_error_class(py)?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
