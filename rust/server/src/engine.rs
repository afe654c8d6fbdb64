//! The engine as the server sees it: text in, requests submitted, never a step.

use std::fmt;
use std::sync::Arc;

use cbrs_core::{Error, Submitter};
use cbrs_text::{ChatRequest, ChatTemplate, OutputProcessor, Tokenizer};

use crate::error::ApiError;

/// Tells the time on the engine's clock, in nanoseconds.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What a server needs of an engine; whoever made it steps the engine, on a thread of its own.
#[derive(Clone)]
pub struct EngineHandle {
    /// Takes requests and tells what comes of them.
    pub processor: Arc<OutputProcessor>,
    /// The scheduler's face towards other threads.
    pub submitter: Submitter,
    /// Without one, prompts are token ids and answers have no text.
    pub tokenizer: Option<Tokenizer>,
    /// Without one there are no chats.
    pub template: Option<ChatTemplate>,
    /// The clock that the scheduler's steps go by.
    pub clock: Clock,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").field("processor", &self.processor).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Splits a text into ids; long texts go to a thread of the pool.
    pub(crate) async fn encode(&self, text: String, specials: bool, max_inline: usize) -> Result<Vec<i32>, ApiError> {
        let Some(tokenizer) = self.tokenizer.clone() else {
            return Err(ApiError::invalid("prompt", "the model has no tokenizer; give token ids"));
        };
        if text.len() <= max_inline {
            return tokenizer.encode(&text, specials).map_err(ApiError::from);
        }
        apart(move || tokenizer.encode_in_background(&text, specials).map_err(ApiError::from)).await
    }

    /// The ids of a conversation; `num_bytes` is the size of its texts.
    pub(crate) async fn encode_chat(
        &self,
        request: ChatRequest,
        num_bytes: usize,
        max_inline: usize,
    ) -> Result<Vec<i32>, ApiError> {
        let (Some(template), Some(tokenizer)) = (self.template.clone(), self.tokenizer.clone()) else {
            let message = "the model has no chat template; use /v1/completions".to_owned();
            return Err(Error::ChatTemplate { message }.into());
        };
        // The template writes the special tokens itself.
        if num_bytes <= max_inline && !template.may_wait() {
            return Ok(tokenizer.encode(&template.render(&request)?, false)?);
        }
        apart(move || Ok(tokenizer.encode_in_background(&template.render(&request)?, false)?)).await
    }
}

/// Does work on a thread of the pool, where it delays no connection.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(ApiError::failed("what was asked for could not be prepared")))
}
