//! What must hold between any two calls, as code.

use std::collections::{BTreeMap, BTreeSet};

use super::choices::Fork;
use super::lanes::{IS_UNSAMPLED, NO_SLOT};
use super::{Request, Scheduler};
use crate::block::{BlockId, NONE, Parent};
use crate::policy::Class;

impl Scheduler {
    /// Panics with what is wrong if an invariant does not hold. `O(blocks + live requests)`; for tests and debugging.
    ///
    /// Memory: each block is free, cached or used, and has as many holders as tables and pins name it; tables cover what is computed and no more
    /// than is known; published chains are closed under prefix. Scheduling: rows, running and waiting lists name each live request
    /// exactly once; the budget and the reservations add up.
    pub fn check_invariants(&self) {
        crate::fault::point("check_invariants");
        self.check_requests();
        self.check_rows();
        self.check_blocks();
        self.check_batch();
    }

    /// Panics unless nothing is live and every block is free or cached: the state that any run must come back to.
    pub fn check_drained(&self) {
        self.check_invariants();
        assert_eq!(self.num_running() + self.flows.num_preempted + self.flows.num_listed, 0, "sequences are left");
        assert_eq!(self.pool.num_used(), 0, "blocks are held by nobody");
        assert!(self.requests.iter().all(Option::is_none), "a request is left");
        let shared = &self.shared;
        assert_eq!(shared.slots.num_free(), shared.slots.capacity(), "a slot leaked");
        shared.gate.check_drained();
        assert!(self.late_controls.is_empty() && !self.in_flight, "work is left");
    }

    fn check_requests(&self) {
        let mut waiting = vec![false; self.requests.len()];
        for (flow, entry) in self.flows.iter() {
            let mut last = None;
            for slot in self.flows.slot_links.iter(&entry.waiting) {
                assert!(!std::mem::replace(&mut waiting[slot as usize], true), "slot {slot} waits twice");
                let request = self.request(slot);
                let place = (!request.is_started(), request.arrival);
                assert!(last < Some(place), "the waiting list is out of order at {:?}", request.id);
                assert_eq!((self.flows.of(slot), self.deadline_key(slot)), (flow, None));
                last = Some(place);
            }
            for &(deadline, arrival, slot) in &entry.by_deadline {
                assert!(!std::mem::replace(&mut waiting[slot as usize], true), "slot {slot} waits twice");
                let request = self.request(slot);
                assert_eq!((self.flows.of(slot), self.deadline_key(slot)), (flow, Some(deadline)));
                assert_eq!(request.arrival, arrival);
            }
        }
        assert_eq!(
            waiting.iter().filter(|&&waits| waits).count(),
            self.flows.num_listed,
            "the waiting list is miscounted"
        );
        self.flows.check_invariants();
        let with_deadline = self.requests.iter().flatten().filter(|request| request.next_deadline_ns().is_some());
        assert_eq!(with_deadline.count(), self.deadlines.len(), "deadlines are miscounted");
        for request in self.requests.iter().flatten() {
            let mut sequences = self.sequences.siblings(request.first_sequence);
            let waits = request.is_waiting() || sequences.any(|sequence| self.sequences[sequence].row == NONE);
            assert_eq!(self.flows.is_in_wait(request.id.slot()), waits, "{:?} waits or does not", request.id);
        }
        let shielded = self.requests.iter().flatten().filter(|request| request.is_shielded());
        assert_eq!(shielded.count(), self.num_shielded, "shielded requests are miscounted");
        let pinning = self.requests.iter().flatten().filter(|request| !request.pins().is_empty());
        let pinning: BTreeSet<_> = pinning.map(|request| self.pin_place(request.id.slot())).collect();
        assert_eq!(pinning, self.pinning, "the list of those that hold pins is wrong");
        let (mut num_queued, mut num_queued_tokens, mut num_unstarted) = (0, 0, 0);
        for (slot, request) in self.requests.iter().enumerate() {
            let Some(request) = request else { continue };
            assert!(self.shared.slots.is_live(request.id), "{:?} is listed but its slot is free", request.id);
            assert_eq!(request.id.slot() as usize, slot);
            assert_eq!(request.is_waiting(), waiting[slot], "{:?} is in the wrong list", request.id);
            self.check_choices(request);
            if request.is_started() {
                num_unstarted += u64::from(request.num_unstarted_choices());
            } else {
                num_queued += 1;
                num_queued_tokens += u64::from(request.num_prompt_tokens);
            }
        }
        assert_eq!(self.num_unstarted_choices, num_unstarted, "choices that have not started are miscounted");
        // The gate also counts what is still on its way; that nothing leaks shows when it is drained.
        assert!(self.shared.gate.queued_requests() >= num_queued, "a reservation is missing");
        assert!(self.shared.gate.queued_tokens() >= num_queued_tokens, "a token reservation is missing");
    }

    fn check_choices(&self, request: &Request) {
        let id = request.id;
        let (mut num_live, mut last) = (u32::from(request.num_unstarted_choices()), None);
        for sequence in self.sequences.siblings(request.first_sequence) {
            let num_tokens = self.num_tokens(sequence);
            let sequence = &self.sequences[sequence];
            assert_eq!(sequence.slot, id.slot(), "a choice of another request is listed under {id:?}");
            assert!(last < Some(sequence.order), "the choices of {id:?} are out of order");
            assert!(sequence.order.choice() < u32::from(request.num_started_choices));
            assert!(num_tokens < request.max_num_tokens, "{id:?} should have ended");
            last = Some(sequence.order);
            num_live += 1;
        }
        assert_eq!(u32::from(request.num_live_choices), num_live, "{id:?}: live choices are miscounted");
        assert!(num_live > 0, "{id:?} should have ended");
        let num_prompt_tokens = request.prompt.as_ref().map(|known| known.tokens.len() as u32);
        let is_needed = request.num_unstarted_choices() > 0;
        assert!(!is_needed || num_prompt_tokens == Some(request.num_prompt_tokens), "{id:?} has lost its prompt");
        let block_size = self.config.block_size;
        let num_pins = match request.fork() {
            Fork::Ready if request.num_unstarted_choices() > 0 => (request.num_prompt_tokens as usize - 1) / block_size,
            _ => 0,
        };
        assert_eq!(request.pins().len(), num_pins, "{id:?} pins too much or too little");
        let mut parent = Parent::Root(request.root);
        let prompt = if request.pins().is_empty() { &[] } else { &request.prompt().tokens[..] };
        for (&block, tokens) in request.pins().iter().zip(prompt.chunks_exact(block_size)) {
            if self.pool.is_published(block) {
                assert_eq!(self.pool.tokens(block), tokens, "{id:?} pins {block:?}, which holds something else");
                assert_eq!(
                    self.pool.parent(block),
                    Some(parent),
                    "{id:?} pins {block:?}, which continues something else"
                );
            }
            parent = Parent::Block(block);
        }
    }

    /// Rows of running sequences with the number of their known and computed tokens, in no order.
    fn running(&self) -> impl Iterator<Item = (u32, usize, usize)> + '_ {
        let decoding = (0..self.lanes.len()).filter_map(|lane| {
            let num_tokens = self.lanes.num_tokens[lane] as usize;
            self.lanes.row(lane).map(|row| (row, num_tokens, num_tokens - 1))
        });
        let prefilling = self.prefilling.iter().flatten().map(|&row| (row, self.rows.get(row)));
        decoding.chain(prefilling.filter(|(_, state)| state.is_prefilling()).map(|(row, state)| {
            (row, self.sequences[state.sequence].known().tokens.len(), state.num_computed_tokens as usize)
        }))
    }

    fn check_lanes(&self) {
        assert!(self.lanes.orders.is_sorted(), "the lanes are out of order");
        for lane in (0..self.lanes.len()).filter(|&lane| self.lanes.row(lane).is_some()) {
            let lanes = &self.lanes;
            let row = lanes.rows[lane] as u32;
            let state = self.rows.get(row);
            let sequence = &self.sequences[state.sequence];
            let id = self.request(sequence.slot).id;
            assert!(state.is_decoding, "{id:?} has a lane and does not know it");
            assert_eq!((lanes.orders[lane], lanes.request_ids[lane]), (sequence.order, id.as_u64()));
            let num_tokens = lanes.num_tokens[lane] as usize;
            let block_size = self.config.block_size;
            let (last_block, offset) = ((num_tokens - 1) / block_size, (num_tokens - 1) % block_size);
            let block = self.rows.blocks(row).get(last_block);
            let slot = block.map_or(NO_SLOT, |&block| i64::from(block) * block_size as i64 + offset as i64);
            assert_eq!(lanes.slots[lane], slot, "{id:?} writes elsewhere");
            assert_eq!(lanes.tail_ends[lane] as usize, row as usize * block_size + offset, "{id:?} has another tail");
            assert_eq!(lanes.tokens[lane], self.rows.tail(row)[offset]);
            assert_eq!(lanes.num_prompt_tokens[lane] as u32, self.num_prompt_tokens(row));
            let num_left = lanes.max_num_tokens[lane] - lanes.num_tokens[lane];
            assert!(
                i32::from(lanes.quiet_steps[lane]) <= num_left.min((block_size - offset) as i32),
                "{id:?} is overlooked"
            );
            let is_unsampled = lanes.flags[lane] & IS_UNSAMPLED != 0;
            assert_eq!(self.sequences[state.sequence].known.is_some(), is_unsampled, "{id:?} lists its tokens");
        }
    }

    fn check_rows(&self) {
        self.check_lanes();
        let mut owners = BTreeMap::new();
        let is_older = |rows: &[u32]| self.order(rows[0]) < self.order(rows[1]);
        assert!(
            self.prefilling_has_gaps || self.prefilling.iter().all(|rows| rows.windows(2).all(is_older)),
            "the prefilling list is out of order"
        );
        for (row, num_tokens, num_computed) in self.running() {
            let state = self.rows.get(row);
            let sequence = &self.sequences[state.sequence];
            let id = self.request(sequence.slot).id;
            assert!(owners.insert(state.sequence, row).is_none(), "a choice of {id:?} runs twice");
            assert_eq!(sequence.row, row, "{id:?}: row and sequence disagree");
            if let Some(known) = &sequence.known {
                assert_eq!(num_tokens, known.tokens.len(), "{id:?}: row and sequence disagree");
            }
            assert!(num_computed < num_tokens, "{id:?} has nothing to compute");
            let is_planned = self.in_flight && self.pieces.iter().any(|planned| planned.row == row);
            assert_eq!(state.is_planned, is_planned, "{id:?} does not know whether a piece of it is in flight");
            let is_forked_from = self.request(id.slot()).fork() == (Fork::UnderWay { sequence: state.sequence });
            assert_eq!(state.is_forked_from, is_forked_from, "{id:?}: row and request disagree");
            let block_size = self.config.block_size;
            let capacity = state.num_blocks as usize * block_size;
            assert!(num_computed <= capacity, "{id:?}: its table does not cover what is computed");
            assert!(state.num_blocks as usize <= num_tokens.div_ceil(block_size), "{id:?} holds too much");
            assert!(state.num_blocks <= state.max_blocks, "{id:?} holds more than it can ever need");
        }
        let num_growing = self.running().filter(|&(row, ..)| self.rows.get(row).may_grow()).count();
        assert_eq!(self.rows.num_growing(), num_growing, "sequences that may grow are miscounted");
        let num_rows = self.config.max_num_seqs;
        assert_eq!(owners.len() + self.rows.num_free(), num_rows, "a row is neither free nor running");
        let (running, preempted): (Vec<_>, Vec<_>) =
            self.sequences.iter().partition(|(_, sequence)| sequence.is_running());
        assert_eq!(running.len(), owners.len(), "a running sequence has no row");
        let mut preempted: Vec<u32> = preempted.iter().map(|&(index, _)| index).collect();
        let mut listed: Vec<u32> = Vec::new();
        for (flow, entry) in self.flows.iter() {
            for &(order, index) in &entry.preempted {
                assert_eq!(self.sequences[index].order, order, "a preempted sequence stands elsewhere");
                assert_eq!(self.flows.of(self.sequences[index].slot), flow);
                listed.push(index);
            }
            let num_running = self.running().filter(|&(row, ..)| self.flow_of(row) == flow).count();
            assert_eq!(entry.num_running as usize, num_running, "flow {flow} is miscounted");
        }
        preempted.sort_unstable();
        listed.sort_unstable();
        assert_eq!(preempted, listed, "the lists of preempted sequences are wrong");
        for class in Class::ALL {
            let of_class = self.running().filter(|&(row, ..)| self.order(row).class() == class).count();
            assert_eq!(self.num_running_of[class as usize], of_class, "running sequences of a class are miscounted");
        }
        let growth: u32 =
            self.running().map(|(row, ..)| self.rows.get(row)).map(|row| row.max_blocks - row.num_blocks).sum();
        assert_eq!(self.rows.num_growth(), growth as usize, "blocks that may be needed are miscounted");
        let total: usize = (0..self.lanes.len())
            .filter(|&lane| self.lanes.row(lane).is_some())
            .map(|lane| self.lanes.num_tokens[lane] as usize)
            .sum();
        assert_eq!(self.lanes.total_tokens(), total as u64, "tokens of lanes are miscounted");
        let num_siblings = |request: &Request| self.sequences.siblings(request.first_sequence).count();
        let num_listed: usize = self.requests.iter().flatten().map(num_siblings).sum();
        assert_eq!(num_listed, self.sequences.iter().count(), "a sequence belongs to no request");
    }

    fn check_blocks(&self) {
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        let mut live_root_refs: BTreeMap<u32, u32> = BTreeMap::new();
        for request in self.requests.iter().flatten() {
            *live_root_refs.entry(request.root.0).or_default() += 1;
            for &block in request.pins() {
                *holders.entry(block).or_default() += 1;
            }
        }
        for (row, _, num_computed) in self.running() {
            let state = self.rows.get(row);
            let sequence = &self.sequences[state.sequence];
            let id = self.request(sequence.slot).id;
            let block_size = self.config.block_size;
            let mut parent = Parent::Root(self.request(id.slot()).root);
            for (column, &entry) in self.rows.blocks(row).iter().enumerate() {
                let block = BlockId::from_table(entry);
                *holders.entry(block).or_default() += 1;
                let is_published = self.pool.is_published(block);
                let is_full = (column + 1) * block_size <= num_computed;
                if state.may_publish {
                    assert_eq!(is_published, is_full, "{id:?}: column {column}");
                }
                if is_published && state.may_publish {
                    assert_eq!(self.pool.parent(block), Some(parent), "{id:?}: {block:?} continues something else");
                } else {
                    assert!(
                        is_published || self.pool.ref_count(block) == 1 || !state.may_publish,
                        "{block:?} is private and shared"
                    );
                }
                if let (true, Some(known)) = (is_full, &sequence.known) {
                    let tokens = &known.tokens[column * block_size..][..block_size];
                    assert_eq!(self.pool.tokens(block), tokens, "{id:?}: {block:?} keeps other tokens");
                }
                parent = Parent::Block(block);
            }
        }
        for index in 0..self.pool.num_blocks() as u32 {
            let block = BlockId::new(index);
            let expected = holders.get(&block).copied().unwrap_or(0);
            assert_eq!(self.pool.ref_count(block), expected, "{block:?} has other holders than tables and pins say");
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
        // What was kept from an earlier batch is about these very lanes; those that have ended meanwhile still have their numbers.
        for (index, lane) in self.planned_lanes.iter().enumerate() {
            let lanes = &self.lanes;
            let Some(row) = lanes.row(lane) else { continue };
            assert_eq!((batch.row_ids[index], batch.sample_rows[index]), (row as i32, row as i32));
            assert_eq!(batch.request_ids[index], lanes.request_ids[lane]);
            let choice = i32::from(lanes.choice_ids[lane]);
            assert_eq!((batch.choice_ids[index], batch.sample_choices[index]), (choice, choice));
            let index = index as i32;
            assert_eq!(
                (
                    batch.query_start[index as usize + 1],
                    batch.logits_index[index as usize],
                    batch.sample_index[index as usize]
                ),
                (index + 1, index, index),
                "a lane has one sampled query token"
            );
        }
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
