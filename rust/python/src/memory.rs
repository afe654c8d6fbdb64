//! `Memory`: what lent arrays stand in, and the base object of every view of them.
//!
//! 1. A view refers to the memory and the memory to no Python object, so there is no cycle: the scheduler's memory goes when the
//!    scheduler and the last view of it are gone, whichever that is.
//! 2. The core never reallocates what is lent. A view kept longer than its batch shows stale data, never freed memory.
//! 3. Reading a view while another thread is in `step` may show a mix of old and new numbers; nothing but plain numbers is ever lent.
//!    What the scheduler itself reads again (the block tables) is lent read-only.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use numpy::ndarray::{ArrayView1, ArrayView2};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

/// Most changes of block tables in one step that are lent rather than copied.
pub(crate) const MAX_LENT_UPDATES: usize = 64;

/// The scheduler of the core with all arrays that it lends, and a place for updates of block tables, whose own arrays may grow.
#[pyclass(frozen, module = "cbrs", weakref)]
pub(crate) struct Memory {
    pub(crate) core: Mutex<cbrs_core::Scheduler>,
    /// One for each set of batch arrays, which take turns.
    updates: [UpdateMemory; 2],
}

/// Updates of block tables of one block each, in the layout of `Batch.block_table_updates`.
#[derive(Debug)]
struct UpdateMemory {
    rows: [AtomicI32; MAX_LENT_UPDATES],
    first_columns: [AtomicI32; MAX_LENT_UPDATES],
    start: [AtomicI32; MAX_LENT_UPDATES + 1],
    ids: [AtomicI32; MAX_LENT_UPDATES],
}

impl UpdateMemory {
    fn new() -> Self {
        Self {
            rows: [const { AtomicI32::new(0) }; _],
            first_columns: [const { AtomicI32::new(0) }; _],
            start: [const { AtomicI32::new(0) }; _],
            ids: [const { AtomicI32::new(0) }; _],
        }
    }
}

impl Memory {
    pub(crate) fn new(core: cbrs_core::Scheduler) -> Self {
        Self { core: Mutex::new(core), updates: [UpdateMemory::new(), UpdateMemory::new()] }
    }

    /// Writes updates of one block each to set `set`; there are at most `MAX_LENT_UPDATES`.
    pub(crate) fn write_updates(&self, set: usize, updates: &cbrs_core::BlockTableUpdates) {
        let memory = &self.updates[set];
        // Relaxed: numbers only, which are read after the call that wrote them; the cells say that another thread may look meanwhile.
        let write = |cells: &[AtomicI32], values: &[i32]| {
            for (cell, &value) in cells.iter().zip(values) {
                cell.store(value, Ordering::Relaxed);
            }
        };
        write(&memory.rows, &updates.rows);
        write(&memory.first_columns, &updates.first_columns);
        write(&memory.start, &updates.start);
        write(&memory.ids, &updates.ids);
    }

    /// Views of the first `num_updates` updates of set `set`: rows, first columns, start, ids.
    pub(crate) fn lend_updates(this: &Bound<'_, Self>, set: usize, num_updates: usize) -> [Py<PyArray1<i32>>; 4] {
        let memory = &this.get().updates[set];
        let view = |cells: &[AtomicI32], len: usize| {
            let cells = &cells[..len];
            // SAFETY: the cells live in `this`, which the view keeps alive and which never moves; `AtomicI32` has the layout of `i32`.
            #[allow(unsafe_code)]
            unsafe {
                view_of(cells.as_ptr().cast::<i32>(), len, this)
            }
        };
        [
            view(&memory.rows, num_updates),
            view(&memory.first_columns, num_updates),
            view(&memory.start, num_updates + 1),
            view(&memory.ids, num_updates),
        ]
    }
}

/// A view of shape `[len]` whose base is `memory`.
///
/// # Safety
/// There are `len` numbers at `ptr` as long as `memory` lives.
#[allow(unsafe_code)]
unsafe fn view_of<T: Element>(ptr: *const T, len: usize, memory: &Bound<'_, Memory>) -> Py<PyArray1<T>> {
    // SAFETY: as the caller says; the view holds a reference to `memory`.
    unsafe { PyArray1::borrow_from_array(&ArrayView1::from_shape_ptr(len, ptr), memory.clone().into_any()).unbind() }
}

/// A view of an array of the core's that is never reallocated.
pub(crate) fn lend<T: Element>(array: &[T], memory: &Bound<'_, Memory>) -> Py<PyArray1<T>> {
    // SAFETY: the array belongs to the core in `memory`, which keeps it at this address for its whole life.
    #[allow(unsafe_code)]
    unsafe {
        view_of(array.as_ptr(), array.len(), memory)
    }
}

/// A read-only view of shape `[len / columns, columns]` of an array of the core's that is never reallocated.
pub(crate) fn lend_2d<T: Element>(array: &[T], columns: usize, memory: &Bound<'_, Memory>) -> Py<PyArray2<T>> {
    let shape = (array.len() / columns, columns);
    // SAFETY: as in `lend`; the shape has at most `len` elements.
    #[allow(unsafe_code)]
    let view = unsafe {
        PyArray2::borrow_from_array(&ArrayView2::from_shape_ptr(shape, array.as_ptr()), memory.clone().into_any())
    };
    view.readwrite().make_nonwriteable();
    view.unbind()
}
