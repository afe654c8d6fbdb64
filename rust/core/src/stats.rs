//! Counters and gauges, published once per step and read without waiting for one.

/// A figure: a number of things, or a measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    /// A number of things.
    Count(u64),
    /// A measure.
    Measure(f64),
}

/// What a field of `Stats` can be.
trait Field: Copy {
    /// As it is published.
    fn to_bits(self) -> u64;

    /// Reads back what `to_bits` gave.
    fn from_bits(bits: u64) -> Self;

    fn figure(self) -> Figure;
}

impl Field for u64 {
    fn to_bits(self) -> u64 {
        self
    }

    fn from_bits(bits: u64) -> Self {
        bits
    }

    fn figure(self) -> Figure {
        Figure::Count(self)
    }
}

impl Field for f64 {
    fn to_bits(self) -> u64 {
        self.to_bits()
    }

    fn from_bits(bits: u64) -> Self {
        Self::from_bits(bits)
    }

    fn figure(self) -> Figure {
        Figure::Measure(self)
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident: $kind:ty,)*) => {
        /// What the scheduler holds and has done; a copy by value.
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: $kind,)*
        }

        /// Number of figures.
        pub(crate) const NUM_STATS: usize = [$(stringify!($name)),*].len();

        impl Stats {
            /// Every figure with its name, in the order of the fields.
            pub fn entries(&self) -> [(&'static str, Figure); NUM_STATS] {
                [$((stringify!($name), Field::figure(self.$name))),*]
            }

            /// Every figure, in the order of the fields.
            pub(crate) fn to_numbers(self) -> [u64; NUM_STATS] {
                [$(Field::to_bits(self.$name)),*]
            }

            /// Reads back what `to_numbers` gave.
            pub(crate) fn from_numbers([$($name),*]: [u64; NUM_STATS]) -> Self {
                Self { $($name: Field::from_bits($name)),* }
            }
        }
    };
}

stats! {
    /// Sequences that own a row.
    num_running: u64,
    /// Requests that have not started, and choices of started ones that own no row: preempted, or not started yet.
    num_waiting: u64,
    /// Unheld blocks without content.
    num_free_blocks: u64,
    /// Unheld blocks that the prefix cache can serve.
    num_cached_blocks: u64,
    /// Held blocks.
    num_used_blocks: u64,
    /// Prompt tokens of the requests that have not started.
    num_queued_tokens: u64,
    /// 1 while no request may start.
    is_paused: u64,
    /// Plans that scheduled something.
    num_steps: u64,
    /// Query tokens scheduled, recomputed ones included.
    num_scheduled_tokens: u64,
    /// Requests accepted by `submit`.
    num_accepted_requests: u64,
    /// Choices ended by EOS, a stop id or a stop string.
    num_stop_requests: u64,
    /// Choices ended by `max_tokens` or the context.
    num_length_requests: u64,
    /// Choices ended by a cancel or by closing.
    num_cancelled_requests: u64,
    /// Choices ended by a failed step.
    num_error_requests: u64,
    /// Prompt tokens of started requests, each request's once.
    num_prompt_tokens: u64,
    /// Of these, tokens found in the prefix cache at first admission.
    num_cached_prompt_tokens: u64,
    /// Output tokens that belong to some result.
    num_output_tokens: u64,
    /// Sequences that lost their blocks to others.
    num_preemptions: u64,
    /// Of these, those that made way for a request of a higher class or of a tenant below its share.
    num_displacements: u64,
    /// Starts that belonged to a request because it had waited longest and was aged.
    num_aged_starts: u64,
    /// Requests that were dropped or ended at a deadline.
    num_expired_requests: u64,
    /// Tokens whose keys and values a preempted sequence lost and has to compute again, counted when it is admitted again.
    num_recomputed_tokens: u64,
    /// Cached blocks that were reused for other content.
    num_evicted_blocks: u64,
    /// How long the last step took; 0 = unknown.
    last_step_ns: u64,
    /// How long the planned one is predicted to take; 0 = unknown.
    predicted_step_ns: u64,
    /// The usual error of these predictions, as a part of the time.
    step_time_error: f64,
    /// Tokens that the last plan might have scheduled: less than `max_num_batched_tokens` for a latency target.
    token_budget: u64,
    /// Requests refused because of load, rates or deadlines.
    num_refused_requests: u64,
    /// Requests per second that came past the rate limits over the last seconds, refused ones included.
    arrival_rate: f64,
    /// Requests like these that could be served per second; 0 = unknown.
    service_rate: f64,
    /// Seconds of service that arrived per second: above 1 the queue grows.
    load: f64,
    /// Predicted seconds of service of the requests that have not started.
    queued_service_s: f64,
    /// 1 while requests are refused because of load.
    is_refusing: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_back_in_their_order() {
        let numbers = std::array::from_fn(|index| index as u64 + 1);
        assert_eq!(Stats::from_numbers(numbers).to_numbers(), numbers);
    }

    #[test]
    fn counts_and_measures_are_told_apart() {
        let stats = Stats { num_running: 3, load: 0.5, ..Stats::default() };
        let stats = Stats::from_numbers(stats.to_numbers());
        assert!(stats.entries().contains(&("num_running", Figure::Count(3))));
        assert!(stats.entries().contains(&("load", Figure::Measure(0.5))));
    }
}
