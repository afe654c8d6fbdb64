//! Growing a running sequence by a block, and whom it displaces when the pool is exhausted.

use super::{Scheduler, State};

impl Scheduler {
    /// Makes sure that the next token of a decode has a slot, preempting newer sequences if it must.
    ///
    /// Returns false if the sequence cannot run in this step (it was preempted itself, or waits for a later step).
    pub(super) fn ensure_slot(&mut self, row: u32) -> bool {
        let state = self.rows.get(row);
        if (state.num_computed_tokens as usize) < state.num_blocks as usize * self.config.block_size {
            return true;
        }
        loop {
            if let Some(block) = self.pool.allocate() {
                let column = self.rows.get(row).num_blocks as usize;
                self.rows.push_block(row, block);
                self.table_updates.push(row, column, &[block.as_i32()]);
                return true;
            }
            match self.pick_victim(row) {
                Some(victim) => {
                    self.preempt(victim);
                    if victim == row {
                        return false;
                    }
                }
                None => return false,
            }
        }
    }

    /// The newest sequence not older than `row`'s whose blocks would become free, and that is not in this plan already.
    ///
    /// A sequence all of whose blocks have other holders is chosen only if no other is left: displacing it gains nothing by itself.
    /// `None` if the only one left is `row` and a newer sequence is in the plan: then it waits for its turn instead.
    fn pick_victim(&self, row: u32) -> Option<u32> {
        let beneficiary = self.rows.get(row).arrival;
        let mut newest = None;
        let mut newer_is_planned = false;
        for &candidate in self.running.iter().rev() {
            let state = self.rows.get(candidate);
            if state.request.is_none() {
                continue;
            }
            if state.arrival < beneficiary {
                break;
            }
            if state.is_planned {
                newer_is_planned = true;
                continue;
            }
            if candidate == row && newer_is_planned {
                break;
            }
            if self.frees_capacity(candidate) {
                return Some(candidate);
            }
            newest = newest.or(Some(candidate));
        }
        newest
    }

    /// Whoever holds a block holds its parents too, so the deepest block of a table has the fewest holders.
    fn frees_capacity(&self, row: u32) -> bool {
        let deepest = self.rows.get(row).num_blocks - 1;
        self.pool.ref_count(self.rows.tables.get(row, deepest)) == 1
    }

    /// Takes row and blocks from a running sequence; it computes its tokens again when it is admitted next,
    /// before any request of later arrival that has not started.
    fn preempt(&mut self, row: u32) {
        let state = *self.rows.get(row);
        let id = state.request.expect("only a running sequence is preempted");
        self.release_row(row);
        let request = self.request_mut(id.slot());
        request.state = State::Waiting;
        request.num_lost_tokens = state.num_computed_tokens;
        let arrival = request.arrival;
        let requests = &self.requests;
        self.waiting.insert_before_first(id.slot(), |other| {
            let other = requests[other as usize].as_ref().expect("a listed slot has a request");
            !other.is_started || other.arrival > arrival
        });
        self.num_preempted_waiting += 1;
        self.stats.num_preemptions += 1;
    }

    /// Gives back a row and its blocks, deepest first so that eviction reaches children before their parents.
    pub(super) fn release_row(&mut self, row: u32) {
        while let Some(block) = self.rows.pop_block(row) {
            self.pool.release(block).expect("a block in a table is held");
        }
        self.rows.release(row);
        self.running_has_gaps = true;
    }
}
