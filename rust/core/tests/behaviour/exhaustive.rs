//! Every state that two requests can reach on three blocks of one token with two token values, breadth first, until no new one is found.
//!
//! A scheduler cannot be copied, so a state is the list of moves that leads to it, replayed from the start. Two lists lead to the same
//! state if everything that can matter later is the same (`oracle/fingerprint.rs`); each is continued once.

use std::collections::HashSet;
use std::env;
use std::panic::resume_unwind;
use std::thread;

use cbrs_core::{Policy, RequestSpec, SchedulerConfig};

use crate::episode::quietly;
use crate::oracle::Oracle;
use crate::script::Script;

const MAX_LIVE: usize = 2;

/// A prompt, how many choices, and `max_tokens`.
type Request = (&'static [i32], u32, Option<u64>);

/// The first token of the first request is 0 without loss of generality.
const REQUESTS: &[Request] =
    &[(&[0], 1, None), (&[0], 1, Some(1)), (&[1], 1, None), (&[0, 0], 1, None), (&[0, 1], 1, None), (&[1, 0], 1, None)];
const CHOICES: &[Request] = &[(&[0], 2, None), (&[0, 1], 2, None), (&[0], 1, None), (&[0, 1], 1, None)];

#[derive(Debug, Clone, Copy)]
enum Move {
    Submit(u8),
    /// Bit i: the token of sample i; the first sample is unusable if `is_error`.
    Step {
        tokens: u8,
        is_error: bool,
    },
    Fail,
    /// By place among the live requests.
    Cancel(u8),
    Finish(u8),
    Reset,
}

fn apply(oracle: &mut Oracle, requests: &[Request], next: Move) {
    let live = |oracle: &Oracle, place: u8| oracle.model().live[usize::from(place)];
    match next {
        Move::Submit(index) => {
            let (prompt, n, max_tokens) = requests[usize::from(index)];
            let spec = RequestSpec { n, max_tokens, ..RequestSpec::new(prompt.to_vec()) };
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
fn moves(oracle: &Oracle, world: &World) -> Vec<Move> {
    let model = oracle.model();
    let num_samples = num_samples(oracle);
    let mut moves: Vec<Move> = (0..1 << num_samples).map(|tokens| Move::Step { tokens, is_error: false }).collect();
    if num_samples > 0 {
        moves.push(Move::Step { tokens: 0, is_error: true });
    }
    if model.live_requests().len() < MAX_LIVE && model.requests.len() < world.num_requests {
        let is_first = model.requests.is_empty();
        let is_offered = |index: &u8| !is_first || world.requests[usize::from(*index)].0[0] == 0;
        moves.extend((0..world.requests.len() as u8).filter(is_offered).map(Move::Submit));
    }
    if oracle.scheduler().is_in_flight() {
        moves.push(Move::Fail);
    }
    let mut cancelled = None;
    for (place, &index) in (0..).zip(&model.live) {
        if !model.is_end_asked(index) {
            let request = model.choices[index].request;
            // A cancel of another choice of the same request is the same.
            moves.extend((cancelled.replace(request) != Some(request)).then_some(Move::Cancel(place)));
            moves.push(Move::Finish(place));
        }
    }
    moves.push(Move::Reset);
    moves
}

/// A state, by how to get there, and what can happen next.
struct State {
    path: Vec<Move>,
    moves: Vec<Move>,
}

/// Goes to a state; everything is checked at its last move, as it was at the others when they were last.
fn replay(world: &World, path: &[Move]) -> Oracle {
    let mut oracle = Oracle::new(world.config.clone());
    oracle.set_thorough(false);
    for (index, &next) in path.iter().enumerate() {
        oracle.set_thorough(index + 1 == path.len());
        apply(&mut oracle, world.requests, next);
    }
    oracle
}

/// What is searched: a configuration, which requests there are, and how many come in all (two of them live at once).
#[derive(Debug)]
struct World {
    config: SchedulerConfig,
    requests: &'static [Request],
    num_requests: usize,
}

impl World {
    fn visit(&self, path: Vec<Move>) -> (u64, State) {
        let look = || {
            let oracle = replay(self, &path);
            (oracle.model().fingerprint(oracle.scheduler()), moves(&oracle, self))
        };
        let (name, moves) = quietly(look).unwrap_or_else(|message| panic!("{self:?}\n{path:?}\n{message}"));
        (name, State { path, moves })
    }

    fn neighbours(&self, states: &[State]) -> Vec<(u64, State)> {
        let paths = states.iter().flat_map(|state| state.moves.iter().map(|&next| [&state.path[..], &[next]].concat()));
        paths.map(|path| self.visit(path)).collect()
    }

    /// Visits every state that can be reached by any number of moves; returns how many there are, and the most moves that one needs.
    fn search(&self) -> (usize, usize) {
        let (start, state) = self.visit(Vec::new());
        let (mut seen, mut frontier, mut depth) = (HashSet::from([start]), vec![state], 0);
        loop {
            let (left, right) = frontier.split_at(frontier.len() / 2);
            let found = thread::scope(|scope| {
                let other = scope.spawn(|| self.neighbours(right));
                let mut found = self.neighbours(left);
                found.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
                found
            });
            frontier = found.into_iter().filter_map(|(name, state)| seen.insert(name).then_some(state)).collect();
            if frontier.is_empty() {
                return (seen.len(), depth);
            }
            depth += 1;
            for state in frontier.iter().step_by(7) {
                let drain = || replay(self, &state.path).drain();
                quietly(drain).unwrap_or_else(|message| panic!("{self:?}\n{:?}, then drained\n{message}", state.path));
            }
        }
    }
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

fn is_long_run() -> bool {
    env::var_os("CBRS_SOAK").is_some()
}

fn search_world(world: &World, at_least: usize) {
    let (num_states, depth) = world.search();
    assert!(num_states > at_least, "only {num_states} states up to {depth} moves: the search has missed something");
}

/// Searches the world of three requests (four in the long run), of which two live at once.
fn search(config: SchedulerConfig) {
    let num_requests = if is_long_run() { 4 } else { 3 };
    search_world(&World { config, requests: REQUESTS, num_requests }, 4000);
}

/// Searches a world in which requests have two choices: two requests, or three in the long run.
fn search_choices(config: SchedulerConfig) {
    let num_requests = if is_long_run() { 3 } else { 2 };
    search_world(&World { config, requests: CHOICES, num_requests }, 5000);
}

#[test]
fn no_reachable_state_is_wrong() {
    search(tiny());
}

#[test]
fn no_reachable_state_is_wrong_without_prefix_cache() {
    search(SchedulerConfig { enable_prefix_caching: false, ..tiny() });
}

#[test]
fn no_reachable_state_is_wrong_with_a_budget_of_one_token() {
    search(SchedulerConfig { max_num_batched_tokens: 1, ..tiny() });
}

#[test]
fn no_reachable_state_is_wrong_with_chunks_of_one_token() {
    search(SchedulerConfig { max_prefill_chunk_tokens: Some(1), ..tiny() });
}

#[test]
fn no_reachable_state_is_wrong_with_equal_hashes() {
    search(SchedulerConfig { collide_hashes: true, ..tiny() });
}

#[test]
fn no_reachable_state_is_wrong_under_static() {
    search(SchedulerConfig { policy: Policy::Static, max_num_batched_tokens: 1, ..tiny() });
}

#[test]
fn no_reachable_state_of_two_choices_is_wrong() {
    search_choices(tiny());
}

#[test]
fn no_reachable_state_of_two_choices_is_wrong_without_prefix_cache() {
    search_choices(SchedulerConfig { enable_prefix_caching: false, ..tiny() });
}

#[test]
fn no_reachable_state_of_two_choices_is_wrong_in_a_single_row() {
    search_choices(SchedulerConfig { max_num_seqs: 1, ..tiny() });
}
