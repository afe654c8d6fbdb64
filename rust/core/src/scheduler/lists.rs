//! Intrusive lists over numbers such as slots: many lists share the arrays of their links, and each number is in at most one of them.

use crate::block::NONE;

/// One list: its ends and its length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0 };

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }
}

/// The links of all entries.
#[derive(Debug)]
pub(crate) struct Links {
    next: Vec<u32>,
    prev: Vec<u32>,
}

impl Links {
    pub(crate) fn new(num_entries: usize) -> Self {
        Self { next: vec![NONE; num_entries], prev: vec![NONE; num_entries] }
    }

    /// Makes room for entries up to this number.
    pub(crate) fn grow(&mut self, num_entries: usize) {
        self.next.resize(num_entries, NONE);
        self.prev.resize(num_entries, NONE);
    }

    pub(crate) fn after(&self, entry: u32) -> Option<u32> {
        let next = self.next[entry as usize];
        (next != NONE).then_some(next)
    }

    pub(crate) fn iter(&self, list: &List) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(list.first(), |&entry| self.after(entry))
    }

    /// Whether an entry is in a list; it must not be in another one.
    pub(crate) fn contains(&self, list: &List, entry: u32) -> bool {
        self.prev[entry as usize] != NONE || list.head == entry
    }

    pub(crate) fn push_back(&mut self, list: &mut List, entry: u32) {
        self.insert_before(list, NONE, entry);
    }

    /// Inserts `entry` before the first one that `stands_after` accepts, searching from the front.
    pub(crate) fn insert_before_first(&mut self, list: &mut List, entry: u32, stands_after: impl Fn(u32) -> bool) {
        let at = self.iter(list).find(|&other| stands_after(other)).unwrap_or(NONE);
        self.insert_before(list, at, entry);
    }

    fn insert_before(&mut self, list: &mut List, at: u32, entry: u32) {
        let prev = if at == NONE { list.tail } else { self.prev[at as usize] };
        self.next[entry as usize] = at;
        self.prev[entry as usize] = prev;
        match prev {
            NONE => list.head = entry,
            prev => self.next[prev as usize] = entry,
        }
        match at {
            NONE => list.tail = entry,
            at => self.prev[at as usize] = entry,
        }
        list.len += 1;
    }

    pub(crate) fn remove(&mut self, list: &mut List, entry: u32) {
        let (prev, next) = (self.prev[entry as usize], self.next[entry as usize]);
        match prev {
            NONE => list.head = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => list.tail = prev,
            next => self.prev[next as usize] = prev,
        }
        (self.prev[entry as usize], self.next[entry as usize]) = (NONE, NONE);
        list.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_leave_from_anywhere_and_enter_where_they_belong() {
        let mut links = Links::new(8);
        let (mut list, mut other) = (List::EMPTY, List::EMPTY);
        for entry in [4, 2, 7] {
            links.push_back(&mut list, entry);
        }
        links.push_back(&mut other, 6);
        links.remove(&mut list, 2);
        links.insert_before_first(&mut list, 1, |other| other == 4);
        links.insert_before_first(&mut list, 3, |_| false);
        assert_eq!(links.iter(&list).collect::<Vec<_>>(), [1, 4, 7, 3]);
        for entry in [1, 3, 4, 7] {
            assert!(links.contains(&list, entry));
            links.remove(&mut list, entry);
            assert!(!links.contains(&list, entry));
        }
        assert_eq!((list.first(), list.len(), other.len()), (None, 0, 1));
    }
}
