//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use cbrs_text::ChatRequest;

use super::{json, read};
use crate::access::{self, ApiKey};
use crate::app::App;
use crate::engine::apart;
use crate::error::ApiError;
use crate::reply::write;
use crate::wire::{DetokenizeBody, TokenizeBody, TokenizeSource, num_bytes};

/// Charges a request to the tenant of a key; without keys, to that of requests that name none. Its tokens cost the engine nothing.
fn charge(app: &App, caller: Option<&ApiKey>) -> Result<(), ApiError> {
    let (submitter, tenant) = (&app.engine.submitter, caller.and_then(ApiKey::tenant));
    let class = submitter.default_class(tenant.map(|name| &**name));
    Ok(submitter.charge_request(tenant, class, (app.engine.clock)())?)
}

/// `POST /tokenize`
pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let caller = access::caller(&request);
    let body: TokenizeBody = read(&app, request).await?;
    body.model.as_deref().map_or(Ok(()), |model| app.check_model(model))?;
    charge(&app, caller.as_deref())?;
    let max_inline = app.config.limits.max_inline_bytes;
    let ids = match body.source()? {
        TokenizeSource::Prompt { text, add_special_tokens } => {
            app.engine.encode(text, add_special_tokens, max_inline).await?
        }
        TokenizeSource::Messages { messages, add_generation_prompt } => {
            let request = ChatRequest::from_messages(&messages, add_generation_prompt);
            app.engine.encode_chat(request, num_bytes(&messages), max_inline).await?
        }
    };
    let is_short = ids.len() <= max_inline;
    let max_model_len = app.engine.submitter.max_model_len();
    let write = move || {
        let mut out = b"{\"count\":".to_vec();
        write::integer(&mut out, ids.len());
        out.extend_from_slice(b",\"max_model_len\":");
        write::integer(&mut out, max_model_len);
        out.extend_from_slice(b",\"tokens\":");
        write::ids(&mut out, &ids);
        out.push(b'}');
        Ok(out)
    };
    Ok(json(if is_short { write()? } else { apart(write).await? }))
}

/// `POST /detokenize`
pub(crate) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let caller = access::caller(&request);
    let body: DetokenizeBody = read(&app, request).await?;
    body.model.as_deref().map_or(Ok(()), |model| app.check_model(model))?;
    let Some(tokenizer) = app.engine.tokenizer.clone() else {
        return Err(ApiError::invalid("tokens", "the model has no tokenizer"));
    };
    charge(&app, caller.as_deref())?;
    let ids = body.ids(tokenizer.vocab_size())?;
    let is_short = ids.len() <= app.config.limits.max_inline_bytes;
    let decode = move || Ok(tokenizer.decode(&ids, false));
    let text = if is_short { decode()? } else { apart(decode).await? };
    let mut out = b"{\"prompt\":".to_vec();
    write::string(&mut out, &text);
    out.push(b'}');
    Ok(json(out))
}
