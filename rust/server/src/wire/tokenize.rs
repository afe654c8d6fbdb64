//! `POST /tokenize` and `/detokenize`.

use serde::Deserialize;

use super::messages::{Message, check_messages};
use super::params::token_ids;
use crate::error::ApiError;

/// A body of `/tokenize`: a prompt or messages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeBody {
    pub(crate) model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
}

/// What is to be tokenized.
#[derive(Debug)]
pub(crate) enum TokenizeSource {
    Prompt { text: String, add_special_tokens: bool },
    Messages { messages: Vec<Message>, add_generation_prompt: bool },
}

impl TokenizeBody {
    /// Checks that it has one source, and nothing that goes with the other.
    pub(crate) fn source(self) -> Result<TokenizeSource, ApiError> {
        match (self.prompt, self.messages) {
            (Some(text), None) if self.add_generation_prompt.is_none() => {
                Ok(TokenizeSource::Prompt { text, add_special_tokens: self.add_special_tokens.unwrap_or(true) })
            }
            (None, Some(messages)) if self.add_special_tokens.is_none() => {
                let messages = check_messages(messages)?;
                let add_generation_prompt = self.add_generation_prompt.unwrap_or(true);
                Ok(TokenizeSource::Messages { messages, add_generation_prompt })
            }
            (Some(_), None) => Err(ApiError::invalid("add_generation_prompt", "add_generation_prompt needs messages")),
            (None, Some(_)) => {
                let message = "add_special_tokens needs a prompt: a chat template writes them itself";
                Err(ApiError::invalid("add_special_tokens", message))
            }
            (None, None) | (Some(_), Some(_)) => Err(ApiError::invalid("prompt", "give either prompt or messages")),
        }
    }
}

/// A body of `/detokenize`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DetokenizeBody {
    pub(crate) model: Option<String>,
    tokens: Vec<i64>,
}

impl DetokenizeBody {
    /// The ids, which must be in `0..vocab_size`.
    pub(crate) fn ids(&self, vocab_size: usize) -> Result<Vec<i32>, ApiError> {
        if let Some((at, id)) = self.tokens.iter().enumerate().find(|&(_, &id)| id < 0 || id >= vocab_size as i64) {
            let message = format!("tokens[{at}] is {id}, but token ids must be in 0..{vocab_size}");
            return Err(ApiError::invalid("tokens", message));
        }
        token_ids("tokens", &self.tokens)
    }
}
