//! What each choice was asked for, what it knows so far, and what it must be told.

use std::sync::Arc;

use cbrs_core::{FinishReason, RequestId, RequestSpec, StepOutput};

use crate::rng::mix;
use crate::script::Script;

/// A choice of a request that `submit` accepted. Its index in the list of all choices is its place in the order of arrival.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) id: RequestId,
    /// Its request among all, and its number there.
    pub(crate) request: usize,
    pub(crate) number: usize,
    pub(crate) spec: Arc<RequestSpec>,
    pub(crate) script: Script,
    pub(crate) root: u64,
    /// Prompt, then generated tokens.
    pub(crate) tokens: Vec<i32>,
    /// Names root and tokens up to and including each position.
    pub(crate) prefix: Vec<u64>,
    pub(crate) max_total: usize,
    pub(crate) computed: usize,
    /// Leading blocks that were found in the cache or published since.
    pub(crate) published: usize,
    pub(crate) row: Option<usize>,
    pub(crate) is_started: bool,
    /// Number of cache resets before its last admission.
    pub(crate) epoch: u64,
    /// Computed tokens that its last preemption lost.
    pub(crate) lost: usize,
    /// Key of its random numbers, known from its first admission on.
    pub(crate) seed: Option<u64>,
    /// Steps in which a later arrival was admitted before it, and how many were.
    pub(crate) steps_passed: usize,
    pub(crate) overtaken: usize,
    /// Steps in which it could have started, but was left to wait for a block in flight.
    pub(crate) deferrals: usize,
    /// Steps since it could have decoded and was left out, and how many it may be.
    pub(crate) turns_waited: usize,
    pub(crate) turns_limit: usize,
    pub(crate) is_cancel_asked: bool,
    pub(crate) end: Option<FinishReason>,
}

impl Choice {
    /// Choice `number` of a request; the place of the request is not known yet.
    pub(crate) fn new(
        id: RequestId,
        number: usize,
        spec: Arc<RequestSpec>,
        script: Script,
        max_model_len: usize,
    ) -> Self {
        let root = root_of(&spec);
        let room = max_model_len - spec.prompt_token_ids.len();
        let max_total = spec.prompt_token_ids.len() + spec.max_tokens.map_or(room, |max_tokens| max_tokens as usize);
        let mut choice = Self {
            id,
            request: usize::MAX,
            number,
            script,
            root,
            tokens: Vec::new(),
            prefix: Vec::new(),
            max_total,
            computed: 0,
            published: 0,
            row: None,
            is_started: false,
            epoch: 0,
            lost: 0,
            seed: None,
            steps_passed: 0,
            overtaken: 0,
            deferrals: 0,
            turns_waited: 0,
            turns_limit: 0,
            is_cancel_asked: false,
            end: None,
            spec,
        };
        for index in 0..choice.num_prompt() {
            choice.push(choice.spec.prompt_token_ids[index]);
        }
        choice
    }

    pub(crate) fn num_prompt(&self) -> usize {
        self.spec.prompt_token_ids.len()
    }

    pub(crate) fn num_output(&self) -> usize {
        self.tokens.len() - self.num_prompt()
    }

    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn push(&mut self, token: i32) {
        let parent = self.prefix.last().copied().unwrap_or(self.root);
        self.prefix.push(mix(parent ^ mix(token as u64)));
        self.tokens.push(token);
    }

    /// What a full block of this choice stands for.
    pub(crate) fn block_prefix(&self, column: usize, block_size: usize) -> u64 {
        self.prefix[(column + 1) * block_size - 1]
    }

    /// How many blocks it could find in a cache that has everything: one token is left to compute.
    pub(crate) fn max_hits(&self, block_size: usize) -> usize {
        (self.tokens.len() - 1) / block_size
    }

    /// Whether it may need more blocks than `held`: its last token is sampled, never computed.
    pub(crate) fn may_grow(&self, held: usize, block_size: usize) -> bool {
        (self.max_total - 1).div_ceil(block_size) > held
    }

    /// How the output ends with `token`, if it does, and the stop id to be told.
    pub(crate) fn finish_with(&self, token: i32, eos_token_ids: &[i32]) -> (Option<FinishReason>, i32) {
        if !self.spec.ignore_eos && eos_token_ids.contains(&token) {
            (Some(FinishReason::Stop), -1)
        } else if self.spec.stop_token_ids.contains(&token) {
            (Some(FinishReason::Stop), token)
        } else if self.tokens.len() >= self.max_total {
            (Some(FinishReason::Length), -1)
        } else {
            (None, -1)
        }
    }
}

/// Names a tenant and salt; an absent one is a value of its own.
fn root_of(spec: &RequestSpec) -> u64 {
    let fold = |hash: u64, label: &Option<Arc<str>>| match label {
        None => mix(hash ^ 1),
        Some(text) => text.bytes().fold(mix(hash ^ 2), |hash, byte| mix(hash ^ (u64::from(byte) + 3))),
    };
    fold(fold(0, &spec.tenant), &spec.cache_salt)
}

/// A cancel or finish that the next step has to apply.
#[derive(Debug, Clone)]
pub(crate) enum Control {
    /// All choices of the request of this one.
    Cancel {
        choice: usize,
    },
    Finish {
        choice: usize,
        num_tokens: usize,
        reason: Option<Arc<str>>,
    },
}

/// The text of an event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Detail {
    Absent,
    Exactly(Arc<str>),
    /// Some message for a reader.
    Message,
}

/// What a choice must be told, in order.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) id: RequestId,
    pub(crate) number: usize,
    /// -1 = none.
    pub(crate) token: i32,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_id: i32,
    pub(crate) detail: Detail,
}

impl Event {
    pub(crate) fn end(choice: &Choice, finish: FinishReason, detail: Detail) -> Self {
        Self { id: choice.id, number: choice.number, token: -1, finish: Some(finish), stop_id: -1, detail }
    }
}

/// Compares what a step told with what it had to tell: each token once, in order, and one end for each choice.
pub(crate) fn check_events(output: &StepOutput, expected: &[Event]) {
    let told = |index| (output.request_ids[index], output.choice_ids[index], output.token_ids[index]);
    let told: Vec<_> = (0..output.len()).map(told).collect();
    let wanted: Vec<_> = expected.iter().map(|event| (event.id.as_u64(), event.number as i32, event.token)).collect();
    assert_eq!(told, wanted, "the events (request, choice, token) are wrong");
    for (index, event) in expected.iter().enumerate() {
        let finish = FinishReason::from_code(output.finish_reasons[index]);
        assert_eq!(
            (finish, output.stop_ids[index]),
            (event.finish, event.stop_id),
            "the end of {:?} is wrong",
            event.id
        );
        match (&event.detail, output.detail(index)) {
            (Detail::Absent, None) => {}
            (Detail::Exactly(wanted), Some(told)) if wanted == told => {}
            (Detail::Message, Some(told)) if !told.is_empty() => {}
            (wanted, told) => panic!("the detail of {:?} is {told:?}, not {wanted:?}", event.id),
        }
    }
    assert!(output.details.iter().all(|&(index, _)| (index as usize) < output.len()), "a detail without an event");
}
