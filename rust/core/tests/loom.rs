//! Every model of the lock-free part, run by loom over all interleavings and all values that Relaxed loads may see.
//!
//! Run: `RUSTFLAGS="--cfg loom" cargo test -p cbrs-core --test loom --release`. "all" explores everything; a number is
//! the bound on preemptions, which `LOOM_MAX_PREEMPTIONS` raises (it never lowers it). loom's `wait_timeout` never
//! times out, so a lost wake-up is a deadlock, which loom reports. Each model has at least one mutant that it alone is
//! asked to kill, in `tests/mutants/loom.toml` at the root.
//!
//! | model | threads | explores |
//! |---|---|---|
//! | `two_producers_of_two_items_at_capacity_one` | 2 producers | all |
//! | `two_producers_of_two_items_at_capacity_two` | 2 producers | all |
//! | `two_producers_and_a_consumer_at_capacity_one_within_3_preemptions` | 2 producers, one pops | 3 |
//! | `two_producers_and_a_consumer_at_capacity_two_within_3_preemptions` | 2 producers, one pops | 3 |
//! | `three_producers_at_capacity_two_within_3_preemptions` | 3 producers, one pops | 3 |
//! | `two_consumers_never_get_the_same_item` | 2 consumers | all |
//! | `close_against_push_accepts_or_gives_back` | producer, closer | all |
//! | `the_last_owner_drops_what_is_left_once` | producer, consumer | all |
//! | `a_sleeper_never_misses_a_push` | producer, sleeper | all |
//! | `a_sleeper_gets_the_items_of_two_producers_within_3_preemptions` | 2 producers, sleeper | 3 |
//! | `a_second_sleeper_does_not_silence_the_first_within_3_preemptions` | waker, 2 sleepers | 3 |
//! | `close_against_push_and_sleep_ends_the_sleeper_within_3_preemptions` | producer, closer, sleeper | 3 |
//! | `take_all_against_two_pushers_loses_nothing_within_3_preemptions` | 2 pushers, taker | 3 |
//! | `dropping_the_stack_frees_what_was_pushed` | 2 pushers | all |
//! | `exactly_one_of_two_cancels_is_the_first` | 2 cancellers | all |
//! | `a_stale_cancel_never_hits_the_next_request` | canceller, engine | all |
//! | `an_overtaken_acquire_never_takes_a_live_slot` | 2 acquirers | all |
//! | `a_slot_is_handed_over_with_its_generation` | engine, acquirer | all |
//! | `the_gate_never_holds_more_requests_than_its_bound` | 2 reservers | all |
//! | `the_gate_never_holds_more_requests_than_its_bound_within_3_preemptions` | 3 reservers | 3 |
//! | `the_gate_never_holds_more_tokens_than_its_bound` | 2 reservers | all |
//! | `a_reservation_guarantees_a_slot_in_the_queue_within_3_preemptions` | 2 producers, consumer | 3 |
//! | `two_first_requests_of_a_tenant_share_a_cell` | 2 submitters | all |
//! | `a_cell_is_never_taken_over_from_a_tenant_that_came_back` | 2 submitters | all |
//! | `a_cell_with_something_to_pay_is_not_taken_over` | engine, submitter | all |
//! | `a_tenant_that_comes_and_goes_is_not_taken_for_one_that_stayed_away` | 2 submitters | all |
//! | `weights_of_waiting_tenants_add_up` | submitter, engine | all |
//! | `two_charges_never_share_a_unit_of_a_rate` | 2 submitters | all |
//! | `a_refund_gives_back_no_more_than_was_charged` | 2 submitters | all |
//! | `reserved_service_never_exceeds_its_bound` | 2 reservers | all |
//! | `a_more_urgent_class_is_never_refused_for_a_less_urgent_one` | 2 reservers | all |
//! | `the_refusing_of_a_class_is_not_ended_by_one_who_looked_before` | submitter, engine | all |
//! | `two_promises_never_name_the_same_time` | 2 submitters | all |
//! | `a_snapshot_is_never_a_mixture_of_two` | publisher, reader | all |
//! | `a_reader_of_a_trace_gets_or_misses_each_record` | writer, reader | all |
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicUsize as StdAtomicUsize, Ordering as StdOrdering};
use std::time::Duration;

use cbrs_core::RequestId;
use cbrs_core::admission::AdmissionGate;
use cbrs_core::control::ControlStack;
use cbrs_core::overload::{Bucket, Outlook, Promises, QueuedService, RateLimit, TenantCell, TenantTable};
use cbrs_core::policy::Class;
use cbrs_core::queue::{PushError, RequestQueue};
use cbrs_core::slots::SlotTable;
use cbrs_core::snapshot::Snapshot;
use cbrs_core::trace::{Trace, TraceKind, TraceReader, TraceRecord};
use cbrs_core::waker::Waker;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// Explores every interleaving of `model`.
fn explore_all(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = None;
    builder.check(model);
}

/// Explores the interleavings of `model` with at most `preemptions`, or more if the environment asks for more.
fn explore_within(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions.max(builder.preemption_bound.unwrap_or(0)));
    builder.check(model);
}

/// An item whose content loom watches: reading it without having synchronised with its writer is reported.
struct Watched(UnsafeCell<usize>);

impl Watched {
    fn new(value: usize) -> Self {
        Self(UnsafeCell::new(value))
    }

    #[expect(unsafe_code, reason = "the cell is loom's race detector")]
    fn get(&self) -> usize {
        // SAFETY: the value is never written after `new`; loom checks that `new` happened before.
        self.0.with(|value| unsafe { *value })
    }
}

/// Counts its drops.
struct Counted(StdArc<StdAtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, StdOrdering::Relaxed);
    }
}

/// `num_producers` push `num_items` each, once. If asked to, the last of them is the consumer, too, and pops once after
/// its first push: a thread less keeps the model small. Afterwards every item has come out once or was refused, those of one
/// producer in order, and all slots are usable.
fn producers_on_queue(num_producers: usize, num_items: usize, capacity: usize, pops_meanwhile: bool) {
    let queue = Arc::new(RequestQueue::new(capacity));
    let last = num_producers - 1;
    let producers: Vec<_> = (0..last)
        .map(|producer| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                let push = |item: &usize| queue.push(*item).is_err();
                (0..num_items).map(|i| producer * num_items + i).filter(push).collect::<Vec<_>>()
            })
        })
        .collect();
    let (mut popped, mut refused) = (Vec::new(), Vec::new());
    for i in 0..num_items {
        let item = last * num_items + i;
        if queue.push(item).is_err() {
            refused.push(item);
        }
        if pops_meanwhile && i == 0 {
            popped.extend(queue.pop());
        }
    }
    refused.extend(producers.into_iter().flat_map(|producer| producer.join().unwrap()));
    assert!(queue.len() <= capacity, "{} items in {capacity} slots", queue.len());
    assert!(refused.is_empty() || num_producers * num_items > capacity, "{refused:?} refused with room left");
    popped.extend(std::iter::from_fn(|| queue.pop()));

    for producer in 0..num_producers {
        let own: Vec<_> = popped.iter().filter(|&&item| item / num_items == producer).collect();
        assert!(own.is_sorted(), "producer {producer}'s items came out as {own:?}");
    }
    let mut all = [popped, refused].concat();
    all.sort_unstable();
    assert_eq!(all, (0..num_producers * num_items).collect::<Vec<_>>());
    for item in 0..capacity {
        assert_eq!(queue.push(item), Ok(()), "a slot was lost");
    }
    assert_eq!(queue.push(0), Err(PushError::Full(0)));
}

#[test]
fn two_producers_of_two_items_at_capacity_one() {
    explore_all(|| producers_on_queue(2, 2, 1, false));
}

#[test]
fn two_producers_of_two_items_at_capacity_two() {
    explore_all(|| producers_on_queue(2, 2, 2, false));
}

#[test]
fn two_producers_and_a_consumer_at_capacity_one_within_3_preemptions() {
    explore_within(3, || producers_on_queue(2, 2, 1, true));
}

#[test]
fn two_producers_and_a_consumer_at_capacity_two_within_3_preemptions() {
    explore_within(3, || producers_on_queue(2, 2, 2, true));
}

#[test]
fn three_producers_at_capacity_two_within_3_preemptions() {
    explore_within(3, || producers_on_queue(3, 1, 2, true));
}

#[test]
fn two_consumers_never_get_the_same_item() {
    explore_all(|| {
        let queue = Arc::new(RequestQueue::new(2));
        queue.push(0).unwrap();
        queue.push(1).unwrap();
        let consumer = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.pop())
        };
        let mine = queue.pop();
        let mut popped = [mine, consumer.join().unwrap()];
        popped.sort_unstable();
        assert_eq!(popped, [Some(0), Some(1)]);
    });
}

#[test]
fn close_against_push_accepts_or_gives_back() {
    explore_all(|| {
        let queue = Arc::new(RequestQueue::new(2));
        let producer = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || [queue.push(0), queue.push(1)])
        };
        queue.close();
        assert_eq!(queue.push(9), Err(PushError::Closed(9)));
        let drained_early = queue.is_drained();
        let results = producer.join().unwrap();
        let accepted: Vec<_> = (0..2).filter(|&item| results[item].is_ok()).collect();
        for (item, result) in results.into_iter().enumerate() {
            assert!(matches!(result, Ok(()) | Err(PushError::Closed(_))), "{item} was refused as {result:?}");
        }
        assert!(!drained_early || accepted.is_empty(), "{accepted:?} came after the queue was drained");
        assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(), accepted);
        assert!(queue.is_drained());
    });
}

#[test]
fn the_last_owner_drops_what_is_left_once() {
    explore_all(|| {
        let num_drops = StdArc::new(StdAtomicUsize::new(0));
        let queue = Arc::new(RequestQueue::new(2));
        let producer = {
            let (queue, num_drops) = (Arc::clone(&queue), StdArc::clone(&num_drops));
            thread::spawn(move || {
                for _ in 0..2 {
                    assert!(queue.push(Counted(StdArc::clone(&num_drops))).is_ok());
                }
            })
        };
        drop(queue.pop());
        drop(queue);
        producer.join().unwrap();
        assert_eq!(num_drops.load(StdOrdering::Relaxed), 2);
    });
}

/// Pops until it has `num_items`, sleeping whenever there is nothing.
fn pop_sleeping(queue: &RequestQueue<usize>, waker: &Waker, num_items: usize) -> Vec<usize> {
    let mut popped = Vec::new();
    while popped.len() < num_items {
        match queue.pop() {
            Some(item) => popped.push(item),
            None => waker.sleep_unless(Duration::from_secs(1), || !queue.is_empty()),
        }
    }
    popped
}

fn spawn_push_and_wake(queue: &Arc<RequestQueue<usize>>, waker: &Arc<Waker>, item: usize) -> thread::JoinHandle<bool> {
    let (queue, waker) = (Arc::clone(queue), Arc::clone(waker));
    thread::spawn(move || {
        let accepted = queue.push(item).is_ok();
        if accepted {
            waker.wake();
        }
        accepted
    })
}

#[test]
fn a_sleeper_never_misses_a_push() {
    explore_all(|| {
        let (queue, waker) = (Arc::new(RequestQueue::new(1)), Arc::new(Waker::new()));
        let producer = spawn_push_and_wake(&queue, &waker, 7);
        assert_eq!(pop_sleeping(&queue, &waker, 1), [7]);
        assert!(producer.join().unwrap());
    });
}

#[test]
fn a_sleeper_gets_the_items_of_two_producers_within_3_preemptions() {
    explore_within(3, || {
        let (queue, waker) = (Arc::new(RequestQueue::new(2)), Arc::new(Waker::new()));
        let producers = [0, 1].map(|item| spawn_push_and_wake(&queue, &waker, item));
        let mut popped = pop_sleeping(&queue, &waker, 2);
        popped.sort_unstable();
        assert_eq!(popped, [0, 1]);
        assert!(producers.into_iter().all(|producer| producer.join().unwrap()));
    });
}

#[test]
fn a_second_sleeper_does_not_silence_the_first_within_3_preemptions() {
    explore_within(3, || {
        let (queue, waker) = (Arc::new(RequestQueue::new(1)), Arc::new(Waker::new()));
        let second = {
            let waker = Arc::clone(&waker);
            thread::spawn(move || waker.sleep_unless(Duration::from_secs(1), || true))
        };
        let producer = spawn_push_and_wake(&queue, &waker, 7);
        assert_eq!(pop_sleeping(&queue, &waker, 1), [7]);
        second.join().unwrap();
        assert!(producer.join().unwrap());
    });
}

#[test]
fn close_against_push_and_sleep_ends_the_sleeper_within_3_preemptions() {
    explore_within(3, || {
        let (queue, waker) = (Arc::new(RequestQueue::new(1)), Arc::new(Waker::new()));
        let producer = spawn_push_and_wake(&queue, &waker, 7);
        let closer = {
            let (queue, waker) = (Arc::clone(&queue), Arc::clone(&waker));
            thread::spawn(move || {
                queue.close();
                waker.wake();
            })
        };
        let mut num_popped = 0;
        while !queue.is_drained() {
            match queue.pop() {
                Some(_) => num_popped += 1,
                None => waker.sleep_unless(Duration::from_secs(1), || !queue.is_empty() || queue.is_drained()),
            }
        }
        closer.join().unwrap();
        assert_eq!(num_popped, usize::from(producer.join().unwrap()));
    });
}

#[test]
fn take_all_against_two_pushers_loses_nothing_within_3_preemptions() {
    explore_within(3, || {
        let stack = Arc::new(ControlStack::new());
        let pushers = [vec![1, 2], vec![3]].map(|items| {
            let stack = Arc::clone(&stack);
            thread::spawn(move || items.into_iter().for_each(|item| stack.push(Watched::new(item))))
        });
        let mut taken: Vec<usize> = stack.take_all().map(|item| item.get()).collect();
        for pusher in pushers {
            pusher.join().unwrap();
        }
        taken.extend(stack.take_all().map(|item| item.get()));
        let own: Vec<_> = taken.iter().copied().filter(|item| *item <= 2).collect();
        assert_eq!(own, [1, 2], "items of one pusher came out of order");
        taken.sort_unstable();
        assert_eq!(taken, [1, 2, 3]);
    });
}

#[test]
fn dropping_the_stack_frees_what_was_pushed() {
    explore_all(|| {
        let num_drops = StdArc::new(StdAtomicUsize::new(0));
        let stack = Arc::new(ControlStack::new());
        let pusher = {
            let (stack, num_drops) = (Arc::clone(&stack), StdArc::clone(&num_drops));
            thread::spawn(move || stack.push(Counted(num_drops)))
        };
        stack.push(Counted(StdArc::clone(&num_drops)));
        drop(stack);
        pusher.join().unwrap();
        assert_eq!(num_drops.load(StdOrdering::Relaxed), 2);
    });
}

#[test]
fn exactly_one_of_two_cancels_is_the_first() {
    explore_all(|| {
        let table = Arc::new(SlotTable::new(1));
        let id = table.acquire().unwrap();
        let canceller = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.request_cancel(id))
        };
        let mine = table.request_cancel(id);
        assert!(mine ^ canceller.join().unwrap());
        assert!(table.is_live(id));
        table.release(id);
        assert!(!table.is_live(id));
    });
}

#[test]
fn a_stale_cancel_never_hits_the_next_request() {
    explore_all(|| {
        let table = Arc::new(SlotTable::new(1));
        let id = table.acquire().unwrap();
        let canceller = {
            let table = Arc::clone(&table);
            thread::spawn(move || [table.request_cancel(id), table.request_cancel(id)])
        };
        table.release(id);
        let next = table.acquire().unwrap();
        assert_eq!(next.slot(), id.slot());
        assert!(table.request_cancel(next), "the next request was cancelled by the id of the one before");
        assert!(!canceller.join().unwrap()[1], "the second cancel reported itself as the first");
        table.release(next);
        assert_eq!(table.num_free(), 1);
    });
}

#[test]
fn an_overtaken_acquire_never_takes_a_live_slot() {
    explore_all(|| {
        let table = Arc::new(SlotTable::new(2));
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.acquire())
        };
        let first = table.acquire();
        let second = table.acquire();
        if let Some(id) = first {
            table.release(id);
        }
        let ids: Vec<_> = [other.join().unwrap(), second, table.acquire()].into_iter().flatten().collect();
        let mut slots: Vec<_> = ids.iter().map(|id| id.slot()).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1], "{ids:?} are live together");
        assert!(ids.iter().all(|&id| table.is_live(id)));
    });
}

#[test]
fn a_slot_is_handed_over_with_its_generation() {
    explore_all(|| {
        let table = Arc::new(SlotTable::new(1));
        let id = table.acquire().unwrap();
        let acquirer = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.acquire())
        };
        table.release(id);
        let next = acquirer.join().unwrap().or_else(|| table.acquire()).expect("the slot was given back");
        assert_eq!((next.slot(), next.generation()), (0, 2));
        assert!(table.is_live(next) && !table.is_live(id));
    });
}

/// `num_threads` reserve, hold and release; never more than `max_holders` hold at the same time, and nothing is left.
fn reservers_against_gate(gate: AdmissionGate, num_threads: usize, num_tokens: u64, max_holders: usize) {
    let gate = Arc::new(gate);
    let num_holders = StdArc::new(StdAtomicUsize::new(0));
    let reserve_and_release = move |gate: &AdmissionGate, num_holders: &StdAtomicUsize| {
        let accepted = gate.reserve(num_tokens).is_ok();
        if accepted {
            let before = num_holders.fetch_add(1, StdOrdering::Relaxed);
            assert!(before < max_holders, "{} hold a reservation", before + 1);
            // Also lets the others run while this one holds.
            assert!(gate.queued_requests() <= max_holders);
            num_holders.fetch_sub(1, StdOrdering::Relaxed);
            gate.release(num_tokens);
        }
        accepted
    };
    let reservers: Vec<_> = (1..num_threads)
        .map(|_| {
            let (gate, num_holders) = (Arc::clone(&gate), StdArc::clone(&num_holders));
            thread::spawn(move || reserve_and_release(&gate, &num_holders))
        })
        .collect();
    let mut num_accepted = usize::from(reserve_and_release(&gate, &num_holders));
    for reserver in reservers {
        num_accepted += usize::from(reserver.join().unwrap());
    }
    assert!(num_accepted >= max_holders.min(num_threads), "only {num_accepted} were let in");
    assert_eq!((gate.queued_requests(), gate.queued_tokens()), (0, 0));
}

#[test]
fn the_gate_never_holds_more_requests_than_its_bound() {
    explore_all(|| reservers_against_gate(AdmissionGate::new(1, None), 2, 1, 1));
}

#[test]
fn the_gate_never_holds_more_requests_than_its_bound_within_3_preemptions() {
    explore_within(3, || reservers_against_gate(AdmissionGate::new(2, None), 3, 1, 2));
}

#[test]
fn the_gate_never_holds_more_tokens_than_its_bound() {
    explore_all(|| reservers_against_gate(AdmissionGate::new(9, Some(3)), 2, 2, 1));
}

#[test]
fn a_reservation_guarantees_a_slot_in_the_queue_within_3_preemptions() {
    explore_within(3, || {
        let gate = Arc::new(AdmissionGate::new(1, None));
        let queue = Arc::new(RequestQueue::new(1));
        let producers = [0, 1].map(|item| {
            let (gate, queue) = (Arc::clone(&gate), Arc::clone(&queue));
            thread::spawn(move || {
                gate.reserve(1).is_ok() && queue.push(item).map_or_else(|e| panic!("{e:?}"), |()| true)
            })
        });
        let mut num_popped = 0;
        for _ in 0..2 {
            if queue.pop().is_some() {
                gate.release(1);
                num_popped += 1;
            }
        }
        let num_accepted =
            producers.into_iter().filter(|_| true).map(|p| usize::from(p.join().unwrap())).sum::<usize>();
        num_popped += std::iter::from_fn(|| queue.pop()).count();
        assert_eq!(num_popped, num_accepted);
    });
}

/// Keys of tenants that are looked for in the same cells.
fn tenant_key(tag: u32) -> u64 {
    u64::from(tag) << 32
}

#[test]
fn two_first_requests_of_a_tenant_share_a_cell() {
    explore_all(|| {
        let table = Arc::new(TenantTable::new(1));
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.acquire(tenant_key(1), 0))
        };
        let cell = table.acquire(tenant_key(1), 0);
        assert_eq!(cell, other.join().unwrap());
        assert_eq!(table.num_references(), 2);
        table.release(cell);
        table.release(cell);
        assert_eq!(table.num_references(), 0);
    });
}

#[test]
fn a_cell_is_never_taken_over_from_a_tenant_that_came_back() {
    explore_all(|| {
        let table = Arc::new(TenantTable::new(1));
        let left = table.acquire(tenant_key(1), 0);
        table.release(left);
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.acquire(tenant_key(2), 0))
        };
        let mine = table.acquire(tenant_key(1), 0);
        let others = other.join().unwrap();
        assert!(mine != others && mine != TenantCell::NONE && others != TenantCell::NONE, "{mine:?} and {others:?}");
        assert_eq!(table.acquire(tenant_key(2), 0), others);
        assert_eq!(table.num_references(), 3);
    });
}

#[test]
fn a_cell_with_something_to_pay_is_not_taken_over() {
    explore_all(|| {
        let table = Arc::new(TenantTable::new(1));
        let limits = [None, Some(RateLimit::per_min(60.0))];
        let cell = table.acquire(tenant_key(1), 0);
        table.charge(cell, limits, 0, 0).unwrap();
        let engine = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.charge_output(cell, 30, 0);
                table.release(cell);
            })
        };
        let other = table.acquire(tenant_key(2), 0);
        assert_ne!(other, cell, "30 s are to pay");
        engine.join().unwrap();
        assert_eq!(table.acquire(tenant_key(1), 0), cell);
        assert_eq!(table.charge(cell, limits, 31, 0), Err(("tokens_per_min", 1_000_000_000)));
    });
}

/// One looks at a cell that nobody holds; meanwhile its tenant comes, uses its rate, and goes.
#[test]
fn a_tenant_that_comes_and_goes_is_not_taken_for_one_that_stayed_away() {
    explore_all(|| {
        let table = Arc::new(TenantTable::new(1));
        let limits = [Some(RateLimit::per_min(60.0)), None];
        let cell = table.acquire(tenant_key(1), 0);
        table.release(cell);
        let owner = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let cell = table.acquire(tenant_key(1), 0);
                table.charge(cell, limits, 1, 0).unwrap();
                table.release(cell);
            })
        };
        let other = table.acquire(tenant_key(2), 0);
        for _ in 0..60 {
            assert_eq!(table.charge(other, limits, 1, 0), Ok(()), "it pays for the tenant before it");
        }
        owner.join().unwrap();
    });
}

#[test]
fn weights_of_waiting_tenants_add_up() {
    explore_all(|| {
        let table = Arc::new(TenantTable::new(1));
        let cell = table.acquire(tenant_key(1), 0);
        table.queue(cell, 2.0, 9).unwrap();
        let engine = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.dequeue(cell))
        };
        let has_queued = table.queue(cell, 2.0, 1).is_ok();
        engine.join().unwrap();
        assert_eq!(table.queued(cell).requests, u64::from(has_queued));
        assert_eq!(table.waiting_weight(), if has_queued { 2000 } else { 0 });
    });
}

#[test]
fn two_charges_never_share_a_unit_of_a_rate() {
    explore_all(|| {
        let bucket = Arc::new(Bucket::new());
        let limit = RateLimit::per_min(2.0);
        let other = {
            let bucket = Arc::clone(&bucket);
            thread::spawn(move || [bucket.charge(limit, 1, 0), bucket.charge(limit, 1, 0)])
        };
        let mine = bucket.charge(limit, 1, 0);
        let [first, second] = other.join().unwrap();
        let num_conforming = [mine, first, second].iter().filter(|result| result.is_ok()).count();
        assert_eq!(num_conforming, 2);
        assert!([mine, first, second].contains(&Err(30_000_000_000)));
    });
}

#[test]
fn a_refund_gives_back_no_more_than_was_charged() {
    explore_all(|| {
        let bucket = Arc::new(Bucket::new());
        let limit = RateLimit::per_min(2.0);
        let other = {
            let bucket = Arc::clone(&bucket);
            thread::spawn(move || {
                if bucket.charge(limit, 1, 7).is_ok() {
                    bucket.refund(limit, 1);
                }
            })
        };
        bucket.charge_anyway(limit, 1, 7);
        other.join().unwrap();
        assert_eq!(bucket.charge(limit, 2, 7), Err(30_000_000_000));
        assert_eq!(bucket.charge(limit, 1, 7), Ok(()));
    });
}

/// Two reserve 60 of a class each, hold and release; gives what each was told.
fn reservers_against_service(classes: [Class; 2], limits: [u64; 2]) -> [bool; 2] {
    let queued = Arc::new(QueuedService::new());
    queued.reserve(Class::Interactive, 20, u64::MAX).unwrap();
    let other = {
        let queued = Arc::clone(&queued);
        thread::spawn(move || queued.reserve(classes[0], 60, limits[0]).is_ok())
    };
    let mine = queued.reserve(classes[1], 60, limits[1]).is_ok();
    let others = other.join().unwrap();
    let num_held = u64::from(mine) + u64::from(others);
    assert_eq!(queued.total(), 20 + 60 * num_held);
    for (class, is_held) in classes.into_iter().zip([others, mine]) {
        if is_held {
            queued.release(class, 60);
        }
    }
    assert_eq!(queued.total(), 20);
    [others, mine]
}

#[test]
fn reserved_service_never_exceeds_its_bound() {
    explore_all(|| {
        let [others, mine] = reservers_against_service([Class::Standard; 2], [100; 2]);
        assert!(others ^ mine, "one of them fits, and not both");
    });
}

#[test]
fn a_more_urgent_class_is_never_refused_for_a_less_urgent_one() {
    explore_all(|| {
        let [interactive, _] = reservers_against_service([Class::Interactive, Class::Batch], [80, 80]);
        assert!(interactive, "what batch holds does not count for it");
    });
}

#[test]
fn the_refusing_of_a_class_is_not_ended_by_one_who_looked_before() {
    explore_all(|| {
        let queued = Arc::new(QueuedService::new());
        queued.reserve(Class::Standard, 100, u64::MAX).unwrap();
        queued.start_refusing(Class::Standard);
        let engine = {
            let queued = Arc::clone(&queued);
            thread::spawn(move || queued.release(Class::Standard, 50))
        };
        let was_refusing = queued.keeps_refusing(Class::Standard).is_some();
        if !was_refusing {
            assert_eq!(queued.start_refusing(Class::Standard), 50, "the new level is what is left");
        }
        engine.join().unwrap();
        assert_eq!(queued.is_refusing(Class::Standard), !was_refusing);
    });
}

#[test]
fn two_promises_never_name_the_same_time() {
    explore_all(|| {
        let promises = Arc::new(Promises::new());
        let outlook = Outlook { excess_ns: 10, is_closed: true, base_load: 0.4 };
        let other = {
            let promises = Arc::clone(&promises);
            thread::spawn(move || promises.book(0, 50, outlook))
        };
        let mut times = [promises.book(0, 50, outlook), other.join().unwrap(), promises.book(0, 50, outlook)];
        times.sort_unstable();
        assert_eq!(times, [10, 110, 210]);
    });
}

#[test]
fn a_snapshot_is_never_a_mixture_of_two() {
    explore_all(|| {
        let snapshot = Arc::new(Snapshot::new([0, 0]));
        let publisher = {
            let snapshot = Arc::clone(&snapshot);
            thread::spawn(move || {
                snapshot.publish([1, 1]);
                snapshot.publish([2, 2]);
            })
        };
        if let Some([first, second]) = snapshot.try_read() {
            assert_eq!(first, second, "parts of two snapshots");
        }
        publisher.join().unwrap();
        assert_eq!(snapshot.read(), [2, 2]);
    });
}

#[test]
fn a_reader_of_a_trace_gets_or_misses_each_record() {
    explore_all(|| {
        let trace = StdArc::new(Trace::with_capacity(1));
        let mut reader = TraceReader::new(StdArc::clone(&trace));
        let record = |number: u64| {
            let (request, num_tokens) = (RequestId::from_u64(number), number as u32);
            TraceRecord { request, choice: 0, kind: TraceKind::Chunk, time_ns: number, num_tokens }
        };
        let writer = {
            let trace = StdArc::clone(&trace);
            thread::spawn(move || (1..=2).for_each(|number| trace.push(record(number))))
        };
        let mut records = Vec::new();
        reader.read(&mut records);
        writer.join().unwrap();
        reader.read(&mut records);
        assert_eq!(records.len() as u64 + reader.num_missed(), 2);
        assert_eq!(records.last(), Some(&record(2)), "nothing came after it");
        assert!(records.is_sorted_by(|before, after| before.time_ns < after.time_ns), "each comes once");
        assert!(records.iter().all(|&found| found == record(found.time_ns)), "parts of two records");
    });
}
