//! Lanes: what changes with every token of a decoding sequence, as arrays over all of them.
//!
//! 1. Every running sequence that lacks exactly one token has a lane, from the commit (or the admission of a group) that left it so to its
//!    end or preemption. Lanes stand in order of arrival and keep their numbers from a plan to its commit.
//! 2. While it has a lane, the lane is the only owner of how many tokens are known and computed (one less) and where the next one goes.
//! 3. The tokens of its full blocks stand in the block pool, those of the last block in the row's tail (`Rows::tail`).
//!
//! A step in which everybody decodes is then a handful of passes over arrays: the arrays of a batch are copies of these.

use super::sequence::Order;

/// `rows` of a lane whose sequence has ended or was preempted, until `compact`.
pub(super) const VACANT: i32 = -1;

/// `slots` of a lane whose blocks are full.
pub(super) const NO_SLOT: i64 = -1;

/// It has stop token ids of its own.
pub(super) const HAS_STOP_IDS: u8 = 1;
/// EOS does not end it.
pub(super) const IGNORES_EOS: u8 = 2;
/// Nothing was sampled in this lane: its next token is the last of the prompt, or of what is computed again.
pub(super) const IS_UNSAMPLED: u8 = 4;
/// It has more sampling parameters than the scalar ones, or had some for its first tokens (`SamplingRows::extras_below`).
pub(super) const HAS_EXTRAS: u8 = 8;

macro_rules! lanes {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// One lane, to be inserted.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Lane {
            $($(#[$doc])* pub(super) $name: $type,)*
        }

        /// All lanes, one array for each of their fields.
        #[derive(Debug)]
        pub(super) struct Lanes {
            $($(#[$doc])* pub(super) $name: Vec<$type>,)*
            /// Vacant ones.
            gaps: Vec<u32>,
            /// Tokens known to all that are not vacant.
            total_tokens: u64,
            /// Lanes with `HAS_EXTRAS` that are not vacant.
            num_with_extras: usize,
            /// Changes whenever a lane comes, goes or gets another number; never 0.
            version: u64,
        }

        impl Lanes {
            pub(super) fn new(max_num_seqs: usize) -> Self {
                Self { $($name: Vec::with_capacity(max_num_seqs),)* gaps: Vec::with_capacity(max_num_seqs), total_tokens: 0, num_with_extras: 0, version: 1 }
            }

            fn insert_at(&mut self, at: usize, lane: Lane) {
                $(self.$name.insert(at, lane.$name);)*
            }

            fn move_run(&mut self, from: std::ops::Range<usize>, to: usize) {
                $(self.$name.copy_within(from.clone(), to);)*
            }

            fn truncate(&mut self, len: usize) {
                $(self.$name.truncate(len);)*
            }
        }
    };
}

lanes! {
    /// Row of the sequence, or `VACANT`.
    rows: i32,
    /// Place of the sequence in the order of arrival.
    orders: Order,
    /// Its request.
    request_ids: u64,
    /// Its number within the request.
    choice_ids: u8,
    /// The last known token: the one to run next.
    tokens: i32,
    /// Tokens known, the next to run included.
    num_tokens: i32,
    num_prompt_tokens: i32,
    /// Prompt plus `max_tokens`.
    max_num_tokens: i32,
    /// Where keys and values of the next token go; `NO_SLOT` = it needs a new block.
    slots: i64,
    /// Where the next token stands in the tails of all rows.
    tail_ends: u32,
    /// Steps until the lane is notable: its block full, its length reached. 0 = it is so in every step.
    quiet_steps: i16,
    /// Most likely ids that its request wants with each sample; -1 = nothing.
    num_logprobs: i8,
    /// `HAS_STOP_IDS` and so on.
    flags: u8,
}

impl Lanes {
    /// All lanes, vacant ones included.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Sequences that have a lane.
    pub(super) fn num_live(&self) -> usize {
        self.rows.len() - self.gaps.len()
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Tokens known to all lanes: what a step that runs them reads of the cache.
    pub(super) fn total_tokens(&self) -> u64 {
        self.total_tokens
    }

    /// Whether a lane has, or had, more sampling parameters than the scalar ones.
    pub(super) fn have_extras(&self) -> bool {
        self.num_with_extras > 0
    }

    pub(super) fn has_gaps(&self) -> bool {
        !self.gaps.is_empty()
    }

    /// The row of a lane, unless it is vacant.
    pub(super) fn row(&self, lane: usize) -> Option<u32> {
        let row = self.rows[lane];
        (row != VACANT).then_some(row as u32)
    }

    /// The lane of the sequence at this place in the order of arrival, which has one. O(log lanes).
    pub(super) fn locate(&self, order: Order) -> usize {
        self.orders.binary_search(&order).expect("a decoding sequence has a lane")
    }

    /// The first lane that is not before this place.
    pub(super) fn first_from(&self, order: Order) -> usize {
        self.orders.partition_point(|&other| other < order)
    }

    /// Gives a sequence a lane in its place, nearly always the last one; returns its number.
    pub(super) fn insert(&mut self, lane: Lane) -> usize {
        let at = match self.orders.last() {
            Some(&last) if last > lane.orders => self.first_from(lane.orders),
            _ => self.len(),
        };
        for gap in &mut self.gaps {
            *gap += u32::from(*gap as usize >= at);
        }
        self.total_tokens += lane.num_tokens as u64;
        self.num_with_extras += usize::from(lane.flags & HAS_EXTRAS != 0);
        self.insert_at(at, lane);
        self.version += 1;
        at
    }

    /// Takes the lane from its sequence.
    pub(super) fn vacate(&mut self, lane: usize) {
        debug_assert_ne!(self.rows[lane], VACANT, "a lane is vacated once");
        self.rows[lane] = VACANT;
        self.total_tokens -= self.num_tokens[lane] as u64;
        self.num_with_extras -= usize::from(self.flags[lane] & HAS_EXTRAS != 0);
        self.gaps.push(lane as u32);
    }

    /// Removes vacant lanes.
    pub(super) fn compact(&mut self) {
        let mut gaps = std::mem::take(&mut self.gaps);
        gaps.sort_unstable();
        let len = self.len();
        let end = for_each_run(&gaps, len, |run, to| self.move_run(run, to));
        self.truncate(end);
        gaps.clear();
        self.gaps = gaps;
        self.version += 1;
    }

    /// Removes from `values`, one for each lane, those of vacant ones.
    pub(super) fn compact_values(&mut self, values: &mut Vec<i32>) {
        self.gaps.sort_unstable();
        let end = for_each_run(&self.gaps, values.len(), |run, to| values.copy_within(run, to));
        values.truncate(end);
    }

    /// Every lane has computed its token and got the next one.
    pub(super) fn advance(&mut self, tokens: &[i32]) {
        self.total_tokens += tokens.len() as u64;
        self.tokens.copy_from_slice(tokens);
        self.num_tokens.iter_mut().for_each(|count| *count += 1);
        self.slots.iter_mut().for_each(|slot| *slot += 1);
        self.tail_ends.iter_mut().for_each(|end| *end += 1);
        self.quiet_steps.iter_mut().for_each(|count| *count -= 1);
    }

    /// The same for one lane.
    pub(super) fn advance_one(&mut self, lane: usize, token: i32) {
        self.total_tokens += 1;
        self.tokens[lane] = token;
        self.num_tokens[lane] += 1;
        self.slots[lane] += 1;
        self.tail_ends[lane] += 1;
        self.quiet_steps[lane] -= 1;
    }

    /// Lists the lanes that need a look after `advance`, in order: a block is full, the length is reached, the token is one of `eos`, or it
    /// has flags. Returns how many there are; `notable` has room for all lanes.
    pub(super) fn find_notable(&self, eos: &[i32], notable: &mut [u32]) -> usize {
        let lanes = self.quiet_steps.iter().zip(&self.tokens);
        if eos.iter().any(|&eos| contains(&self.tokens, eos)) {
            collect(lanes.map(|(&quiet, token)| quiet <= 0 || eos.contains(token)), notable)
        } else {
            collect(lanes.map(|(&quiet, _)| quiet <= 0), notable)
        }
    }

    /// Lists the lanes whose next token needs a new block, in order; returns how many there are.
    pub(super) fn find_full(&self, full: &mut [u32]) -> usize {
        collect(self.slots.iter().map(|&slot| slot == NO_SLOT), full)
    }
}

/// Writes the indices at which `wanted` holds to the beginning of `found`, without branches; returns how many there are.
fn collect(wanted: impl Iterator<Item = bool>, found: &mut [u32]) -> usize {
    let mut num_found = 0;
    for (index, is_wanted) in (0..).zip(wanted) {
        found[num_found] = index;
        num_found += usize::from(is_wanted);
    }
    num_found
}

/// Calls `move_run` with each run of values between `gaps` (ascending) that has to move, and where to; returns how many values remain.
fn for_each_run(gaps: &[u32], len: usize, mut move_run: impl FnMut(std::ops::Range<usize>, usize)) -> usize {
    let Some(&first) = gaps.first() else { return len };
    let mut to = first as usize;
    for (index, &gap) in gaps.iter().enumerate() {
        let run = gap as usize + 1..gaps.get(index + 1).map_or(len, |&next| next as usize);
        let run_len = run.len();
        if run_len > 0 {
            move_run(run, to);
        }
        to += run_len;
    }
    to
}

fn contains(tokens: &[i32], wanted: i32) -> bool {
    // Without a way out of the middle it is a vector loop.
    tokens.iter().fold(0, |found, &token| found | u8::from(token == wanted)) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Class;

    fn lane(arrival: u64) -> Lane {
        Lane {
            rows: arrival as i32,
            orders: Order::new(Class::Standard, arrival, 0),
            request_ids: arrival,
            choice_ids: 0,
            tokens: arrival as i32,
            num_tokens: 5,
            num_prompt_tokens: 4,
            max_num_tokens: 9,
            slots: 4,
            tail_ends: 4,
            quiet_steps: 4,
            num_logprobs: -1,
            flags: 0,
        }
    }

    #[test]
    fn lanes_stay_in_order_and_values_follow_them() {
        let mut lanes = Lanes::new(8);
        for arrival in [0, 1, 2, 5, 6, 7, 4] {
            lanes.insert(lane(arrival));
        }
        assert_eq!(lanes.rows, [0, 1, 2, 4, 5, 6, 7]);
        for arrival in [7, 0, 4] {
            lanes.vacate(lanes.locate(Order::new(Class::Standard, arrival, 0)));
        }
        assert_eq!((lanes.len(), lanes.num_live(), lanes.row(0), lanes.row(1)), (7, 4, None, Some(1)));
        let mut values = vec![10, 11, 12, 14, 15, 16, 17];
        lanes.compact_values(&mut values);
        lanes.compact();
        assert_eq!(values, [11, 12, 15, 16]);
        assert_eq!(lanes.rows, [1, 2, 5, 6]);
        assert_eq!(lanes.orders, [1, 2, 5, 6].map(|arrival| Order::new(Class::Standard, arrival, 0)));
        assert_eq!((lanes.len(), lanes.has_gaps(), lanes.first_from(Order::new(Class::Standard, 3, 0))), (4, false, 2));
    }

    #[test]
    fn a_lane_is_notable_if_its_time_has_come_or_at_eos() {
        let mut lanes = Lanes::new(8);
        for arrival in 0..6 {
            lanes.insert(lane(arrival));
        }
        lanes.quiet_steps[1] = 1;
        lanes.quiet_steps[3] = 0;
        lanes.advance(&[20, 21, 22, 23, 24, 25]);
        let mut notable = [0; 8];
        assert_eq!(lanes.find_notable(&[99], &mut notable), 2);
        assert_eq!(notable[..2], [1, 3]);
        assert_eq!(lanes.find_notable(&[99, 24], &mut notable), 3);
        assert_eq!(notable[..3], [1, 3, 4]);
        assert_eq!((lanes.num_tokens[0], lanes.slots[0], lanes.tail_ends[0], lanes.quiet_steps[0]), (6, 5, 5, 3));
        lanes.slots[5] = NO_SLOT;
        assert_eq!((lanes.find_full(&mut notable), notable[0]), (1, 5));
    }
}
