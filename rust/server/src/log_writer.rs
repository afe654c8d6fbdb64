//! Lines on their way to the standard error output: appended by those who serve, written by a thread of its own, many at once.
//!
//! 1. Who serves never waits for the reader of the log: what would make the pending lines too long is dropped and counted.
//! 2. The thread sleeps while nothing is pending.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pending bytes.
const MAX_PENDING: usize = 1 << 20;
/// Time between two writes, so that many lines share one.
const PERIOD: Duration = Duration::from_millis(20);

/// Writes lines on a thread of its own, which ends when this is dropped.
#[derive(Debug)]
pub struct LogWriter {
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
    /// Bytes that were appended ever, and those of them that were written.
    num_appended: u64,
    num_written: u64,
    /// Callers who wait for that.
    num_flushing: usize,
    /// Nobody appends any more.
    is_closed: bool,
}

impl LogWriter {
    /// Writes to what is the standard error output now.
    ///
    /// # Errors
    /// What the operating system says if it has no file or thread to give.
    pub fn to_stderr() -> io::Result<Self> {
        // Not by the library's handle: whoever reports a panic would wait for its lock.
        let out = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        Self::start(Box::new(out))
    }

    fn start(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let writing = Arc::clone(&shared);
        std::thread::Builder::new().name("cbrs-log".to_owned()).spawn(move || writing.run(out))?;
        Ok(Self { shared })
    }

    /// Appends a text, which should end a line. It is dropped and counted if too much is pending.
    pub fn write(&self, text: &str) {
        self.push(|out| out.extend_from_slice(text.as_bytes()));
    }

    /// Appends what `write` appends.
    pub(crate) fn push(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.shared.lock();
        let len = state.pending.len();
        if len >= MAX_PENDING {
            self.shared.num_dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        write(&mut state.pending);
        state.num_appended += (state.pending.len() - len) as u64;
        drop(state);
        if len == 0 {
            self.shared.changed.notify_all();
        }
    }

    /// Texts that were dropped because nobody read them fast enough.
    pub fn num_dropped(&self) -> u64 {
        self.shared.num_dropped.load(Ordering::Relaxed)
    }

    /// Waits until what was appended before is written, at most `timeout`; returns whether that is so.
    pub fn flush(&self, timeout: Duration) -> bool {
        let mut state = self.shared.lock();
        let wanted = state.num_appended;
        state.num_flushing += 1;
        self.shared.changed.notify_all();
        let waited = self.shared.changed.wait_timeout_while(state, timeout, |state| state.num_written < wanted);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.num_flushing -= 1;
        state.num_written >= wanted
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
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
                return;
            }
            std::mem::swap(&mut state.pending, &mut lines);
            drop(state);
            // Nobody is left to be told that the log cannot be written.
            let _ = out.write_all(&lines).and_then(|()| out.flush());
            let mut state = self.lock();
            state.num_written += lines.len() as u64;
            lines.clear();
            self.changed.notify_all();
            let waited =
                self.changed.wait_timeout_while(state, PERIOD, |state| !state.is_closed && state.num_flushing == 0);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

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

    fn slow() -> (LogWriter, Sender<()>, Receiver<Vec<u8>>) {
        let ((permit, permission), (written, read)) = (channel(), channel());
        (LogWriter::start(Box::new(Slow { permission, written })).unwrap(), permit, read)
    }

    #[test]
    fn lines_that_wait_are_written_at_once() {
        let (writer, permit, read) = slow();
        for number in 0..1_000 {
            writer.write(&format!("{number}\n"));
        }
        drop(permit);
        assert!(writer.flush(LONG));
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
        assert!(!writer.flush(Duration::from_millis(1)), "a reader that stands still holds nobody up");
        drop(permit);
        assert!(writer.flush(LONG));
        let num_written: usize = read.try_iter().map(|bytes| bytes.len() / line.len()).sum();
        assert_eq!(num_written + num_dropped, num_lines);
    }
}
