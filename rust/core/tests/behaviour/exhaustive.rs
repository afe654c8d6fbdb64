//! Every state that two requests can reach on three blocks of one token with two token values, breadth first.
//!
//! A scheduler cannot be copied, so a state is the list of moves that leads to it, replayed from the start. Two lists lead to the same
//! state if everything that can matter later is the same (`oracle/fingerprint.rs`); each is continued once.

use std::collections::HashSet;

use cbrs_core::{Policy, RequestSpec, SchedulerConfig};

use crate::episode::quietly;
use crate::oracle::Oracle;
use crate::script::Script;

/// Moves from the empty scheduler.
const DEPTH: usize = 10;
const MAX_LIVE: usize = 2;

/// Prompts and `max_tokens`; the first token of the first request is 0 without loss of generality.
const REQUESTS: [(&[i32], Option<u64>); 6] =
    [(&[0], None), (&[0], Some(1)), (&[1], None), (&[0, 0], None), (&[0, 1], None), (&[1, 0], None)];

#[derive(Debug, Clone, Copy)]
enum Move {
    Submit(u8),
    /// Bit i: the token of sample i; the first sample is unusable if `is_error`.
    Step { tokens: u8, is_error: bool },
    Fail,
    /// By place among the live requests.
    Cancel(u8),
    Finish(u8),
    Reset,
}

fn apply(oracle: &mut Oracle, next: Move) {
    let live = |oracle: &Oracle, place: u8| oracle.model().live[usize::from(place)];
    match next {
        Move::Submit(index) => {
            let (prompt, max_tokens) = REQUESTS[usize::from(index)];
            let spec = RequestSpec { max_tokens, ..RequestSpec::new(prompt.to_vec()) };
            oracle.submit(spec, Script::constant(0)).expect("two requests fit the queue");
        }
        Move::Step { tokens, is_error } => {
            let num_samples = num_samples(oracle);
            let tokens: Vec<i32> = (0..num_samples).map(|sample| i32::from(tokens >> sample & 1)).collect();
            let errors: Vec<u8> = (0..num_samples).map(|sample| u8::from(is_error && sample == 0)).collect();
            oracle.step_with(&tokens, &errors);
        }
        Move::Fail => oracle.fail("failed"),
        Move::Cancel(place) => oracle.cancel(live(oracle, place)),
        Move::Finish(place) => oracle.finish(live(oracle, place), 0, None),
        Move::Reset => oracle.reset_prefix_cache(),
    }
}

fn num_samples(oracle: &Oracle) -> usize {
    if oracle.scheduler().is_in_flight() { oracle.batch().num_samples() } else { 0 }
}

/// Everything that could happen next.
fn moves(oracle: &Oracle) -> Vec<Move> {
    let num_live = oracle.model().live.len() as u8;
    let num_samples = num_samples(oracle);
    let mut moves: Vec<Move> = (0..1 << num_samples).map(|tokens| Move::Step { tokens, is_error: false }).collect();
    if num_samples > 0 {
        moves.push(Move::Step { tokens: 0, is_error: true });
    }
    if usize::from(num_live) < MAX_LIVE && oracle.model().requests.len() < 2 {
        let is_first = oracle.model().requests.is_empty();
        let is_offered = |index: &u8| !is_first || REQUESTS[usize::from(*index)].0[0] == 0;
        moves.extend((0..REQUESTS.len() as u8).filter(is_offered).map(Move::Submit));
    }
    if oracle.scheduler().is_in_flight() {
        moves.push(Move::Fail);
    }
    for place in 0..num_live {
        if !oracle.model().requests[oracle.model().live[usize::from(place)]].is_cancel_asked {
            moves.extend([Move::Cancel(place), Move::Finish(place)]);
        }
    }
    moves.push(Move::Reset);
    moves
}

fn replay(config: &SchedulerConfig, path: &[Move]) -> Oracle {
    let mut oracle = Oracle::new(config.clone());
    for &next in path {
        apply(&mut oracle, next);
    }
    oracle
}

/// Visits every state within `depth` moves; returns how many there are.
fn search(config: &SchedulerConfig, depth: usize) -> usize {
    let mut seen = HashSet::from([replay(config, &[]).model().fingerprint(replay(config, &[]).scheduler())]);
    let mut frontier: Vec<Vec<Move>> = vec![Vec::new()];
    for _ in 0..depth {
        let mut next_frontier = Vec::new();
        for path in &frontier {
            for next in moves(&replay(config, path)) {
                let mut longer = path.clone();
                longer.push(next);
                let visit = || {
                    let oracle = replay(config, &longer);
                    oracle.model().fingerprint(oracle.scheduler())
                };
                let state = quietly(visit).unwrap_or_else(|message| panic!("{config:?}\n{longer:?}\n{message}"));
                if seen.insert(state) {
                    next_frontier.push(longer);
                }
            }
        }
        frontier = next_frontier;
    }
    // Whatever the state, it comes to rest.
    for path in frontier.iter().step_by(7) {
        quietly(|| replay(config, path).drain()).unwrap_or_else(|message| panic!("{config:?}\n{path:?}\n{message}"));
    }
    seen.len()
}

fn tiny() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 4,
        num_blocks: 3,
        max_model_len: 3,
        block_size: 1,
        vocab_size: Some(2),
        queue_capacity: 2,
        ..SchedulerConfig::default()
    }
}

#[test]
fn probe() {
    for depth in [6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20] {
        let t = std::time::Instant::now();
        let n = search(&tiny(), depth);
        eprintln!("{depth} {n} {:?}", t.elapsed());
    }
    let _ = Policy::Static;
}
