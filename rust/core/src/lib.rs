//! cbrs-core: the request queue, the token-budget scheduler and the block pool with its prefix cache.
//!
//! Knows neither Python nor tensors nor text, has no async runtime, and reads no clock: time is passed in.
//!
//! # One request's way
//!
//! 1. [`Submitter::submit`] (any thread): [`RequestSpec`] is checked, `AdmissionGate` reserves room, its prompt blocks are hashed, `SlotTable`
//!    gives it a [`RequestId`], and `RequestQueue` takes it (`submit.rs`, `admission.rs`, `reserved.rs`, `slots.rs`, `queue.rs`).
//! 2. [`Scheduler::step`] (engine thread): drains the queue and the control stack (`scheduler/control.rs`), commits the result of the last
//!    batch (`scheduler/commit.rs`, `decode.rs`), plans the next one (`scheduler/plan.rs`, `decode.rs`, `admit.rs`, `preempt.rs`) and fills a
//!    [`Batch`] (`scheduler/write.rs`, `batch.rs`).
//! 3. The caller runs the model on the batch's arrays and passes one token per sample to the next `step`.
//! 4. [`StepOutput`] tells what happened, in flat arrays; an [`OutputSink`] gets the same.
//!
//! Blocks belong to [`block::BlockPool`]; what a block contains, so that another request can use it, to `block/prefix.rs`.
//!
//! # Invariants
//!
//! A module that owns state names what holds for it. [`Scheduler::check_invariants`] is the same as code, and tests call it after every operation.

pub mod admission;
pub mod batch;
pub mod block;
pub mod config;
pub mod control;
pub mod error;
pub mod fault;
mod hash;
pub mod histogram;
pub mod logprobs;
mod memory;
pub mod overload;
pub mod policy;
pub mod queue;
pub mod request;
mod reserved;
mod row_tables;
pub mod sampling;
mod scheduler;
pub mod slots;
pub mod snapshot;
pub mod stats;
mod submit;
mod sync;
pub mod trace;
pub mod waker;

pub use batch::{Batch, BlockTableUpdates, OutputSink, StepOutput, StepResult};
pub use config::{Policy, SchedulerConfig};
pub use error::{Error, Result};
pub use logprobs::{LogprobMatrix, LogprobRows};
pub use overload::{ListError, RefusalReason};
pub use request::{FinishReason, RequestId, RequestSpec};
pub use reserved::Reserved;
pub use row_tables::NewRowTables;
pub use sampling::SamplingSpec;
pub use scheduler::{SamplingRows, Scheduler};
pub use stats::{Figure, Stats};
pub use submit::Submitter;
pub use trace::{TraceKind, TraceReader, TraceRecord};
