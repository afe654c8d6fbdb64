//! The policy beyond first come, first served: classes, tenants, deadlines, latency targets, aging.
//!
//! | module | what it checks |
//! | --- | --- |
//! | `rig` | a scripted model, a clock |
//! | `checks` | what must hold after every step whatever the policy |
//! | `classes` | who is served and displaced by class; pauses of batch work |
//! | `aging` | who has waited long |
//! | `tenants` | shares, displacement, caps |
//! | `deadlines` | order, expiry |
//! | `door` | what is let in and refused, and when the refused may come back |
//! | `pace` | budgets in time |
//! | `memory` | admission by the estimated peak, victims, requests that do not fit |
//! | `misfits` | many tenants whose requests lack memory, and those who would fit behind them |
//! | `starvation` | the bounds on waits while others go on coming |
//! | `reload` | another policy while the engine runs |
//! | `trace` | what is written down about requests, and the times of steps |
//! | `random` | random policies and operations, each step checked by the rig |

#[path = "../behaviour/rng.rs"]
mod rng;

mod aging;
mod checks;
mod classes;
mod deadlines;
mod door;
mod memory;
mod misfits;
mod pace;
mod random;
mod reload;
mod rig;
mod starvation;
mod tenants;
mod trace;
