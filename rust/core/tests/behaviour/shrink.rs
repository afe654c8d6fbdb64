//! Finds a short list of operations that still fails: remove halves, quarters, ... single operations, then simplify what is left.

use crate::ops::Op;

/// Replays after which the best list so far is good enough.
const MAX_REPLAYS: usize = 20_000;

/// The shortest list found for which `fails` still holds; `ops` itself must fail.
pub(crate) fn shrink(ops: &[Op], mut fails: impl FnMut(&[Op]) -> bool) -> Vec<Op> {
    let mut best = ops.to_vec();
    let mut num_replays = 0;
    let mut try_with = |candidate: Vec<Op>, best: &mut Vec<Op>| {
        num_replays += 1;
        let is_better = num_replays <= MAX_REPLAYS && fails(&candidate);
        if is_better {
            *best = candidate;
        }
        is_better
    };
    loop {
        let before = best.clone();
        let mut size = best.len().div_ceil(2).max(1);
        loop {
            let mut start = 0;
            while start < best.len() {
                let end = (start + size).min(best.len());
                let candidate = [&best[..start], &best[end..]].concat();
                if !try_with(candidate, &mut best) {
                    start += size;
                }
            }
            if size == 1 {
                break;
            }
            size = size.div_ceil(2);
        }
        for index in 0..best.len() {
            let mut simplify = |best: &mut Vec<Op>| {
                simpler(&best[index]).into_iter().any(|simpler| {
                    let mut candidate = best.clone();
                    candidate[index] = simpler;
                    try_with(candidate, best)
                })
            };
            while simplify(&mut best) {}
        }
        if best == before {
            return best;
        }
    }
}

/// The parts of a submission that can be made simpler.
struct Submit<'a> {
    prompt: &'a mut Vec<i32>,
    n: &'a mut u32,
    prompt_logprobs: &'a mut Option<u32>,
    max_tokens: &'a mut Option<u64>,
    owner: &'a mut u8,
    stop: &'a mut Option<i32>,
    ignore_eos: &'a mut bool,
}

/// Operations that do a little less than this one.
fn simpler(op: &Op) -> Vec<Op> {
    let mut simpler = Vec::new();
    match op {
        Op::Submit { prompt, n, prompt_logprobs, max_tokens, owner, stop, ignore_eos, .. } => {
            let with = |change: &dyn Fn(&mut Submit<'_>)| {
                let mut simpler = op.clone();
                if let Op::Submit { prompt, n, prompt_logprobs, max_tokens, owner, stop, ignore_eos, .. } = &mut simpler
                {
                    change(&mut Submit { prompt, n, prompt_logprobs, max_tokens, owner, stop, ignore_eos });
                }
                simpler
            };
            let shorter = [prompt.len() / 2, prompt.len().saturating_sub(1)];
            for len in shorter.into_iter().filter(|&len| len > 0 && len < prompt.len()) {
                simpler.push(with(&|submit| submit.prompt.truncate(len)));
            }
            for fewer in [1, *n - 1].into_iter().filter(|fewer| (1..*n).contains(fewer)) {
                simpler.push(with(&|submit| *submit.n = fewer));
            }
            let max_tokens = *max_tokens;
            for fewer in
                [max_tokens.map(|tokens| tokens / 2), max_tokens.map(|tokens| tokens.saturating_sub(1)), Some(1)]
            {
                if fewer < max_tokens && fewer > Some(0) || max_tokens.is_none() && fewer.is_some() {
                    simpler.push(with(&|submit| *submit.max_tokens = fewer));
                }
            }
            if prompt_logprobs.is_some() {
                simpler.push(with(&|submit| *submit.prompt_logprobs = None));
            }
            if *owner != 0 {
                simpler.push(with(&|submit| *submit.owner = 0));
            }
            if stop.is_some() {
                simpler.push(with(&|submit| *submit.stop = None));
            }
            if !ignore_eos {
                simpler.push(with(&|submit| *submit.ignore_eos = true));
            }
        }
        Op::Step { errors } if *errors != 0 => simpler.push(Op::Step { errors: 0 }),
        Op::Finish { request, choice, num_tokens } if *num_tokens > 0 => {
            simpler.push(Op::Finish { request: *request, choice: *choice, num_tokens: 0 });
        }
        Op::Finish { request, choice: 1.., num_tokens } => {
            simpler.push(Op::Finish { request: *request, choice: 0, num_tokens: *num_tokens });
        }
        _ => {}
    }
    simpler
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::episode::{quietly, random};

    #[test]
    fn a_long_list_shrinks_to_what_matters() {
        let ops = random(7, 300).ops;
        let is_long_prompt = |op: &Op| matches!(op, Op::Submit { prompt, .. } if prompt.len() >= 3);
        let fails = |ops: &[Op]| {
            let first = ops.iter().position(is_long_prompt);
            first.is_some_and(|first| ops[first..].contains(&Op::Fail))
        };
        assert!(fails(&ops), "the list has a long prompt and a failed step");
        let short = shrink(&ops, fails);
        assert_eq!(short.len(), 2, "{short:?}");
        assert!(
            matches!(&short[0], Op::Submit { prompt, n: 1, max_tokens: Some(1), .. } if prompt.len() == 3),
            "{short:?}"
        );
    }

    #[test]
    fn the_message_of_a_panic_is_kept() {
        let outcome = quietly(|| panic!("the number is {}", 7));
        assert!(outcome.is_err_and(|message| message.contains("the number is 7")));
        assert_eq!(quietly(|| 7), Ok(7));
    }
}
