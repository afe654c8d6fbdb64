//! Every way the core (and the text layer above it) can refuse.
//!
//! Variants are facts with fields; the message gives the numbers and the limit. Running out of blocks is
//! not an error but a scheduling outcome, and a broken invariant is a panic.

use std::sync::Arc;

use thiserror::Error;

/// Result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal: what was wrong, the limit, and what to do about it.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Error {
    /// A field of `SchedulerConfig` is out of range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// The value given.
        value: i64,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// The tables that the limits need are larger than what the machine gives.
    #[error("{what} need {bytes} bytes, which this machine does not give; lower these limits")]
    OutOfMemory {
        /// Which tables, and the limits that size them.
        what: &'static str,
        /// Their size.
        bytes: usize,
    },
    /// A number of the policy, or of a request, is out of range or not a number.
    #[error("{name} is {value}, but must be between {min} and {max}")]
    InvalidNumber {
        /// Name of the number.
        name: &'static str,
        /// The value given.
        value: f64,
        /// Least value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// No such value.
    #[error("unknown {what} {name:?}; choose one of {expected}")]
    UnknownName {
        /// What was named.
        what: &'static str,
        /// The name given.
        name: String,
        /// The names there are.
        expected: String,
    },
    /// `policy` names no built-in policy.
    #[error("unknown policy {name:?}; choose \"fcfs\", \"fair\" or \"static\"")]
    UnknownPolicy {
        /// The name given.
        name: String,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error("{field}[{position}] is {token}, but token ids must be in 0..{vocab_size}")]
    TokenOutOfVocabulary {
        /// Which list of ids.
        field: &'static str,
        /// Index in that list.
        position: usize,
        /// The offending id.
        token: i64,
        /// Number of valid ids (2^31 when the configuration names no vocabulary).
        vocab_size: i64,
    },
    /// A request parameter is out of range or not finite.
    #[error("{name} is {value}, but must be {expected}")]
    InvalidParameter {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: f64,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// A text parameter (a stop string, a tenant, a cache salt) has an unusable length.
    #[error("{name} is {len} {unit} long, but must be {expected}")]
    InvalidLength {
        /// Name of the parameter.
        name: &'static str,
        /// Its length.
        len: usize,
        /// What the length counts.
        unit: &'static str,
        /// The lengths that are allowed.
        expected: &'static str,
    },
    /// A list parameter has too many entries.
    #[error("{name} has {len} entries, but at most {limit} are allowed")]
    TooManyEntries {
        /// Name of the parameter.
        name: &'static str,
        /// Number of entries given.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// A parameter lacks what it needs.
    #[error("{name} {reason}")]
    UnusableParameter {
        /// Name of the parameter.
        name: &'static str,
        /// What it needs, and what to give instead.
        reason: &'static str,
    },
    /// A parameter that this version does not implement was given a value.
    #[error("{name} is not supported by this version; leave it unset")]
    Unsupported {
        /// Name of the parameter.
        name: &'static str,
    },
    /// Prompt plus output cannot fit the context or the block pool.
    #[error(
        "the prompt has {num_prompt_tokens} tokens and {max_tokens} more were asked for, but max_model_len is \
         {max_model_len}; shorten the prompt or lower max_tokens"
    )]
    PromptTooLong {
        /// Length of the prompt.
        num_prompt_tokens: usize,
        /// Output tokens asked for (1 when `max_tokens` was absent).
        max_tokens: u64,
        /// The effective limit on prompt plus output.
        max_model_len: usize,
    },
    /// A parameter is above what the class or the tenant of the request may ask for.
    #[error("{name} is {value}, but the cap of the request's {of} is {cap}; ask for at most {cap}, or leave it unset")]
    AboveCap {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: u64,
        /// The largest value.
        cap: u32,
        /// Whose cap it is: class or tenant.
        of: &'static str,
    },
    /// The bound on waiting requests is reached.
    #[error(
        "the queue is full: {queued} requests are waiting, but at most {limit} may now (queue_capacity, of which a class \
         fills its queue_share; 9/10 of it until a queue that was full is shorter; under max_queue_s as many as max_num_seqs \
         until it is known how long a step takes); try again in {retry_after_s:.3} s"
    )]
    QueueFull {
        /// Requests waiting now.
        queued: usize,
        /// How many may wait now.
        limit: usize,
        /// Seconds after which to try again.
        retry_after_s: f64,
    },
    /// The bound on waiting prompt tokens is reached.
    #[error(
        "the queue is full: {queued} prompt tokens are waiting and this prompt has {requested}, but at most {limit} may \
         wait now (max_queued_tokens, of which a class fills its queue_share; 9/10 of it until a queue that was full is \
         shorter); try again in {retry_after_s:.3} s"
    )]
    QueuedTokensFull {
        /// Prompt tokens waiting now.
        queued: u64,
        /// Prompt tokens of the refused request.
        requested: u64,
        /// How many may wait now.
        limit: u64,
        /// Seconds after which to try again.
        retry_after_s: f64,
    },
    /// The tenant fills its part of the queue; the rest is kept for others.
    #[error(
        "{queued} {what} of tenant {tenant:?} are waiting, and one tenant may have at most {limit} of them now \
         (the rest of the queue is kept for others); try again in {retry_after_s:.3} s"
    )]
    TenantQueueFull {
        /// Name of the tenant; empty for requests that name none.
        tenant: Arc<str>,
        /// What is counted: "requests", or "seconds of work".
        what: &'static str,
        /// How much of it waits.
        queued: f64,
        /// How much may wait.
        limit: f64,
        /// Seconds after which to try again.
        retry_after_s: f64,
    },
    /// The tenant has used up its rate.
    #[error("tenant {tenant:?} is above its {what} of {limit}; try again in {retry_after_s:.3} s")]
    TenantOverRate {
        /// Name of the tenant; empty for requests that name none.
        tenant: Arc<str>,
        /// Which rate: `requests_per_min` or `tokens_per_min`.
        what: &'static str,
        /// The rate.
        limit: f64,
        /// Seconds after which the request conforms to the rate.
        retry_after_s: f64,
    },
    /// The tenant has a rate, but what it uses cannot be counted: too many tenants with rates have something to pay.
    #[error(
        "the use of tenant {tenant:?} cannot be counted against its rate: too many other tenants have used theirs within \
         the last minute; try again in {retry_after_s:.3} s"
    )]
    TooManyTenants {
        /// Name of the tenant; empty for requests that name none.
        tenant: Arc<str>,
        /// Seconds after which to try again.
        retry_after_s: f64,
    },
    /// Several prompts that are let in together or not at all are more than can ever be let in at once.
    #[error(
        "the {num_prompts} prompts together are {value} {what}, but no more than {limit} can ever be let in at once \
         ({name}); send fewer prompts with each request"
    )]
    ListTooLong {
        /// Prompts of the list.
        num_prompts: usize,
        /// What is counted: "requests", "prompt tokens", or "seconds of work".
        what: &'static str,
        /// How much of it the list is.
        value: f64,
        /// The bound.
        name: &'static str,
        /// Its value.
        limit: f64,
    },
    /// The predicted time in the queue is above its bound.
    #[error(
        "the queue is too long: a wait of {predicted_s:.3} s is predicted, but at most {limit_s:.3} are allowed now \
         (max_queue_s, of which a class fills its queue_share; 9/10 of it until a queue that was full is shorter); try \
         again in {retry_after_s:.3} s"
    )]
    QueueTooLong {
        /// Seconds that a request would wait.
        predicted_s: f64,
        /// What is allowed now.
        limit_s: f64,
        /// Seconds after which to try again.
        retry_after_s: f64,
    },
    /// The first token, or the last one, is predicted to come after its deadline.
    #[error(
        "the deadline cannot be met: the {token} token is predicted after {predicted_ms:.1} ms, but the deadline is \
         after {deadline_ms:.1}; {}", deadline_advice(token, *retry_after_s)
    )]
    DeadlineUnattainable {
        /// Which token: "first" or "last".
        token: &'static str,
        /// Milliseconds until that token.
        predicted_ms: f64,
        /// The deadline, in milliseconds from the submission.
        deadline_ms: f64,
        /// Seconds after which to try again; `None` = it cannot be met even when nothing waits.
        retry_after_s: Option<f64>,
    },
    /// The scheduler was closed.
    #[error("the engine is closed; create a new one")]
    Closed,
    /// A result or failure names another step than the one that is in flight.
    #[error("the result is for step {got}, but the batch in flight is step {expected}")]
    WrongStep {
        /// Step in flight.
        expected: u64,
        /// Step named by the caller.
        got: u64,
    },
    /// A result or failure came while no batch was in flight.
    #[error("a result for step {got} was given, but no batch is in flight")]
    NoBatchInFlight {
        /// Step named by the caller.
        got: u64,
    },
    /// A batch with samples was in flight, and `step` was called without its result.
    #[error("step {step_id} needs {num_samples} sampled tokens; pass them to step() or call fail()")]
    MissingResult {
        /// Step in flight.
        step_id: u64,
        /// Length of its `sample_index`.
        num_samples: usize,
    },
    /// An array of the result has the wrong length.
    #[error("{field} has {got} entries, but step {step_id} needs {expected}")]
    ResultLength {
        /// Name of the array.
        field: &'static str,
        /// Step in flight.
        step_id: u64,
        /// Entries needed.
        expected: usize,
        /// Entries given.
        got: usize,
    },
    /// A sampled token is outside the vocabulary.
    #[error(
        "token_ids[{position}] of the result of step {step_id} is {token}, but token ids must be in 0..{vocab_size}"
    )]
    ResultToken {
        /// Step in flight.
        step_id: u64,
        /// Index in the array.
        position: usize,
        /// The offending id.
        token: i64,
        /// Number of valid ids (2^31 when the configuration names no vocabulary).
        vocab_size: i64,
    },
    /// `token_start` of a result is not one token per sample.
    #[error("token_start[{position}] is {got}, but must be {expected}: one token per sample")]
    ResultTokenStart {
        /// Index in the array.
        position: usize,
        /// The value needed.
        expected: i32,
        /// The value given.
        got: i32,
    },
    /// A block was released that nobody holds; nothing changed.
    #[error("block {block} was released, but has no holder")]
    BlockNotHeld {
        /// The block.
        block: u32,
    },
    /// The tokenizer could not be built or could not encode.
    #[error("tokenizer: {message}")]
    Tokenizer {
        /// What the tokenizer said.
        message: String,
    },
    /// The chat template is absent, malformed, or refused the messages.
    #[error("chat template: {message}")]
    ChatTemplate {
        /// What was wrong.
        message: String,
    },
}

/// What to do about a deadline that cannot be met.
fn deadline_advice(token: &str, retry_after_s: Option<f64>) -> String {
    match retry_after_s {
        Some(seconds) => format!("try again in {seconds:.3} s, or with a later deadline"),
        None if token == "first" => {
            "nothing has to be waited for: give a later deadline or a shorter prompt".to_owned()
        }
        None => "nothing has to be waited for: give a later deadline or a lower max_tokens".to_owned(),
    }
}

impl Error {
    /// Seconds after which to try again, of a refusal because of load or rates; of others coming back does not help.
    pub fn retry_after_s(&self) -> Option<f64> {
        match *self {
            Self::QueueFull { retry_after_s, .. }
            | Self::QueuedTokensFull { retry_after_s, .. }
            | Self::TenantQueueFull { retry_after_s, .. }
            | Self::TenantOverRate { retry_after_s, .. }
            | Self::TooManyTenants { retry_after_s, .. }
            | Self::QueueTooLong { retry_after_s, .. } => Some(retry_after_s),
            Self::DeadlineUnattainable { retry_after_s, .. } => retry_after_s,
            _ => None,
        }
    }
}
