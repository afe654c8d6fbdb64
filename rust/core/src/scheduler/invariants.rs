//! What must hold between any two calls, as code.

use std::collections::BTreeMap;

use super::{Scheduler, State};
use crate::block::{BlockId, Parent};

impl Scheduler {
    /// Panics with what is wrong if an invariant does not hold. `O(blocks + live requests)`; for tests and debugging.
    ///
    /// Memory: each block is free, cached or used, and has as many holders as tables name it; tables cover what is computed and no more
    /// than is known; published chains are closed under prefix. Scheduling: rows, running and waiting lists name each live request
    /// exactly once; the budget and the reservations add up.
    pub fn check_invariants(&self) {
        self.check_requests();
        self.check_rows();
        self.check_blocks();
        self.check_batch();
    }

    /// Panics unless nothing is live and every block is free or cached: the state that any run must come back to.
    pub fn check_drained(&self) {
        self.check_invariants();
        assert_eq!(self.running.len() + self.waiting.len(), 0, "sequences are left");
        assert_eq!(self.pool.num_used(), 0, "blocks are held by nobody");
        assert!(self.requests.iter().all(Option::is_none), "a request is left");
        let shared = &self.shared;
        assert_eq!(shared.slots.num_free(), shared.slots.capacity(), "a slot leaked");
        assert_eq!((shared.gate.queued_requests(), shared.gate.queued_tokens()), (0, 0), "a reservation leaked");
        assert!(self.late_controls.is_empty() && !self.in_flight, "work is left");
    }

    fn check_requests(&self) {
        let mut waiting = vec![false; self.requests.len()];
        let mut last = None;
        for slot in self.waiting.iter() {
            assert!(!std::mem::replace(&mut waiting[slot as usize], true), "slot {slot} waits twice");
            let request = self.request(slot);
            let place = (!request.is_started, request.arrival);
            assert!(last < Some(place), "the waiting list is out of order at {:?}", request.id);
            last = Some(place);
        }
        assert_eq!(
            waiting.iter().filter(|&&waits| waits).count(),
            self.waiting.len(),
            "the waiting list is miscounted"
        );
        let (mut num_queued, mut num_queued_tokens, mut num_preempted) = (0, 0, 0);
        for (slot, request) in self.requests.iter().enumerate() {
            let Some(request) = request else { continue };
            assert!(self.shared.slots.is_live(request.id), "{:?} is listed but its slot is free", request.id);
            assert_eq!(request.id.slot() as usize, slot);
            assert_eq!(request.state == State::Waiting, waiting[slot], "{:?} is in the wrong list", request.id);
            assert!(request.tokens.len() < request.max_num_tokens as usize, "{:?} should have ended", request.id);
            if request.is_started {
                num_preempted += u64::from(request.state == State::Waiting);
            } else {
                num_queued += 1;
                num_queued_tokens += u64::from(request.num_prompt_tokens);
            }
        }
        assert_eq!(self.num_preempted_waiting, num_preempted, "preempted requests are miscounted");
        // The gate also counts what is still on its way; that nothing leaks shows when it is drained.
        assert!(self.shared.gate.queued_requests() >= num_queued, "a reservation is missing");
        assert!(self.shared.gate.queued_tokens() >= num_queued_tokens, "a token reservation is missing");
    }

    fn check_rows(&self) {
        let mut owners = BTreeMap::new();
        let mut last_arrival = None;
        for &row in &self.running {
            let state = self.rows.get(row);
            let Some(id) = state.request else {
                assert!(self.running_has_gaps, "a free row runs");
                continue;
            };
            assert!(last_arrival < Some(state.arrival), "the running list is out of order");
            last_arrival = Some(state.arrival);
            assert!(owners.insert(id.slot(), row).is_none(), "{id:?} runs twice");
            let request = self.request(id.slot());
            assert_eq!((request.id, request.state), (id, State::Running { row }));
            assert_eq!(state.num_tokens as usize, request.tokens.len(), "{id:?}: row and request disagree");
            assert_eq!(Some(&state.last_token), request.tokens.last(), "{id:?}: row and request disagree");
            assert!(state.num_computed_tokens < state.num_tokens, "{id:?} has nothing to compute");
            let block_size = self.config.block_size;
            let capacity = state.num_blocks as usize * block_size;
            assert!(
                state.num_computed_tokens as usize <= capacity,
                "{id:?}: its table does not cover what is computed"
            );
            assert!(state.num_blocks as usize <= request.tokens.len().div_ceil(block_size), "{id:?} holds too much");
        }
        let num_rows = self.config.max_num_seqs;
        assert_eq!(owners.len() + self.rows.num_free(), num_rows, "a row is neither free nor running");
        let num_running = self.requests.iter().flatten().filter(|request| request.state != State::Waiting).count();
        assert_eq!(num_running, owners.len(), "a running request has no row");
    }

    fn check_blocks(&self) {
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        let mut live_root_refs: BTreeMap<u32, u32> = BTreeMap::new();
        for request in self.requests.iter().flatten() {
            *live_root_refs.entry(request.root.0).or_default() += 1;
        }
        for &row in &self.running {
            let state = self.rows.get(row);
            let Some(id) = state.request else { continue };
            let request = self.request(id.slot());
            let mut parent = Parent::Root(request.root);
            for (column, &entry) in self.rows.blocks(row).iter().enumerate() {
                let block = BlockId::from_table(entry);
                *holders.entry(block).or_default() += 1;
                let is_published = self.pool.is_published(block);
                if state.may_publish {
                    assert_eq!(is_published, column < state.num_published_blocks as usize, "{id:?}: column {column}");
                }
                if is_published && state.may_publish {
                    let start = column * self.config.block_size;
                    assert_eq!(self.pool.tokens(block), &request.tokens[start..start + self.config.block_size]);
                    assert_eq!(self.pool.parent(block), Some(parent), "{id:?}: {block:?} continues something else");
                } else {
                    assert!(
                        is_published || self.pool.ref_count(block) == 1 || !state.may_publish,
                        "{block:?} is private and shared"
                    );
                }
                parent = Parent::Block(block);
            }
        }
        for index in 0..self.pool.num_blocks() as u32 {
            let block = BlockId::new(index);
            let expected = holders.get(&block).copied().unwrap_or(0);
            assert_eq!(self.pool.ref_count(block), expected, "{block:?} has other holders than the tables say");
        }
        self.pool.check_invariants(&live_root_refs);
    }

    fn check_batch(&self) {
        if !self.in_flight {
            return;
        }
        let batch = self.batch();
        assert!(batch.num_tokens() <= self.config.max_num_batched_tokens, "the token budget is exceeded");
        assert!(batch.num_seqs() <= self.config.max_num_seqs);
        assert!(batch.query_start.windows(2).all(|pair| pair[0] < pair[1]), "a sequence is scheduled without tokens");
        let mut slots = batch.slot_mapping.clone();
        slots.sort_unstable();
        assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "a slot has two writers");
        for &slot in &batch.slot_mapping {
            let block = BlockId::new((slot as usize / self.config.block_size) as u32);
            // A cancel after the plan may have released it; while it is held, its one holder writes it.
            assert!(
                self.pool.ref_count(block) <= 1 && !self.pool.is_published(block),
                "{block:?} is written and shared"
            );
        }
    }
}
