//! What one HTTP request became, and who may end it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use cbrs_core::{RequestId, Submitter};
use cbrs_text::Prepared;
use tokio::sync::Notify;

use crate::access::{self, ApiKey};
use crate::error::ApiError;

/// The requests of the core that one HTTP request became, and its names. It has names before it has requests: its prompts are prepared first.
#[derive(Debug)]
pub(crate) struct Submitted {
    id: String,
    /// What the client calls it.
    name: Option<String>,
    /// The key that it was sent with, if keys are configured.
    owner: Option<Arc<ApiKey>>,
    state: Mutex<State>,
    /// Somebody asked for its end by one of its names.
    is_cancelled: AtomicBool,
    /// Told when its end is asked for.
    ending: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Absent while the prompts are prepared.
    requests: Option<Vec<RequestId>>,
    /// Its end was asked for, by whomever.
    is_ended: bool,
}

impl Submitted {
    pub(crate) fn new(id: String, name: Option<String>, owner: Option<Arc<ApiKey>>) -> Self {
        let (state, is_cancelled, ending) = (Mutex::default(), AtomicBool::new(false), Notify::new());
        Self { id, name, owner, state, is_cancelled, ending }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id that the response carries.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Whether a caller may see, cancel and read it; for others it does not exist.
    pub(crate) fn is_visible_to(&self, caller: Option<&ApiKey>) -> bool {
        access::may_see(caller, self.owner.as_deref())
    }

    /// All its names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.id.as_str()).chain(self.name.as_deref())
    }

    /// Submits what was prepared, unless its end was asked for meanwhile.
    ///
    /// # Errors
    /// 499 or 503 in that case, 503 if the engine takes nothing any more.
    pub(super) fn submit(&self, prepared: Prepared<'_>) -> Result<(), ApiError> {
        let ids = prepared.ids().collect();
        // A cancel comes before this or finds the requests.
        let mut state = self.lock();
        self.check_wanted(&state)?;
        prepared.submit()?;
        state.requests = Some(ids);
        Ok(())
    }

    /// Prepares a part of it, for as long as nobody has asked for its end.
    ///
    /// # Errors
    /// Those of `work`; 499 or 503 once its end was asked for.
    pub(crate) async fn prepare<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        let (mut ended, mut work) = (pin!(self.ending.notified()), pin!(work));
        let done = poll_fn(|cx| match ended.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => work.as_mut().poll(cx).map(Some),
        });
        let done = done.await;
        self.check_wanted(&self.lock())?;
        done.unwrap_or_else(|| Err(ApiError::failed("the request was ended")))
    }

    fn check_wanted(&self, state: &State) -> Result<(), ApiError> {
        match state.is_ended {
            false => Ok(()),
            true if self.is_cancelled() => Err(ApiError::cancelled()),
            true => Err(ApiError::unavailable("the server is shutting down")),
        }
    }

    /// Whether somebody asked for its end by one of its names.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Asks for the end of all because somebody wants it; returns whether one of them was live, or would have been submitted.
    pub(crate) fn cancel(&self, submitter: &Submitter) -> bool {
        let mut state = self.lock();
        if !state.is_ended {
            // Before the engine is told, for its answer is read with this.
            self.is_cancelled.store(true, Ordering::Relaxed);
        }
        self.ending.notify_one();
        state.end(submitter)
    }

    /// Asks for the end of all because the server ends, which is what their readers are told.
    pub(crate) fn cut(&self, submitter: &Submitter) {
        self.lock().end(submitter);
        self.ending.notify_one();
    }
}

impl State {
    /// Returns whether something was left to end.
    fn end(&mut self, submitter: &Submitter) -> bool {
        let was_ended = std::mem::replace(&mut self.is_ended, true);
        match &self.requests {
            None => !was_ended,
            Some(requests) => requests.iter().filter(|&&request| submitter.cancel(request)).count() > 0,
        }
    }
}
