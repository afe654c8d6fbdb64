//! The way from the consumer to a reader that wants output as it comes: updates behind a file descriptor that is readable
//! while there are some, or behind a call that says so.
//!
//! 1. A byte is in the socket exactly while unread updates are there: one wake-up for all that comes before they are taken. A
//!    call comes as often.
//! 2. The consumer never waits for a reader: it appends under a lock that is held for a move of memory and one small write. It
//!    holds no lock of the channel while it calls.
//! 3. What an unread update says is never dropped, until `close`; then everything is, and live requests are cancelled.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cbrs_core::{Error, LogprobRows, Result};
use compact_str::CompactString;
use smallvec::SmallVec;

use super::Shared;
use super::choice::End;

/// Ids of tokens; those of one update need no memory of their own.
pub type TokenIds = SmallVec<[i32; 4]>;

/// What is new about one choice of a request. Times are nanoseconds on the engine's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// Id that the engine gave.
    pub request_id: u64,
    /// Number that the caller gave at submission.
    pub index: u64,
    /// Number of the choice.
    pub choice: u32,
    /// Text that may be shown from now on.
    pub text: CompactString,
    /// New tokens: one, or none if the choice has only ended; all of a choice that is told as a whole.
    pub token_ids: TokenIds,
    /// One row for each of `token_ids`; absent unless asked for.
    pub logprobs: Option<Box<LogprobRows>>,
    /// How the choice ended; absent if it goes on.
    pub end: Option<End>,
    /// The prompt, as far as it was not truncated; with the request's first update.
    pub prompt_token_ids: Option<Vec<i32>>,
    /// What was asked about each prompt token but the first; with the request's first update, if the prompt was read to its end.
    pub prompt_logprobs: Option<Box<LogprobRows>>,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub num_cached_tokens: usize,
    /// When the request was submitted.
    pub arrival_ns: u64,
    /// When it was first planned; absent if it ended while it waited.
    pub first_scheduled_ns: Option<u64>,
    /// When the first token of the choice came; absent if there is none.
    pub first_token_ns: Option<u64>,
    /// When this came.
    pub time_ns: u64,
    /// No update of this request will follow.
    pub is_last: bool,
}

/// Updates for one reader, such as an event loop; every processor may send to it.
///
/// Dropping it is `close`.
#[derive(Debug)]
pub struct OutputChannel {
    channel: Arc<Channel>,
    /// Process that made it: in a fork of it nothing will come, and the lock may be held for ever.
    process: u32,
}

#[derive(Debug)]
pub(super) struct Channel {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    updates: Vec<Update>,
    /// Absent once closed.
    signal: Option<Signal>,
    /// Those that have sent or may send here.
    processors: Vec<Weak<Shared>>,
}

/// How a reader learns that there is something to take.
enum Signal {
    Socket { reader: UnixStream, writer: UnixStream },
    Call(Arc<dyn Fn() + Send + Sync>),
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Socket { .. } => "Socket",
            Self::Call(_) => "Call",
        })
    }
}

impl OutputChannel {
    /// Makes an empty channel.
    ///
    /// # Errors
    /// What the operating system says if it has no file descriptors to give.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        Ok(Self::with_signal(Signal::Socket { reader, writer }))
    }

    /// Makes an empty channel that calls `wake` when there is something to take, once until it is taken.
    ///
    /// The consumer calls it, or whoever closes the processor: it must not wait for anything.
    pub fn with_wake(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self::with_signal(Signal::Call(Arc::new(wake)))
    }

    fn with_signal(signal: Signal) -> Self {
        let state = State { updates: Vec::new(), signal: Some(signal), processors: Vec::new() };
        Self { channel: Arc::new(Channel { state: Mutex::new(state) }), process: std::process::id() }
    }

    /// The file descriptor that is readable while there is something to take; absent after `close`, in a forked process, and of a channel
    /// that calls.
    ///
    /// It stays the channel's: wait for it, but do not read or close it.
    pub fn fileno(&self) -> Option<RawFd> {
        if self.is_fork() {
            return None;
        }
        match &self.channel.lock().signal {
            Some(Signal::Socket { reader, .. }) => Some(reader.as_raw_fd()),
            Some(Signal::Call(_)) | None => None,
        }
    }

    /// Takes all updates, in the order in which they came. Never waits for the consumer's work.
    pub fn take(&self) -> Vec<Update> {
        cbrs_core::fault::point("channel: take");
        if self.is_fork() { Vec::new() } else { self.channel.lock().take() }
    }

    /// Drops what was not taken and cancels the requests that would have sent more; a second call does nothing.
    pub fn close(&self) {
        if self.is_fork() {
            return;
        }
        let (unread, processors) = {
            let mut state = self.channel.lock();
            let signal = state.signal.take();
            ((signal, std::mem::take(&mut state.updates)), std::mem::take(&mut state.processors))
        };
        drop(unread);
        for processor in processors.iter().filter_map(Weak::upgrade) {
            processor.cancel_all_of(&self.channel);
        }
    }

    /// Whether nothing can be sent here.
    pub fn is_closed(&self) -> bool {
        self.is_fork() || self.channel.lock().signal.is_none()
    }

    /// The end at which a processor sends; it is remembered, to cancel its requests at `close`.
    pub(super) fn attach(&self, processor: &Arc<Shared>) -> Result<Arc<Channel>> {
        if self.is_fork() {
            return Err(Error::Closed);
        }
        let mut state = self.channel.lock();
        if state.signal.is_none() {
            return Err(Error::Closed);
        }
        if !state.processors.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(processor))) {
            state.processors.retain(|known| known.strong_count() > 0);
            state.processors.push(Arc::downgrade(processor));
        }
        Ok(Arc::clone(&self.channel))
    }

    /// The end at which to send, without a processor.
    #[cfg(test)]
    pub(super) fn sender(&self) -> Arc<Channel> {
        Arc::clone(&self.channel)
    }

    fn is_fork(&self) -> bool {
        std::process::id() != self.process
    }
}

impl Drop for OutputChannel {
    fn drop(&mut self) {
        self.close();
    }
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over updates; a closed channel leaves them to be dropped.
    fn send(&self, updates: &mut Vec<Update>) {
        let mut state = self.lock();
        let is_news = state.updates.is_empty() && !updates.is_empty();
        let call = match &mut state.signal {
            None => return,
            Some(Signal::Socket { writer, .. }) if is_news => {
                // There is room: at most this one byte is ever on its way.
                let _ = writer.write(&[1]);
                None
            }
            Some(Signal::Call(call)) if is_news => Some(Arc::clone(call)),
            Some(_) => None,
        };
        state.updates.append(updates);
        drop(state);
        if let Some(call) = call {
            call();
        }
    }
}

impl State {
    fn take(&mut self) -> Vec<Update> {
        if let Some(Signal::Socket { reader, .. }) = self.signal.as_mut().filter(|_| !self.updates.is_empty()) {
            // Nobody else is to read here; if somebody did, there is nothing, and nothing is lost.
            let _ = reader.read(&mut [0]);
        }
        std::mem::take(&mut self.updates)
    }
}

/// The updates of one step on their way to their channels.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    parts: Vec<(Arc<Channel>, Vec<Update>)>,
}

impl Outbox {
    pub(super) fn push(&mut self, channel: &Arc<Channel>, update: Update) {
        // There are as many channels as event loops: nearly always one.
        match self.parts.iter_mut().find(|(known, _)| Arc::ptr_eq(known, channel)) {
            Some((_, updates)) => updates.push(update),
            None => self.parts.push((Arc::clone(channel), vec![update])),
        }
    }

    /// Hands everything over, one wake-up for each channel that has nothing unread.
    pub(super) fn deliver(&mut self) {
        for (channel, mut updates) in self.parts.drain(..) {
            channel.send(&mut updates);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn update(index: u64) -> Update {
        Update {
            request_id: 1,
            index,
            choice: 0,
            text: CompactString::default(),
            token_ids: TokenIds::from_slice(&[1]),
            logprobs: None,
            end: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
            num_cached_tokens: 0,
            arrival_ns: 0,
            first_scheduled_ns: None,
            first_token_ns: None,
            time_ns: 0,
            is_last: false,
        }
    }

    /// Bytes in the socket: wake-ups that the reader has not seen.
    fn num_wakeups(channel: &OutputChannel) -> usize {
        let state = channel.channel.lock();
        let Some(Signal::Socket { reader, .. }) = &state.signal else { panic!("it has no socket") };
        let mut reader = reader.try_clone().unwrap();
        drop(state);
        reader.read(&mut [0; 100]).unwrap_or(0)
    }

    fn deliver(channel: &OutputChannel, indices: std::ops::Range<u64>) {
        let mut outbox = Outbox::default();
        indices.for_each(|index| outbox.push(&channel.sender(), update(index)));
        outbox.deliver();
    }

    #[test]
    fn one_wake_up_announces_all_that_is_unread() {
        let channel = OutputChannel::new().unwrap();
        assert_eq!(num_wakeups(&channel), 0);
        deliver(&channel, 0..256);
        assert_eq!(num_wakeups(&channel), 1, "one for a step");
        deliver(&channel, 256..300);
        deliver(&channel, 300..301);
        assert_eq!(num_wakeups(&channel), 0, "none while unread ones wait");
        let indices: Vec<_> = channel.take().iter().map(|update| update.index).collect();
        assert_eq!(indices, (0..301).collect::<Vec<_>>());
        deliver(&channel, 0..1);
        assert_eq!(channel.take().len(), 1);
        assert_eq!(num_wakeups(&channel), 0, "taking drains the socket");
        assert!(channel.take().is_empty());
        deliver(&channel, 0..0);
        assert_eq!(num_wakeups(&channel), 0, "nothing is nothing");
    }

    #[test]
    fn each_channel_gets_its_own_updates_and_one_wake_up() {
        let channels = [(); 3].map(|()| OutputChannel::new().unwrap());
        let mut outbox = Outbox::default();
        for index in 0..9 {
            outbox.push(&channels[index as usize % 3].sender(), update(index));
        }
        outbox.deliver();
        for (number, channel) in channels.iter().enumerate() {
            assert_eq!(num_wakeups(channel), 1);
            let indices: Vec<_> = channel.take().iter().map(|update| update.index).collect();
            assert_eq!(indices, [number as u64, number as u64 + 3, number as u64 + 6]);
        }
    }

    #[test]
    fn a_closed_channel_drops_what_comes() {
        let channel = OutputChannel::new().unwrap();
        let sender = channel.sender();
        deliver(&channel, 0..3);
        channel.close();
        deliver(&channel, 3..6);
        assert!(channel.take().is_empty());
        assert!(sender.lock().updates.is_empty());
        assert!(sender.lock().signal.is_none(), "the descriptors are closed although somebody could still send");
    }

    #[test]
    fn a_channel_that_calls_does_so_once_for_all_that_is_unread() {
        let num_calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&num_calls);
        let channel = OutputChannel::with_wake(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(channel.fileno(), None);
        deliver(&channel, 0..5);
        deliver(&channel, 5..7);
        assert_eq!(num_calls.load(Ordering::Relaxed), 1);
        assert_eq!(channel.take().len(), 7);
        deliver(&channel, 0..0);
        assert_eq!(num_calls.load(Ordering::Relaxed), 1, "nothing is nothing");
        deliver(&channel, 0..1);
        assert_eq!(num_calls.load(Ordering::Relaxed), 2);
        channel.close();
        deliver(&channel, 0..1);
        assert_eq!(num_calls.load(Ordering::Relaxed), 2);
        assert_eq!(Arc::strong_count(&num_calls), 1, "closing drops the call");
    }
}
