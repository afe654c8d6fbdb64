//! Random configurations and operations.

use std::sync::Arc;

use cbrs_core::{Policy, RequestSpec, SamplingSpec, SchedulerConfig};

use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::script::Script;

/// Ends the output, comes once in eight tokens of most scripts.
const EOS: i32 = 3;
/// Two or three ordinary tokens, and EOS.
const VOCAB_SIZE: u32 = 4;

/// One operation. Requests are named by a number that is taken modulo the number of accepted ones, so that a list stays valid when
/// operations are removed from it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Submit {
        prompt: Vec<i32>,
        n: u32,
        prompt_logprobs: Option<u32>,
        max_tokens: Option<u64>,
        owner: u8,
        stop: Option<i32>,
        ignore_eos: bool,
        script: u64,
    },
    /// Bit i: sample i is unusable.
    Step {
        errors: u64,
    },
    /// A result that must be refused.
    BadStep(Mistake),
    Fail,
    Cancel(usize),
    Finish {
        request: usize,
        choice: usize,
        num_tokens: usize,
    },
    ResetPrefixCache,
    SetPaused(bool),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mistake {
    NoResult,
    WrongStep,
    TooLong,
    OutOfVocabulary,
    Start,
    NoLogprobs,
    NoPromptLogprobs,
    FewPromptLogprobs,
}

/// Number of different (tenant, salt) pairs.
pub(crate) const NUM_OWNERS: u8 = 5;

/// A tenant and salt; the absent ones and those that look alike are there.
pub(crate) fn owner(index: u8) -> (Option<Arc<str>>, Option<Arc<str>>) {
    let name = |text: &str| Some(Arc::from(text));
    match index {
        0 => (None, None),
        1 => (name("a"), None),
        2 => (None, name("a")),
        3 => (name("a"), name("a")),
        _ => (name("b"), None),
    }
}

/// What a `Submit` asks for.
pub(crate) fn request(op: &Op) -> Option<(RequestSpec, Script)> {
    let Op::Submit { prompt, n, prompt_logprobs, max_tokens, owner: index, stop, ignore_eos, script } = op else {
        return None;
    };
    let (tenant, cache_salt) = owner(*index);
    let stop_token_ids = stop.iter().copied().collect();
    let (max_tokens, ignore_eos) = (*max_tokens, *ignore_eos);
    let prompt_token_ids = prompt.clone();
    let spec = RequestSpec {
        prompt_token_ids,
        n: *n,
        max_tokens,
        stop_token_ids,
        ignore_eos,
        tenant,
        cache_salt,
        prompt_logprobs: *prompt_logprobs,
        sampling: sampling(*script),
        logit_bias: if (script >> 16).is_multiple_of(8) { vec![(2, -1.0), (0, 2.0)] } else { Vec::new() },
        bad_words_token_ids: if (script >> 24).is_multiple_of(8) { vec![vec![2], vec![1, 1]] } else { Vec::new() },
        ..RequestSpec::default()
    };
    let vocab_size = 2 + (script % 2) as i32;
    Some((spec, Script::Random { seed: *script, vocab_size, rare: (script % 8 < 5).then_some(EOS) }))
}

/// Sampling parameters that the script's seed stands for; they do not change its tokens.
fn sampling(script: u64) -> SamplingSpec {
    let mut sampling = SamplingSpec { seed: script.is_multiple_of(2).then_some(script), ..SamplingSpec::default() };
    match script >> 32 & 15 {
        0 => sampling.presence_penalty = 0.5,
        1 => sampling.frequency_penalty = -0.5,
        2 => sampling.repetition_penalty = 1.5,
        3 => sampling.min_tokens = 1,
        4..=6 => sampling.logprobs = Some((script >> 36 & 3) as u32),
        _ => {}
    }
    sampling
}

/// A small configuration: the smaller, the more often everything collides.
pub(crate) fn random_config(rng: &mut Rng) -> SchedulerConfig {
    let num_blocks = if rng.one_in(2) { rng.within(4, 8) } else { rng.within(4, 32) };
    let block_size = rng.within(1, 4);
    let max_num_seqs = rng.within(1, 6);
    let max_num_batched_tokens = if rng.one_in(3) { rng.within(1, max_num_seqs) } else { rng.within(1, 24) };
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens,
        num_blocks,
        block_size,
        max_model_len: rng.within(4, 48).max(2),
        vocab_size: Some(VOCAB_SIZE),
        eos_token_ids: vec![EOS],
        enable_prefix_caching: !rng.one_in(4),
        queue_capacity: rng.within(1, 12),
        max_queued_tokens: rng.one_in(3).then(|| rng.within(4, 60) as u64),
        max_prefill_chunk_tokens: (!rng.one_in(3)).then(|| rng.within(1, 8)),
        policy: if rng.one_in(5) { Policy::Static } else { Policy::Fcfs },
        rules: None,
        seed: rng.next(),
        hash_seed: rng.next(),
        max_prompt_logits: if rng.one_in(2) { rng.within(1, 8) } else { 512 },
        collide_hashes: rng.one_in(4),
    }
}

/// The next operation, given what has happened so far.
pub(crate) fn random_op(rng: &mut Rng, oracle: &Oracle) -> Op {
    let (num_requests, num_live) = (oracle.model().requests.len(), oracle.model().live_requests().len());
    // Ends by cancel or finish are drawn from the last few requests: most others have ended.
    let recent = |rng: &mut Rng| num_requests.saturating_sub(1 + rng.below(8));
    match rng.below(100) {
        0..=24 if num_live < 12 || rng.one_in(8) => random_submit(rng, oracle),
        0..=87 => Op::Step { errors: if rng.one_in(32) { rng.next() & rng.next() } else { 0 } },
        88 => Op::SetPaused(rng.one_in(3)),
        89..=92 => Op::Cancel(recent(rng)),
        93..=95 => Op::Finish { request: recent(rng), choice: rng.below(4), num_tokens: rng.below(4) },
        96 => Op::Fail,
        97 => Op::ResetPrefixCache,
        _ => {
            let mistakes = [
                Mistake::NoResult,
                Mistake::WrongStep,
                Mistake::TooLong,
                Mistake::OutOfVocabulary,
                Mistake::Start,
                Mistake::NoLogprobs,
                Mistake::NoPromptLogprobs,
                Mistake::FewPromptLogprobs,
            ];
            Op::BadStep(mistakes[rng.below(mistakes.len())])
        }
    }
}

fn random_submit(rng: &mut Rng, oracle: &Oracle) -> Op {
    if rng.one_in(6)
        && let Some(twin) = twin(rng, oracle)
    {
        return twin;
    }
    let max_model_len = oracle.model().config.max_model_len;
    let mut prompt = shared_start(rng, oracle);
    let num_more = rng.within(usize::from(prompt.is_empty()), (max_model_len / 2).clamp(1, 12));
    prompt.extend((0..num_more).map(|_| rng.below(2) as i32));
    if !rng.one_in(50) {
        prompt.truncate(max_model_len - 1);
    }
    let room = max_model_len.saturating_sub(prompt.len());
    let max_tokens = match rng.below(40) {
        0 => Some(0),
        1 => Some(room as u64 + 1),
        2..=12 => None,
        13..=25 => Some(room as u64),
        _ => Some(rng.within(1, room.clamp(1, 8)) as u64),
    };
    if rng.one_in(100) {
        match rng.below(3) {
            0 => prompt.clear(),
            1 => prompt[0] = VOCAB_SIZE as i32,
            _ => prompt[0] = -1,
        }
    }
    let owner = if rng.one_in(3) { rng.below(usize::from(NUM_OWNERS)) as u8 } else { 0 };
    let stop = rng.one_in(8).then(|| rng.below(3) as i32);
    let n = if rng.one_in(3) { rng.within(2, 4) as u32 } else { 1 };
    let prompt_logprobs = rng.one_in(5).then(|| rng.below(3) as u32);
    Op::Submit { prompt, n, prompt_logprobs, max_tokens, owner, stop, ignore_eos: rng.one_in(4), script: rng.next() }
}

/// The same as one of the last requests, which will get the same answer, as two greedy ones do: all their blocks become the same.
fn twin(rng: &mut Rng, oracle: &Oracle) -> Option<Op> {
    let choices = &oracle.model().choices;
    let earlier = choices.get(choices.len().checked_sub(1 + rng.below(3))?)?;
    let Script::Random { seed, .. } = earlier.script else { return None };
    let owner = (0..NUM_OWNERS)
        .find(|&index| owner(index) == (earlier.spec.tenant.clone(), earlier.spec.cache_salt.clone()))?;
    let prompt = earlier.spec.prompt_token_ids.clone();
    Some(Op::Submit {
        prompt,
        n: 1,
        prompt_logprobs: None,
        max_tokens: None,
        owner,
        stop: None,
        ignore_eos: true,
        script: seed,
    })
}

/// The beginning of what an earlier request knows, its output included, as the next turn of a conversation would have.
fn shared_start(rng: &mut Rng, oracle: &Oracle) -> Vec<i32> {
    let choices = &oracle.model().choices;
    if choices.is_empty() || rng.one_in(3) {
        return Vec::new();
    }
    let earlier = &choices[choices.len() - 1 - rng.below(choices.len().min(10))].tokens;
    let num_shared = if rng.one_in(2) { earlier.len() } else { rng.within(0, earlier.len()) };
    earlier[..num_shared].to_vec()
}
