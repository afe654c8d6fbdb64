//! The answer to a completion.

use std::sync::Arc;

use cbrs_core::FinishReason;
use cbrs_text::{TextOffsets, Tokenizer, Update};

use super::logprobs::{CompletionLogprobs, Token};
use super::prompts::{self, Prompts, ToldPrompt};
use super::{Answer, Outline, Usage, write};

/// How prompts are repeated in front of their completions.
#[derive(Debug)]
pub(crate) struct Echo {
    /// The prompts as they were given; absent for ids, and for what may have been shortened.
    pub(crate) given: Vec<Option<String>>,
    pub(crate) tokenizer: Option<Tokenizer>,
}

/// What was added to a choice and not written yet.
#[derive(Debug, Default)]
struct Choice {
    text: String,
    token_ids: Vec<i32>,
    logprobs: CompletionLogprobs,
    /// Characters of the prompt in front of it.
    num_prompt_chars: usize,
    /// Offsets in what follows; from the first token with log-probabilities on, if there is a text.
    offsets: Option<TextOffsets>,
    finish: Option<FinishReason>,
    has_begun: bool,
    /// Its prompt, until it is told.
    prompt: Option<Arc<ToldPrompt>>,
    /// What a chunk with nothing but text begins with; empty until the first.
    token_head: Vec<u8>,
}

/// The choices of all prompts of one completion.
#[derive(Debug)]
pub(crate) struct CompletionAnswer {
    outline: Outline,
    echo: Option<Echo>,
    /// What every chunk begins with.
    chunk_head: Vec<u8>,
    choices: Vec<Choice>,
    prompts: Prompts,
}

impl CompletionAnswer {
    pub(crate) fn new(outline: Outline, echo: Option<Echo>) -> Self {
        let mut chunk_head = b"data: ".to_vec();
        let Outline { id, created, model, num_prompts, n, .. } = &outline;
        write::head(&mut chunk_head, id, "text_completion", *created, model);
        chunk_head.extend_from_slice(b"\"choices\":[");
        let choices = (0..num_prompts * n).map(|_| Choice::default()).collect();
        let prompts = Prompts::new(*num_prompts);
        Self { outline, echo, chunk_head, choices, prompts }
    }

    /// Puts the prompt in front of a choice.
    fn begin(&mut self, index: usize, prompt: usize, told: Arc<ToldPrompt>) {
        let choice = &mut self.choices[index];
        choice.has_begun = true;
        if let Some(echo) = &self.echo {
            let given = echo.given[prompt].as_deref();
            let (ids, tokenizer) = (&told.token_ids, echo.tokenizer.as_ref());
            let text = prompts::text(given, ids, tokenizer);
            if let Some(count) = self.outline.logprobs {
                choice.num_prompt_chars = text.chars().count();
                let offsets = prompts::offsets(given, ids, tokenizer);
                for (place, (&id, offset)) in ids.iter().zip(offsets).enumerate() {
                    let rows = told.logprobs.as_ref().filter(|_| place > 0);
                    let row = rows.map(|rows| rows.row(place - 1)).map(|(ids, values, _)| (ids, values));
                    choice.logprobs.push(&self.outline.texts, Token { id, offset, row }, count as usize);
                }
            }
            choice.text.push_str(&text);
        }
        choice.prompt = Some(told);
    }

    /// Appends a chunk with nothing but text: nearly all of them are, and only the text differs.
    fn write_token(&mut self, index: usize, out: &mut Vec<u8>) {
        let choice = &mut self.choices[index];
        if choice.token_head.is_empty() {
            choice.token_head.extend_from_slice(&self.chunk_head);
            choice.token_head.extend_from_slice(b"{\"index\":");
            write::integer(&mut choice.token_head, index);
            choice.token_head.extend_from_slice(b",\"text\":");
        }
        out.extend_from_slice(&choice.token_head);
        write::string(out, &choice.text);
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":null}");
        self.outline.close_chunk(out);
        choice.text.clear();
        choice.token_ids.clear();
    }

    fn write_choice(&self, index: usize, choice: &mut Choice, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"index\":");
        write::integer(out, index);
        out.extend_from_slice(b",\"text\":");
        write::string(out, &choice.text);
        out.extend_from_slice(b",\"logprobs\":");
        match self.outline.logprobs {
            None => out.extend_from_slice(b"null"),
            Some(_) => choice.logprobs.write(out),
        }
        if let Some(prompt) = choice.prompt.take() {
            if self.outline.has_token_ids {
                out.extend_from_slice(b",\"prompt_token_ids\":");
                write::ids(out, &prompt.token_ids);
            }
            if let (Some(rows), Some(count)) = (&prompt.logprobs, self.outline.prompt_logprobs) {
                out.extend_from_slice(b",\"prompt_logprobs\":");
                self.outline.texts.write_prompt(rows, count as usize, out);
            }
        }
        if self.outline.has_token_ids {
            out.extend_from_slice(b",\"token_ids\":");
            write::ids(out, &choice.token_ids);
        }
        out.extend_from_slice(b",\"finish_reason\":");
        write::finish_reason(out, choice.finish);
        out.push(b'}');
    }
}

impl Answer for CompletionAnswer {
    fn add(&mut self, prompt: usize, mut update: Update) -> usize {
        let told = self.prompts.read(prompt, &mut update).map(Arc::clone);
        let index = prompt * self.outline.n + update.choice as usize;
        if let Some(told) = told.filter(|_| !self.choices[index].has_begun) {
            self.begin(index, prompt, told);
        }
        let choice = &mut self.choices[index];
        choice.text.push_str(&update.text);
        choice.token_ids.extend_from_slice(&update.token_ids);
        if let (Some(rows), Some(count)) = (&update.logprobs, self.outline.logprobs) {
            let texts = &self.outline.texts;
            if choice.offsets.is_none() {
                choice.offsets = texts.offsets();
            }
            for (row, &id) in update.token_ids.iter().enumerate() {
                let (ids, values, _) = rows.row(row);
                let own = choice.offsets.as_mut().map_or(0, |offsets| offsets.push(id));
                let token = Token { id, offset: choice.num_prompt_chars + own, row: Some((ids, values)) };
                choice.logprobs.push(texts, token, count as usize);
            }
        }
        choice.finish = update.end.map(|end| end.finish_reason);
        index
    }

    fn write_chunk(&mut self, index: usize, out: &mut Vec<u8>) {
        let Choice { prompt, finish, .. } = &self.choices[index];
        if prompt.is_none() && finish.is_none() && self.outline.is_plain() {
            return self.write_token(index, out);
        }
        out.extend_from_slice(&self.chunk_head);
        let mut choice = std::mem::take(&mut self.choices[index]);
        self.write_choice(index, &mut choice, out);
        choice.text.clear();
        choice.token_ids.clear();
        self.choices[index] = choice;
        self.outline.close_chunk(out);
    }

    fn write_usage_chunk(&self, usage: &Usage, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.chunk_head);
        out.extend_from_slice(b"],\"usage\":");
        usage.write(out);
        out.extend_from_slice(b"}\n\n");
    }

    fn write_whole(&mut self, usage: &Usage, out: &mut Vec<u8>) {
        let Outline { id, created, model, .. } = &self.outline;
        write::head(out, id, "text_completion", *created, model);
        out.extend_from_slice(b"\"choices\":[");
        for (index, mut choice) in std::mem::take(&mut self.choices).into_iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            self.write_choice(index, &mut choice, out);
        }
        out.extend_from_slice(b"],\"usage\":");
        usage.write(out);
        out.push(b'}');
    }
}
