//! `Rates`: how much arrives, and how much of it could be served, over the last seconds.
//!
//! Time is cut into windows of half a second. The engine thread counts what enters in the current one, and adds at its end what the gate
//! has refused meanwhile; figures are sums over the last ten complete windows. So they are the same for the same events, and a step
//! costs a comparison.
//!
//! The *base load* is what arrives when nobody is refused: what is left of the capacity is for promised returns. It comes from the last 40
//! windows without a refusal, so it stands still while the gate refuses; as the middle one of five means over four seconds each, it does
//! not see a burst before the gate begins to refuse.

use std::collections::VecDeque;

use super::AdmissionControl;
use crate::policy::Class;

const WINDOW_NS: u64 = 500_000_000;
/// Windows that the published rates are taken from.
const NUM_RECENT: usize = 10;
/// Windows that the base load is taken from, and how many of them make one mean.
const NUM_BASE: usize = 40;
const BASE_GROUP: usize = 8;
const US_PER_WINDOW: f64 = 500_000.0;

/// Figures of the last seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoadFigures {
    /// Requests per second that came past the rate limits, refused ones included.
    pub arrival_rate: f64,
    /// Requests like these that could be served per second; 0 = unknown.
    pub service_rate: f64,
    /// Seconds of service that arrived per second, refused requests included.
    pub load: f64,
    /// Seconds of service that were accepted per second, by class.
    pub class_loads: [f64; 3],
    /// Seconds of service that arrive per second when nobody is refused.
    pub base_load: f64,
    /// Whether somebody was refused because of load in the last window.
    pub is_refusing: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Window {
    num_requests: u64,
    accepted_us: [u64; 3],
    refused_us: u64,
    has_refused: bool,
}

impl Window {
    fn arrived_us(&self) -> u64 {
        self.accepted_us.iter().sum::<u64>() + self.refused_us
    }
}

/// What the gate has refused because of load, since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Refused {
    /// Requests.
    pub num_requests: u64,
    /// Their predicted service.
    pub service_us: u64,
}

/// Counts arrivals; belongs to the engine thread.
///
/// ```
/// use cbrs_core::overload::{Rates, Refused};
/// use cbrs_core::policy::Class;
/// let mut rates = Rates::default();
/// rates.advance(0, Refused::default());
/// for _ in 0..5 {
///     rates.enter(Class::Standard, 20_000);
/// }
/// let figures = rates.advance(500_000_000, Refused::default()).expect("a window has ended");
/// assert_eq!((figures.arrival_rate, figures.service_rate), (10.0, 50.0));
/// assert!((figures.load - 0.2).abs() < 1e-9);
/// ```
#[derive(Debug)]
pub struct Rates {
    /// When the current window ends; absent before the first step.
    window_end_ns: Option<u64>,
    current: Window,
    refused: Refused,
    recent: VecDeque<Window>,
    /// Load of windows without a refusal.
    base: VecDeque<f64>,
    figures: LoadFigures,
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            window_end_ns: None,
            current: Window::default(),
            refused: Refused::default(),
            recent: VecDeque::with_capacity(NUM_RECENT),
            base: VecDeque::with_capacity(NUM_BASE),
            figures: LoadFigures::default(),
        }
    }
}

impl Rates {
    /// Counts an accepted request that the scheduler takes in.
    pub fn enter(&mut self, class: Class, service_us: u64) {
        self.current.num_requests += 1;
        self.current.accepted_us[class as usize] += service_us;
    }

    /// Tells the gate the time of a step, and the figures when they have changed. Once in each step, after what has come was entered.
    pub(crate) fn tick(&mut self, now_ns: u64, gate: &AdmissionControl) {
        gate.set_now_ns(now_ns);
        if self.window_end_ns.is_none_or(|end| now_ns >= end)
            && let Some(figures) = self.advance(now_ns, gate.refused())
        {
            gate.publish_load(figures);
        }
    }

    /// Ends the windows that are over; the new figures if one is.
    pub fn advance(&mut self, now_ns: u64, refused: Refused) -> Option<&LoadFigures> {
        let Some(end) = self.window_end_ns else {
            self.window_end_ns = Some(now_ns.saturating_add(WINDOW_NS));
            return None;
        };
        if now_ns < end {
            return None;
        }
        self.current.num_requests += refused.num_requests - self.refused.num_requests;
        self.current.refused_us = refused.service_us - self.refused.service_us;
        self.current.has_refused = refused.num_requests != self.refused.num_requests;
        self.refused = refused;
        let num_ended = 1 + (now_ns - end) / WINDOW_NS;
        self.window_end_ns = Some(end.saturating_add(num_ended * WINDOW_NS));
        self.end_window();
        // What lies further back than the longest memory is forgotten in any case.
        for _ in 1..num_ended.min(NUM_BASE as u64 + 1) {
            self.end_window();
        }
        self.measure();
        Some(&self.figures)
    }

    fn end_window(&mut self) {
        let window = std::mem::take(&mut self.current);
        push_bounded(&mut self.recent, window, NUM_RECENT);
        if !window.has_refused {
            push_bounded(&mut self.base, window.arrived_us() as f64 / US_PER_WINDOW, NUM_BASE);
        }
    }

    fn measure(&mut self) {
        let seconds = self.recent.len() as f64 * 0.5;
        let num_requests: u64 = self.recent.iter().map(|window| window.num_requests).sum();
        let arrived_us: u64 = self.recent.iter().map(Window::arrived_us).sum();
        let class_us = |class: usize| self.recent.iter().map(|window| window.accepted_us[class]).sum::<u64>() as f64;
        let figures = &mut self.figures;
        figures.arrival_rate = num_requests as f64 / seconds;
        figures.load = arrived_us as f64 / 1e6 / seconds;
        figures.class_loads = std::array::from_fn(|class| class_us(class) / 1e6 / seconds);
        if arrived_us > 0 {
            figures.service_rate = num_requests as f64 * 1e6 / arrived_us as f64;
        }
        figures.base_load = base_load(&mut self.base);
        figures.is_refusing = self.recent.back().is_some_and(|window| window.has_refused);
    }
}

/// The middle one of the means of groups of windows (the lower one of two).
fn base_load(windows: &mut VecDeque<f64>) -> f64 {
    let mut means = [0.0; NUM_BASE / BASE_GROUP];
    let groups = windows.make_contiguous().chunks(BASE_GROUP);
    let num_groups = groups.len();
    for (mean, group) in means.iter_mut().zip(groups) {
        *mean = group.iter().sum::<f64>() / group.len() as f64;
    }
    let means = &mut means[..num_groups];
    means.sort_by(f64::total_cmp);
    means.get(num_groups.saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

fn push_bounded<T>(ring: &mut VecDeque<T>, item: T, capacity: usize) {
    if ring.len() == capacity {
        ring.pop_front();
    }
    ring.push_back(item);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Runs windows of `num` requests of 0.1 s each, of which the gate refuses `num_refused`.
    fn run(rates: &mut Rates, refused: &mut Refused, now_ns: &mut u64, num: u64, num_refused: u64) -> LoadFigures {
        for _ in num_refused..num {
            rates.enter(Class::Standard, 100_000);
        }
        refused.num_requests += num_refused;
        refused.service_us += num_refused * 100_000;
        *now_ns += WINDOW_NS;
        *rates.advance(*now_ns, *refused).expect("a window has ended")
    }

    fn start(now_ns: u64) -> Rates {
        let mut rates = Rates::default();
        assert_eq!(rates.advance(now_ns, Refused::default()), None);
        rates
    }

    #[test]
    fn rates_are_sums_over_five_seconds() {
        let (mut rates, mut refused, mut now) = (start(7), Refused::default(), 7);
        for _ in 0..20 {
            run(&mut rates, &mut refused, &mut now, 2, 0);
        }
        let figures = run(&mut rates, &mut refused, &mut now, 2, 0);
        assert_eq!((figures.arrival_rate, figures.service_rate), (4.0, 10.0));
        assert!((figures.load - 0.4).abs() < 1e-9 && (figures.class_loads[1] - 0.4).abs() < 1e-9);
        assert!((figures.base_load - 0.4).abs() < 1e-9 && !figures.is_refusing);
        assert_eq!(rates.advance(now + WINDOW_NS - 1, refused), None, "the window is not over");
        for _ in 0..5 {
            run(&mut rates, &mut refused, &mut now, 20, 10);
        }
        let figures = rates.figures;
        assert!((figures.arrival_rate - 22.0).abs() < 1e-9, "5 windows of 2, 5 of 20");
        assert!((figures.load - 2.2).abs() < 1e-9, "refused requests count");
        assert!((figures.class_loads[1] - 1.2).abs() < 1e-9, "as far as they were let in");
        assert!((figures.base_load - 0.4).abs() < 1e-9 && figures.is_refusing);
        assert_eq!(rates.advance(now + 60 * WINDOW_NS, refused).map(|figures| figures.arrival_rate), Some(0.0));
        assert_eq!(
            (rates.figures.service_rate, rates.figures.base_load),
            (10.0, 0.0),
            "the last one known; nothing came"
        );
    }

    #[test]
    fn a_burst_before_the_first_refusal_is_not_taken_for_the_base() {
        let (mut rates, mut refused, mut now) = (start(0), Refused::default(), 0);
        for _ in 0..60 {
            run(&mut rates, &mut refused, &mut now, 2, 0);
        }
        for num_before in 1..=7 {
            let figures = run(&mut rates, &mut refused, &mut now, 50, 0);
            assert!((figures.base_load - 0.4).abs() < 1e-9, "{figures:?} after {num_before} windows of a burst");
        }
        for _ in 0..10 {
            let figures = run(&mut rates, &mut refused, &mut now, 50, 49);
            assert!((figures.base_load - 0.4).abs() < 1e-9);
        }
        for _ in 0..50 {
            run(&mut rates, &mut refused, &mut now, 3, 0);
        }
        assert!((rates.figures.base_load - 0.6).abs() < 1e-9, "a lasting change is seen");
    }
}
