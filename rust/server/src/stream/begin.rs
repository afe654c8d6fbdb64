//! Submission: all prompts of a request, or none.

use std::sync::Arc;

use cbrs_core::{ListError, RequestSpec};
use cbrs_text::TextSpec;
use hyper::StatusCode;

use super::submitted::Submitted;
use super::ticket::Ticket;
use crate::access_log::Entry;
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
}

/// Opens a ticket before there is anything to submit: from now on the request can be cancelled by its names.
///
/// # Errors
/// 503 while the server is draining, 429 if the tenant's rates would not let its prompts in, whatever is in them.
pub(crate) fn open(
    app: &Arc<App>,
    submitted: Submitted,
    spec: &RequestSpec,
    (num_prompts, has_texts): (usize, bool),
    entry: &Entry,
) -> Result<Ticket, ApiError> {
    let class = app.engine.submitter.class_of(spec);
    entry.set_terms(spec.tenant.as_ref(), class);
    let mut ticket = Ticket::open(app, submitted, num_prompts)?;
    app.engine.submitter.check_rates(spec.tenant.as_ref(), class, num_prompts, (app.engine.clock)())?;
    if has_texts {
        ticket.owe((spec.tenant.clone(), class));
    }
    Ok(ticket)
}

/// Submits a request under its ticket. Its prompts are checked, hashed and let in together, and no lock is held meanwhile.
///
/// # Errors
/// Why its prompts were refused; none is submitted then. 499 if somebody has cancelled it.
pub(crate) fn begin(
    app: &Arc<App>,
    mut ticket: Ticket,
    submission: Submission,
    entry: Arc<Entry>,
) -> Result<Ticket, ApiError> {
    let Submission { prompts, spec, text, is_whole } = submission;
    let (engine, num_prompts) = (&app.engine, prompts.len());
    let now_ns = (engine.clock)();
    let recipient = app.router.recipient(ticket.indices().start, is_whole);
    let prepared = engine.processor.prepare_list(spec, prompts, &text, recipient, now_ns).map_err(|refused| {
        let error = at_prompt(refused, num_prompts);
        if error.status != StatusCode::BAD_REQUEST {
            // It is to come back when the rate lets it in, which it must not use up meanwhile.
            ticket.settle();
        }
        error
    })?;
    // Its reservation was charged.
    ticket.settle();
    // Entered before the engine can tell anything of it.
    let place = app.events.enter(ticket.submitted(), now_ns, prepared.ids().zip(prepared.prompt_lens()));
    let submitted = ticket.submitted().submit(prepared);
    submitted.inspect_err(|_| app.events.withdraw(place))?;
    ticket.log_to(entry);
    Ok(ticket)
}

/// Names the prompt that was refused, if there are several.
fn at_prompt(refused: ListError, num_prompts: usize) -> ApiError {
    let error = ApiError::from(refused.error);
    match refused.index.filter(|_| num_prompts > 1) {
        Some(index) => error.at("prompt", index),
        None => error,
    }
}
