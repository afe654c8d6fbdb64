//! How much memory an admission needs: now, and up to the peak of all that runs.

use super::Scheduler;
use crate::block::BlockId;
use crate::policy::lengths::LengthHistory;
use crate::policy::peak::{Candidate, PeakEstimate};
use crate::policy::{Admission, Class};

/// What a sequence that wants to start needs besides the cached blocks that were found for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Blocks that are taken at once.
    pub(super) num_new: usize,
    /// Cached blocks found that nobody holds: they stop being available.
    pub(super) num_unheld_hits: usize,
    /// Further blocks at most.
    pub(super) num_growth: usize,
    /// Output tokens that it has, and that may come at most.
    pub(super) num_generated: u32,
    pub(super) num_left: u32,
    pub(super) class: Class,
}

/// Lengths of outputs so far, and the peak that follows from them for what runs now.
#[derive(Debug, Default)]
pub(super) struct Growth {
    lengths: LengthHistory,
    peak: PeakEstimate,
    /// Blocks that the sequences in `peak` hold, and nobody else.
    num_held: u64,
    /// The plan that `peak` belongs to; 0 = it has to be made again.
    step_id: u64,
}

impl Growth {
    /// Somebody left, or came in an unusual way.
    pub(super) fn forget_plan(&mut self) {
        self.step_id = 0;
    }

    /// Mean length of the last outputs.
    pub(super) fn mean_length(&self, class: Class) -> f64 {
        self.lengths.mean(class)
    }

    /// Length that nine of ten outputs reach.
    pub(super) fn likely_length(&self, class: Class) -> f64 {
        self.lengths.likely(class)
    }

    /// An output has ended by itself, by its length, or at a stop string.
    pub(super) fn observe(&mut self, class: Class, num_output_tokens: u32) {
        self.lengths.observe(class, num_output_tokens);
    }
}

impl Scheduler {
    /// Blocks that lack for a sequence with these needs to start; 0 = it fits.
    pub(super) fn shortage(&mut self, needs: Needs) -> usize {
        let available = self.pool.num_available() - needs.num_unheld_hits;
        if self.num_running() == 0 {
            // An empty engine admits its first sequence without reserve: it fits alone, or `submit` would have refused it.
            return needs.num_new.saturating_sub(available);
        }
        let required = match self.rules.admission {
            // One for each that may grow, so that a newcomer does not displace, or get displaced, at once.
            Admission::Prompt => needs.num_new + self.rows.num_growing() + usize::from(needs.num_growth > 0),
            Admission::Guaranteed => needs.num_new + self.rows.num_growth() + needs.num_growth,
            Admission::Estimated => {
                let at_once = self.rows.num_growing() + usize::from(needs.num_growth > 0);
                let growth = if self.is_ample(needs, available) { 0 } else { self.estimate_growth(needs) };
                needs.num_new + growth.max(at_once)
            }
        };
        required.saturating_sub(available)
    }

    /// The same when some of those that run have given way. Blocks that several of these share count as gained by nobody.
    pub(super) fn shortage_without(&mut self, needs: Needs, mut gone: Vec<u32>) -> usize {
        gone.sort_unstable();
        let num_gained: usize = gone.iter().map(|&row| self.num_exclusive_blocks(row)).sum();
        // Hits that are theirs alone would become available, but are needed.
        let is_theirs = |&(column, block): &(usize, &BlockId)| {
            let holds = |&row: &u32| self.rows.blocks(row).get(column) == Some(&block.as_i32());
            self.pool.ref_count(*block) == 1 && gone.iter().any(holds)
        };
        let num_theirs = self.hits.blocks.iter().enumerate().filter(is_theirs).count();
        let available = self.pool.num_available() + num_gained - needs.num_unheld_hits - num_theirs;
        if gone.len() == self.num_running() {
            return needs.num_new.saturating_sub(available);
        }
        let growth = |row: &u32| {
            let row = self.rows.get(*row);
            (row.max_blocks - row.num_blocks) as usize
        };
        let num_growing = self.rows.num_growing() - gone.iter().filter(|row| growth(row) > 0).count();
        let at_once = num_growing + usize::from(needs.num_growth > 0);
        let required = match self.rules.admission {
            Admission::Prompt => needs.num_new + at_once,
            Admission::Guaranteed => {
                needs.num_new + self.rows.num_growth() - gone.iter().map(growth).sum::<usize>() + needs.num_growth
            }
            Admission::Estimated if self.is_ample(needs, available) => needs.num_new + at_once,
            Admission::Estimated => {
                self.estimate_running(&gone);
                let growth = self.estimate_growth(needs);
                self.growth.forget_plan();
                needs.num_new + growth.max(at_once)
            }
        };
        required.saturating_sub(available)
    }

    /// Whether the estimate, whatever the lengths, cannot ask for more than `available`: then it need not be made.
    ///
    /// It is never more than all that may ever come. A token more than the blocks hold is up to a block for each sequence.
    fn is_ample(&self, needs: Needs, available: usize) -> bool {
        needs.num_new + self.rows.num_growth() + needs.num_growth + self.num_running() < available
    }

    /// Blocks that all that runs, and a newcomer, will take at their peak besides those they hold when it has started.
    fn estimate_growth(&mut self, needs: Needs) -> usize {
        if self.growth.step_id != self.step_id {
            self.estimate_running(&[]);
        }
        let growth = &self.growth;
        let num_own = (needs.num_new + needs.num_unheld_hits) as u32;
        let candidate = Candidate {
            survival: growth.lengths.survival(needs.class, needs.num_generated),
            num_left: needs.num_left,
            num_held: num_own,
            block_size: self.config.block_size as u32,
        };
        let peak = growth.peak.peak_with(candidate, self.config.num_blocks);
        (peak.saturating_sub(growth.num_held + u64::from(num_own))) as usize
    }

    /// Adds up all that runs but some.
    fn estimate_running(&mut self, gone: &[u32]) {
        let generated = |lane: usize| (self.lanes.num_tokens[lane] - self.lanes.num_prompt_tokens[lane]) as u32;
        let lanes = (0..self.lanes.len()).filter(|&lane| self.lanes.row(lane).is_some());
        self.growth.lengths.refresh(lanes.map(|lane| (self.lanes.orders[lane].class(), generated(lane))));
        self.growth.peak.clear(self.pool.num_used() as f64 / self.num_running() as f64);
        self.growth.num_held = 0;
        self.growth.step_id = self.step_id;
        for lane in 0..self.lanes.len() {
            if let Some(row) = self.lanes.row(lane).filter(|row| gone.binary_search(row).is_err()) {
                let num_generated = self.lanes.num_tokens[lane] - self.lanes.num_prompt_tokens[lane];
                let num_left = self.lanes.max_num_tokens[lane] - self.lanes.num_tokens[lane];
                self.add_running(row, self.lanes.orders[lane].class(), num_generated as u32, num_left as u32);
            }
        }
        for class in Class::ALL {
            for index in 0..self.prefilling[class as usize].len() {
                let row = self.prefilling[class as usize][index];
                if self.rows.get(row).is_prefilling() && gone.binary_search(&row).is_err() {
                    self.add_prefilling(row, class);
                }
            }
        }
    }

    fn add_prefilling(&mut self, row: u32, class: Class) {
        let sequence = &self.sequences[self.rows.get(row).sequence];
        let request = self.request(sequence.slot);
        let num_tokens = sequence.known().tokens.len() as u32;
        let (num_generated, num_left) = (num_tokens - request.num_prompt_tokens, request.max_num_tokens - num_tokens);
        self.add_running(row, class, num_generated, num_left);
    }

    fn add_running(&mut self, row: u32, class: Class, num_generated: u32, num_left: u32) {
        let num_held = self.rows.num_own_blocks(row);
        let survival = self.growth.lengths.survival(class, num_generated);
        let block_size = self.config.block_size as u32;
        self.growth.peak.add(Candidate { survival, num_left, num_held, block_size });
        self.growth.num_held += u64::from(num_held);
    }

    /// Counts a sequence that was just admitted in the estimate of this plan.
    pub(super) fn note_growth(&mut self, row: u32) {
        if self.growth.step_id == self.step_id {
            let class = self.order(row).class();
            self.add_prefilling(row, class);
        }
    }
}
