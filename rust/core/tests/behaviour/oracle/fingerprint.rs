//! One number for a state, the same for states that behave the same from here on: what is past and how things are numbered is left out.
//!
//! Blocks are named by where they stand: in tables, then in the order of eviction. Choices are named by their order of arrival among
//! the live ones.

use super::model::Model;
use crate::rng::mix;
use cbrs_core::Scheduler;

impl Model {
    pub(crate) fn fingerprint(&self, scheduler: &Scheduler) -> u64 {
        let mut state = Folder(0);
        let mut names: Vec<i32> = Vec::new();
        for &index in &self.live {
            let request = &self.choices[index];
            state.add_all(request.tokens.iter().map(|&token| token as u64));
            let counts = [
                request.num_prompt(),
                request.max_total,
                request.computed,
                request.published,
                request.row.map_or(0, |row| row + 1),
                usize::from(request.is_started),
                usize::from(request.is_started && request.epoch == self.epoch),
                request.lost,
                request.steps_passed,
                request.overtaken,
                request.deferrals,
                request.turns_waited,
                usize::from(request.is_cancel_asked),
                request.number,
                self.request_of(index).choices.len(),
                usize::from(self.request_of(index).leader == Some(index)),
                usize::from(self.request_of(index).is_forked),
                self.num_untold(index),
                usize::from(index < self.left_out) + 2 * usize::from(index == self.left_out),
            ];
            state.add_all(counts.into_iter().map(|count| count as u64));
            state.add(request.root);
            let table = request.row.map_or(&[][..], |row| self.tables.row(row));
            state.add_all(table.iter().map(|&block| name(&mut names, block)));
            let pins = &self.request_of(index).pins;
            state.add_all(pins.iter().map(|&block| name(&mut names, block)));
        }
        state.add(u64::from(self.is_paused));
        self.add_traffic(&mut state);
        let pool = scheduler.pool();
        for block in pool.eviction_order() {
            name(&mut names, block.as_i32());
        }
        let contents = self.cache.contents();
        state.add_all(names.iter().map(|&block| contents[block as usize].unwrap_or(1)));
        state.0
    }

    /// What is in flight, asked for, or still to be told.
    fn add_traffic(&self, state: &mut Folder) {
        let place =
            |choice: usize| self.live.iter().position(|&other| other == choice).map_or(u64::MAX, |at| at as u64);
        for flying in &self.flight {
            let (start, end) = (flying.start as u64, flying.end as u64);
            state.add_all([place(flying.choice), flying.row as u64, start, end].into_iter());
        }
        for control in &self.controls {
            let (kind, choice) = match control {
                super::Control::Cancel { choice } => (0, *choice),
                super::Control::Finish { choice, .. } => (1, *choice),
            };
            state.add_all([kind, place(choice)].into_iter());
        }
        state.add_all(self.events.iter().map(|event| event.finish.map_or(0, |finish| finish as u64)));
        state.add_all(self.freed.iter().map(|&row| row as u64));
    }
}

/// The name of a block: when it was first met.
fn name(names: &mut Vec<i32>, block: i32) -> u64 {
    let known = names.iter().position(|&other| other == block);
    known.unwrap_or_else(|| {
        names.push(block);
        names.len() - 1
    }) as u64
}

struct Folder(u64);

impl Folder {
    fn add(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }

    fn add_all(&mut self, values: impl Iterator<Item = u64>) {
        values.for_each(|value| self.add(value));
        self.add(0x5E9A_4A70);
    }
}
