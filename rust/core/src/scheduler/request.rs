//! Requests as the scheduler keeps them while they live. Small: what few of them ask for stands apart, and the prompt goes with the last
//! choice that starts.

use std::ops::{Deref, DerefMut};

use super::choices::Fork;
use super::sequence::Known;
use crate::block::{BlockId, NONE, RootId};
use crate::overload::terms::Times;
use crate::overload::{Reservation, TenantCell};
use crate::policy::Class;
use crate::request::{RequestId, RequestSpec};
use crate::row_tables::NewRow;

/// A live request: what was asked for, and how far its choices are.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    /// Position in the order of arrival.
    pub(super) arrival: u64,
    /// For the choices that have not started: the last one takes it along.
    pub(super) prompt: Option<Box<Known>>,
    pub(super) seed: u64,
    /// Where its prefix begins; it holds a reference.
    pub(super) root: RootId,
    pub(super) num_prompt_tokens: u32,
    /// Prompt plus `max_tokens`.
    pub(super) max_num_tokens: u32,
    pub(super) temperature: f32,
    pub(super) top_k: i32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    /// Predicted service that it holds at the gate until it starts.
    service_us: u32,
    /// Its tenant's cell at the gate, which it holds until it ends.
    pub(super) tenant: TenantCell,
    pub(super) extras: Option<Box<Extras>>,
    /// First of the choices that have started and not ended, or `NONE`.
    pub(super) first_sequence: u32,
    pub(super) num_choices: u8,
    /// Choices that were ever admitted; they start in order.
    pub(super) num_started_choices: u8,
    /// Choices that have not ended.
    pub(super) num_live_choices: u8,
    /// Steps it waited for a block that another sequence was filling.
    pub(super) num_deferrals: u8,
    /// Later arrivals of its flow admitted before it.
    pub(super) num_overtaken: u8,
    /// Times that one of its sequences was preempted, or `SHIELDED`.
    num_preemptions: u8,
    pub(super) ignore_eos: bool,
    pub(super) class: Class,
}

const _: () = assert!(size_of::<Option<Request>>() <= 88, "a request is part of what a running sequence costs");

/// Live requests by slot. The lowest slots are the first to be taken, so the table becomes as long as the most that ever lived at once.
#[derive(Debug)]
pub(super) struct Requests(Vec<Option<Request>>);

impl Requests {
    pub(super) fn new(num_slots: usize) -> Self {
        Self(Vec::with_capacity(num_slots))
    }

    /// Puts a new request in its slot.
    pub(super) fn insert(&mut self, request: Request) {
        let slot = request.id.slot() as usize;
        while self.0.len() <= slot {
            self.0.push(None);
        }
        self.0[slot] = Some(request);
    }
}

impl Deref for Requests {
    type Target = [Option<Request>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Requests {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// What few requests have: wishes besides the usual ones, or several choices.
#[derive(Debug, PartialEq)]
pub(super) struct Extras {
    pub(super) stop_token_ids: Vec<i32>,
    pub(super) logit_bias: Vec<(i32, f32)>,
    pub(super) bad_words: Vec<Vec<i32>>,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) repetition_penalty: f32,
    pub(super) has_penalty: bool,
    /// Output tokens before which neither EOS nor a stop id may come.
    pub(super) min_tokens: u32,
    /// Most likely ids wanted with each output token; -1 = nothing.
    pub(super) num_logprobs: i8,
    /// Most likely ids wanted with each prompt token but the first; absent = nothing.
    pub(super) prompt_logprobs: Option<u32>,
    /// Leading positions of the prompt for which they were told, the first one aside.
    pub(super) num_told_prompt_logprobs: u32,
    /// Times, on the scheduler's clock; `u64::MAX` = none. The first counts until it starts.
    pub(super) ttft_deadline_ns: u64,
    pub(super) deadline_ns: u64,
    /// Latency target in microseconds; 0 = none.
    pub(super) target_itl_us: u32,
    /// Who computes the prompt for the choices that have not started.
    fork: Fork,
    /// Full blocks of the prompt that wait for choices that have not started, first to last.
    pins: Vec<BlockId>,
}

/// Those of a request that has none of this.
static NO_EXTRAS: Extras = Extras {
    stop_token_ids: Vec::new(),
    logit_bias: Vec::new(),
    bad_words: Vec::new(),
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    repetition_penalty: 1.0,
    has_penalty: false,
    min_tokens: 0,
    num_logprobs: -1,
    prompt_logprobs: None,
    num_told_prompt_logprobs: 0,
    ttft_deadline_ns: u64::MAX,
    deadline_ns: u64::MAX,
    target_itl_us: 0,
    fork: Fork::Absent,
    pins: Vec::new(),
};

/// What the scheduler adds to the specification of a request that it takes in.
pub(super) struct Entry {
    pub(super) id: RequestId,
    pub(super) arrival: u64,
    pub(super) seed: u64,
    pub(super) root: RootId,
    pub(super) max_tokens: u32,
    pub(super) reservation: Reservation,
    pub(super) times: Times,
    /// Chained hash of each full block of the prompt.
    pub(super) hashes: Vec<u64>,
}

/// It started because it was aged: it is a victim only for memory safety, and its prompt gets a share of every step.
const SHIELDED: u8 = u8::MAX;

impl Request {
    pub(super) fn new(spec: RequestSpec, entry: Entry) -> Self {
        let Entry { id, arrival, seed, root, max_tokens, reservation, times, hashes } = entry;
        let num_prompt_tokens = spec.prompt_token_ids.len() as u32;
        let num_choices = u8::try_from(spec.n).expect("a request has at most MAX_CHOICES choices");
        let (sampling, tokens) = (spec.sampling, spec.prompt_token_ids);
        let extras = Extras {
            stop_token_ids: spec.stop_token_ids,
            logit_bias: spec.logit_bias,
            bad_words: spec.bad_words_token_ids,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: sampling.repetition_penalty,
            has_penalty: sampling.has_penalty(),
            min_tokens: sampling.min_tokens,
            num_logprobs: sampling.logprobs.map_or(-1, |count| count as i8),
            prompt_logprobs: spec.prompt_logprobs,
            num_told_prompt_logprobs: 0,
            ttft_deadline_ns: times.ttft_deadline_ns.unwrap_or(u64::MAX),
            deadline_ns: times.deadline_ns.unwrap_or(u64::MAX),
            target_itl_us: times
                .target_itl_ns
                .map_or(0, |target| u32::try_from(target.div_ceil(1000)).unwrap_or(u32::MAX)),
            fork: Fork::Absent,
            pins: Vec::new(),
        };
        let has_extras = num_choices > 1 || extras != NO_EXTRAS;
        Self {
            id,
            arrival,
            prompt: Some(Box::new(Known::new(tokens, hashes))),
            seed,
            root,
            num_prompt_tokens,
            max_num_tokens: num_prompt_tokens + max_tokens,
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            service_us: reservation.service_us,
            tenant: reservation.tenant,
            extras: has_extras.then(|| Box::new(extras)),
            first_sequence: NONE,
            num_choices,
            num_started_choices: 0,
            num_live_choices: num_choices,
            num_deferrals: 0,
            num_overtaken: 0,
            num_preemptions: 0,
            ignore_eos: spec.ignore_eos,
            class: reservation.class,
        }
    }

    pub(super) fn extras(&self) -> &Extras {
        self.extras.as_deref().unwrap_or(&NO_EXTRAS)
    }

    /// What it holds at the gate.
    pub(super) fn reservation(&self) -> Reservation {
        let Self { service_us, num_prompt_tokens, tenant, class, .. } = *self;
        Reservation { service_us, num_prompt_tokens, tenant, class }
    }

    /// Its service was unknown when it came, and is reserved now.
    pub(super) fn set_service_us(&mut self, service_us: u32) {
        self.service_us = service_us;
    }

    /// The prompt of a request with a choice that has not started.
    pub(super) fn prompt(&self) -> &Known {
        self.prompt.as_ref().expect("the prompt goes with the last choice")
    }

    /// Who computes the prompt for the choices that have not started.
    pub(super) fn fork(&self) -> Fork {
        self.extras().fork
    }

    /// Sets that; only of a request that has several choices.
    pub(super) fn set_fork(&mut self, fork: Fork) {
        self.extras.as_mut().expect("a request with several choices has room for it").fork = fork;
    }

    /// Full blocks of the prompt that wait for choices that have not started, first to last.
    pub(super) fn pins(&self) -> &[BlockId] {
        &self.extras().pins
    }

    /// The same, of a request that has several choices, to change.
    pub(super) fn pins_mut(&mut self) -> Option<&mut Vec<BlockId>> {
        self.extras.as_mut().map(|extras| &mut extras.pins)
    }

    /// Blocks that one of its choices needs at most: the last token is sampled, never computed.
    pub(super) fn max_blocks(&self, block_size: usize) -> usize {
        (self.max_num_tokens as usize - 1).div_ceil(block_size)
    }

    /// Preemptions so far; beyond every limit once it is shielded.
    pub(super) fn num_preemptions(&self) -> u8 {
        self.num_preemptions
    }

    pub(super) fn count_preemption(&mut self) {
        if !self.is_shielded() {
            self.num_preemptions = (self.num_preemptions + 1).min(SHIELDED - 1);
        }
    }

    /// It started because it was aged.
    pub(super) fn shield(&mut self) {
        self.num_preemptions = SHIELDED;
    }

    pub(super) fn is_shielded(&self) -> bool {
        self.num_preemptions == SHIELDED
    }

    /// When it is dropped, or ended if it has started.
    pub(super) fn next_deadline_ns(&self) -> Option<u64> {
        let extras = self.extras();
        let ttft = if self.is_started() { u64::MAX } else { extras.ttft_deadline_ns };
        Some(ttft.min(extras.deadline_ns)).filter(|&deadline| deadline != u64::MAX)
    }

    /// Whether a choice was ever admitted: the queue reservation is given back then.
    pub(super) fn is_started(&self) -> bool {
        self.num_started_choices > 0
    }

    pub(super) fn num_unstarted_choices(&self) -> u8 {
        self.num_choices - self.num_started_choices
    }

    /// Whether a choice of it could start, if there is room.
    pub(super) fn is_waiting(&self) -> bool {
        self.num_unstarted_choices() > 0 && !matches!(self.fork(), Fork::UnderWay { .. })
    }

    /// Positions of the prompt whose log-probabilities are wanted and were not told.
    pub(super) fn num_untold_prompt_logprobs(&self) -> u32 {
        let extras = self.extras();
        match extras.prompt_logprobs {
            Some(_) => self.num_prompt_tokens - 1 - extras.num_told_prompt_logprobs,
            None => 0,
        }
    }

    /// Counts that the log-probabilities of another position of the prompt are told; returns the position.
    pub(super) fn tell_prompt_position(&mut self) -> u32 {
        let extras = self.extras.as_mut().expect("it has asked for log-probabilities of its prompt");
        extras.num_told_prompt_logprobs += 1;
        extras.num_told_prompt_logprobs
    }

    /// Whether the sampler gets tables for it besides the scalar parameters.
    pub(super) fn has_tables(&self) -> bool {
        let extras = self.extras();
        !extras.logit_bias.is_empty() || !extras.bad_words.is_empty()
    }

    /// What the sampler has to know of a sequence with these tokens.
    pub(super) fn new_row<'a>(&'a self, tokens: &'a [i32], eos_token_ids: &'a [i32]) -> NewRow<'a> {
        let extras = self.extras();
        let needs_history = extras.has_penalty || !extras.bad_words.is_empty();
        let eos: &[i32] = if self.ignore_eos { &[] } else { eos_token_ids };
        let banned = if extras.min_tokens > 0 { [eos, &*extras.stop_token_ids] } else { [&[] as &[i32]; 2] };
        NewRow {
            history: if needs_history { tokens } else { &[] },
            num_prompt_tokens: if needs_history { self.num_prompt_tokens as usize } else { 0 },
            bias: &extras.logit_bias,
            banned,
            bad_words: &extras.bad_words,
        }
    }
}
