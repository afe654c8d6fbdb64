//! `/v1/completions` and `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use cbrs_core::RequestSpec;
use cbrs_text::ChatRequest;
use hyper::header::HeaderValue;

use super::{json, read};
use crate::access::{self, ApiKey};
use crate::access_log::Entry;
use crate::app::{App, unix_time};
use crate::error::ApiError;
use crate::names::{REQUEST_ID, given_name};
use crate::reply::{Answer, ChatAnswer, CompletionAnswer, Echo, Outline, TokenTexts, collect};
use crate::stream::{Submission, Submitted, Ticket, begin, event_stream, open};
use crate::wire::{ChatBody, Common, CompletionBody, Prompt, num_bytes};

/// How a request is called.
struct Name {
    id: String,
    given: Option<String>,
    header: HeaderValue,
    entry: Arc<Entry>,
}

impl Name {
    fn new(app: &App, request: &Request, prefix: &str) -> Self {
        let id = app.ids.next(prefix);
        let given = given_name(request.headers());
        let header = given.cloned().or_else(|| HeaderValue::from_str(&id).ok());
        let header = header.unwrap_or_else(|| HeaderValue::from_static(""));
        let given = given.and_then(|name| name.to_str().ok()).map(str::to_owned);
        let entry = request.extensions().get::<Arc<Entry>>().cloned().expect("every request is observed");
        entry.name(&id, given.as_deref());
        Self { id, given, header, entry }
    }

    /// Opens a ticket under it: from now on the request can be cancelled. It has so many prompts, which are texts or not.
    fn open(
        &self,
        app: &Arc<App>,
        owner: Option<Arc<ApiKey>>,
        spec: &RequestSpec,
        prompts: (usize, bool),
    ) -> Result<Ticket, ApiError> {
        let submitted = Submitted::new(self.id.clone(), self.given.clone(), owner);
        open(app, submitted, spec, prompts, &self.entry)
    }
}

/// `POST /v1/completions`
pub(crate) async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    let name = Name::new(&app, &request, "cmpl-");
    let header = name.header.clone();
    named(complete(app, request, name).await, header)
}

/// `POST /v1/chat/completions`
pub(crate) async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    let name = Name::new(&app, &request, "chatcmpl-");
    let header = name.header.clone();
    named(chat(app, request, name).await, header)
}

/// An answer or an error, with the name of the request.
fn named(answer: Result<Response, ApiError>, name: HeaderValue) -> Response {
    let mut response = answer.unwrap_or_else(ApiError::into_response);
    response.headers_mut().insert(REQUEST_ID, name);
    response
}

async fn complete(app: Arc<App>, request: Request, name: Name) -> Result<Response, ApiError> {
    let limits = &app.config.limits;
    let owner = access::caller(&request);
    let body: CompletionBody = read(&app, request).await?;
    let mut completion = body.check(limits)?;
    let common = &mut completion.common;
    app.check_model(&common.model)?;
    let num_prompts = completion.prompt.len();
    let (mut spec, text) = common.take_specs(num_prompts, limits)?;
    access::claim(owner.as_deref(), &mut spec, common, &app.engine.submitter)?;
    spec.sampling.logprobs = completion.logprobs;
    if completion.echo {
        // The likely tokens of the prompt stand beside those of the output.
        spec.prompt_logprobs = spec.prompt_logprobs.max(completion.logprobs);
    }
    let has_texts = matches!(completion.prompt, Prompt::Texts(_));
    let ticket = name.open(&app, owner, &spec, (num_prompts, has_texts))?;
    let has_given_text = completion.echo && common.truncate_prompt_tokens.is_none();
    let mut given = vec![None; num_prompts];
    let mut prompts = Vec::with_capacity(num_prompts);
    match completion.prompt {
        Prompt::Ids(lists) => prompts = Prompt::ids(&lists)?,
        Prompt::Texts(texts) => {
            // Many short texts take as long as a long one.
            let num_bytes: usize = texts.iter().map(String::len).sum();
            let max_inline = if num_bytes <= limits.max_inline_bytes { num_bytes } else { 0 };
            for (prompt, given) in texts.into_iter().zip(&mut given) {
                *given = has_given_text.then(|| prompt.clone());
                let ids = ticket.submitted().prepare(app.engine.encode(prompt, true, max_inline)).await?;
                if num_prompts > 1 {
                    let one = RequestSpec { prompt_token_ids: ids.clone(), ..spec.clone() };
                    app.engine
                        .submitter
                        .check(one)
                        .map_err(|error| ApiError::from(error).at("prompt", prompts.len()))?;
                }
                prompts.push(ids);
            }
        }
    }
    let tokenizer = app.engine.tokenizer.clone();
    let echo = completion.echo.then_some(Echo { given, tokenizer });
    let outline = outline(&app, &name.id, common, num_prompts, completion.logprobs);
    let submission = Submission { prompts, spec, text, is_whole: !common.stream };
    let ticket = begin(&app, ticket, submission, name.entry)?;
    answer(ticket, CompletionAnswer::new(outline, echo), common).await
}

async fn chat(app: Arc<App>, request: Request, name: Name) -> Result<Response, ApiError> {
    let limits = &app.config.limits;
    let owner = access::caller(&request);
    let body: ChatBody = read(&app, request).await?;
    let mut chat = body.check()?;
    let common = &mut chat.common;
    app.check_model(&common.model)?;
    let (mut spec, text) = common.take_specs(1, limits)?;
    access::claim(owner.as_deref(), &mut spec, common, &app.engine.submitter)?;
    spec.sampling.logprobs = chat.logprobs;
    let size = num_bytes(&chat.messages);
    let request = ChatRequest::from_messages(&chat.messages, true);
    let ticket = name.open(&app, owner, &spec, (1, true))?;
    let renamed = |error: ApiError| {
        error
            .renamed("prompt", "messages")
            .renamed("logprobs", "top_logprobs")
            .renamed("max_tokens", chat.max_tokens_name)
    };
    let encoding = app.engine.encode_chat(request, size, limits.max_inline_bytes);
    let prompts = vec![ticket.submitted().prepare(encoding).await.map_err(renamed)?];
    let outline = outline(&app, &name.id, common, 1, chat.logprobs);
    let submission = Submission { prompts, spec, text, is_whole: !common.stream };
    let ticket = begin(&app, ticket, submission, name.entry).map_err(renamed)?;
    answer(ticket, ChatAnswer::new(outline), common).await
}

/// Streams an answer, or collects it.
async fn answer(ticket: Ticket, answer: impl Answer, common: &Common) -> Result<Response, ApiError> {
    if common.stream {
        return Ok(event_stream(ticket, answer, common.has_usage()));
    }
    collect(ticket, answer).await.map(json)
}

fn outline(app: &App, id: &str, common: &Common, num_prompts: usize, logprobs: Option<u32>) -> Outline {
    Outline {
        id: id.to_owned(),
        created: unix_time(),
        model: app.model().to_owned(),
        num_prompts,
        n: common.n.unwrap_or(1) as usize,
        logprobs,
        prompt_logprobs: common.prompt_logprobs,
        has_token_ids: common.return_token_ids,
        has_usage: common.has_usage(),
        texts: TokenTexts::new(app.engine.tokenizer.clone()),
    }
}
