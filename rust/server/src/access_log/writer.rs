//! Lines on their way out: appended by those who serve, written by a thread of its own, many at once.
//!
//! 1. Who serves never waits for the reader of the log: what would make the pending lines too long is dropped and counted.
//! 2. The thread sleeps while nothing is pending.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pending bytes.
const MAX_PENDING: usize = 1 << 20;
/// Time between two writes, so that many lines share one.
const PERIOD: Duration = Duration::from_millis(20);
/// How long `close` waits for the reader of the log.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    num_dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    pending: Vec<u8>,
    is_closed: bool,
    /// The thread has written everything and ends.
    is_done: bool,
}

impl Writer {
    /// Starts the thread that writes to `out`.
    pub(super) fn start(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let writing = Arc::clone(&shared);
        std::thread::Builder::new().name("cbrs-log".to_owned()).spawn(move || writing.run(out))?;
        Ok(Self { shared })
    }

    /// Appends what `write` appends.
    pub(super) fn push(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.shared.lock();
        if state.pending.len() >= MAX_PENDING {
            self.shared.num_dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let is_first = state.pending.is_empty();
        write(&mut state.pending);
        drop(state);
        if is_first {
            self.shared.changed.notify_all();
        }
    }

    pub(super) fn num_dropped(&self) -> u64 {
        self.shared.num_dropped.load(Ordering::Relaxed)
    }

    /// Waits a moment for everything to be written; the thread ends.
    pub(super) fn close(&self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        self.shared.changed.notify_all();
        let waited = self.shared.changed.wait_timeout_while(state, CLOSE_TIMEOUT, |state| !state.is_done);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between lock and unlock leaves at worst half a line.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, mut out: Box<dyn Write + Send>) {
        let mut lines = Vec::new();
        loop {
            let waited = self.changed.wait_while(self.lock(), |state| state.pending.is_empty() && !state.is_closed);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.pending.is_empty() {
                state.is_done = true;
                self.changed.notify_all();
                return;
            }
            std::mem::swap(&mut state.pending, &mut lines);
            drop(state);
            // Nobody is left to be told that the log cannot be written.
            let _ = out.write_all(&lines).and_then(|()| out.flush());
            lines.clear();
            let waited = self.changed.wait_timeout_while(self.lock(), PERIOD, |state| !state.is_closed);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Waits for permission to write, then hands over what was written.
    struct Slow {
        permission: Receiver<()>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.permission.recv();
            self.written.send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Writer, Sender<()>, Receiver<Vec<u8>>) {
        let ((permit, permission), (written, read)) = (channel(), channel());
        (Writer::start(Box::new(Slow { permission, written })).unwrap(), permit, read)
    }

    #[test]
    fn lines_that_wait_are_written_at_once() {
        let (writer, permit, read) = slow();
        for number in 0..1_000 {
            writer.push(|out| writeln!(out, "{number}").unwrap());
        }
        drop(permit);
        writer.close();
        let written: Vec<_> = read.try_iter().collect();
        assert!(written.len() <= 3, "{} writes", written.len());
        let text = String::from_utf8(written.concat()).unwrap();
        assert!(text.lines().eq((0..1_000).map(|number| number.to_string())));
    }

    #[test]
    fn nobody_waits_for_a_reader_that_stands_still() {
        let (writer, permit, read) = slow();
        let line = [b'x'; 1 << 10];
        let num_lines = 3 * MAX_PENDING / line.len();
        for _ in 0..num_lines {
            writer.push(|out| out.extend_from_slice(&line));
        }
        let num_dropped = writer.num_dropped() as usize;
        assert!(num_dropped >= MAX_PENDING / line.len(), "at most one batch is on its way and one pending");
        drop(permit);
        writer.close();
        let num_written: usize = read.try_iter().map(|bytes| bytes.len() / line.len()).sum();
        assert_eq!(num_written + num_dropped, num_lines);
    }
}
