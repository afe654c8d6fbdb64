//! The lock-free part on real threads: histories, bounds, drops, and random sequences against plain models.
//!
//! `tests/loom.rs` tries every interleaving of a few operations; here many operations meet the interleavings that the
//! machine happens to produce.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cbrs_core::admission::{AdmissionGate, UNKNOWN_RETRY_S};
use cbrs_core::control::ControlStack;
use cbrs_core::queue::{PushError, RequestQueue};
use cbrs_core::slots::SlotTable;
use cbrs_core::waker::Waker;
use cbrs_core::{Error, RequestId};
use proptest::prelude::*;

const NUM_ITEMS: usize = if cfg!(miri) { 20 } else { 5_000 };

/// Longer than any of these tests takes: a sleeper that sleeps so long has missed its wake-up.
const TOO_LONG: Duration = Duration::from_secs(60);

/// Counts its drops.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Checks that `history`, as popped by one consumer, holds every item once and keeps each producer's order.
fn assert_complete_and_ordered(history: &[(usize, usize)], num_producers: usize, num_items: usize) {
    assert_eq!(history.len(), num_producers * num_items);
    let mut next = vec![0; num_producers];
    for &(producer, item) in history {
        assert_eq!(item, next[producer], "producer {producer}'s item came out of order, or twice, or one was lost");
        next[producer] += 1;
    }
}

/// `num_producers` push until all is in; one consumer pops and sleeps until the queue is drained.
fn run_producers(num_producers: usize, num_items: usize, capacity: usize) -> Vec<(usize, usize)> {
    let (queue, waker) = (RequestQueue::new(capacity), Waker::new());
    let num_running = AtomicUsize::new(num_producers);
    let (queue, waker, num_running) = (&queue, &waker, &num_running);
    thread::scope(|scope| {
        for producer in 0..num_producers {
            scope.spawn(move || {
                for item in 0..num_items {
                    while queue.push((producer, item)).is_err() {
                        thread::yield_now();
                    }
                    waker.wake();
                }
                if num_running.fetch_sub(1, Ordering::AcqRel) == 1 {
                    queue.close();
                    waker.wake();
                }
            });
        }
        let mut history = Vec::new();
        while !queue.is_drained() {
            assert!(queue.len() <= capacity);
            let Some(entry) = queue.pop() else {
                let before = Instant::now();
                waker.sleep_unless(TOO_LONG, || !queue.is_empty() || queue.is_drained());
                assert!(before.elapsed() < TOO_LONG, "a wake-up was lost");
                continue;
            };
            history.push(entry);
        }
        history
    })
}

#[test]
fn items_come_out_in_the_order_in_which_they_went_in() {
    let queue = RequestQueue::new(3);
    for lap in 0..5 {
        for item in 0..3 {
            assert_eq!(queue.push(lap * 3 + item), Ok(()));
        }
        for item in 0..3 {
            assert_eq!(queue.pop(), Some(lap * 3 + item));
        }
        assert_eq!(queue.pop(), None);
    }
}

#[test]
fn one_slot_is_enough_for_many_laps() {
    let queue = RequestQueue::new(1);
    for lap in 0..100 {
        assert!(queue.is_empty());
        assert_eq!(queue.push(lap), Ok(()));
        assert_eq!(queue.push(-1), Err(PushError::Full(-1)));
        assert!(!queue.is_empty());
        assert_eq!(queue.pop(), Some(lap));
        assert_eq!(queue.pop(), None);
    }
}

#[test]
fn a_full_queue_answers_at_once_and_gives_the_item_back() {
    let queue = RequestQueue::new(2);
    queue.push("a".to_owned()).unwrap();
    queue.push("b".to_owned()).unwrap();
    let refused = queue.push("c".to_owned()).unwrap_err();
    assert!(matches!(&refused, PushError::Full(item) if item == "c"));
    assert_eq!(refused.into_inner(), "c");
    assert_eq!((queue.len(), queue.capacity()), (2, 2));
}

#[test]
fn a_closed_queue_refuses_and_still_gives_what_it_holds() {
    let queue = RequestQueue::new(2);
    queue.push(1).unwrap();
    assert!(!queue.is_closed());
    queue.close();
    queue.close();
    assert!(queue.is_closed() && !queue.is_drained());
    assert_eq!(queue.push(2), Err(PushError::Closed(2)));
    assert_eq!(queue.pop(), Some(1));
    assert!(queue.is_drained());
    assert_eq!(queue.push(2), Err(PushError::Closed(2)));
}

#[test]
fn a_full_queue_that_is_closed_says_closed() {
    let queue = RequestQueue::new(1);
    queue.push(1).unwrap();
    queue.close();
    assert_eq!(queue.push(2), Err(PushError::Closed(2)));
}

#[test]
#[should_panic(expected = "at least one slot")]
fn a_queue_without_slots_is_refused() {
    let _ = RequestQueue::<u8>::new(0);
}

#[test]
fn dropping_the_queue_drops_each_remaining_item_once() {
    let num_drops = Arc::new(AtomicUsize::new(0));
    let queue = RequestQueue::new(4);
    for _ in 0..4 {
        assert!(queue.push(Counted(Arc::clone(&num_drops))).is_ok());
    }
    drop(queue.pop());
    assert!(queue.push(Counted(Arc::clone(&num_drops))).is_ok());
    drop(queue.push(Counted(Arc::clone(&num_drops))));
    assert_eq!(num_drops.load(Ordering::Relaxed), 2, "one popped, one refused");
    drop(queue);
    assert_eq!(num_drops.load(Ordering::Relaxed), 6);
}

#[test]
fn two_producers_lose_and_repeat_nothing_through_one_slot() {
    assert_complete_and_ordered(&run_producers(2, NUM_ITEMS, 1), 2, NUM_ITEMS);
}

#[test]
fn eight_producers_lose_and_repeat_nothing() {
    for capacity in [3, 64] {
        assert_complete_and_ordered(&run_producers(8, NUM_ITEMS, capacity), 8, NUM_ITEMS);
    }
}

#[test]
fn several_consumers_share_the_items_without_losing_or_repeating_one() {
    let queue = RequestQueue::new(5);
    let queue = &queue;
    let consume = move || {
        let mut popped = Vec::new();
        while !queue.is_drained() {
            popped.extend(queue.pop());
        }
        popped
    };
    let histories = thread::scope(|scope| {
        let consumers = [0; 2].map(|_| scope.spawn(consume));
        for item in 0..NUM_ITEMS {
            while queue.push(item).is_err() {
                thread::yield_now();
            }
        }
        queue.close();
        consumers.map(|consumer| consumer.join().unwrap())
    });
    assert!(histories.iter().all(|history| history.is_sorted()), "a later item overtook an earlier one");
    let mut all = histories.concat();
    all.sort_unstable();
    assert_eq!(all, (0..NUM_ITEMS).collect::<Vec<_>>());
}

#[test]
fn close_among_pushes_keeps_exactly_what_was_accepted() {
    for round in 0..NUM_ITEMS / 20 {
        let queue = RequestQueue::new(64);
        let queue = &queue;
        let accepted = thread::scope(|scope| {
            let producers = [0, 1]
                .map(|producer| scope.spawn(move || (0..30).filter(|i| queue.push(i * 2 + producer).is_ok()).count()));
            for _ in 0..round % 50 {
                std::hint::spin_loop();
            }
            queue.close();
            producers.map(|producer| producer.join().unwrap())
        });
        let popped: Vec<usize> = std::iter::from_fn(|| queue.pop()).collect();
        let from = |producer| popped.iter().filter(|&&item| item % 2 == producer).count();
        assert_eq!(accepted, [from(0), from(1)]);
        assert!(queue.is_drained());
    }
}

#[test]
fn the_stack_gives_items_in_push_order_and_only_once() {
    let stack = ControlStack::new();
    assert!(stack.is_empty());
    (0..5).for_each(|item| stack.push(item));
    assert!(!stack.is_empty());
    assert_eq!(stack.take_all().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(stack.take_all().count(), 0);
}

#[test]
fn the_stack_loses_and_repeats_nothing_under_eight_pushers() {
    let stack = ControlStack::new();
    let stack = &stack;
    let history = thread::scope(|scope| {
        for producer in 0..8 {
            scope.spawn(move || (0..NUM_ITEMS).for_each(|item| stack.push((producer, item))));
        }
        let mut history = Vec::new();
        while history.len() < 8 * NUM_ITEMS {
            history.extend(stack.take_all());
        }
        history
    });
    assert_complete_and_ordered(&history, 8, NUM_ITEMS);
}

#[test]
fn dropping_the_stack_or_its_iterator_drops_each_item_once() {
    let num_drops = Arc::new(AtomicUsize::new(0));
    let stack = ControlStack::new();
    (0..3).for_each(|_| stack.push(Counted(Arc::clone(&num_drops))));
    let mut taken = stack.take_all();
    drop(taken.next());
    assert_eq!(num_drops.load(Ordering::Relaxed), 1);
    drop(taken);
    assert_eq!(num_drops.load(Ordering::Relaxed), 3);
    stack.push(Counted(Arc::clone(&num_drops)));
    drop(stack);
    assert_eq!(num_drops.load(Ordering::Relaxed), 4);
}

#[test]
fn stale_unknown_and_invented_ids_are_not_live_and_cancel_nothing() {
    let table = SlotTable::new(2);
    let id = table.acquire().unwrap();
    assert_eq!((id.slot(), id.generation()), (0, 1));
    table.release(id);
    let next = table.acquire().unwrap();
    assert_eq!((next.slot(), next.generation()), (0, 2));
    let unused_slot = RequestId::new(1, 1);
    let future = RequestId::new(3, 0);
    for stranger in
        [id, unused_slot, future, RequestId::new(1, 2), RequestId::from_u64(0), RequestId::from_u64(u64::MAX)]
    {
        assert!(!table.is_live(stranger) && !table.request_cancel(stranger), "{stranger:?}");
    }
    assert!(table.is_live(next) && table.request_cancel(next), "strangers have changed nothing");
    assert!(!table.request_cancel(next) && table.is_live(next));
}

#[test]
#[should_panic(expected = "RequestId(0v1) was released, but is not live")]
fn releasing_twice_panics() {
    let table = SlotTable::new(1);
    let id = table.acquire().unwrap();
    table.release(id);
    table.release(id);
}

#[test]
fn a_live_slot_is_never_given_out_again() {
    let table = SlotTable::new(5);
    let holders: Vec<_> = (0..table.capacity()).map(|_| AtomicUsize::new(0)).collect();
    let (table, holders) = (&table, &holders);
    let ids: Vec<RequestId> = thread::scope(|scope| {
        let threads = [0; 4].map(|_| {
            scope.spawn(move || {
                let mut ids = Vec::new();
                for _ in 0..NUM_ITEMS {
                    let Some(id) = table.acquire() else { continue };
                    let holder = &holders[id.slot() as usize];
                    assert_eq!(holder.fetch_add(1, Ordering::AcqRel), 0, "{id:?} has two owners");
                    assert!(table.request_cancel(id), "a new request was cancelled already");
                    holder.fetch_sub(1, Ordering::AcqRel);
                    table.release(id);
                    ids.push(id);
                }
                ids
            })
        });
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(table.num_free(), table.capacity());
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len(), "an id was given out twice");
}

#[test]
fn the_gate_names_the_bound_that_is_reached_and_keeps_nothing() {
    let gate = AdmissionGate::new(2, Some(10));
    assert_eq!(gate.reserve(7), Ok(()));
    assert_eq!(
        gate.reserve(4),
        Err(Error::QueuedTokensFull { queued: 7, requested: 4, limit: 10, retry_after_s: UNKNOWN_RETRY_S })
    );
    assert_eq!((gate.queued_requests(), gate.queued_tokens()), (1, 7));
    assert_eq!(gate.reserve(3), Ok(()));
    assert_eq!(gate.reserve(0), Err(Error::QueueFull { queued: 2, limit: 2, retry_after_s: UNKNOWN_RETRY_S }));
    gate.release(7);
    assert_eq!((gate.queued_requests(), gate.queued_tokens()), (1, 3));
    assert!(matches!(gate.reserve(u64::MAX), Err(Error::QueuedTokensFull { requested: u64::MAX, .. })));
}

#[test]
#[should_panic(expected = "1 request of 3 tokens was given back, but 1 requests of 2 tokens were reserved")]
fn giving_back_more_than_was_reserved_panics() {
    let gate = AdmissionGate::new(1, None);
    gate.reserve(2).unwrap();
    gate.release(3);
}

#[test]
fn the_gate_keeps_both_bounds_under_eight_reservers() {
    let gate = AdmissionGate::new(3, Some(20));
    let gate = &gate;
    thread::scope(|scope| {
        for num_tokens in 1..=8 {
            scope.spawn(move || {
                for _ in 0..NUM_ITEMS {
                    let accepted = gate.reserve(num_tokens).is_ok();
                    assert!(gate.queued_requests() <= 3 && gate.queued_tokens() <= 20);
                    if accepted {
                        gate.release(num_tokens);
                    }
                }
            });
        }
    });
    assert_eq!((gate.queued_requests(), gate.queued_tokens()), (0, 0));
}

#[test]
fn a_sleeper_does_not_sleep_when_there_is_work_and_not_longer_than_asked() {
    let waker = Waker::new();
    let before = Instant::now();
    waker.sleep_unless(TOO_LONG, || true);
    assert!(before.elapsed() < TOO_LONG);
    waker.wake();
    waker.sleep_unless(Duration::from_millis(1), || false);
    assert!(before.elapsed() < TOO_LONG);
}

#[test]
fn two_threads_that_wake_each_other_never_miss_a_turn() {
    let turn = AtomicUsize::new(0);
    let wakers = [Waker::new(), Waker::new()];
    let (turn, wakers) = (&turn, &wakers);
    thread::scope(|scope| {
        for me in 0..2 {
            scope.spawn(move || {
                for round in 0..NUM_ITEMS {
                    let mine = round * 2 + me;
                    while turn.load(Ordering::Acquire) != mine {
                        let before = Instant::now();
                        wakers[me].sleep_unless(TOO_LONG, || turn.load(Ordering::Acquire) == mine);
                        assert!(before.elapsed() < TOO_LONG, "a wake-up was lost");
                    }
                    turn.store(mine + 1, Ordering::Release);
                    wakers[1 - me].wake();
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// Below 40 pushes, below 80 pops, 80 closes.
    #[test]
    fn the_queue_behaves_like_a_bounded_deque(capacity in 1_usize..6, operations in prop::collection::vec(0..81_u8, 0..200)) {
        let queue = RequestQueue::new(capacity);
        let mut deque = VecDeque::new();
        let mut num_pushed = 0;
        let mut is_closed = false;
        for (item, operation) in operations.into_iter().enumerate() {
            match operation {
                0..40 => {
                    let expected = if is_closed {
                        Err(PushError::Closed(item))
                    } else if deque.len() == capacity {
                        Err(PushError::Full(item))
                    } else {
                        deque.push_back(item);
                        num_pushed += 1;
                        Ok(())
                    };
                    prop_assert_eq!(queue.push(item), expected);
                }
                40..80 => prop_assert_eq!(queue.pop(), deque.pop_front()),
                _ => {
                    queue.close();
                    is_closed = true;
                }
            }
            prop_assert_eq!(queue.len(), deque.len());
            prop_assert_eq!(queue.num_pushed(), num_pushed);
            prop_assert_eq!(queue.is_empty(), deque.is_empty());
            prop_assert_eq!(queue.is_closed(), is_closed);
            prop_assert_eq!(queue.is_drained(), is_closed && deque.is_empty());
        }
    }
}
