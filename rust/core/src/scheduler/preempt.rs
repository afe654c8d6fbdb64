//! Growing a running sequence by a block, and whom it displaces when the pool is exhausted: pins of choices that have not started,
//! then newer sequences.

use super::Scheduler;

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
            // What waits gives way first; as a last resort also where that frees nothing by itself, since only pins may be left.
            if self.drop_newest_pins(true) {
                continue;
            }
            match self.pick_victim(row) {
                Some(victim) if victim != row => self.preempt(victim),
                _ if self.drop_newest_pins(false) => {}
                Some(_) => {
                    self.preempt(row);
                    return false;
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
        let beneficiary = self.rows.get(row).order;
        let mut newest = None;
        let mut newer_is_planned = false;
        for &candidate in self.running.iter().rev() {
            let state = self.rows.get(candidate);
            if state.request.is_none() {
                continue;
            }
            if state.order < beneficiary {
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
    /// before anything that has not started.
    fn preempt(&mut self, row: u32) {
        let state = *self.rows.get(row);
        self.release_row(row);
        let sequence = &mut self.sequences[state.sequence];
        sequence.row = None;
        sequence.num_lost_tokens = state.num_computed_tokens;
        let sequences = &self.sequences;
        self.preempted.insert_before_first(state.sequence, |other| sequences[other].order > state.order);
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
