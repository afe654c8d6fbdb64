//! OpenAI's error object, and what each refusal of the core is on the wire.

use std::borrow::Cow;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use cbrs_core::Error;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};
use serde::Serialize;

/// How the core begins the message of a request whose deadline passed, and of no other.
const DEADLINE_PASSED: &str = "the deadline passed";

/// The `code` of an error response, or its `type`, for the access log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorCode(pub(crate) &'static str);

/// Tells OpenAI's clients not to try again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Why a request is not answered.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<Cow<'static, str>>,
    code: Option<&'static str>,
    retry_after_s: Option<u64>,
    /// Coming back with the same is no use, although the client could think so.
    is_final: bool,
}

/// The object as it stands in a body or an event.
#[derive(Serialize)]
struct Envelope<'a> {
    error: Object<'a>,
}

#[derive(Serialize)]
struct Object<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>, code: Option<&'static str>) -> Self {
        Self { status, kind, message: message.into(), param: None, code, retry_after_s: None, is_final: false }
    }

    /// 400 about a parameter.
    pub(crate) fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let param = Some(param.into());
        Self { param, ..Self::bad_request(message) }
    }

    /// 400 about the body as a whole.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message, None)
    }

    /// 400 about a field of OpenAI's that this version has not.
    pub(crate) fn unsupported(param: impl Into<Cow<'static, str>>, what: &str) -> Self {
        let param = param.into();
        let message = format!("{param}: {what} not supported by this version; leave it out");
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 404.
    pub(crate) fn not_found(message: impl Into<String>, code: &'static str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message, Some(code))
    }

    /// 401: no API key, or none that is valid.
    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message, Some("invalid_api_key"))
    }

    /// 403 about a parameter that the API key does not permit.
    pub(crate) fn forbidden(param: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::FORBIDDEN, "permission_error", message, Some("permission_denied"));
        Self { param: Some(param.into()), ..error }
    }

    /// 421: the request calls the server by a name that is not its own.
    pub(crate) fn misdirected(host: &str) -> Self {
        let shown: String = host.chars().take(100).collect();
        let message = format!("the host {shown:?} is not served here; --allowed-host adds names");
        Self::new(StatusCode::MISDIRECTED_REQUEST, "invalid_request_error", message, Some("host_not_allowed"))
    }

    /// 403 for a page of another site.
    pub(crate) fn foreign_origin(origin: &str) -> Self {
        let shown: String = origin.chars().take(100).collect();
        let message = format!("pages of {shown:?} may not use this server; --allowed-host adds names");
        Self::new(StatusCode::FORBIDDEN, "permission_error", message, Some("origin_not_allowed"))
    }

    /// 404 for a model that is not served.
    pub(crate) fn unknown_model(name: &str) -> Self {
        let shown: String = name.chars().take(200).collect();
        let message = format!("the model {shown:?} is not served here; GET /v1/models lists what is");
        Self { param: Some("model".into()), ..Self::not_found(message, "model_not_found") }
    }

    /// A status with a message of its own.
    pub(crate) fn with_status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message, None)
    }

    /// 503: nothing will be answered here any more.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", message, Some("unavailable"));
        Self { retry_after_s: Some(1), ..error }
    }

    /// 503: there is no place for the connection.
    pub(crate) fn too_many_connections(message: impl Into<String>) -> Self {
        Self { code: Some("too_many_connections"), ..Self::unavailable(message) }
    }

    /// 499: somebody asked for the end of the request by its name. (A client that has gone is told nothing; only the log has 499 for it.)
    pub(crate) fn cancelled() -> Self {
        let status = StatusCode::from_u16(499).expect("a status of three digits");
        Self::new(status, "cancelled", "the request was cancelled", Some("cancelled"))
    }

    /// What the message of a failed choice says: 504 for a deadline, otherwise 500.
    pub(crate) fn failed(message: &str) -> Self {
        if message.starts_with(DEADLINE_PASSED) {
            Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message, Some("deadline_exceeded"))
        } else {
            Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message, Some("engine_error"))
        }
    }

    /// The same about `to`, if it is about `from`.
    pub(crate) fn renamed(mut self, from: &str, to: &'static str) -> Self {
        if self.param.as_deref() == Some(from) && from != to {
            self.message = self.message.replacen(from, to, 1);
            self.param = Some(to.into());
        }
        self
    }

    /// The same about entry `index` of the list `param`, if it is about the list.
    pub(crate) fn at(mut self, param: &str, index: usize) -> Self {
        if self.param.as_deref() == Some(param) {
            self.message = format!("{param}[{index}]: {}", self.message);
            self.param = Some(format!("{param}[{index}]").into());
        }
        self
    }

    /// Its code, or its type if it has none.
    pub(crate) fn code(&self) -> &'static str {
        self.code.unwrap_or(self.kind)
    }

    /// Appends `{"error": …}`.
    pub(crate) fn write_json(&self, out: &mut Vec<u8>) {
        let error = Object { message: &self.message, r#type: self.kind, param: self.param.as_deref(), code: self.code };
        serde_json::to_writer(out, &Envelope { error }).expect("an object of strings, written to memory");
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(3);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        } else if self.is_final || self.status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        headers
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::PromptTooLong { num_prompt_tokens, max_model_len, .. } => {
                let param = if num_prompt_tokens < max_model_len { "max_tokens" } else { "prompt" };
                Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
            }
            Error::ListTooLong { .. } => {
                let error = Self::invalid("prompt", message);
                Self { code: Some("too_many_prompts"), is_final: true, ..error }
            }
            Error::EmptyPrompt | Error::Tokenizer { .. } => Self::invalid("prompt", message),
            Error::TokenOutOfVocabulary { field: name, .. }
            | Error::InvalidParameter { name, .. }
            | Error::AboveCap { name, .. }
            | Error::InvalidLength { name, .. }
            | Error::TooManyEntries { name, .. }
            | Error::UnusableParameter { name, .. }
            | Error::UnknownName { what: name, .. }
            | Error::InvalidNumber { name, .. } => Self::invalid(name, message).renamed("prompt_token_ids", "prompt"),
            Error::Unsupported { name } => Self { code: Some("unsupported_parameter"), ..Self::invalid(name, message) },
            Error::ChatTemplate { .. } => Self::invalid("messages", message),
            Error::QueueFull { .. }
            | Error::QueuedTokensFull { .. }
            | Error::TenantQueueFull { .. }
            | Error::TenantOverRate { .. }
            | Error::TooManyTenants { .. }
            | Error::QueueTooLong { .. }
            | Error::DeadlineUnattainable { .. } => {
                let code = match error {
                    Error::TenantOverRate { .. } | Error::TooManyTenants { .. } => "rate_limit_exceeded",
                    Error::DeadlineUnattainable { .. } => "deadline_unattainable",
                    _ => "overloaded",
                };
                // Without a time, coming back is no use, which the header below says.
                let seconds = error.retry_after_s().map(|seconds| seconds.ceil().clamp(1.0, 86_400.0) as u64);
                let refusal = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message, Some(code));
                Self { retry_after_s: seconds, ..refusal }
            }
            Error::Closed => Self::unavailable("the engine is shutting down"),
            // Nothing of these is about a request.
            Error::InvalidConfig { .. }
            | Error::OutOfMemory { .. }
            | Error::UnknownPolicy { .. }
            | Error::WrongStep { .. }
            | Error::NoBatchInFlight { .. }
            | Error::MissingResult { .. }
            | Error::ResultLength { .. }
            | Error::ResultToken { .. }
            | Error::ResultTokenStart { .. }
            | Error::BlockNotHeld { .. } => Self::failed(&message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut body = Vec::new();
        self.write_json(&mut body);
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers();
        response.extensions_mut().insert(ErrorCode(self.code()));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(error: &ApiError) -> serde_json::Value {
        let mut out = Vec::new();
        error.write_json(&mut out);
        serde_json::from_slice(&out).expect("it is JSON")
    }

    #[test]
    fn an_overload_tells_whole_seconds_of_at_least_one() {
        for (seconds, header) in [(0.001, 1), (1.0, 1), (1.2, 2), (1e9, 86_400)] {
            let error = ApiError::from(Error::QueueFull { queued: 4, limit: 4, retry_after_s: seconds });
            assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(error.headers()[RETRY_AFTER], HeaderValue::from(header));
        }
    }

    #[test]
    fn what_cannot_become_possible_is_not_to_be_tried_again() {
        let late = |retry_after_s| Error::DeadlineUnattainable {
            token: "first",
            predicted_ms: 3.0,
            deadline_ms: 1.0,
            retry_after_s,
        };
        let headers = ApiError::from(late(None)).headers();
        assert_eq!((headers.get(RETRY_AFTER), headers[SHOULD_RETRY].as_bytes()), (None, &b"false"[..]));
        let headers = ApiError::from(late(Some(1.5))).headers();
        assert_eq!((headers[RETRY_AFTER].as_bytes(), headers.get(SHOULD_RETRY)), (&b"2"[..], None));
    }

    #[test]
    fn a_list_that_never_gets_in_is_the_clients_mistake() {
        let (what, name) = ("requests", "queue_capacity");
        let error = ApiError::from(Error::ListTooLong { num_prompts: 9, what, value: 9.0, name, limit: 8.0 });
        assert_eq!((error.status, error.headers()[SHOULD_RETRY].as_bytes()), (StatusCode::BAD_REQUEST, &b"false"[..]));
        assert_eq!((error.headers().get(RETRY_AFTER), error.code()), (None, "too_many_prompts"));
        let error = json(&error);
        assert_eq!(error["error"]["param"], "prompt");
        let message = error["error"]["message"].as_str().expect("a text");
        assert!(
            message.contains("9 prompts") && message.contains("no more than 8") && message.contains(name),
            "{message}"
        );
    }

    #[test]
    fn a_refusal_names_the_parameter_as_the_wire_does() {
        let error = Error::TokenOutOfVocabulary { field: "prompt_token_ids", position: 3, token: -1, vocab_size: 10 };
        let error = json(&ApiError::from(error));
        assert_eq!(error["error"]["param"], "prompt");
        assert_eq!(error["error"]["message"], "prompt[3] is -1, but token ids must be in 0..10");
        assert_eq!(error["error"]["code"], serde_json::Value::Null);
    }

    #[test]
    fn a_deadline_is_told_from_other_failures() {
        let late = ApiError::failed("the deadline passed: the request still waited after 3 ms");
        assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(json(&late)["error"]["code"], "deadline_exceeded");
        assert_eq!(ApiError::failed("NaN").status, StatusCode::INTERNAL_SERVER_ERROR);
    }
}
