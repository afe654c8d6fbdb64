//! When requests are started: by their clients (closed loop) or at times of their own (open loop).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::random::Random;
use crate::trace::{Row, arrival_times_s};

const STREAM: u64 = 0x0a77;
const MIN_REQUESTS: u64 = 8;
const REQUESTS_PER_CLIENT: u64 = 2;
const OPEN_LOOP_REQUESTS: u64 = 100;

/// How requests arrive.
#[derive(Debug, Clone)]
pub(crate) enum Arrivals {
    /// So many clients, each sends its next request when its last has ended.
    Closed(usize),
    /// Exponential gaps with this mean rate per second.
    Poisson(f64),
    /// At these times, in seconds from the start, ascending.
    At(Vec<f64>),
}

impl Arrivals {
    /// Picks the arrivals that the configuration asks for, and the number of requests: None = until the
    /// duration has passed.
    pub(crate) fn new(config: &Config, trace: Option<&[Row]>) -> Result<(Self, Option<u64>)> {
        let arrivals = match (config.concurrency, config.rate, trace) {
            (Some(concurrency), _, _) => Self::Closed(concurrency),
            (None, rate, Some(rows)) => match (arrival_times_s(rows), rate) {
                (Some(times), rate) => Self::At(scaled(times, rate)),
                (None, Some(rate)) => Self::Poisson(rate),
                (None, None) => {
                    return Err(Error::NoArrivalTimes { path: config.trace.clone().unwrap_or_default() });
                }
            },
            (None, Some(rate), None) => Self::Poisson(rate),
            (None, None, None) => Self::Closed(1),
        };
        let mut num_requests = config.num_requests;
        if num_requests.is_none() && config.duration_s.is_none() {
            num_requests = Some(match (trace, &arrivals) {
                (Some(rows), _) => rows.len() as u64,
                (None, Self::Closed(clients)) => MIN_REQUESTS.max(REQUESTS_PER_CLIENT * *clients as u64),
                (None, _) => OPEN_LOOP_REQUESTS,
            });
        }
        if let Self::At(times) = &arrivals {
            // A trace is replayed once: what it does next is not known.
            num_requests = Some(num_requests.map_or(times.len() as u64, |wanted| wanted.min(times.len() as u64)));
        }
        Ok((arrivals, num_requests))
    }

    /// Times of an open loop in seconds from the start; none for a closed loop.
    pub(crate) fn times_s(&self, seed: u64) -> Box<dyn Iterator<Item = f64> + Send + '_> {
        match self {
            Self::Closed(_) => Box::new(std::iter::empty()),
            Self::At(times) => Box::new(times.iter().copied()),
            Self::Poisson(rate) => {
                let mut random = Random::new(seed, STREAM, 0);
                let mut time = 0.0;
                Box::new(std::iter::repeat_with(move || {
                    time += random.exponential() / rate;
                    time
                }))
            }
        }
    }
}

/// Stretches times so that their mean rate is the one wanted.
fn scaled(mut times: Vec<f64>, rate: Option<f64>) -> Vec<f64> {
    if let (Some(rate), Some(&last)) = (rate, times.last())
        && last > 0.0
    {
        // n arrivals from the first to the last have n - 1 gaps.
        let factor = (times.len() - 1) as f64 / rate / last;
        for time in &mut times {
            *time *= factor;
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> Config {
        Config::from_json(&format!(r#"{{"url": "http://h:1", "model": "m"{more}}}"#)).expect("valid")
    }

    fn rows(times: &[Option<f64>]) -> Vec<Row> {
        let row = |&timestamp_ms| Row {
            timestamp_ms,
            input_length: 1,
            output_length: 1,
            hash_ids: Vec::new(),
            hash_block: 1,
        };
        times.iter().map(row).collect()
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_the_spread_of_exponential_ones() {
        let times: Vec<f64> = Arrivals::Poisson(50.0).times_s(3).take(20_000).collect();
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Five standard errors: 1/sqrt(20000) of the mean, and twice that of the deviation's.
        assert!((mean * 50.0 - 1.0).abs() < 0.036, "mean {mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
        // More than half of exponential gaps are below the mean: 1 - 1/e.
        let below = gaps.iter().filter(|&&gap| gap < mean).count() as f64 / gaps.len() as f64;
        assert!((below - 0.632).abs() < 0.018, "{below} below the mean");
    }

    #[test]
    fn the_seed_decides_the_arrivals() {
        let times = |seed| Arrivals::Poisson(1.0).times_s(seed).take(5).collect::<Vec<_>>();
        assert_eq!(times(1), times(1));
        assert_ne!(times(1), times(2));
    }

    #[test]
    fn a_trace_is_scaled_to_the_rate() {
        let rows = rows(&[Some(100.0), Some(200.0), Some(600.0)]);
        let (as_recorded, num_requests) = Arrivals::new(&config(""), Some(&rows)).expect("it has times");
        assert_eq!(as_recorded.times_s(0).collect::<Vec<_>>(), [0.0, 0.1, 0.5]);
        assert_eq!(num_requests, Some(3));
        let config = config(r#", "rate": 0.5, "num_requests": 99"#);
        let (scaled, num_requests) = Arrivals::new(&config, Some(&rows)).expect("it has times");
        assert_eq!(scaled.times_s(0).collect::<Vec<_>>(), [0.0, 0.8, 4.0]);
        assert_eq!(num_requests, Some(3));
    }

    #[test]
    fn a_trace_of_lengths_needs_a_rate_or_clients() {
        let rows = rows(&[None, None]);
        let new = |more| Arrivals::new(&config(more), Some(&rows)).map(|(arrivals, _)| arrivals);
        assert!(matches!(new(""), Err(Error::NoArrivalTimes { .. })));
        assert!(matches!(new(r#", "rate": 2"#), Ok(Arrivals::Poisson(2.0))));
        assert!(matches!(new(r#", "concurrency": 2"#), Ok(Arrivals::Closed(2))));
    }

    #[test]
    fn the_number_of_requests_follows_from_the_load() {
        let num_requests = |more| Arrivals::new(&config(more), None).expect("valid").1;
        assert_eq!(num_requests(""), Some(8));
        assert_eq!(num_requests(r#", "concurrency": 32"#), Some(64));
        assert_eq!(num_requests(r#", "rate": 5"#), Some(100));
        assert_eq!(num_requests(r#", "rate": 5, "duration_s": 2"#), None);
        assert_eq!(num_requests(r#", "duration_s": 2, "num_requests": 7"#), Some(7));
    }
}
