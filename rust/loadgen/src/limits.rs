//! What the operating system allows and tells.

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Raises the soft limit of open files to the hard one, as far as allowed: each connection is a file.
pub(crate) fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        // Without it, connections beyond the limit fail and say so.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

/// Seconds that the calling thread has computed.
pub(crate) fn thread_cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
