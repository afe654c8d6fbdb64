//! The threads that run work items.
//!
//! A call that needs several rounds of items (a decoder step has hundreds) opens a `Team`: between its rounds the
//! threads wait awake for a few microseconds before they sleep, because waking one costs as much as a round of a small
//! batch. The calling thread never waits for a thread to arrive: items go to whoever asks, so a thread that sleeps, or
//! that the system has given to another process, costs the round no more than the item it holds.
//!
//! Invariants:
//! 1. The calling thread works too: a pool of `n` starts `n - 1` threads, and a pool of 1 none.
//! 2. Outside a call all threads sleep; they are joined when the pool is dropped.
//! 3. Each item runs exactly once; which thread runs it does not show in any result.
//! 4. A round returns when all its items have ended, and only then is what it borrows given back. An item is claimed by
//!    a compare-exchange on one word that names the round as well, so a thread that comes late gets none of it.
//! 5. After a fork the child has no such threads: it gets an error instead of waiting for them for ever.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Largest number of threads of a pool.
pub const MAX_THREADS: usize = 1024;
/// How long a thread of a team waits awake for the next round: longer than the work that one thread does between rounds.
const IDLE_SPIN: Duration = Duration::from_micros(10);
/// How long the caller waits awake for the last items of a round: about as long as an item takes.
const END_SPIN: Duration = Duration::from_micros(25);
/// Looks at the word between two looks at the clock.
const SPINS_PER_CLOCK: usize = 32;

/// A fixed set of sleeping threads.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the call that works at the moment; others wait.
    turn: Mutex<()>,
    owner: u32,
}

/// What a round does: called with the number of the thread (the caller is 0) and that of the item.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A round, as the threads find it.
#[derive(Clone, Copy)]
struct Round {
    work: *const Work<'static>,
    num_items: usize,
}

/// State that the threads share. One cache line for what they write most.
#[repr(align(128))]
struct Shared {
    /// Round in the upper half, items of it that nobody has claimed in the lower one.
    unclaimed: AtomicU64,
    /// Items that have not ended.
    unfinished: AtomicUsize,
    /// Written by the caller while `unfinished` is 0; read by whoever has claimed an item.
    round: UnsafeCell<Option<Round>>,
    /// Whether a call is at work, so that waiting awake pays.
    is_open: AtomicBool,
    is_closing: AtomicBool,
    /// The caller, while it sleeps until the last item has ended.
    waiting_caller: Mutex<Option<Thread>>,
    is_caller_waiting: AtomicBool,
    sleepers: Vec<Sleeper>,
    /// What the first item that panicked said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A thread that may be asleep.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Sleeper {
    is_asleep: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

// SAFETY: `round` is the only part that is not `Sync` by itself. The caller writes it while no item is claimed or
// claimable (`unfinished` and the lower half of `unclaimed` are 0), and a thread reads it after it has claimed an item
// of that round, which orders the read after the write and keeps the caller from writing until the item has ended.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `round` is only followed under the rule above, by any thread.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("unclaimed", &self.unclaimed).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(num_workers: usize) -> Self {
        Self {
            unclaimed: AtomicU64::new(0),
            unfinished: AtomicUsize::new(0),
            round: UnsafeCell::new(None),
            is_open: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            waiting_caller: Mutex::new(None),
            is_caller_waiting: AtomicBool::new(false),
            sleepers: (0..num_workers).map(|_| Sleeper::default()).collect(),
            panic: Mutex::new(None),
        }
    }

    fn has_items(&self) -> bool {
        self.unclaimed.load(Ordering::Acquire) & u64::from(u32::MAX) > 0
    }

    /// Claims an item and returns it with its round.
    fn claim(&self) -> Option<(Round, usize)> {
        let mut word = self.unclaimed.load(Ordering::Acquire);
        loop {
            let left = (word & u64::from(u32::MAX)) as usize;
            if left == 0 {
                return None;
            }
            match self.unclaimed.compare_exchange_weak(word, word - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: this thread holds an item, so the caller does not write the round.
                    let round = unsafe { *self.round.get() }?;
                    return Some((round, round.num_items - left));
                }
                Err(now) => word = now,
            }
        }
    }

    /// Runs items until none is left to claim.
    fn drain(&self, thread: usize) {
        while let Some((round, item)) = self.claim() {
            // SAFETY: the caller keeps what `work` borrows until the item has ended.
            let work = unsafe { &*round.work };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(thread, item))) {
                lock(&self.panic).get_or_insert(payload);
            }
            self.end_item();
        }
    }

    fn end_item(&self) {
        // Release: what the item wrote comes before the caller's return. SeqCst with `sleep_until_done`: either this
        // sees the caller waiting, or the caller sees the count of 0.
        if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
            && self.is_caller_waiting.load(Ordering::SeqCst)
            && let Some(caller) = lock(&self.waiting_caller).as_ref()
        {
            // Left in place: this thread may be late, and the caller already be waiting for the end of a later round.
            caller.unpark();
        }
    }

    fn is_done(&self) -> bool {
        self.unfinished.load(Ordering::SeqCst) == 0
    }

    /// Waits until all items have ended: awake for a moment, then asleep.
    fn wait_until_done(&self) {
        if spin_until(END_SPIN, || self.is_done()) {
            return;
        }
        *lock(&self.waiting_caller) = Some(std::thread::current());
        self.is_caller_waiting.store(true, Ordering::SeqCst);
        while !self.is_done() {
            std::thread::park();
        }
        self.is_caller_waiting.store(false, Ordering::SeqCst);
        lock(&self.waiting_caller).take();
    }

    /// Wakes at most `count` sleeping threads.
    fn wake(&self, count: usize) {
        // With the fence in `sleep`: either the sleeper is seen here, or it sees what was published before.
        fence(Ordering::SeqCst);
        let asleep = self.sleepers.iter().filter(|sleeper| sleeper.is_asleep.load(Ordering::Relaxed));
        for sleeper in asleep.take(count) {
            sleeper.is_asleep.store(false, Ordering::Relaxed);
            if let Some(thread) = lock(&sleeper.thread).as_ref() {
                thread.unpark();
            }
        }
    }

    fn sleep(&self, sleeper: &Sleeper) {
        sleeper.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while sleeper.is_asleep.load(Ordering::Relaxed) && !self.has_items() && !self.is_closing.load(Ordering::Acquire)
        {
            std::thread::park();
        }
        sleeper.is_asleep.store(false, Ordering::Relaxed);
    }

    /// Life of the thread with this number, 1 or more.
    fn serve(&self, thread: usize) {
        let sleeper = &self.sleepers[thread - 1];
        *lock(&sleeper.thread) = Some(std::thread::current());
        while !self.is_closing.load(Ordering::Acquire) {
            self.drain(thread);
            let is_idle = || !self.is_open.load(Ordering::Relaxed);
            if is_idle() || !spin_until(IDLE_SPIN, || self.has_items() || is_idle()) || !self.has_items() {
                self.sleep(sleeper);
            }
        }
    }
}

/// Waits awake until `is_true`, at most for `limit`, and tells whether it became so in time.
fn spin_until(limit: Duration, is_true: impl Fn() -> bool) -> bool {
    let mut started = None;
    loop {
        for _ in 0..SPINS_PER_CLOCK {
            if is_true() {
                return true;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() > limit {
            return is_true();
        }
    }
}

/// The pool's threads, lent to one call for its rounds.
#[derive(Debug)]
pub(crate) struct Team<'a> {
    shared: &'a Shared,
    num_threads: usize,
    _turn: MutexGuard<'a, ()>,
}

impl Team<'_> {
    /// Threads that may take part, the calling one included; their numbers are below this.
    pub(crate) fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Runs `work(thread, item)` for each item below `num_items`, on all threads if `parallel`, else on the calling one.
    ///
    /// Items are handed out in ascending order. A panic of an item is passed on after all others have ended.
    #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen the lifetime in the type")]
    pub(crate) fn run(&self, num_items: usize, parallel: bool, work: impl Fn(usize, usize) + Sync) {
        let is_countable = u32::try_from(num_items).is_ok();
        if !parallel || num_items <= 1 || self.num_threads == 1 || !is_countable {
            (0..num_items).for_each(|item| work(0, item));
            return;
        }
        let work: &Work<'_> = &work;
        // SAFETY: only the lifetime changes. The pointer is followed by claimed items only, and this function does not
        // return before all of them have ended: `drain` catches the panics of items, and nothing else here panics.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let shared = self.shared;
        // SAFETY: the turn is this call's and its last round has ended, so no thread reads or writes the round.
        unsafe { *shared.round.get() = Some(Round { work, num_items }) };
        shared.unfinished.store(num_items, Ordering::Relaxed);
        let number = (shared.unclaimed.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.unclaimed.store((number << 32) | num_items as u64, Ordering::Release);
        shared.wake(num_items - 1);
        shared.drain(0);
        shared.wait_until_done();
        if let Some(payload) = lock(&shared.panic).take() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        self.shared.is_open.store(false, Ordering::Relaxed);
    }
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
        let shared = Arc::new(Shared::new(num_threads - 1));
        // Dropped on an error, which joins the threads that were started.
        let mut pool = Self { shared, handles: Vec::new(), turn: Mutex::new(()), owner: std::process::id() };
        for thread in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cbrs-cpu-{thread}"));
            let handle = builder.spawn(move || shared.serve(thread));
            pool.handles.push(handle.map_err(|source| Error::Threads { num_threads, source })?);
        }
        Ok(pool)
    }

    /// Threads that work on a call, the calling one included.
    pub fn num_threads(&self) -> usize {
        self.shared.sleepers.len() + 1
    }

    /// Lends the threads to one call; a second caller waits here for its turn.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn team(&self) -> Result<Team<'_>> {
        if self.owner != std::process::id() {
            return Err(Error::Forked { owner: self.owner });
        }
        let turn = lock(&self.turn);
        self.shared.is_open.store(true, Ordering::Relaxed);
        Ok(Team { shared: &self.shared, num_threads: self.num_threads(), _turn: turn })
    }

    /// Runs one round of items, each with the state of its thread, which is made when the first one asks for it.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn for_each<S: Send>(
        &self,
        num_items: usize,
        parallel: bool,
        state: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, usize) + Sync,
    ) -> Result<()> {
        let team = self.team()?;
        let states: Vec<Mutex<Option<S>>> = (0..team.num_threads()).map(|_| Mutex::new(None)).collect();
        team.run(num_items, parallel, |thread, item| work(lock(&states[thread]).get_or_insert_with(&state), item));
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let handles = std::mem::take(&mut self.handles);
        if self.owner != std::process::id() {
            // The threads do not exist here; joining them would wait for ever.
            std::mem::forget(handles);
            return;
        }
        self.shared.is_closing.store(true, Ordering::Release);
        for handle in handles {
            handle.thread().unpark();
            // A panic of an item was already passed on to the caller.
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
                pool.team().expect("same process").run(num_items, true, |thread, item| {
                    assert!(thread < num_threads);
                    seen[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_round_sees_all_that_the_round_before_it_wrote() {
        let pool = Pool::new(4).expect("starts");
        let team = pool.team().expect("same process");
        let cells: Vec<_> = (0..37).map(|_| AtomicUsize::new(0)).collect();
        for round in 0..20_000 {
            // Written and read without order of their own: the round has to give it.
            let num_items = 1 + round % cells.len();
            team.run(num_items, true, |_, item| cells[item].store(round, Ordering::Relaxed));
            assert!(cells[..num_items].iter().all(|cell| cell.load(Ordering::Relaxed) == round));
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(3).expect("starts");
        let busy = AtomicBool::new(false);
        let rounds = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let team = pool.team().expect("same process");
                        assert!(!busy.swap(true, Ordering::AcqRel));
                        team.run(5, true, |_, _| {
                            rounds.fetch_add(1, Ordering::Relaxed);
                        });
                        busy.store(false, Ordering::Release);
                    }
                });
            }
        });
        assert_eq!(rounds.load(Ordering::Relaxed), 4 * 200 * 5);
    }

    #[test]
    fn a_panic_of_an_item_reaches_the_caller_and_the_pool_still_works() {
        let pool = Pool::new(3).expect("starts");
        let ended = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.team().expect("same process").run(50, true, |_, item| {
                assert!(item != 20, "item 20");
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert!(result.is_err());
        assert_eq!(ended.load(Ordering::Relaxed), 49);
        pool.team().expect("not poisoned").run(3, true, |_, _| {
            ended.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ended.load(Ordering::Relaxed), 52);
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
        assert!(matches!(pool.team(), Err(Error::Forked { .. })));
    }
}
