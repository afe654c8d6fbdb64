//! The scheduler's own lists of who waits for a row, in order of arrival: preempted sequences by number, requests that could start by slot.

use crate::block::NONE;

#[derive(Debug)]
pub(crate) struct WaitingList {
    next: Vec<u32>,
    prev: Vec<u32>,
    head: u32,
    tail: u32,
    len: usize,
}

impl WaitingList {
    pub(crate) fn new(num_slots: usize) -> Self {
        Self { next: vec![NONE; num_slots], prev: vec![NONE; num_slots], head: NONE, tail: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    pub(crate) fn after(&self, slot: u32) -> Option<u32> {
        let next = self.next[slot as usize];
        (next != NONE).then_some(next)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.first(), |&slot| self.after(slot))
    }

    pub(crate) fn push_back(&mut self, slot: u32) {
        self.insert_before(NONE, slot);
    }

    /// Inserts `slot` before the first entry that `stands_after` accepts, searching from the front.
    pub(crate) fn insert_before_first(&mut self, slot: u32, stands_after: impl Fn(u32) -> bool) {
        let at = self.iter().find(|&other| stands_after(other)).unwrap_or(NONE);
        self.insert_before(at, slot);
    }

    fn insert_before(&mut self, at: u32, slot: u32) {
        let prev = if at == NONE { self.tail } else { self.prev[at as usize] };
        self.next[slot as usize] = at;
        self.prev[slot as usize] = prev;
        match prev {
            NONE => self.head = slot,
            prev => self.next[prev as usize] = slot,
        }
        match at {
            NONE => self.tail = slot,
            at => self.prev[at as usize] = slot,
        }
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        let (prev, next) = (self.prev[slot as usize], self.next[slot as usize]);
        match prev {
            NONE => self.head = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => self.tail = prev,
            next => self.prev[next as usize] = prev,
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_leave_from_anywhere_and_enter_where_they_belong() {
        let mut list = WaitingList::new(8);
        for slot in [4, 2, 7] {
            list.push_back(slot);
        }
        list.remove(2);
        list.insert_before_first(1, |other| other == 4);
        list.insert_before_first(3, |_| false);
        assert_eq!(list.iter().collect::<Vec<_>>(), [1, 4, 7, 3]);
        for slot in [1, 3, 4, 7] {
            list.remove(slot);
        }
        assert_eq!((list.first(), list.len()), (None, 0));
    }
}
