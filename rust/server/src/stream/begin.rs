//! Submission: all prompts of a request, or none.

use std::sync::Arc;

use cbrs_core::RequestSpec;
use cbrs_text::TextSpec;

use super::ticket::{Submitted, Ticket};
use crate::access::ApiKey;
use crate::app::App;
use crate::error::ApiError;

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
}

/// Submits a request.
///
/// # Errors
/// Why one of its prompts was refused; the others are cancelled then.
pub(crate) fn begin(app: &Arc<App>, submission: Submission) -> Result<Ticket, ApiError> {
    let Submission { prompts, mut spec, text, is_whole, id, name, owner } = submission;
    let ticket = Ticket::open(app, Submitted::new(id, name, owner), prompts.len())?;
    let now_ns = (app.engine.clock)();
    let last = prompts.len() - 1;
    for (number, (index, prompt)) in ticket.indices().zip(prompts).enumerate() {
        let rest = if number == last { std::mem::take(&mut spec) } else { spec.clone() };
        let spec = RequestSpec { prompt_token_ids: prompt, ..rest };
        let submitted = app.engine.processor.submit(spec, &text, app.router.recipient(index, is_whole), now_ns);
        let request = submitted.map_err(|error| at_prompt(error.into(), number, last))?;
        ticket.submitted().add(request, &app.engine.submitter);
    }
    Ok(ticket)
}

/// Names the prompt, if there are several.
fn at_prompt(error: ApiError, number: usize, last: usize) -> ApiError {
    if last == 0 { error } else { error.at("prompt", number) }
}
