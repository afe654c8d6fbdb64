//! Answers: what updates add up to, written whole or as chunks.

mod chat;
mod completion;
mod logprobs;
mod prompts;
#[cfg(test)]
mod tests;
mod usage;
pub(crate) mod write;

use cbrs_text::Update;

pub(crate) use chat::ChatAnswer;
pub(crate) use completion::{CompletionAnswer, Echo};
pub(crate) use logprobs::TokenTexts;
pub(crate) use usage::Usage;

use crate::engine::apart;
use crate::error::ApiError;
use crate::stream::Ticket;

/// Which parts an answer has, and how it introduces itself.
#[derive(Debug)]
pub(crate) struct Outline {
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) num_prompts: usize,
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// Most likely tokens to tell with each token; absent = nothing about them.
    pub(crate) logprobs: Option<u32>,
    /// The same with each token of the prompt, beside the answer.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) has_token_ids: bool,
    /// Chunks say `"usage": null`.
    pub(crate) has_usage: bool,
    pub(crate) texts: TokenTexts,
}

impl Outline {
    /// Whether tokens are told by nothing but their text.
    fn is_plain(&self) -> bool {
        self.logprobs.is_none() && !self.has_token_ids
    }

    /// Appends what follows the choices of a chunk.
    fn close_chunk(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(if self.has_usage { b"],\"usage\":null}\n\n" } else { b"]}\n\n" });
    }
}

/// The answer to a request while it comes.
pub(crate) trait Answer: Send + Unpin + 'static {
    /// Takes what is new about a choice of prompt number `prompt`; returns the number of the choice in the answer.
    fn add(&mut self, prompt: usize, update: Update) -> usize;

    /// Appends what was added to a choice as an event, and forgets it.
    fn write_chunk(&mut self, choice: usize, out: &mut Vec<u8>);

    /// Appends the event that tells the usage.
    fn write_usage_chunk(&self, usage: &Usage, out: &mut Vec<u8>);

    /// Appends all that was added.
    fn write_whole(&mut self, usage: &Usage, out: &mut Vec<u8>);
}

/// Tokens and log-probabilities that are written where connections are served; more of them are written on the pool, where they delay nobody.
pub(crate) const MAX_INLINE_VALUES: usize = 1024;

/// How many tokens and log-probabilities an update has to tell.
pub(crate) fn num_values(update: &Update) -> usize {
    let of_prompt = update.prompt_logprobs.as_ref().map_or(0, |rows| rows.values.len());
    update.token_ids.len() + update.logprobs.as_ref().map_or(0, |rows| rows.values.len()) + of_prompt
}

/// Waits for all of an answer and writes it.
///
/// # Errors
/// Why one of its choices has no proper end; the others are cancelled then.
pub(crate) async fn collect(mut ticket: Ticket, mut answer: impl Answer) -> Result<Vec<u8>, ApiError> {
    let (mut updates, mut usage) = (Vec::new(), Usage::default());
    let (mut all, mut size) = (Vec::new(), 0);
    loop {
        ticket.take(&mut updates).await;
        let mut news = updates.drain(..);
        while let Some(update) = news.next() {
            let error = update.end.as_ref().and_then(|end| ticket.end_error(end));
            let is_over = ticket.note(&update);
            if let Some(error) = error {
                // They have come, whether anybody wants them or not.
                news.for_each(|update| {
                    ticket.note(&update);
                });
                return Err(error);
            }
            usage.add(&update);
            size += num_values(&update);
            all.push((ticket.prompt(&update), update));
            if is_over {
                let write = move || {
                    let mut out = Vec::with_capacity(1024);
                    for (prompt, update) in all {
                        answer.add(prompt, update);
                    }
                    answer.write_whole(&usage, &mut out);
                    Ok(out)
                };
                return if size <= MAX_INLINE_VALUES { write() } else { apart(write).await };
            }
        }
    }
}
