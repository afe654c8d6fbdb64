//! The messages of a chat.

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::fields::Refused;
use crate::error::ApiError;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Templates know it as `system`.
    #[serde(alias = "developer")]
    System,
    User,
    Assistant,
    Tool,
    Function,
}

/// A message, as it is read and as the template sees it.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: Role,
    content: Option<Content>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing)]
    refusal: Refused,
    #[serde(default, skip_serializing)]
    audio: Refused,
    #[serde(default, skip_serializing)]
    tool_calls: Refused,
    #[serde(default, skip_serializing)]
    function_call: Refused,
    #[serde(default, skip_serializing)]
    tool_call_id: Refused,
}

/// What is said: a text, or parts, which become one text with a line end between them.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    #[serde(skip)]
    Parts(Vec<Part>),
}

/// A part of a content; of kinds other than text nothing else is read.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    r#type: String,
    text: Option<String>,
    #[serde(default)]
    image_url: Refused,
    #[serde(default)]
    input_audio: Refused,
    #[serde(default)]
    file: Refused,
    #[serde(default)]
    refusal: Refused,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;

        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = list.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }

        deserializer.deserialize_any(ContentVisitor)
    }
}

/// Checks the messages and joins the parts of their contents.
pub(super) fn check_messages(mut messages: Vec<Message>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; give at least one message"));
    }
    for (index, message) in messages.iter_mut().enumerate() {
        message.check(&format!("messages[{index}]"))?;
    }
    Ok(messages)
}

/// Bytes of all texts.
pub(crate) fn num_bytes(messages: &[Message]) -> usize {
    let len = |message: &Message| match &message.content {
        Some(Content::Text(text)) => text.len(),
        Some(Content::Parts(_)) | None => 0,
    };
    messages.iter().map(len).sum()
}

impl Message {
    fn check(&mut self, place: &str) -> Result<(), ApiError> {
        let given = |field: &Refused| field.is_some();
        let refused = [
            ("tool_calls", given(&self.tool_calls), "tools are"),
            ("tool_call_id", given(&self.tool_call_id), "tools are"),
            ("function_call", given(&self.function_call), "functions are"),
            ("audio", given(&self.audio), "audio is"),
            ("refusal", given(&self.refusal), "a refusal is"),
            ("role", matches!(self.role, Role::Tool | Role::Function), "this role is"),
        ];
        if let Some((name, _, what)) = refused.iter().find(|(_, is_given, _)| *is_given) {
            return Err(ApiError::unsupported(format!("{place}.{name}"), what));
        }
        let content = self.content.take().ok_or_else(|| {
            let message = format!("{place} has no content; give a string (it may be empty)");
            ApiError::invalid(format!("{place}.content"), message)
        })?;
        self.content = Some(Content::Text(content.into_text(place)?));
        Ok(())
    }
}

impl Content {
    fn into_text(self, place: &str) -> Result<String, ApiError> {
        let parts = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(parts) => parts,
        };
        if parts.is_empty() {
            let message = format!("{place}.content is an empty list; give at least one part");
            return Err(ApiError::invalid(format!("{place}.content"), message));
        }
        let mut texts = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            let others: [&Option<IgnoredAny>; 4] = [&part.image_url, &part.input_audio, &part.file, &part.refusal];
            let place = format!("{place}.content[{index}]");
            if part.r#type != "text" || others.iter().any(|other| other.is_some()) {
                return Err(ApiError::unsupported(place, "a part other than text is"));
            }
            let Some(text) = part.text else {
                let message = format!("{place} has no text");
                return Err(ApiError::invalid(place, message));
            };
            texts.push(text);
        }
        Ok(texts.join("\n"))
    }
}
