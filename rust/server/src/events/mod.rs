//! What happened to each of the last requests: when it was submitted and admitted, what was computed, when it lost its place, how it ended.
//!
//! The core writes down what it does with a request (`cbrs_core::trace`); submission, first token and end are seen here. All of it is put
//! together whenever updates are delivered, so that nothing piles up, and when somebody asks.
//!
//! A request is entered under the lock under which it is submitted: nothing that the core tells of it can be read before.

mod answer;
mod record;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cbrs_core::{RequestId, TraceReader, TraceRecord};
use cbrs_text::Update;

use crate::error::ApiError;
use crate::stream::Submitted;
pub(crate) use record::Record;

/// Requests of one name that are told at a time.
const MAX_FOUND: usize = 16;
/// Requests that are remembered, live or not.
const MAX_RECORDS: usize = 1_000;

/// The last requests.
#[derive(Debug)]
pub(crate) struct EventLog {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    records: VecDeque<Record>,
    /// Number of the first of them.
    first: u64,
    /// Record and prompt of each request of the core.
    places: HashMap<u64, (u64, usize), foldhash::fast::RandomState>,
    trace: TraceReader,
    /// Scratch.
    traced: Vec<TraceRecord>,
}

/// Where the prompts of one HTTP request are entered; it has a record from its first accepted prompt on.
#[derive(Debug, Default)]
pub(crate) struct Place(Option<u64>);

impl EventLog {
    pub(crate) fn new(trace: TraceReader) -> Self {
        let state = State {
            records: VecDeque::with_capacity(MAX_RECORDS),
            first: 0,
            places: HashMap::default(),
            trace,
            traced: Vec::new(),
        };
        Self { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between lock and unlock leaves at worst an event out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a prompt of `num_tokens` tokens with `submit` and enters it.
    ///
    /// # Errors
    /// Those of `submit`; nothing is entered then.
    pub(crate) fn submit(
        &self,
        place: &mut Place,
        request: &Arc<Submitted>,
        now_ns: u64,
        num_tokens: usize,
        submit: impl FnOnce() -> Result<RequestId, ApiError>,
    ) -> Result<RequestId, ApiError> {
        let mut state = self.lock();
        let id = submit()?;
        let number = *place.0.get_or_insert_with(|| state.begin(Record::new(Arc::clone(request), now_ns)));
        if let Some(record) = state.get_mut(number) {
            let prompt = record.enter(id, num_tokens);
            state.places.insert(id.as_u64(), (number, prompt));
        }
        Ok(id)
    }

    /// Notes what the core wrote down, and what these updates tell.
    pub(crate) fn note(&self, updates: &[Update]) {
        let mut state = self.lock();
        state.read_trace();
        for update in updates.iter().filter(|update| record::is_event(update)) {
            if let Some((record, prompt)) = state.find(update.request_id) {
                record.note(prompt, update);
            }
        }
    }

    /// The last requests of this name that `is_visible` lets through, oldest first. Who serves waits meanwhile, so there are not many, and
    /// they are written elsewhere.
    pub(crate) fn look_up(&self, name: &str, is_visible: impl Fn(&Submitted) -> bool) -> Vec<Record> {
        let mut state = self.lock();
        state.read_trace();
        let is_wanted =
            |record: &&Record| record.submitted().names().any(|known| known == name) && is_visible(record.submitted());
        let mut found: Vec<_> = state.records.iter().rev().filter(is_wanted).take(MAX_FOUND).cloned().collect();
        found.reverse();
        found
    }
}

impl State {
    /// Enters a record in place of the oldest, if there are enough; returns its number.
    fn begin(&mut self, record: Record) -> u64 {
        if self.records.len() == MAX_RECORDS
            && let Some(oldest) = self.records.pop_front()
        {
            self.first += 1;
            for id in oldest.requests() {
                self.places.remove(&id.as_u64());
            }
        }
        self.records.push_back(record);
        self.first + self.records.len() as u64 - 1
    }

    /// Absent if it was forgotten meanwhile.
    fn get_mut(&mut self, number: u64) -> Option<&mut Record> {
        self.records.get_mut(number.checked_sub(self.first)? as usize)
    }

    fn find(&mut self, request: u64) -> Option<(&mut Record, usize)> {
        let &(number, prompt) = self.places.get(&request)?;
        self.get_mut(number).map(|record| (record, prompt))
    }

    fn read_trace(&mut self) {
        let mut traced = std::mem::take(&mut self.traced);
        self.trace.read(&mut traced);
        for written in traced.drain(..) {
            // Others may use the engine without a server.
            if let Some((record, prompt)) = self.find(written.request.as_u64()) {
                record.trace(prompt, &written);
            }
        }
        self.traced = traced;
    }
}
