//! The turns of a class: which of its flows is next.
//!
//! 1. A flow that waits has one turn: in the heap, by service, or aside, because memory was looked for in vain when it had its turn.
//! 2. A flow that has begun to wait gets a turn, and a number with it. It keeps both when it waits no more, until it is met or forgotten;
//!    those aside are forgotten at once, so that all who are aside wait.
//! 3. What is left of a forgotten turn is known by its number. It goes when it is met, and all of them before they are more than the others.
//! 4. A plan begins by bringing back the least served of those that the last one set aside, then those that were set aside first. At most `MAX_RETURNED` of those in the heap were brought back and not
//!    looked at since. So a plan that looks at more flows than that gets further in the line, however many lack memory.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::Flow;
use crate::policy::Class;

/// Flows that come back from aside at most before they are looked at again: if no more lack memory, all are looked at by service.
pub(in crate::scheduler) const MAX_RETURNED: usize = 16;

/// Those of them that are brought back because they are the least served ones.
const MAX_KEPT: usize = MAX_RETURNED / 2;

/// A flow's place among those of its class: least service first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::scheduler) struct Turn {
    pub(in crate::scheduler) service: u64,
    /// Those with equal service stand in the order in which they began to wait.
    pub(super) activation: u64,
    pub(in crate::scheduler) flow: u32,
}

/// Where a flow has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It has none.
    Nowhere,
    /// In the heap.
    Heap,
    /// In the heap, brought back from aside and not looked at since.
    Returned,
    /// Aside.
    Aside,
}

impl Flow {
    /// Whether a turn is the one that it has.
    fn has(&self, turn: Turn) -> bool {
        self.place != Place::Nowhere && self.activation == turn.activation
    }
}

/// Turns of the flows of one class.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Some with the service that the flow had, which only grows.
    heap: BinaryHeap<Reverse<Turn>>,
    /// First those kept at hand, then the one that was set aside longest ago.
    aside: VecDeque<Turn>,
    /// Flows that this plan has set aside and keeps at hand.
    num_kept: usize,
    /// Turns of either that were forgotten.
    num_stale: usize,
    /// Flows that are in the heap and returned, and flows that are aside.
    num_returned: usize,
    num_aside: usize,
}

impl Turns {
    /// Gives a flow its turn.
    pub(super) fn push(&mut self, flow: &mut Flow, turn: Turn) {
        (flow.place, flow.activation) = (Place::Heap, turn.activation);
        self.heap.push(Reverse(turn));
    }

    /// The waiting flow that is next.
    pub(super) fn peek(&mut self, flows: &mut [Flow]) -> Option<Turn> {
        loop {
            let &Reverse(top) = self.heap.peek()?;
            let flow = &mut flows[top.flow as usize];
            if !flow.has(top) {
                self.heap.pop();
                self.num_stale -= 1;
            } else if !flow.is_waiting() {
                self.heap.pop();
                self.move_to(flow, Place::Nowhere);
            } else if flow.service > top.service {
                // Services only grow, so the least of what the heap says is looked at until it is true.
                self.heap.pop();
                self.heap.push(Reverse(Turn { service: flow.service, ..top }));
            } else {
                return Some(top);
            }
        }
    }

    /// Takes away the turn that `peek` has just found, for a while.
    pub(super) fn pop(&mut self) -> Option<Turn> {
        self.heap.pop().map(|Reverse(turn)| turn)
    }

    /// Puts back what `pop` has taken.
    pub(super) fn extend(&mut self, turns: impl Iterator<Item = Turn>) {
        self.heap.extend(turns.map(Reverse));
    }

    /// Sets the flow that `peek` has just found aside.
    pub(super) fn set_aside(&mut self, flows: &mut [Flow]) {
        let Some(turn) = self.pop() else { return };
        let flow = &mut flows[turn.flow as usize];
        debug_assert!(flow.is_waiting() && flow.has(turn), "`peek` has found it");
        self.move_to(flow, Place::Aside);
        // A plan looks at the least served ones first.
        if self.num_kept < MAX_KEPT {
            self.num_kept += 1;
            self.aside.push_front(turn);
        } else {
            self.aside.push_back(turn);
        }
    }

    /// A plan begins: brings back who was kept at hand, and those that were set aside first.
    pub(super) fn bring_back(&mut self, flows: &mut [Flow]) {
        self.num_kept = 0;
        while self.num_returned < MAX_RETURNED
            && let Some(turn) = self.aside.pop_front()
        {
            let flow = &mut flows[turn.flow as usize];
            if flow.has(turn) {
                self.move_to(flow, Place::Returned);
                self.heap.push(Reverse(turn));
            } else {
                self.num_stale -= 1;
            }
        }
    }

    /// A flow that was brought back is like any other: it was looked at, or something of it waits no more.
    pub(super) fn note_look(&mut self, flow: &mut Flow) {
        if flow.place == Place::Returned {
            self.move_to(flow, Place::Heap);
        }
    }

    fn move_to(&mut self, flow: &mut Flow, place: Place) {
        let from = std::mem::replace(&mut flow.place, place);
        self.num_returned += usize::from(place == Place::Returned);
        self.num_returned -= usize::from(from == Place::Returned);
        self.num_aside += usize::from(place == Place::Aside);
        self.num_aside -= usize::from(from == Place::Aside);
    }

    /// Whether any flow has a turn, even if it waits no more.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == self.num_stale
    }

    /// Whether any flow is aside.
    pub(super) fn has_aside(&self) -> bool {
        self.num_aside > 0
    }

    /// Turns, stale ones too.
    pub(super) fn len(&self) -> usize {
        self.heap.len() + self.aside.len()
    }

    /// A flow that does not wait has no turn any more.
    pub(super) fn forget(&mut self, flows: &mut [Flow], flow: u32) {
        let flow = &mut flows[flow as usize];
        if flow.place == Place::Nowhere {
            return;
        }
        self.move_to(flow, Place::Nowhere);
        self.num_stale += 1;
        // Each of them pays for one of those that stay.
        if self.num_stale > self.len() / 2 {
            self.heap.retain(|&Reverse(turn)| flows[turn.flow as usize].has(turn));
            self.aside.retain(|&turn| flows[turn.flow as usize].has(turn));
            self.num_stale = 0;
        }
    }

    /// Panics if a flow among `flows`, those of the class, has not exactly one turn where it says.
    pub(super) fn check_invariants(&self, flows: &[Flow], class: Class) {
        let heap = self.heap.iter().map(|&Reverse(turn)| (turn, [Place::Heap, Place::Returned]));
        let aside = self.aside.iter().map(|&turn| (turn, [Place::Aside; 2]));
        let (mut num_own, mut num_stale) = (0, 0);
        for (turn, places) in heap.chain(aside) {
            let flow = &flows[turn.flow as usize];
            if !flow.has(turn) {
                num_stale += 1;
                continue;
            }
            num_own += 1;
            assert!(flow.class == class && !flow.is_free && places.contains(&flow.place), "{turn:?} of {flow:?}");
            assert!(flow.is_waiting() || flow.place != Place::Aside, "{flow:?} is aside and does not wait");
        }
        assert_eq!(num_stale, self.num_stale, "stale turns are miscounted");
        let of_class = || flows.iter().filter(|flow| flow.class == class && !flow.is_free);
        let count = |place| of_class().filter(|flow| flow.place == place).count();
        // No two turns have the same number.
        assert_eq!(num_own, of_class().count() - count(Place::Nowhere), "a flow has no turn where it says");
        assert_eq!((count(Place::Returned), count(Place::Aside)), (self.num_returned, self.num_aside));
        assert!(self.num_returned <= MAX_RETURNED);
        assert!(of_class().all(|flow| !flow.is_waiting() || flow.place != Place::Nowhere), "who waits has no turn");
    }
}
