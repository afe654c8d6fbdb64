//! Judges a plan by what any right plan has to be.
//!
//! 1. Rows: freed ones are those of ended requests, then of preempted ones; a new one is the lowest that is free.
//! 2. Tables: replaying `block_table_updates` gives the tables; a block is a hit on exactly the reader's prefix (published before, by the
//!    same tenant and salt, as many as there are), an exchange for an equal block, or fresh, and then evicted in order of release.
//! 3. Budgets, order, turns and victims: `order.rs`. 4. Arrays: `arrays.rs`.
//! 5. Memory: every position that the batch reads stands for the reader's prefix; what it writes is its own alone.
//! 6. Progress: a live request means that something is scheduled.

use cbrs_core::block::BlockId;
use cbrs_core::{Policy, RequestId, Scheduler};

use super::model::{Flying, Model};

/// What a plan did, as far as it can be read from its arrays, and what it started from.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Running and waiting choices before it, in order.
    pub(crate) running: Vec<usize>,
    pub(crate) waiting: Vec<usize>,
    /// Nothing runs, and the first that waits has no room.
    pub(crate) is_first_stuck: bool,
    /// Of `running`: those that lacked one token, and of these, those that needed a block for it.
    pub(crate) decodes: Vec<usize>,
    pub(crate) starved: Vec<usize>,
    /// Holders of each block before it.
    pub(crate) holders: Vec<u32>,
    /// Deepest block of each of `running`.
    pub(crate) deepest: Vec<i32>,
    pub(crate) victims: Vec<usize>,
    /// Admitted choices in order.
    pub(crate) started: Vec<usize>,
    /// Query tokens by row.
    pub(crate) scheduled: Vec<usize>,
}

impl Model {
    /// Checks the plan that the scheduler has just made.
    pub(crate) fn check_plan(&mut self, scheduler: &Scheduler) {
        let mut plan = self.before_plan();
        self.step_id += 1;
        assert_eq!(scheduler.batch().step_id, self.step_id);
        self.take_victims(scheduler, &mut plan);
        self.take_dropped_pins(scheduler, &mut plan);
        self.take_new_rows(scheduler, &mut plan);
        self.replay_tables(scheduler, &plan);
        self.check_started(scheduler, &plan);
        self.counters.num_evicted_blocks += self.cache.check_evictions(scheduler.pool(), self.operation + 1) as u64;
        self.check_row_tables(scheduler, &plan);
        self.check_order(scheduler, &plan);
        self.check_arrays(scheduler);
        self.run_memory(scheduler);
        self.seen.paused_plans += u64::from(self.is_paused && self.queued().0 > 0 && self.rows.contains(&None));
        let mut live = self.live.iter();
        let is_held_back = self.is_paused && live.all(|&index| !self.request_of(index).is_started);
        let is_idle = self.live.is_empty() || is_held_back;
        assert_eq!(
            self.flight.is_empty(),
            is_idle,
            "requests are live, but nothing is scheduled, or the other way round"
        );
    }

    fn before_plan(&self) -> Plan {
        let running = self.running();
        let decodes: Vec<usize> =
            running.iter().copied().filter(|&index| self.choices[index].remaining() == 1).collect();
        let is_full = |&index: &usize| self.choices[index].computed == self.table(index).len() * self.config.block_size;
        let (waiting, holders) = (self.waiting(), self.holders());
        let num_available = holders.iter().filter(|&&holders| holders == 0).count();
        let is_first_stuck =
            running.is_empty() && waiting.first().is_some_and(|&first| self.num_blocks_needed(first) > num_available);
        Plan {
            waiting,
            is_first_stuck,
            starved: decodes.iter().copied().filter(is_full).collect(),
            holders,
            deepest: running
                .iter()
                .map(|&index| *self.table(index).last().expect("a running request has blocks"))
                .collect(),
            victims: Vec::new(),
            started: Vec::new(),
            scheduled: vec![0; self.rows.len()],
            running,
            decodes,
        }
    }

    /// Block table of a running request.
    pub(crate) fn table(&self, index: usize) -> &[i32] {
        self.tables.row(self.choices[index].row.expect("the request runs"))
    }

    /// Whose row was freed although they have not ended: they were preempted.
    fn take_victims(&mut self, scheduler: &Scheduler, plan: &mut Plan) {
        let freed_rows = &scheduler.batch().freed_rows;
        let ended = std::mem::take(&mut self.freed);
        assert!(freed_rows.starts_with(&ended), "freed rows {freed_rows:?} lack those of ended requests, {ended:?}");
        for &row in &freed_rows[ended.len()..] {
            let victim = self.rows[row as usize].expect("a freed row had a sequence");
            self.vacate(row as usize);
            let request = &mut self.choices[victim];
            request.row = None;
            request.lost = std::mem::take(&mut request.computed);
            request.turns_waited = 0;
            self.counters.num_preemptions += 1;
            plan.victims.push(victim);
        }
    }

    fn take_new_rows(&mut self, scheduler: &Scheduler, plan: &mut Plan) {
        let batch = scheduler.batch();
        for (index, &row) in batch.row_ids.iter().enumerate() {
            let num_tokens = batch.query_start[index + 1] - batch.query_start[index];
            assert!(num_tokens >= 1, "a sequence is scheduled without tokens");
            let scheduled = &mut plan.scheduled[row as usize];
            assert_eq!(std::mem::replace(scheduled, num_tokens as usize), 0, "row {row} is scheduled twice");
        }
        for (order, &row) in batch.new_rows.iter().enumerate() {
            let lowest = self.rows.iter().position(Option::is_none);
            assert_eq!(lowest, Some(row as usize), "a new row is not the lowest free one");
            let request = match batch.row_ids.iter().position(|&other| other == row) {
                Some(index) => self.find(RequestId::from_u64(batch.request_ids[index]), batch.choice_ids[index]),
                // Only a static group can be larger than the budget; it is admitted strictly in order.
                None => plan.waiting[order],
            };
            assert!(plan.waiting.contains(&request), "request {request} was admitted, but did not wait");
            assert!(!plan.started.contains(&request), "request {request} was admitted twice");
            self.rows[row as usize] = Some(request);
            self.choices[request].row = Some(row as usize);
            plan.started.push(request);
        }
    }

    fn replay_tables(&mut self, scheduler: &Scheduler, plan: &Plan) {
        let updates = &scheduler.batch().block_table_updates;
        let max_blocks = self.config.max_blocks_per_seq();
        let exchanges = std::mem::take(&mut self.exchanges);
        assert_eq!(updates.start.len(), updates.rows.len() + 1);
        assert!(exchanges.len() <= updates.rows.len(), "an exchange is not told");
        for run in 0..updates.rows.len() {
            let (row, first) = (updates.rows[run] as usize, updates.first_columns[run] as usize);
            let ids = &updates.ids[updates.start[run] as usize..updates.start[run + 1] as usize];
            self.device_tables[row * max_blocks + first..][..ids.len()].copy_from_slice(ids);
            if let Some(&exchange) = exchanges.get(run) {
                assert_eq!((row, first, ids), (exchange.0, exchange.1, &[exchange.2][..]), "an exchange is not told");
                continue;
            }
            let request = self.rows[row].expect("an updated row has a sequence");
            if plan.started.contains(&request) {
                assert_eq!((first, self.tables.len[row]), (0, 0), "a new table is told in pieces");
                self.enter_table(scheduler, request, row, ids);
            } else {
                let is_due = plan.starved.contains(&request) && plan.scheduled[row] == 1;
                assert!(is_due && ids.len() == 1, "request {request} got a block that it does not need now");
                assert_eq!(first, self.tables.len[row], "a table has grown in the middle");
                self.take_fresh(scheduler, row, ids[0]);
            }
        }
        let (tables, width) = scheduler.block_tables();
        assert_eq!(width, max_blocks);
        for row in 0..self.rows.len() {
            let (start, len) = (row * max_blocks, self.tables.len[row]);
            assert_eq!(&tables[start..start + len], self.tables.row(row), "the table of row {row} is wrong");
            assert_eq!(
                &self.device_tables[start..start + len],
                self.tables.row(row),
                "row {row}: the updates lack something"
            );
        }
    }

    /// A newcomer's table: what is cached or pinned of its own prefix, as much as there is, then fresh blocks up to its known tokens.
    fn enter_table(&mut self, scheduler: &Scheduler, index: usize, row: usize, ids: &[i32]) {
        let block_size = self.config.block_size;
        let num_blocks = self.choices[index].tokens.len().div_ceil(block_size);
        assert_eq!(ids.len(), num_blocks, "choice {index} holds too much or too little");
        let (found, may_publish) = self.found_blocks(index);
        assert_eq!(ids[..found.len()], found, "choice {index}: a computed block was not used");
        for &block in &found {
            self.tables.set(row, self.tables.len[row], block);
            self.tables.len[row] += 1;
        }
        for &block in &ids[found.len()..] {
            self.take_fresh(scheduler, row, block);
        }
        let is_fork = self.request_of(index).is_forked && !found.is_empty();
        self.seen.forks += u64::from(is_fork);
        self.seen.unpublished_forks += u64::from(is_fork && !may_publish);
        let choice = &mut self.choices[index];
        choice.computed = found.len() * block_size;
        choice.published = found.len();
        choice.epoch = if may_publish { self.epoch } else { u64::MAX };
    }

    fn take_fresh(&mut self, scheduler: &Scheduler, row: usize, block: i32) {
        let is_published = scheduler.pool().is_published(BlockId::new(block as u32));
        assert!(!is_published, "block {block} is published before anything was computed into it");
        self.cache.reuse(block);
        self.memory.poison_block(block as usize);
        let column = self.tables.len[row];
        self.tables.set(row, column, block);
        self.tables.len[row] += 1;
    }

    /// First admissions are told once, with the prompt tokens that were found; sampling parameters come with the row.
    fn check_started(&mut self, scheduler: &Scheduler, plan: &Plan) {
        let (output, sampling) = (scheduler.output(), scheduler.sampling());
        let mut told = output.started_request_ids.iter().zip(&output.started_num_cached_tokens);
        for &index in &plan.started {
            let choice = &self.choices[index];
            let row = choice.row.expect("a started choice has a row");
            if choice.is_started {
                let recomputed = choice.lost.saturating_sub(choice.computed);
                self.counters.num_recomputed_tokens += recomputed as u64;
            } else if !self.request_of(index).is_started {
                let wanted = (choice.id.as_u64(), choice.computed as i32);
                assert_eq!(
                    told.next().map(|(&id, &cached)| (id, cached)),
                    Some(wanted),
                    "(id, cached) of a first admission"
                );
                self.counters.num_prompt_tokens += choice.num_prompt() as u64;
                self.counters.num_cached_prompt_tokens += choice.computed as u64;
            }
            if !choice.is_started {
                self.start_choice(index);
            }
            let first = self.request_of(index).choices.start;
            let seed = *self.choices[first].seed.get_or_insert(sampling.seeds[row]);
            let asked = &self.choices[index].spec.sampling;
            assert_eq!(
                sampling.seeds[row],
                asked.seed.unwrap_or(seed),
                "choice {index}: another seed than the first choice or before a preemption"
            );
        }
        assert_eq!(told.next(), None, "an admission is told that was not the first, or none");
        let num_sequences = self.live.iter().filter(|&&index| self.choices[index].is_started).count();
        let started = self.live_requests().into_iter().filter(|&request| self.requests[request].is_started);
        let num_most = num_sequences.max(started.count());
        assert!(num_most <= self.config.max_num_seqs, "more sequences or requests are under way than rows");
    }

    /// Checks what the batch reads and lets it write.
    fn run_memory(&mut self, scheduler: &Scheduler) {
        let block_size = self.config.block_size;
        let holders = self.holders();
        let batch = scheduler.batch();
        for (index, &row) in batch.row_ids.iter().enumerate() {
            let flying = &self.flight[index];
            let choice = &self.choices[flying.choice];
            let table = self.tables.row(row as usize);
            self.memory.check(table, &choice.prefix, flying.start);
            for position in flying.start..flying.end {
                let block = table[position / block_size];
                let is_published = scheduler.pool().is_published(BlockId::new(block as u32));
                assert!(holders[block as usize] == 1 && !is_published, "block {block} is written, but is not private");
            }
        }
        for &Flying { choice, row, start, end, .. } in &self.flight {
            self.memory.write(self.tables.row(row), &self.choices[choice].prefix, start, end);
        }
        for &Flying { choice, row, end, .. } in &self.flight {
            self.memory.check(self.tables.row(row), &self.choices[choice].prefix, end);
        }
    }

    /// Whether the scheduler runs groups.
    pub(crate) fn is_static(&self) -> bool {
        self.config.policy == Policy::Static
    }
}
