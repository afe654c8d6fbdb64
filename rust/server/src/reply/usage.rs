//! Tokens of a request, counted from its updates.

use std::io::Write;

use cbrs_text::Update;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    prompt: usize,
    cached: usize,
    completion: usize,
}

impl Usage {
    pub(crate) fn add(&mut self, update: &Update) {
        self.completion += update.token_ids.len();
        // With the first update of each prompt.
        if let Some(prompt) = &update.prompt_token_ids {
            self.prompt += prompt.len();
            self.cached += update.num_cached_tokens;
        }
    }

    /// Appends the object.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let Self { prompt, cached, completion } = self;
        let total = prompt + completion;
        write!(
            out,
            "{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}"
        )
        .expect("memory takes everything");
    }
}
