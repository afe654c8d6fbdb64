//! Scheduling policy: who goes first, who is displaced, who is refused — as data, and as the small models that decisions rest on.
//!
//! The decisions themselves are the scheduler's (`scheduler/`) and the gate's (`overload/`).

pub mod config;
pub mod cost;
pub mod lengths;
pub mod peak;

pub use config::{Admission, Class, ClassLimits, Fairness, Order, PolicyConfig, TenantLimits, Victim};
