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
    /// Running and waiting requests before it, in order.
    pub(crate) running: Vec<usize>,
    pub(crate) waiting: Vec<usize>,
    /// Of `running`: those that lacked one token, and of these, those that needed a block for it.
    pub(crate) decodes: Vec<usize>,
    pub(crate) starved: Vec<usize>,
    /// Holders of each block before it.
    pub(crate) holders: Vec<u32>,
    /// Deepest block of each of `running`.
    pub(crate) deepest: Vec<i32>,
    pub(crate) victims: Vec<usize>,
    /// Admitted requests in order.
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
        self.take_new_rows(scheduler, &mut plan);
        self.replay_tables(scheduler, &plan);
        self.check_started(scheduler, &plan);
        self.counters.num_evicted_blocks += self.cache.check_evictions(scheduler.pool(), self.operation + 1) as u64;
        self.check_order(scheduler, &plan);
        self.check_arrays(scheduler);
        self.run_memory(scheduler);
        assert!(self.live.is_empty() || !self.flight.is_empty(), "requests are live, but nothing is scheduled");
    }

    fn before_plan(&self) -> Plan {
        let running = self.running();
        let decodes: Vec<usize> =
            running.iter().copied().filter(|&index| self.requests[index].remaining() == 1).collect();
        let is_full =
            |&index: &usize| self.requests[index].computed == self.table(index).len() * self.config.block_size;
        Plan {
            waiting: self.waiting(),
            starved: decodes.iter().copied().filter(is_full).collect(),
            holders: self.holders(),
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
        self.tables.row(self.requests[index].row.expect("the request runs"))
    }

    /// Whose row was freed although they have not ended: they were preempted.
    fn take_victims(&mut self, scheduler: &Scheduler, plan: &mut Plan) {
        let freed_rows = &scheduler.batch().freed_rows;
        let ended = std::mem::take(&mut self.freed);
        assert!(freed_rows.starts_with(&ended), "freed rows {freed_rows:?} lack those of ended requests, {ended:?}");
        for &row in &freed_rows[ended.len()..] {
            let victim = self.rows[row as usize].expect("a freed row had a sequence");
            self.vacate(row as usize);
            let request = &mut self.requests[victim];
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
                Some(index) => self.find(RequestId::from_u64(batch.request_ids[index])),
                // Only a static group can be larger than the budget; it is admitted strictly in order.
                None => plan.waiting[order],
            };
            assert!(plan.waiting.contains(&request), "request {request} was admitted, but did not wait");
            assert!(!plan.started.contains(&request), "request {request} was admitted twice");
            self.rows[row as usize] = Some(request);
            self.requests[request].row = Some(row as usize);
            self.requests[request].epoch = self.epoch;
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

    /// A newcomer's table: hits on its own prefix, as many as there are, then fresh blocks up to its known tokens.
    fn enter_table(&mut self, scheduler: &Scheduler, request: usize, row: usize, ids: &[i32]) {
        let block_size = self.config.block_size;
        let tracked = &self.requests[request];
        assert_eq!(
            ids.len(),
            tracked.tokens.len().div_ceil(block_size),
            "request {request} holds too much or too little"
        );
        let num_hits = if self.caches() { self.cache.hits(tracked, block_size) } else { 0 };
        for (column, &block) in ids.iter().enumerate() {
            if column < num_hits {
                let wanted = self.cache.block(self.requests[request].block_prefix(column, block_size));
                assert_eq!(Some(block), wanted, "request {request}, column {column}: a cached block was not used");
                self.tables.set(row, column, block);
                self.tables.len[row] += 1;
            } else {
                self.take_fresh(scheduler, row, block);
            }
        }
        let tracked = &mut self.requests[request];
        tracked.computed = num_hits * block_size;
        tracked.published = num_hits;
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
            let request = &mut self.requests[index];
            let row = request.row.expect("a started request has a row");
            if request.is_started {
                let recomputed = request.lost.saturating_sub(request.computed);
                self.counters.num_recomputed_tokens += recomputed as u64;
            } else {
                request.is_started = true;
                let wanted = (request.id.as_u64(), request.computed as i32);
                assert_eq!(
                    told.next().map(|(&id, &cached)| (id, cached)),
                    Some(wanted),
                    "(id, cached) of a first admission"
                );
                self.counters.num_prompt_tokens += request.num_prompt() as u64;
                self.counters.num_cached_prompt_tokens += request.computed as u64;
            }
            let asked = &request.spec.sampling;
            let given = (sampling.temperature[row], sampling.top_k[row], sampling.top_p[row], sampling.min_p[row]);
            assert_eq!(
                given,
                (asked.temperature, asked.top_k, asked.top_p, asked.min_p),
                "row {row} samples otherwise"
            );
            let seed = *request.seed.get_or_insert(sampling.seeds[row]);
            assert_eq!(
                sampling.seeds[row],
                asked.seed.unwrap_or(seed),
                "request {index}: another seed after preemption"
            );
        }
        assert_eq!(told.next(), None, "an admission is told that was not the first, or none");
        let num_started = self.live.iter().filter(|&&index| self.requests[index].is_started).count();
        assert!(num_started <= self.config.max_num_seqs, "more requests are under way than rows");
    }

    /// Checks what the batch reads and lets it write.
    fn run_memory(&mut self, scheduler: &Scheduler) {
        let block_size = self.config.block_size;
        let holders = self.holders();
        let batch = scheduler.batch();
        for (index, &row) in batch.row_ids.iter().enumerate() {
            let flying = self.flight[index];
            let request = &self.requests[flying.request];
            let table = self.tables.row(row as usize);
            self.memory.check(table, &request.prefix, flying.start);
            for position in flying.start..flying.end {
                let block = table[position / block_size];
                let is_published = scheduler.pool().is_published(BlockId::new(block as u32));
                assert!(holders[block as usize] == 1 && !is_published, "block {block} is written, but is not private");
            }
        }
        for &Flying { request, row, start, end, .. } in &self.flight {
            self.memory.write(self.tables.row(row), &self.requests[request].prefix, start, end);
        }
        for &Flying { request, row, end, .. } in &self.flight {
            self.memory.check(self.tables.row(row), &self.requests[request].prefix, end);
        }
    }

    /// Whether the scheduler runs groups.
    pub(crate) fn is_static(&self) -> bool {
        self.config.policy == Policy::Static
    }
}
