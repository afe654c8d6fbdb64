//! `ControlStack`: what must get through at any load. Cancels and finishes come this way, past the bounded queue.
//!
//! A push-only linked stack (R. K. Treiber's) that is only ever emptied as a whole: `take_all` swaps the head for
//! null, and nobody pops single nodes, so a node's address cannot come back under a compare-exchange that would be
//! wrong about it (no ABA), and no node is read by another thread than its owner.
//!
//! Invariants: a node belongs to its pusher until the exchange that links it, then to the stack, then to the one
//! `take_all` (or the drop) whose swap unlinked it; each item is handed out or dropped once.

use std::fmt;
use std::ptr;

use crate::sync::{AtomicPtr, Ordering};

struct Node<T> {
    item: T,
    /// The node pushed before, null for the first.
    next: *mut Node<T>,
}

/// Unbounded lock-free stack of messages to the engine thread.
///
/// ```
/// let stack = cbrs_core::control::ControlStack::new();
/// stack.push(1);
/// stack.push(2);
/// assert_eq!(stack.take_all().collect::<Vec<_>>(), [1, 2]);
/// assert!(stack.is_empty());
/// ```
// An `AtomicPtr` is `Send` and `Sync` whatever it points to; the bound is what keeps this type sound.
pub struct ControlStack<T: Send> {
    head: AtomicPtr<Node<T>>,
}

impl<T: Send> ControlStack<T> {
    /// An empty stack.
    pub fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Adds `item`. Always succeeds and never waits; it retries only when another push or take came between.
    #[expect(unsafe_code, reason = "links a node that is not shared yet")]
    pub fn push(&self, item: T) {
        let node = Box::into_raw(Box::new(Node { item, next: ptr::null_mut() }));
        // Relaxed: the old head is stored, not followed.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` came from the box above and is not linked yet, so this thread alone has its address.
            unsafe { (*node).next = head };
            // Release: the `take_all` that gets this node sees its item and `next`.
            match self.head.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(current) => head = current,
            }
        }
    }

    /// Empties the stack and gives its items in the order in which they were pushed.
    #[expect(unsafe_code, reason = "takes nodes back into boxes")]
    pub fn take_all(&self) -> impl Iterator<Item = T> + use<T> {
        let mut newest_first = Vec::new();
        if !self.is_empty() {
            // Acquire: pairs with the Release of *every* push in the list, not only the last: the head is changed by
            // exchanges only, and those continue the release sequence of each earlier one.
            let mut node = self.head.swap(ptr::null_mut(), Ordering::Acquire);
            while !node.is_null() {
                // SAFETY: the swap unlinked this list, so no other thread can reach it; each node was made by
                // `Box::into_raw` in `push` and is turned back once.
                let owned = unsafe { Box::from_raw(node) };
                node = owned.next;
                newest_first.push(owned.item);
            }
        }
        newest_first.into_iter().rev()
    }

    /// Whether there is nothing to take.
    pub fn is_empty(&self) -> bool {
        // Relaxed: only a hint for other threads; `take_all` synchronises by its swap.
        self.head.load(Ordering::Relaxed).is_null()
    }
}

impl<T: Send> Default for ControlStack<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Send> Drop for ControlStack<T> {
    fn drop(&mut self) {
        drop(self.take_all());
    }
}

impl<T: Send> fmt::Debug for ControlStack<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlStack").field("is_empty", &self.is_empty()).finish_non_exhaustive()
    }
}
