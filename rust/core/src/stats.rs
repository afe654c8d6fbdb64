//! Counters and gauges, published once per step and read without waiting for one.

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the scheduler holds and has done; a copy by value.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// Number of figures.
        pub(crate) const NUM_STATS: usize = [$(stringify!($name)),*].len();

        impl Stats {
            /// Every figure with its name, in the order of the fields.
            pub fn entries(&self) -> [(&'static str, u64); NUM_STATS] {
                [$((stringify!($name), self.$name)),*]
            }

            /// Every figure, in the order of the fields.
            pub(crate) fn to_numbers(self) -> [u64; NUM_STATS] {
                [$(self.$name),*]
            }

            /// Reads back what `to_numbers` gave.
            pub(crate) fn from_numbers([$($name),*]: [u64; NUM_STATS]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

stats! {
    /// Sequences that own a row.
    num_running,
    /// Requests that have not started, and choices of started ones that own no row: preempted, or not started yet.
    num_waiting,
    /// Unheld blocks without content.
    num_free_blocks,
    /// Unheld blocks that the prefix cache can serve.
    num_cached_blocks,
    /// Held blocks.
    num_used_blocks,
    /// Prompt tokens of the requests that have not started.
    num_queued_tokens,
    /// 1 while no request may start.
    is_paused,
    /// Plans that scheduled something.
    num_steps,
    /// Query tokens scheduled, recomputed ones included.
    num_scheduled_tokens,
    /// Requests accepted by `submit`.
    num_accepted_requests,
    /// Choices ended by EOS, a stop id or a stop string.
    num_stop_requests,
    /// Choices ended by `max_tokens` or the context.
    num_length_requests,
    /// Choices ended by a cancel or by closing.
    num_cancelled_requests,
    /// Choices ended by a failed step.
    num_error_requests,
    /// Prompt tokens of started requests, each request's once.
    num_prompt_tokens,
    /// Of these, tokens found in the prefix cache at first admission.
    num_cached_prompt_tokens,
    /// Output tokens that belong to some result.
    num_output_tokens,
    /// Sequences that lost their blocks to others.
    num_preemptions,
    /// Of these, those that made way for a request of a higher class or of a tenant below its share.
    num_displacements,
    /// Requests that were dropped or ended at a deadline.
    num_expired_requests,
    /// Tokens whose keys and values a preempted sequence lost and has to compute again, counted when it is admitted again.
    num_recomputed_tokens,
    /// Cached blocks that were reused for other content.
    num_evicted_blocks,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_back_in_their_order() {
        let numbers = std::array::from_fn(|index| index as u64 + 1);
        assert_eq!(Stats::from_numbers(numbers).to_numbers(), numbers);
    }
}
