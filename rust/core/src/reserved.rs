//! `Reserved`: requests that have passed the door and are not queued yet.
//!
//! Each holds its slot, so its id is known, and its reservation of the gate. Whoever drops it instead of submitting gives all of that back,
//! as if the requests had never come.

use crate::error::{Error, Result};
use crate::fault;
use crate::overload::terms::Times;
use crate::overload::{RateLimit, Reservation};
use crate::queue::PushError;
use crate::request::{RequestId, RequestSpec};
use crate::submit::{Control, Shared, Submitted};

/// Requests that were checked and for which there is room; `submit` queues them.
///
/// ```
/// use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig};
/// let scheduler = Scheduler::new(SchedulerConfig::default()).unwrap();
/// let submitter = scheduler.submitter();
/// let prompts = vec![vec![1, 2, 3], vec![4, 5]];
/// let reserved = submitter.reserve_list(&RequestSpec::default(), prompts.clone(), 0).unwrap();
/// assert_eq!((reserved.ids().count(), submitter.stats().num_accepted_requests), (2, 0));
/// reserved.submit().unwrap();
/// assert_eq!(submitter.stats().num_accepted_requests, 2);
/// drop(submitter.reserve_list(&RequestSpec::default(), prompts, 0));
/// assert_eq!(submitter.stats().num_waiting, 2, "what is dropped is given back");
/// ```
#[derive(Debug)]
pub struct Reserved<'a> {
    shared: &'a Shared,
    /// Rates that they were charged to.
    limits: [Option<RateLimit>; 2],
    /// Apart from the others, so that one alone needs no list.
    first: Option<Box<Submitted>>,
    #[expect(clippy::vec_box, reason = "the queue takes boxes")]
    rest: Vec<Box<Submitted>>,
}

impl<'a> Reserved<'a> {
    pub(crate) fn new(shared: &'a Shared, limits: [Option<RateLimit>; 2]) -> Self {
        Self { shared, limits, first: None, rest: Vec::new() }
    }

    /// Adds a request that has a reservation; if that fails, the reservation is still the caller's.
    pub(crate) fn add(
        &mut self,
        spec: RequestSpec,
        max_tokens: u32,
        reservation: Reservation,
        times: Times,
    ) -> Result<()> {
        fault::point("submit");
        let (root_hash, hashes) = self.shared.hash_prompt(&spec);
        let Some(id) = self.shared.slots.acquire() else {
            return Err(self.shared.queue_full(reservation.class));
        };
        let request = Box::new(Submitted { id, spec, max_tokens, reservation, times, root_hash, hashes });
        if self.first.is_none() {
            self.first = Some(request);
        } else {
            self.rest.push(request);
        }
        Ok(())
    }

    fn all(&self) -> impl Iterator<Item = &Submitted> + Clone {
        self.first.iter().chain(&self.rest).map(|request| &**request)
    }

    /// Ids of the requests, in their order.
    pub fn ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.all().map(|request| request.id)
    }

    /// Prompts, in their order, as far as they are kept.
    pub fn prompts(&self) -> impl Iterator<Item = &[i32]> + '_ {
        self.all().map(|request| &*request.spec.prompt_token_ids)
    }

    /// Queues them.
    ///
    /// # Errors
    /// `Closed` if the engine was closed meanwhile. Nothing stays behind.
    pub fn submit(mut self) -> Result<()> {
        let mut queued = Vec::new();
        let rest = std::mem::take(&mut self.rest);
        let Some(first) = self.first.take() else { return Ok(()) };
        let more = rest.len();
        let mut waiting = std::iter::once(first).chain(rest);
        while let Some(request) = waiting.next() {
            let id = request.id;
            if let Err((request, error)) = self.push(request) {
                // A closed engine cancels them by itself.
                for id in queued {
                    self.cancel(id);
                }
                self.first = Some(request);
                self.rest = waiting.collect();
                return Err(error);
            }
            if more > 0 {
                queued.push(id);
            }
        }
        self.shared.waker.wake();
        Ok(())
    }

    /// Queues the only one.
    pub(crate) fn submit_one(mut self) -> Result<RequestId> {
        let request = self.first.take().expect("one was added");
        let id = request.id;
        self.push(request).map_err(|(request, error)| {
            self.first = Some(request);
            error
        })?;
        self.shared.waker.wake();
        Ok(id)
    }

    fn push(&self, request: Box<Submitted>) -> Result<(), (Box<Submitted>, Error)> {
        let class = request.reservation.class;
        self.shared.queue.push(request).map_err(|refused| match refused {
            PushError::Full(request) => (request, self.shared.queue_full(class)),
            PushError::Closed(request) => (request, Error::Closed),
        })
    }

    fn cancel(&self, id: RequestId) {
        if self.shared.slots.request_cancel(id) {
            self.shared.controls.push(Control::Cancel(id));
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if self.first.is_none() {
            return;
        }
        // First, for who finds room at the gate is to find a slot.
        self.all().for_each(|request| self.shared.slots.release(request.id));
        self.shared.gate.give_back(self.limits, self.all().map(|request| &request.reservation));
    }
}
