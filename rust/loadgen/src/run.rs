//! A run: threads that send, a thread that keeps the times of an open loop, and the caller's, which waits.
//!
//! Each sending thread has a runtime, connections and figures of its own, so that sending takes no
//! contended lock. All stop when the caller says so.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::arrivals::Arrivals;
use crate::config::Config;
use crate::connection::{Clock, Target};
use crate::error::{Error, Result};
use crate::limits::{raise_file_limit, thread_cpu_s};
use crate::recorder::Recorder;
use crate::report::{ClientShare, Report};
use crate::request::{Client, Counters, Exchange};
use crate::trace::read_trace;
use crate::workload::Workload;

const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// How soon the thread of an open loop sees that the run was stopped.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Clients that warm an open loop up.
const WARM_UP_CLIENTS: usize = 8;
/// Times beyond this are never reached; it keeps durations in range.
const MAX_TIME_S: f64 = 1e9;

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Seconds since the clock started; None during the warm-up.
    pub elapsed_s: Option<f64>,
    /// Requests started.
    pub num_started: u64,
    /// Requests that succeeded.
    pub num_succeeded: u64,
    /// Requests that failed.
    pub num_failed: u64,
    /// Tokens that came, those of requests in flight too.
    pub num_tokens: u64,
    /// Requests that there will be; None if the duration decides.
    pub num_requests: Option<u64>,
}

/// What all threads see.
struct Shared {
    config: Config,
    arrivals: Arrivals,
    workload: Workload,
    num_requests: Option<u64>,
    clock: Clock,
    counters: Counters,
    /// The warm-up's, which are in no figure.
    warm_up_counters: Counters,
    warm_up_index: AtomicU64,
    next_index: AtomicU64,
    is_stopped: AtomicBool,
}

#[derive(Clone, Copy)]
enum Phase {
    WarmUp,
    Measure(Instant),
    Stop,
}

/// A request of an open loop.
struct Job {
    index: u64,
    due_ns: u64,
}

enum Message {
    Warm,
    Done(Box<Recorder>, f64),
    /// The thread has ended, however.
    Ended,
}

/// Sends a load and measures it. `on_progress` is called about twice a second; the run ends early with
/// `Interrupted` if it returns false.
///
/// Raises the soft limit of open files of the process to the hard one.
///
/// # Errors
/// What [`Config::check`] refuses, an address or a file that cannot be used, and `Interrupted`. Failures
/// of single requests are counted in the report.
pub fn run(config: &Config, on_progress: impl FnMut(&Progress) -> bool) -> Result<Report> {
    config.check()?;
    let target = Arc::new(Target::new(config)?);
    let trace = config.trace.as_deref().map(read_trace).transpose()?;
    let (arrivals, num_requests) = Arrivals::new(config, trace.as_deref())?;
    let mut workload = Workload::new(config, trace)?;
    workload.prepare(num_requests);
    raise_file_limit();
    let shared = Arc::new(Shared {
        config: config.clone(),
        arrivals,
        workload,
        num_requests,
        clock: Clock::start(),
        counters: Counters::default(),
        warm_up_counters: Counters::default(),
        warm_up_index: AtomicU64::new(0),
        next_index: AtomicU64::new(0),
        is_stopped: AtomicBool::new(false),
    });
    // A client needs a thread of its own at most.
    let num_threads = match shared.arrivals {
        Arrivals::Closed(clients) => config.threads.min(clients),
        _ => config.threads,
    };
    let (phases, phase) = watch::channel(Phase::WarmUp);
    let (to_caller, messages) = channel();
    let (job_senders, jobs): (Vec<_>, Vec<_>) = (0..num_threads).map(|_| mpsc::unbounded_channel()).unzip();
    thread::scope(|scope| {
        for (index, jobs) in jobs.into_iter().enumerate() {
            let (shared, target, phase) = (Arc::clone(&shared), Arc::clone(&target), phase.clone());
            let num_clients = share_of(&shared.arrivals, index, num_threads);
            let ended = Ended(to_caller.clone());
            let serve = move || serve(&shared, target, num_clients, jobs, phase, &ended.0);
            if let Err(error) = thread::Builder::new().name(format!("load-{index}")).spawn_scoped(scope, serve) {
                phases.send_replace(Phase::Stop);
                return Err(Error::Client(error));
            }
        }
        drop(to_caller);
        let mut caller = Caller { shared: &shared, messages, num_threads, on_progress, start: None };
        let result = caller.warm_up().and_then(|()| {
            let start = Instant::now();
            caller.start = Some(start);
            phases.send_replace(Phase::Measure(start));
            let shared = &*shared;
            scope.spawn(move || keep_times(shared, start, &job_senders));
            caller.finish(start)
        });
        shared.is_stopped.store(true, Relaxed);
        phases.send_replace(Phase::Stop);
        result
    })
}

/// The calling thread: waits for the others and tells how far they are.
struct Caller<'run, F> {
    shared: &'run Shared,
    messages: Receiver<Message>,
    num_threads: usize,
    on_progress: F,
    start: Option<Instant>,
}

impl<F: FnMut(&Progress) -> bool> Caller<'_, F> {
    fn warm_up(&mut self) -> Result<()> {
        for _ in 0..self.num_threads {
            let Message::Warm = self.next()? else { return Err(died()) };
        }
        Ok(())
    }

    fn finish(&mut self, start: Instant) -> Result<Report> {
        let mut total = Recorder::default();
        let mut cpu_s = Vec::new();
        while cpu_s.len() < self.num_threads {
            match self.next()? {
                Message::Done(recorder, thread_cpu_s) => {
                    total.merge(&recorder);
                    cpu_s.push(thread_cpu_s);
                }
                // A thread that is done ends before the others are.
                Message::Ended if !cpu_s.is_empty() => {}
                Message::Warm | Message::Ended => return Err(died()),
            }
        }
        let elapsed_s = start.elapsed().as_secs_f64();
        let duration_s = total.end_ns.saturating_sub(self.shared.clock.at_ns(start)) as f64 / 1e9;
        let client = ClientShare {
            threads: self.num_threads,
            busiest_thread_cpu: cpu_s.iter().fold(0.0, |most: f64, &one| most.max(one)) / elapsed_s,
            total_cpu: cpu_s.iter().sum::<f64>() / elapsed_s,
        };
        Ok(Report::new(&total, &self.shared.counters, duration_s, client))
    }

    /// Waits for a message, and meanwhile tells the progress.
    fn next(&mut self) -> Result<Message> {
        loop {
            match self.messages.recv_timeout(PROGRESS_INTERVAL) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Disconnected) => return Err(died()),
                Err(RecvTimeoutError::Timeout) => {
                    let progress = self.progress();
                    if !(self.on_progress)(&progress) {
                        return Err(Error::Interrupted);
                    }
                }
            }
        }
    }

    fn progress(&self) -> Progress {
        let counters = if self.start.is_some() { &self.shared.counters } else { &self.shared.warm_up_counters };
        Progress {
            elapsed_s: self.start.map(|start| start.elapsed().as_secs_f64()),
            num_started: counters.started.load(Relaxed),
            num_succeeded: counters.succeeded.load(Relaxed),
            num_failed: counters.failed.load(Relaxed),
            num_tokens: counters.tokens.load(Relaxed),
            num_requests: self.shared.num_requests,
        }
    }
}

/// Tells the caller when a thread ends, even by a panic.
struct Ended(Sender<Message>);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.send(Message::Ended);
    }
}

fn died() -> Error {
    Error::Client(io::Error::other("one of its threads ended early"))
}

/// Clients of one thread; none in an open loop.
fn share_of(arrivals: &Arrivals, thread: usize, num_threads: usize) -> usize {
    match arrivals {
        Arrivals::Closed(clients) => clients / num_threads + usize::from(thread < clients % num_threads),
        _ => 0,
    }
}

/// A sending thread.
fn serve(
    shared: &Arc<Shared>,
    target: Arc<Target>,
    num_clients: usize,
    jobs: mpsc::UnboundedReceiver<Job>,
    mut phase: watch::Receiver<Phase>,
    to_caller: &Sender<Message>,
) {
    let Ok(runtime) = runtime::Builder::new_current_thread().enable_all().build() else { return };
    let client = Arc::new(Client::new(&shared.config, target, shared.clock));
    let mut stop = phase.clone();
    let work = async {
        warm_up(shared, &client, if num_clients > 0 { num_clients } else { WARM_UP_CLIENTS }).await;
        let _ = to_caller.send(Message::Warm);
        let measures = |phase: &Phase| matches!(phase, Phase::Measure(_));
        let Ok(Phase::Measure(start)) = phase.wait_for(measures).await.map(|phase| *phase) else { return };
        let cpu_before_s = thread_cpu_s();
        let recorder = Arc::new(Mutex::new(Recorder::default()));
        if num_clients > 0 {
            closed_loop(shared, &client, &recorder, num_clients, start).await;
        } else {
            open_loop(shared, &client, &recorder, jobs).await;
        }
        let recorder = std::mem::take(&mut *recorder.lock().unwrap_or_else(PoisonError::into_inner));
        let _ = to_caller.send(Message::Done(Box::new(recorder), thread_cpu_s() - cpu_before_s));
    };
    runtime.block_on(async {
        tokio::select! {
            () = work => {}
            _ = stop.wait_for(|phase| matches!(phase, Phase::Stop)) => {}
        }
    });
}

/// Sends this thread's part of the warm-up requests.
async fn warm_up(shared: &Arc<Shared>, client: &Arc<Client>, num_clients: usize) {
    let mut clients = JoinSet::new();
    for _ in 0..num_clients {
        let (shared, client) = (Arc::clone(shared), Arc::clone(client));
        clients.spawn(async move {
            let mut exchange = Exchange::default();
            loop {
                let index = shared.warm_up_index.fetch_add(1, Relaxed);
                if index >= shared.config.warmup {
                    return;
                }
                client.send(shared.workload.warm_up_body(index), &mut exchange, &shared.warm_up_counters).await;
            }
        });
    }
    clients.join_all().await;
}

async fn closed_loop(
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    recorder: &Arc<Mutex<Recorder>>,
    num_clients: usize,
    start: Instant,
) {
    let end = shared.config.duration_s.map(|duration_s| start + Duration::from_secs_f64(duration_s));
    let mut clients = JoinSet::new();
    for _ in 0..num_clients {
        let (shared, client, recorder) = (Arc::clone(shared), Arc::clone(client), Arc::clone(recorder));
        clients.spawn(async move {
            let mut exchange = Exchange::default();
            while end.is_none_or(|end| Instant::now() < end) {
                let index = shared.next_index.fetch_add(1, Relaxed);
                if shared.num_requests.is_some_and(|num_requests| index >= num_requests) {
                    return;
                }
                client.send(shared.workload.body(index), &mut exchange, &shared.counters).await;
                recorder.lock().unwrap_or_else(PoisonError::into_inner).record(&exchange);
            }
        });
    }
    clients.join_all().await;
}

async fn open_loop(
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    recorder: &Arc<Mutex<Recorder>>,
    mut jobs: mpsc::UnboundedReceiver<Job>,
) {
    // Closes when the last request has dropped its sender.
    let (in_flight, mut all_done) = mpsc::channel::<()>(1);
    while let Some(job) = jobs.recv().await {
        let (shared, client, recorder) = (Arc::clone(shared), Arc::clone(client), Arc::clone(recorder));
        let in_flight = in_flight.clone();
        tokio::spawn(async move {
            let mut exchange = Exchange::default();
            client.send(shared.workload.body(job.index), &mut exchange, &shared.counters).await;
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            recorder.lag.record(exchange.sent_ns.saturating_sub(job.due_ns));
            recorder.record(&exchange);
            drop(in_flight);
        });
    }
    drop(in_flight);
    let _ = all_done.recv().await;
}

/// Hands the requests of an open loop to the threads when they are due, in turn. Sleeps in a thread,
/// since the timer of the runtime has steps of a millisecond.
fn keep_times(shared: &Shared, start: Instant, threads: &[mpsc::UnboundedSender<Job>]) {
    let end_s = shared.config.duration_s.unwrap_or(MAX_TIME_S).min(MAX_TIME_S);
    let times = shared.arrivals.times_s(shared.config.seed).take_while(|&time_s| time_s < end_s);
    for (index, time_s) in (0..shared.num_requests.unwrap_or(u64::MAX)).zip(times) {
        let due = start + Duration::from_secs_f64(time_s);
        while let Some(rest) = due.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero()) {
            if shared.is_stopped.load(Relaxed) {
                return;
            }
            thread::sleep(rest.min(MAX_SLEEP));
        }
        let job = Job { index, due_ns: shared.clock.at_ns(due) };
        if shared.is_stopped.load(Relaxed) || threads[(index % threads.len() as u64) as usize].send(job).is_err() {
            return;
        }
    }
}
