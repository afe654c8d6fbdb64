//! What happened to each of the last requests: when it was submitted and admitted, what was computed, when it lost its place, how it ended.
//!
//! The core writes down what it does with a request (`cbrs_core::trace`); submission, first token and end are seen here. All of it is put
//! together whenever updates are delivered, so that nothing piles up, and when somebody asks.
//!
//! A request is entered before it is submitted, as soon as its ids are known: nothing that the core tells of it can be read before. No lock is
//! held while prompts are checked and hashed.

mod answer;
mod record;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cbrs_core::{RequestId, TraceReader, TraceRecord};
use cbrs_text::Update;

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

/// Where an HTTP request is entered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(u64);

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

    /// Enters a request that is about to be submitted: an id of the core for each prompt, and how many tokens it has.
    pub(crate) fn enter(
        &self,
        request: &Arc<Submitted>,
        now_ns: u64,
        prompts: impl Iterator<Item = (RequestId, usize)>,
    ) -> Place {
        let mut record = Record::new(Arc::clone(request), now_ns);
        let mut state = self.lock();
        let number = state.next_number();
        for (id, num_tokens) in prompts {
            let prompt = record.enter(id, num_tokens);
            state.places.insert(id.as_u64(), (number, prompt));
        }
        state.begin(record);
        Place(number)
    }

    /// Takes back what was not submitted after all.
    pub(crate) fn withdraw(&self, Place(number): Place) {
        let mut state = self.lock();
        let Some(record) = state.get_mut(number) else { return };
        for id in record.withdraw() {
            state.places.remove(&id.as_u64());
        }
        // Refusals in a row would push out what is remembered. Another may have been entered behind it; then it stays, untold.
        if number + 1 == state.next_number() {
            state.records.pop_back();
        }
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
        let is_wanted = |record: &&Record| {
            let submitted = record.submitted();
            record.is_submitted() && submitted.names().any(|known| known == name) && is_visible(submitted)
        };
        let mut found: Vec<_> = state.records.iter().rev().filter(is_wanted).take(MAX_FOUND).cloned().collect();
        found.reverse();
        found
    }
}

impl State {
    /// Number of the next record.
    fn next_number(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    /// Enters a record, in place of the oldest if there are enough.
    fn begin(&mut self, record: Record) {
        if self.records.len() == MAX_RECORDS
            && let Some(oldest) = self.records.pop_front()
        {
            self.first += 1;
            for id in oldest.requests() {
                self.places.remove(&id.as_u64());
            }
        }
        self.records.push_back(record);
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
        let num_missed = self.trace.num_missed();
        self.trace.read(&mut traced);
        let num_missed = self.trace.num_missed() - num_missed;
        if num_missed > 0 {
            // Whose they were, nobody knows.
            self.records.iter_mut().for_each(|record| record.miss(num_missed));
        }
        for written in traced.drain(..) {
            // Others may use the engine without a server.
            if let Some((record, prompt)) = self.find(written.request.as_u64()) {
                record.trace(prompt, &written);
            }
        }
        self.traced = traced;
    }
}

#[cfg(test)]
mod tests {
    use cbrs_core::trace::{Trace, TraceKind, TraceReader, TraceRecord};
    use serde_json::Value;

    use super::*;

    fn told(log: &EventLog) -> Vec<Value> {
        let write = |record: &Record| {
            let mut out = Vec::new();
            record.write_json(&mut out);
            serde_json::from_slice(&out).expect("it is JSON")
        };
        log.look_up("mine", |_| true).iter().map(write).collect()
    }

    #[test]
    fn events_that_were_missed_are_told_and_what_was_not_submitted_is_not() {
        let trace = Arc::new(Trace::with_capacity(4));
        let log = EventLog::new(TraceReader::new(Arc::clone(&trace)));
        let submitted = |id: &str| Arc::new(Submitted::new(id.to_owned(), Some("mine".to_owned()), None));
        let ids = [7, 8].map(RequestId::from_u64);
        log.enter(&submitted("a"), 0, std::iter::once((ids[0], 3)));
        let place = log.enter(&submitted("b"), 0, std::iter::once((ids[1], 3)));
        log.withdraw(place);
        let record = TraceRecord { request: ids[0], choice: 0, kind: TraceKind::Chunk, time_ns: 5, num_tokens: 2 };
        (0..10).for_each(|_| trace.push(record));
        trace.push(TraceRecord { request: ids[1], ..record });
        let told = told(&log);
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!((&told[0]["id"], &told[0]["num_missed_events"]), (&"a".into(), &7.into()));
        // Submitted, and three of the last four.
        assert_eq!(told[0]["prompts"][0]["events"].as_array().map(Vec::len), Some(4));
    }
}
