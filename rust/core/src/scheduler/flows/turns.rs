//! The turns of a class: which of its flows is next.
//!
//! 1. A flow that waits has one turn.
//! 2. A flow that has begun to wait gets a turn, and a number with it. It keeps both when it waits no more, until it is met or forgotten.
//! 3. What is left of a forgotten turn is known by its number. It goes when it is met, and all of them before they are more than the others.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Flow;

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
    /// Those of them that were forgotten.
    num_stale: usize,
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
                flow.place = Place::Nowhere;
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

    /// Whether any flow has a turn, even if it waits no more.
    pub(super) fn is_empty(&self) -> bool {
        self.heap.len() == self.num_stale
    }

    /// Turns, stale ones too.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    /// A flow that does not wait has no turn any more.
    pub(super) fn forget(&mut self, flows: &mut [Flow], flow: u32) {
        let flow = &mut flows[flow as usize];
        if flow.place == Place::Nowhere {
            return;
        }
        flow.place = Place::Nowhere;
        self.num_stale += 1;
        // Each of them pays for one of those that stay.
        if self.num_stale > self.heap.len() / 2 {
            self.heap.retain(|&Reverse(turn)| flows[turn.flow as usize].has(turn));
            self.num_stale = 0;
        }
    }

    /// Panics if a flow among `flows`, those of the class, has not exactly one turn where it says.
    pub(super) fn check_invariants<'a>(&self, flows: impl Iterator<Item = (u32, &'a Flow)>) {
        let mut num_turns = 0;
        for (number, flow) in flows {
            assert!(!flow.is_waiting() || flow.place != Place::Nowhere, "flow {number} waits and has no turn");
            let is_own = |turn: Turn| turn.flow == number && flow.has(turn);
            let num_in_heap = self.heap.iter().filter(|&&Reverse(turn)| is_own(turn)).count();
            assert_eq!(num_in_heap, usize::from(flow.place == Place::Heap), "turns of flow {number}");
            num_turns += num_in_heap;
        }
        assert_eq!(num_turns + self.num_stale, self.heap.len(), "stale turns are miscounted");
    }
}
