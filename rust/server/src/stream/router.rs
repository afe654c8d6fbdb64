//! One channel from the text thread, and from it to each response's mailbox in one pass.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cbrs_text::{OutputChannel, Recipient};
use tokio::sync::Notify;

use super::mailbox::{Delivered, Mailbox, Rest};
use crate::events::EventLog;

type Mailboxes = HashMap<u64, Arc<Mailbox>, foldhash::fast::RandomState>;

/// Knows which mailbox the updates of an index go to. A response has as many consecutive indices as prompts.
#[derive(Debug)]
pub(crate) struct Router {
    channel: OutputChannel,
    news: Arc<Notify>,
    mailboxes: Mutex<Mailboxes>,
    next_index: AtomicU64,
}

impl Router {
    pub(crate) fn new() -> Self {
        let news = Arc::new(Notify::new());
        let wake = Arc::clone(&news);
        let channel = OutputChannel::with_wake(move || wake.notify_one());
        Self { channel, news, mailboxes: Mutex::default(), next_index: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Mailboxes> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers to `mailbox` what comes for `count` new indices.
    pub(super) fn open(&self, mailbox: &Arc<Mailbox>, count: usize) -> Range<u64> {
        let first = self.next_index.fetch_add(count as u64, Ordering::Relaxed);
        let indices = first..first + count as u64;
        self.lock().extend(indices.clone().map(|index| (index, Arc::clone(mailbox))));
        indices
    }

    /// Drops what comes for these indices from now on.
    pub(super) fn close(&self, indices: Range<u64>) {
        let mut mailboxes = self.lock();
        for index in indices {
            mailboxes.remove(&index);
        }
    }

    /// Counts what still comes for a response that nobody reads any more; false if nothing will. Its indices close by themselves.
    pub(super) fn count_rest(&self, mailbox: &Mailbox, rest: Rest) -> bool {
        // Whoever delivers holds it: what comes is either pending in the mailbox or delivered afterwards.
        let _mailboxes = self.lock();
        mailbox.count_rest(rest)
    }

    /// Drops whatever comes from now on.
    pub(crate) fn close_all(&self) {
        let mailboxes = std::mem::take(&mut *self.lock());
        drop(mailboxes);
    }

    /// Where the processor is to send the updates of `index`; one for each choice, if `is_whole`.
    pub(super) fn recipient(&self, index: u64, is_whole: bool) -> Recipient<'_> {
        Recipient { index, channel: Some(&self.channel), is_whole }
    }

    /// Delivers what comes, for ever.
    pub(crate) async fn run(&self, events: &EventLog) {
        loop {
            self.news.notified().await;
            self.deliver(events);
        }
    }

    fn deliver(&self, events: &EventLog) {
        let updates = self.channel.take();
        events.note(&updates);
        let mut wakers = Vec::with_capacity(updates.len());
        let mut mailboxes = self.lock();
        for update in updates {
            // Absent if nobody waits for it any more.
            let Some(mailbox) = mailboxes.get(&update.index) else { continue };
            match mailbox.push(update) {
                Delivered::Wake(waker) => wakers.extend(waker),
                Delivered::Over(indices) => indices.for_each(|index| drop(mailboxes.remove(&index))),
            }
        }
        drop(mailboxes);
        wakers.into_iter().for_each(std::task::Waker::wake);
    }
}
