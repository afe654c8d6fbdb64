//! Which paths need a key. Others than these do, those that do not exist among them.

/// What probes look at.
const PROBES: [&str; 2] = ["/health", "/ready"];
/// What collectors of figures look at.
const METRICS: [&str; 2] = ["/metrics", "/stats"];

/// What a path asks of whoever wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// A key, if there are any.
    Key,
    /// Nothing; and on the network it may be called by names that only the network knows, such as the address of a pod.
    Nothing,
}

impl Need {
    pub(super) fn of(path: &str, has_open_metrics: bool) -> Self {
        if PROBES.contains(&path) || (has_open_metrics && METRICS.contains(&path)) { Self::Nothing } else { Self::Key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_to_be_open_needs_a_key() {
        for path in ["/health", "/ready"] {
            assert_eq!(Need::of(path, false), Need::Nothing);
        }
        for path in ["/v1/models", "/version", "/nothing", "/health/", "//health", "/%68ealth", "/HEALTH", "", "*"] {
            assert_eq!(Need::of(path, true), Need::Key, "{path}");
        }
        for path in ["/metrics", "/stats"] {
            assert_eq!((Need::of(path, false), Need::of(path, true)), (Need::Key, Need::Nothing));
        }
    }
}
