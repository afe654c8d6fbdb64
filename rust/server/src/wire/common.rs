//! What completions and chats have in common, once both are parsed.

use std::collections::HashMap;

use serde::Deserialize;

use super::fields::{LogitBias, Stops, StreamOptions};

/// Parameters of a request besides its prompt and what its kind alone has.
#[derive(Debug, Default)]
pub(crate) struct Common {
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) n: Option<u32>,
    pub(crate) stop: Option<Stops>,
    pub(crate) seed: Option<i64>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) logit_bias: Option<LogitBias>,
    pub(crate) max_tokens: Option<u64>,
    pub(crate) metadata: Option<HashMap<String, String>>,
    pub(crate) service_tier: Option<ServiceTier>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) stop_token_ids: Option<Vec<i64>>,
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) truncate_prompt_tokens: Option<i64>,
    pub(crate) return_token_ids: bool,
    pub(crate) priority: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) ttft_deadline_ms: Option<f64>,
    pub(crate) deadline_ms: Option<f64>,
    pub(crate) target_itl_ms: Option<f64>,
    pub(crate) cache_salt: Option<String>,
}

impl Common {
    /// Whether a stream tells its usage.
    pub(crate) fn has_usage(&self) -> bool {
        self.stream_options.and_then(|options| options.include_usage).unwrap_or_default()
    }
}

/// `service_tier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ServiceTier {
    Auto,
    Default,
    Flex,
    Priority,
}

/// Declares a body: the fields of its kind, those of both kinds, and `take_common`, which moves the latter out.
macro_rules! body {
    ($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            $($(#[$attribute])* pub(crate) $field: $kind,)*
            model: String,
            stream: Option<bool>,
            stream_options: Option<$crate::wire::fields::StreamOptions>,
            n: Option<u32>,
            stop: Option<$crate::wire::fields::Stops>,
            seed: Option<i64>,
            temperature: Option<f64>,
            top_p: Option<f64>,
            presence_penalty: Option<f64>,
            frequency_penalty: Option<f64>,
            logit_bias: Option<$crate::wire::fields::LogitBias>,
            max_tokens: Option<u64>,
            #[serde(rename = "user")]
            _user: Option<String>,
            metadata: Option<std::collections::HashMap<String, String>>,
            #[serde(rename = "store")]
            _store: Option<bool>,
            service_tier: Option<$crate::wire::common::ServiceTier>,
            top_k: Option<i64>,
            min_p: Option<f64>,
            repetition_penalty: Option<f64>,
            min_tokens: Option<u32>,
            ignore_eos: Option<bool>,
            stop_token_ids: Option<Vec<i64>>,
            prompt_logprobs: Option<u32>,
            truncate_prompt_tokens: Option<i64>,
            return_token_ids: Option<bool>,
            priority: Option<String>,
            tenant: Option<String>,
            ttft_deadline_ms: Option<f64>,
            deadline_ms: Option<f64>,
            target_itl_ms: Option<f64>,
            cache_salt: Option<String>,
        }

        impl $name {
            /// Moves out what both kinds have.
            fn take_common(&mut self) -> $crate::wire::common::Common {
                $crate::wire::common::Common {
                    model: std::mem::take(&mut self.model),
                    stream: self.stream.unwrap_or_default(),
                    stream_options: self.stream_options,
                    n: self.n,
                    stop: self.stop.take(),
                    seed: self.seed,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    logit_bias: self.logit_bias.take(),
                    max_tokens: self.max_tokens,
                    metadata: self.metadata.take(),
                    service_tier: self.service_tier,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    min_tokens: self.min_tokens,
                    ignore_eos: self.ignore_eos.unwrap_or_default(),
                    stop_token_ids: self.stop_token_ids.take(),
                    prompt_logprobs: self.prompt_logprobs,
                    truncate_prompt_tokens: self.truncate_prompt_tokens,
                    return_token_ids: self.return_token_ids.unwrap_or_default(),
                    priority: self.priority.take(),
                    tenant: self.tenant.take(),
                    ttft_deadline_ms: self.ttft_deadline_ms,
                    deadline_ms: self.deadline_ms,
                    target_itl_ms: self.target_itl_ms,
                    cache_salt: self.cache_salt.take(),
                }
            }
        }
    };
}
pub(crate) use body;
