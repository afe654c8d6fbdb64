//! Counters and gauges, published once per step and read without waiting for one.

/// What the scheduler holds and has done; a copy by value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that own a row.
    pub num_running: u64,
    /// Requests that have not started, and choices of started ones that own no row: preempted, or not started yet.
    pub num_waiting: u64,
    /// Unheld blocks without content.
    pub num_free_blocks: u64,
    /// Unheld blocks that the prefix cache can serve.
    pub num_cached_blocks: u64,
    /// Held blocks.
    pub num_used_blocks: u64,
    /// Prompt tokens of the requests that have not started.
    pub num_queued_tokens: u64,
    /// 1 while no request may start.
    pub is_paused: u64,
    /// Plans that scheduled something.
    pub num_steps: u64,
    /// Query tokens scheduled, recomputed ones included.
    pub num_scheduled_tokens: u64,
    /// Requests accepted by `submit`.
    pub num_accepted_requests: u64,
    /// Choices ended by EOS, a stop id or a stop string.
    pub num_stop_requests: u64,
    /// Choices ended by `max_tokens` or the context.
    pub num_length_requests: u64,
    /// Choices ended by a cancel or by closing.
    pub num_cancelled_requests: u64,
    /// Choices ended by a failed step.
    pub num_error_requests: u64,
    /// Prompt tokens of started requests, each request's once.
    pub num_prompt_tokens: u64,
    /// Of these, tokens found in the prefix cache at first admission.
    pub num_cached_prompt_tokens: u64,
    /// Output tokens that belong to some result.
    pub num_output_tokens: u64,
    /// Sequences that lost their blocks to others.
    pub num_preemptions: u64,
    /// Tokens whose keys and values a preempted sequence lost and has to compute again, counted when it is admitted again.
    pub num_recomputed_tokens: u64,
    /// Cached blocks that were reused for other content.
    pub num_evicted_blocks: u64,
}

/// Number of figures.
pub(crate) const NUM_STATS: usize = 20;

impl Stats {
    /// Every figure with its name, in the order of the fields.
    pub fn entries(&self) -> [(&'static str, u64); NUM_STATS] {
        [
            ("num_running", self.num_running),
            ("num_waiting", self.num_waiting),
            ("num_free_blocks", self.num_free_blocks),
            ("num_cached_blocks", self.num_cached_blocks),
            ("num_used_blocks", self.num_used_blocks),
            ("num_queued_tokens", self.num_queued_tokens),
            ("is_paused", self.is_paused),
            ("num_steps", self.num_steps),
            ("num_scheduled_tokens", self.num_scheduled_tokens),
            ("num_accepted_requests", self.num_accepted_requests),
            ("num_stop_requests", self.num_stop_requests),
            ("num_length_requests", self.num_length_requests),
            ("num_cancelled_requests", self.num_cancelled_requests),
            ("num_error_requests", self.num_error_requests),
            ("num_prompt_tokens", self.num_prompt_tokens),
            ("num_cached_prompt_tokens", self.num_cached_prompt_tokens),
            ("num_output_tokens", self.num_output_tokens),
            ("num_preemptions", self.num_preemptions),
            ("num_recomputed_tokens", self.num_recomputed_tokens),
            ("num_evicted_blocks", self.num_evicted_blocks),
        ]
    }

    /// Every figure, in the order of the fields.
    pub(crate) fn to_numbers(self) -> [u64; NUM_STATS] {
        self.entries().map(|(_, number)| number)
    }

    /// Reads back what `to_numbers` gave.
    pub(crate) fn from_numbers(numbers: [u64; NUM_STATS]) -> Self {
        let [
            num_running,
            num_waiting,
            num_free_blocks,
            num_cached_blocks,
            num_used_blocks,
            num_queued_tokens,
            is_paused,
            num_steps,
            num_scheduled_tokens,
            num_accepted_requests,
            num_stop_requests,
            num_length_requests,
            num_cancelled_requests,
            num_error_requests,
            num_prompt_tokens,
            num_cached_prompt_tokens,
            num_output_tokens,
            num_preemptions,
            num_recomputed_tokens,
            num_evicted_blocks,
        ] = numbers;
        Self {
            num_running,
            num_waiting,
            num_free_blocks,
            num_cached_blocks,
            num_used_blocks,
            num_queued_tokens,
            is_paused,
            num_steps,
            num_scheduled_tokens,
            num_accepted_requests,
            num_stop_requests,
            num_length_requests,
            num_cancelled_requests,
            num_error_requests,
            num_prompt_tokens,
            num_cached_prompt_tokens,
            num_output_tokens,
            num_preemptions,
            num_recomputed_tokens,
            num_evicted_blocks,
        }
    }
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
