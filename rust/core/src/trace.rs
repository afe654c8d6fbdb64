//! `Trace`: what the scheduler did with each request, for those who want to know. Off until the first reader asks for it.
//!
//! A ring of the last records, each a `Snapshot` that carries its own number. The engine thread overwrites the oldest; it waits for nobody
//! and does not know its readers. A reader that is too slow finds other numbers than it looked for, and counts what it missed.
//!
//! 1. Records come in the order of their numbers; what a reader gets is what was written under that number.
//! 2. A reader gets or counts as missed each record that was written since it was made.
//! 3. Nothing is written for a sequence that only decodes.

use std::sync::Arc;

use crate::request::RequestId;
use crate::snapshot::Snapshot;
use crate::sync::{AtomicU64, Ordering};

/// Records that a reader may be behind: 320 KiB.
const CAPACITY: usize = 8_192;

/// What happened to a choice of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceKind {
    /// It got a row; the tokens are those found in the prefix cache.
    Admitted = 0,
    /// It got a row again after a preemption; the tokens need not be computed again.
    Resumed = 1,
    /// A step has computed tokens of its prompt, or tokens that it had lost.
    Chunk = 2,
    /// It lost its row and its blocks; the tokens are those that it has to compute again unless they stay cached.
    Preempted = 3,
}

impl TraceKind {
    const ALL: [Self; 4] = [Self::Admitted, Self::Resumed, Self::Chunk, Self::Preempted];
}

/// Something that happened to a choice of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceRecord {
    /// Which request.
    pub request: RequestId,
    /// Which of its choices.
    pub choice: u8,
    /// What happened.
    pub kind: TraceKind,
    /// Time of the step, in nanoseconds on the scheduler's clock.
    pub time_ns: u64,
    /// How many tokens it was about.
    pub num_tokens: u32,
}

impl TraceRecord {
    fn to_numbers(self, number: u64) -> [u64; 4] {
        let what = u64::from(self.num_tokens) << 16 | u64::from(self.choice) << 8 | self.kind as u64;
        [number, self.request.as_u64(), self.time_ns, what]
    }

    fn from_numbers([_, request, time_ns, what]: [u64; 4]) -> Self {
        Self {
            request: RequestId::from_u64(request),
            choice: (what >> 8) as u8,
            kind: TraceKind::ALL[what as usize % TraceKind::ALL.len()],
            time_ns,
            num_tokens: (what >> 16) as u32,
        }
    }
}

/// The last records.
#[derive(Debug)]
pub struct Trace {
    slots: Box<[Snapshot<4>]>,
    /// Number of the next record.
    head: AtomicU64,
}

impl Trace {
    pub(crate) fn new() -> Self {
        Self::with_capacity(CAPACITY)
    }

    /// A trace of the last `capacity` records, at least one.
    #[doc(hidden)]
    pub fn with_capacity(capacity: usize) -> Self {
        let slots = (0..capacity.max(1)).map(|_| Snapshot::new([u64::MAX; 4])).collect();
        Self { slots, head: AtomicU64::new(0) }
    }

    fn slot(&self, number: u64) -> &Snapshot<4> {
        &self.slots[number as usize % self.slots.len()]
    }

    /// Writes a record. Never waits. Calls must not overlap.
    #[doc(hidden)]
    pub fn push(&self, record: TraceRecord) {
        let number = self.head.load(Ordering::Relaxed);
        self.slot(number).publish(record.to_numbers(number));
        // Release: a reader that sees this head sees the record, or a later one in its place.
        self.head.store(number + 1, Ordering::Release);
    }
}

/// Reads a trace from where it was made on.
#[derive(Debug)]
pub struct TraceReader {
    trace: Arc<Trace>,
    next: u64,
    num_missed: u64,
}

impl TraceReader {
    #[doc(hidden)]
    pub fn new(trace: Arc<Trace>) -> Self {
        let next = trace.head.load(Ordering::Acquire);
        Self { trace, next, num_missed: 0 }
    }

    /// Appends the records since the last call. Never waits.
    pub fn read(&mut self, records: &mut Vec<TraceRecord>) {
        let head = self.trace.head.load(Ordering::Acquire);
        let oldest = head.saturating_sub(self.trace.slots.len() as u64);
        self.num_missed += oldest.saturating_sub(self.next);
        for number in self.next.max(oldest)..head {
            match self.trace.slot(number).try_read() {
                Some(numbers) if numbers[0] == number => records.push(TraceRecord::from_numbers(numbers)),
                // Overwritten meanwhile.
                _ => self.num_missed += 1,
            }
        }
        self.next = head;
    }

    /// Records that were overwritten before they were read.
    pub fn num_missed(&self) -> u64 {
        self.num_missed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn record(number: u32) -> TraceRecord {
        let kind = TraceKind::ALL[number as usize % 4];
        let (request, time_ns) = (RequestId::from_u64(u64::MAX - u64::from(number)), u64::from(number) << 40);
        TraceRecord { request, choice: number as u8, kind, time_ns, num_tokens: u32::MAX - number }
    }

    fn read(reader: &mut TraceReader) -> Vec<TraceRecord> {
        let mut records = Vec::new();
        reader.read(&mut records);
        records
    }

    #[test]
    fn readers_get_what_was_written_since_they_were_made() {
        let trace = Arc::new(Trace::with_capacity(4));
        let mut first = TraceReader::new(Arc::clone(&trace));
        trace.push(record(0));
        let mut second = TraceReader::new(Arc::clone(&trace));
        trace.push(record(255));
        assert_eq!(read(&mut first), [record(0), record(255)]);
        assert_eq!(read(&mut second), [record(255)]);
        assert_eq!(read(&mut second), []);
    }

    #[test]
    fn a_slow_reader_gets_the_last_ones_and_counts_the_others() {
        let trace = Arc::new(Trace::with_capacity(4));
        let mut reader = TraceReader::new(Arc::clone(&trace));
        (0..11).for_each(|number| trace.push(record(number)));
        assert_eq!(read(&mut reader), [7, 8, 9, 10].map(record));
        assert_eq!(reader.num_missed(), 7);
    }
}
