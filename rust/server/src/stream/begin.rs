//! Submission: all prompts of a request, or none.

use std::sync::Arc;

use cbrs_core::RequestSpec;
use cbrs_text::TextSpec;

use super::ticket::{Submitted, Ticket};
use crate::access::ApiKey;
use crate::access_log::Entry;
use crate::app::App;
use crate::error::ApiError;
use crate::events::Place;

/// A request that is ready to be submitted.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) prompts: Vec<Vec<i32>>,
    /// Without a prompt.
    pub(crate) spec: RequestSpec,
    pub(crate) text: TextSpec,
    /// Choices are wanted when they end, not as they come.
    pub(crate) is_whole: bool,
    /// The id of the response.
    pub(crate) id: String,
    /// What the client calls it.
    pub(crate) name: Option<String>,
    /// The key that it was sent with.
    pub(crate) owner: Option<Arc<ApiKey>>,
    /// Its line of the access log, if there is one.
    pub(crate) entry: Option<Arc<Entry>>,
}

/// Submits a request.
///
/// # Errors
/// Why one of its prompts was refused; the others are cancelled then.
pub(crate) fn begin(app: &Arc<App>, submission: Submission) -> Result<Ticket, ApiError> {
    let Submission { prompts, mut spec, text, is_whole, id, name, owner, entry } = submission;
    if let Some(entry) = &entry {
        entry.set_terms(spec.tenant.as_ref(), app.engine.submitter.class_of(&spec));
    }
    let mut ticket = Ticket::open(app, Submitted::new(id, name, owner), prompts.len())?;
    let mut place = Place::default();
    let now_ns = (app.engine.clock)();
    let last = prompts.len() - 1;
    for (number, (index, prompt)) in ticket.indices().zip(prompts).enumerate() {
        let rest = if number == last { std::mem::take(&mut spec) } else { spec.clone() };
        let mut spec = RequestSpec { prompt_token_ids: prompt, ..rest };
        let submitting = spec.truncate_prompt(app.engine.submitter.max_model_len()).map_err(ApiError::from);
        let num_tokens = spec.prompt_token_ids.len();
        let recipient = app.router.recipient(index, is_whole);
        let submit = || Ok(app.engine.processor.submit(spec, &text, recipient, now_ns)?);
        let submitted =
            submitting.and_then(|()| app.events.submit(&mut place, ticket.submitted(), now_ns, num_tokens, submit));
        let request = submitted.map_err(|error| at_prompt(error, number, last))?;
        ticket.submitted().add(request, &app.engine.submitter);
    }
    ticket.log_to(entry);
    Ok(ticket)
}

/// Names the prompt, if there are several.
fn at_prompt(error: ApiError, number: usize, last: usize) -> ApiError {
    if last == 0 { error } else { error.at("prompt", number) }
}
