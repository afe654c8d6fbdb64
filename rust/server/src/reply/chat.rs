//! The answer to a chat.

use std::sync::Arc;

use cbrs_core::FinishReason;
use cbrs_text::Update;

use super::prompts::{Prompts, ToldPrompt};
use super::{Answer, Outline, Usage, write};

/// What was added to a choice and not written yet.
#[derive(Debug, Default)]
struct Choice {
    text: String,
    token_ids: Vec<i32>,
    /// Entries with commas between them.
    logprobs: Vec<u8>,
    finish: Option<FinishReason>,
    has_begun: bool,
    /// What a chunk with nothing but text begins with; empty until the first.
    token_head: Vec<u8>,
}

/// The choices of one conversation.
#[derive(Debug)]
pub(crate) struct ChatAnswer {
    outline: Outline,
    /// What every chunk begins with.
    chunk_head: Vec<u8>,
    choices: Vec<Choice>,
    prompts: Prompts,
    /// The prompt, until it is told.
    prompt: Option<Arc<ToldPrompt>>,
}

impl ChatAnswer {
    pub(crate) fn new(outline: Outline) -> Self {
        let mut chunk_head = b"data: ".to_vec();
        let Outline { id, created, model, .. } = &outline;
        write::head(&mut chunk_head, id, "chat.completion.chunk", *created, model);
        let choices = (0..outline.n).map(|_| Choice::default()).collect();
        Self { outline, chunk_head, choices, prompts: Prompts::new(1), prompt: None }
    }

    /// Appends what an answer tells of its prompt, with commas after it.
    fn write_prompt(&self, prompt: &ToldPrompt, out: &mut Vec<u8>) {
        if self.outline.has_token_ids {
            out.extend_from_slice(b"\"prompt_token_ids\":");
            write::ids(out, &prompt.token_ids);
            out.push(b',');
        }
        if let (Some(rows), Some(count)) = (&prompt.logprobs, self.outline.prompt_logprobs) {
            out.extend_from_slice(b"\"prompt_logprobs\":");
            self.outline.texts.write_prompt(rows, count as usize, out);
            out.push(b',');
        }
    }

    /// Appends a chunk with nothing but text: nearly all of them are, and only the text differs.
    fn write_token(&mut self, index: usize, out: &mut Vec<u8>) {
        let choice = &mut self.choices[index];
        if choice.token_head.is_empty() {
            choice.token_head.extend_from_slice(&self.chunk_head);
            choice.token_head.extend_from_slice(b"\"choices\":[{\"index\":");
            write::integer(&mut choice.token_head, index);
            choice.token_head.extend_from_slice(b",\"delta\":{\"content\":");
        }
        out.extend_from_slice(&choice.token_head);
        write::string(out, &choice.text);
        out.extend_from_slice(b"},\"logprobs\":null,\"finish_reason\":null}");
        self.outline.close_chunk(out);
        choice.text.clear();
        choice.token_ids.clear();
    }

    /// Appends one chunk with one choice; `delta` writes what is in it, `finish` is its end.
    fn chunk(&self, index: usize, choice: &Choice, delta: &[u8], text: Option<&str>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\"choices\":[{\"index\":");
        write::integer(out, index);
        out.extend_from_slice(b",\"delta\":{");
        out.extend_from_slice(delta);
        if let Some(text) = text {
            write::string(out, text);
        }
        out.push(b'}');
        self.write_logprobs(choice, out);
        if self.outline.has_token_ids && text.is_some() {
            out.extend_from_slice(b",\"token_ids\":");
            write::ids(out, &choice.token_ids);
        }
        out.extend_from_slice(b",\"finish_reason\":");
        let is_end = delta.is_empty();
        write::finish_reason(out, choice.finish.filter(|_| is_end));
        out.push(b'}');
        self.outline.close_chunk(out);
    }

    fn write_logprobs(&self, choice: &Choice, out: &mut Vec<u8>) {
        out.extend_from_slice(b",\"logprobs\":");
        if self.outline.logprobs.is_none() || choice.logprobs.is_empty() {
            return out.extend_from_slice(b"null");
        }
        out.extend_from_slice(b"{\"content\":[");
        out.extend_from_slice(&choice.logprobs);
        out.extend_from_slice(b"],\"refusal\":null}");
    }
}

impl Answer for ChatAnswer {
    fn add(&mut self, prompt: usize, mut update: Update) -> usize {
        let has_prompt = update.prompt_token_ids.is_some();
        if let Some(told) = self.prompts.read(prompt, &mut update).filter(|_| has_prompt) {
            self.prompt = Some(Arc::clone(told));
        }
        let index = update.choice as usize;
        let choice = &mut self.choices[index];
        choice.text.push_str(&update.text);
        choice.token_ids.extend_from_slice(&update.token_ids);
        if let Some(rows) = &update.logprobs {
            for row in 0..rows.len() {
                if !choice.logprobs.is_empty() {
                    choice.logprobs.push(b',');
                }
                let (ids, values, _) = rows.row(row);
                self.outline.texts.write_chat((ids, values), &mut choice.logprobs);
            }
        }
        choice.finish = update.end.map(|end| end.finish_reason);
        index
    }

    fn write_chunk(&mut self, index: usize, out: &mut Vec<u8>) {
        let Choice { token_ids, finish, has_begun, .. } = &self.choices[index];
        if *has_begun && finish.is_none() && !token_ids.is_empty() && self.outline.is_plain() {
            return self.write_token(index, out);
        }
        let mut choice = std::mem::take(&mut self.choices[index]);
        if !choice.has_begun {
            choice.has_begun = true;
            out.extend_from_slice(&self.chunk_head);
            if let Some(prompt) = self.prompt.take() {
                self.write_prompt(&prompt, out);
            }
            let nothing = Choice::default();
            self.chunk(index, &nothing, b"\"role\":\"assistant\",\"content\":\"\"", None, out);
        }
        if !choice.token_ids.is_empty() || !choice.text.is_empty() {
            out.extend_from_slice(&self.chunk_head);
            self.chunk(index, &choice, b"\"content\":", Some(&choice.text), out);
        }
        choice.text.clear();
        choice.token_ids.clear();
        choice.logprobs.clear();
        if choice.finish.is_some() {
            out.extend_from_slice(&self.chunk_head);
            self.chunk(index, &choice, b"", None, out);
        }
        self.choices[index] = choice;
    }

    fn write_usage_chunk(&self, usage: &Usage, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.chunk_head);
        out.extend_from_slice(b"\"choices\":[],\"usage\":");
        usage.write(out);
        out.extend_from_slice(b"}\n\n");
    }

    fn write_whole(&mut self, usage: &Usage, out: &mut Vec<u8>) {
        let Outline { id, created, model, .. } = &self.outline;
        write::head(out, id, "chat.completion", *created, model);
        if let Some(prompt) = self.prompt.take() {
            self.write_prompt(&prompt, out);
        }
        out.extend_from_slice(b"\"choices\":");
        write::list(out, self.choices.iter().enumerate(), |out, (index, choice)| {
            out.extend_from_slice(b"{\"index\":");
            write::integer(out, index);
            out.extend_from_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
            write::string(out, &choice.text);
            out.extend_from_slice(b",\"refusal\":null}");
            self.write_logprobs(choice, out);
            if self.outline.has_token_ids {
                out.extend_from_slice(b",\"token_ids\":");
                write::ids(out, &choice.token_ids);
            }
            out.extend_from_slice(b",\"finish_reason\":");
            write::finish_reason(out, choice.finish);
            out.push(b'}');
        });
        out.extend_from_slice(b",\"usage\":");
        usage.write(out);
        out.push(b'}');
    }
}
