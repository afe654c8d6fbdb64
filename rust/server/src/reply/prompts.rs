//! What an answer tells of its prompts.

use std::sync::Arc;

use cbrs_core::LogprobRows;
use cbrs_text::{TextOffsets, Tokenizer, Update};

/// A prompt, once its first update has come.
#[derive(Debug)]
pub(crate) struct ToldPrompt {
    pub(crate) token_ids: Vec<i32>,
    pub(crate) logprobs: Option<Box<LogprobRows>>,
}

/// What has come of each prompt.
#[derive(Debug)]
pub(crate) struct Prompts {
    told: Vec<Option<Arc<ToldPrompt>>>,
}

impl Prompts {
    pub(crate) fn new(count: usize) -> Self {
        Self { told: vec![None; count] }
    }

    /// Keeps what a first update brings, and returns what is known of its prompt.
    pub(crate) fn read(&mut self, prompt: usize, update: &mut Update) -> Option<&Arc<ToldPrompt>> {
        if let Some(token_ids) = update.prompt_token_ids.take() {
            self.told[prompt] = Some(Arc::new(ToldPrompt { token_ids, logprobs: update.prompt_logprobs.take() }));
        }
        self.told[prompt].as_ref()
    }
}

/// The text of a prompt: as it was given, or what its ids say if it was given as ids or shortened.
pub(crate) fn text(given: Option<&str>, ids: &[i32], tokenizer: Option<&Tokenizer>) -> String {
    match given {
        Some(text) => text.to_owned(),
        None => tokenizer.map_or_else(String::new, |tokenizer| tokenizer.decode(ids, true)),
    }
}

/// Where the tokens of a prompt begin in its text, in characters.
pub(crate) fn offsets(given: Option<&str>, ids: &[i32], tokenizer: Option<&Tokenizer>) -> Vec<usize> {
    let Some(tokenizer) = tokenizer else { return vec![0; ids.len()] };
    if let Some(text) = given {
        return TextOffsets::of_text(tokenizer, text, ids);
    }
    let mut offsets = TextOffsets::new(tokenizer.clone(), true);
    ids.iter().map(|&id| offsets.push(id)).collect()
}
