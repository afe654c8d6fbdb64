//! `POST /v1/chat/completions`.

use serde::Deserialize;

use super::common::{Common, body};
use super::fields::Refused;
use super::messages::{Message, check_messages};
use crate::error::ApiError;

body! {
    /// A body of `/v1/chat/completions`.
    ChatBody {
        messages: Vec<Message>,
        max_completion_tokens: Option<u64>,
        logprobs: Option<bool>,
        top_logprobs: Option<u32>,
        response_format: Option<ResponseFormat>,
        modalities: Option<Vec<String>>,
        safety_identifier: Option<String>,
        #[serde(rename = "prompt_cache_key")]
        _prompt_cache_key: Option<String>,
        tool_choice: Option<ToolChoice>,
        function_call: Option<ToolChoice>,
        tools: Refused,
        functions: Refused,
        parallel_tool_calls: Refused,
        audio: Refused,
        prediction: Refused,
        web_search_options: Refused,
        moderation: Refused,
        verbosity: Refused,
        reasoning_effort: Refused,
        prompt_cache_retention: Refused,
        prompt_cache_options: Refused,
    }
}

/// `response_format`, of which only the kind is read.
#[derive(Debug, Deserialize)]
pub(crate) struct ResponseFormat {
    r#type: String,
}

/// `tool_choice`: a word, or an object that names a tool.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum ToolChoice {
    Word(String),
    Tool(serde::de::IgnoredAny),
}

impl ToolChoice {
    fn is_none(&self) -> bool {
        matches!(self, Self::Word(word) if word == "none")
    }
}

/// Longest `safety_identifier`, in characters.
const MAX_SAFETY_IDENTIFIER: usize = 64;

/// A chat as it was asked for.
#[derive(Debug)]
pub(crate) struct Chat {
    pub(crate) common: Common,
    pub(crate) messages: Vec<Message>,
    pub(crate) logprobs: Option<u32>,
    /// The field that gave `max_tokens`.
    pub(crate) max_tokens_name: &'static str,
}

impl ChatBody {
    /// Checks what chats alone have.
    pub(crate) fn check(mut self) -> Result<Chat, ApiError> {
        self.refuse()?;
        let mut common = self.take_common();
        let mut max_tokens_name = "max_tokens";
        if let Some(count) = self.max_completion_tokens {
            if common.max_tokens.is_some_and(|other| other != count) {
                let message = "max_tokens and max_completion_tokens differ; give one of them";
                return Err(ApiError::invalid("max_tokens", message));
            }
            (common.max_tokens, max_tokens_name) = (Some(count), "max_completion_tokens");
        }
        let logprobs = match (self.logprobs.unwrap_or_default(), self.top_logprobs) {
            (false, Some(_)) => {
                return Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true"));
            }
            (false, None) => None,
            (true, count) => Some(count.unwrap_or(0)),
        };
        let messages = check_messages(self.messages)?;
        Ok(Chat { common, messages, logprobs, max_tokens_name })
    }

    /// Refuses what changes an answer and is not there yet.
    fn refuse(&self) -> Result<(), ApiError> {
        let refused = [
            ("tools", self.tools.is_some(), "tools are"),
            ("functions", self.functions.is_some(), "functions are"),
            ("parallel_tool_calls", self.parallel_tool_calls.is_some(), "tools are"),
            ("audio", self.audio.is_some(), "audio is"),
            ("prediction", self.prediction.is_some(), "predicted outputs are"),
            ("web_search_options", self.web_search_options.is_some(), "web search is"),
            ("moderation", self.moderation.is_some(), "moderation is"),
            ("verbosity", self.verbosity.is_some(), "it is"),
            ("reasoning_effort", self.reasoning_effort.is_some(), "it is"),
            ("prompt_cache_retention", self.prompt_cache_retention.is_some(), "it is"),
            ("prompt_cache_options", self.prompt_cache_options.is_some(), "it is"),
            ("tool_choice", self.tool_choice.as_ref().is_some_and(|choice| !choice.is_none()), "a choice of tools is"),
            ("function_call", self.function_call.as_ref().is_some_and(|choice| !choice.is_none()), "functions are"),
            (
                "response_format",
                self.response_format.as_ref().is_some_and(|format| format.r#type != "text"),
                "a format other than text is",
            ),
            (
                "modalities",
                self.modalities.as_ref().is_some_and(|kinds| kinds.iter().any(|kind| kind != "text")),
                "a modality other than text is",
            ),
        ];
        if let Some((name, _, what)) = refused.iter().find(|(_, is_given, _)| *is_given) {
            return Err(ApiError::unsupported(*name, what));
        }
        let label = self.safety_identifier.as_ref().map_or(0, |label| label.chars().count());
        if label > MAX_SAFETY_IDENTIFIER {
            let message = format!("safety_identifier is {label} characters long, but at most 64 are allowed");
            return Err(ApiError::invalid("safety_identifier", message));
        }
        Ok(())
    }
}
