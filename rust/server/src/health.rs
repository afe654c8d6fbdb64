//! Whether the engine makes progress.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cbrs_core::Submitter;

/// Time between two looks at the engine's counters.
const INTERVAL: Duration = Duration::from_secs(1);

/// Looks at the engine's counters from time to time.
#[derive(Debug)]
pub(crate) struct Health {
    submitter: Submitter,
    step_timeout: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    num_steps: u64,
    since: Instant,
}

impl Health {
    pub(crate) fn new(submitter: Submitter, step_timeout: Duration) -> Self {
        let seen = Mutex::new(Seen { num_steps: 0, since: Instant::now() });
        Self { submitter, step_timeout, seen }
    }

    /// Looks at the counters regularly, for ever.
    pub(crate) async fn watch(&self) {
        loop {
            // What is wrong is told to those who ask.
            let _ = self.check();
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Looks at the counters; returns what is wrong, if something is.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.submitter.is_closed() {
            return Err("the engine has stopped".to_owned());
        }
        let stats = self.submitter.stats();
        let has_work = stats.num_running > 0 || (stats.num_waiting > 0 && stats.is_paused == 0);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_work || seen.num_steps != stats.num_steps {
            *seen = Seen { num_steps: stats.num_steps, since: Instant::now() };
        }
        let stalled = seen.since.elapsed();
        if stalled > self.step_timeout {
            return Err(format!("the engine has work, but has finished no step for {} s", stalled.as_secs()));
        }
        Ok(())
    }
}
