//! What came of a request, in numbers.

use cbrs_core::FinishReason;
use cbrs_text::Update;

use super::line::Line;

/// What came of a request, summed up from its updates.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    num_prompt_tokens: usize,
    num_cached_tokens: usize,
    num_output_tokens: usize,
    first_token_ns: Option<u64>,
    /// Bit by code of the finish reasons of its choices.
    reasons: u8,
}

impl Tally {
    pub(crate) fn add(&mut self, update: &Update) {
        self.num_output_tokens += update.token_ids.len();
        if let Some(prompt) = &update.prompt_token_ids {
            self.num_prompt_tokens += prompt.len();
            self.num_cached_tokens += update.num_cached_tokens;
        }
        if let Some(end) = &update.end {
            self.add_reason(end.finish_reason);
        }
        // Later ones cannot be earlier, but the first update that is read may be another choice's end.
        if update.end.is_some() || self.first_token_ns.is_none() {
            self.first_token_ns = [self.first_token_ns, update.first_token_ns].into_iter().flatten().min();
        }
    }

    pub(crate) fn add_reason(&mut self, reason: FinishReason) {
        self.reasons |= 1 << reason as u8;
    }

    pub(super) fn write(&self, arrived_ns: u64, line: &mut Line<'_>) {
        line.number("prompt_tokens", self.num_prompt_tokens);
        line.number("cached_tokens", self.num_cached_tokens);
        line.number("output_tokens", self.num_output_tokens);
        if let Some(first_ns) = self.first_token_ns {
            line.seconds("ttft_s", first_ns.saturating_sub(arrived_ns));
        }
        let reasons = FinishReason::ALL.iter().filter(|&&reason| self.reasons >> reason as u8 & 1 == 1);
        let reasons: Vec<&str> = reasons.map(|reason| reason.as_str()).collect();
        if !reasons.is_empty() {
            line.text("finish_reason", &reasons.join(","));
        }
    }
}
