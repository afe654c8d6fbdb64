//! The threads that run work items.
//!
//! Invariants:
//! 1. The calling thread works too: a pool of `n` starts `n - 1` threads, and a pool of 1 none.
//! 2. Threads sleep while there is no work, and are joined when the pool is dropped.
//! 3. Each item runs exactly once; which thread runs it does not show in any result.
//! 4. After a fork the child has no such threads: it gets an error instead of waiting for them for ever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Largest number of threads of a pool.
pub const MAX_THREADS: usize = 1024;

/// A fixed set of sleeping threads.
#[derive(Debug)]
pub struct Pool {
    /// `None` if the calling thread is the only one.
    workers: Option<ThreadPool>,
    handles: Vec<JoinHandle<()>>,
    num_threads: usize,
    owner: u32,
}

impl Pool {
    /// Starts `num_threads - 1` threads.
    ///
    /// # Errors
    /// [`Error::NumThreads`], [`Error::Threads`].
    pub fn new(num_threads: usize) -> Result<Self> {
        if !(1..=MAX_THREADS).contains(&num_threads) {
            return Err(Error::NumThreads { num_threads, max: MAX_THREADS });
        }
        let mut handles = Vec::new();
        let workers = if num_threads == 1 {
            None
        } else {
            let built = ThreadPoolBuilder::new()
                .num_threads(num_threads - 1)
                .spawn_handler(|thread| {
                    let name = format!("cbrs-cpu-{}", thread.index());
                    let builder = std::thread::Builder::new().name(name);
                    handles.push(builder.spawn(|| thread.run())?);
                    Ok(())
                })
                .build();
            Some(built.map_err(|error| Error::Threads { num_threads, source: std::io::Error::other(error) })?)
        };
        Ok(Self { workers, handles, num_threads, owner: std::process::id() })
    }

    /// Threads that work on a call, the calling one included.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Runs `work` for each index below `num_items`, on all threads if `parallel`, else on the calling one.
    ///
    /// `state` is made once by each thread that takes part. Items are handed out in ascending order.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn for_each<S>(
        &self,
        num_items: usize,
        parallel: bool,
        state: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, usize) + Sync,
    ) -> Result<()> {
        if self.owner != std::process::id() {
            return Err(Error::Forked { owner: self.owner });
        }
        let next = AtomicUsize::new(0);
        // Relaxed: the counter only hands out indices; the end of the scope orders the writes of the items
        // before the return of this function.
        let claim = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&item| item < num_items);
        let drain = || {
            let Some(first) = claim() else { return };
            let mut state = state();
            let mut item = Some(first);
            while let Some(index) = item {
                work(&mut state, index);
                item = claim();
            }
        };
        match &self.workers {
            Some(workers) if parallel && num_items > 1 => workers.in_place_scope(|scope| {
                for _ in 1..self.num_threads.min(num_items) {
                    scope.spawn(|_| drain());
                }
                drain();
            }),
            _ => drain(),
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let workers = self.workers.take();
        let handles = std::mem::take(&mut self.handles);
        if self.owner != std::process::id() {
            // The threads do not exist here; ending or joining them would wait for ever.
            std::mem::forget((workers, handles));
            return;
        }
        drop(workers);
        for handle in handles {
            // A panic of a worker was already passed on to the caller of `for_each`.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_runs_exactly_once_on_any_number_of_threads() {
        for num_threads in [1, 2, 5] {
            let pool = Pool::new(num_threads).expect("starts");
            for num_items in [0, 1, 2, 100] {
                let seen: Vec<_> = (0..num_items).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(
                    num_items,
                    true,
                    || (),
                    |(), item| {
                        seen[item].fetch_add(1, Ordering::Relaxed);
                    },
                )
                .expect("same process");
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_pool_of_no_threads_is_refused_with_the_limit() {
        let error = Pool::new(0).expect_err("nobody would work");
        assert_eq!(error.to_string(), "num_threads must be 1..=1024, got 0");
        assert!(Pool::new(MAX_THREADS + 1).is_err());
    }

    #[test]
    fn a_pool_of_another_process_refuses_instead_of_waiting() {
        let mut pool = Pool::new(1).expect("starts");
        pool.owner = pool.owner.wrapping_add(1);
        let result = pool.for_each(3, true, || (), |(), _| ());
        assert!(matches!(result, Err(Error::Forked { .. })));
    }
}
