//! Array hand-over: numpy views of memory that a scheduler owns, and integers and token ids from Python.
//!
//! A view's base object is the scheduler, so the memory lives as long as the view; the scheduler never reallocates what is
//! lent this way. A view kept longer than its batch shows stale data, never freed memory. Reading one while another thread is
//! in `step` may show a mix of old and new numbers; nothing but plain numbers is ever lent. What the scheduler itself reads
//! again (the block tables) is lent read-only.

use cbrs_core::Error;
use numpy::ndarray::{ArrayView1, ArrayView2};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;

use crate::errors::to_py;
use crate::scheduler::Scheduler;

/// Address and length of one lent array.
pub(crate) struct Lent<T> {
    ptr: *const T,
    len: usize,
}

// SAFETY: a plain address of numbers, which is only read through a view that keeps the owner of the memory alive.
#[allow(unsafe_code)]
unsafe impl<T: Sync> Send for Lent<T> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<T: Sync> Sync for Lent<T> {}

impl<T: Element> Lent<T> {
    /// Lends `array`, which must not be reallocated as long as its owner lives.
    pub(crate) fn new(array: &[T]) -> Self {
        Self { ptr: array.as_ptr(), len: array.len() }
    }

    /// A view of shape `[len]` whose base is `owner`.
    pub(crate) fn view<'py>(&self, owner: Bound<'py, PyAny>) -> Bound<'py, PyArray1<T>> {
        // SAFETY: the pointer and length come from a slice that `owner` keeps at that address for its whole life, and the view holds
        // a reference to `owner`.
        #[allow(unsafe_code)]
        unsafe {
            PyArray1::borrow_from_array(&ArrayView1::from_shape_ptr(self.len, self.ptr), owner)
        }
    }

    /// A read-only view of shape `[len / columns, columns]` whose base is `owner`.
    pub(crate) fn view_2d<'py>(&self, columns: usize, owner: Bound<'py, PyAny>) -> Bound<'py, PyArray2<T>> {
        // SAFETY: as in `view`; the shape has at most `len` elements.
        #[allow(unsafe_code)]
        let view = unsafe {
            PyArray2::borrow_from_array(&ArrayView2::from_shape_ptr((self.len / columns, columns), self.ptr), owner)
        };
        view.readwrite().make_nonwriteable();
        view
    }
}

/// A lent array and the view of it, once somebody asked.
pub(crate) struct Array<T> {
    lent: Lent<T>,
    view: PyOnceLock<Py<PyArray1<T>>>,
}

impl<T: numpy::Element> Array<T> {
    pub(crate) fn new(array: &[T]) -> Self {
        Self { lent: Lent::new(array), view: PyOnceLock::new() }
    }

    pub(crate) fn get(&self, py: Python<'_>, owner: &Py<Scheduler>) -> Py<PyArray1<T>> {
        let make = || self.lent.view(owner.bind(py).clone().into_any()).unbind();
        self.view.get_or_init(py, make).clone_ref(py)
    }
}

/// Reads any Python integer; one beyond 64 bits becomes the nearest, so that the range check names the limit.
pub(crate) fn integer(value: &Bound<'_, PyAny>, name: &str) -> PyResult<i64> {
    match value.extract::<i64>() {
        Ok(number) => Ok(number),
        Err(err) if err.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.lt(0)? { i64::MIN } else { i64::MAX })
        }
        Err(_) => Err(PyTypeError::new_err(format!("{name} must be an integer, not {}", value.get_type().name()?))),
    }
}

/// Reads token ids from an int32 or int64 buffer, or from any iterable of integers.
pub(crate) fn token_ids(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<i32>> {
    let py = value.py();
    if let Ok(buffer) = PyBuffer::<i32>::get(value) {
        return one_dimension(&buffer, field).and_then(|()| buffer.to_vec(py));
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(value) {
        one_dimension(&buffer, field)?;
        let wide = buffer.to_vec(py)?;
        return wide.iter().enumerate().map(|(position, &token)| narrow(token, field, position)).collect();
    }
    if let Ok(list) = value.cast::<PyList>() {
        let mut ids = Vec::with_capacity(list.len());
        for (position, item) in list.iter().enumerate() {
            ids.push(narrow(integer(&item, field)?, field, position)?);
        }
        return Ok(ids);
    }
    let items = value.try_iter().map_err(|_| {
        PyTypeError::new_err(format!("{field} must be an int32 array or a list of integers, not {}", type_name(value)))
    })?;
    items.enumerate().map(|(position, item)| narrow(integer(&item?, field)?, field, position)).collect()
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "an unknown type".to_owned(), |name| name.to_string())
}

fn one_dimension<T: pyo3::buffer::Element>(buffer: &PyBuffer<T>, field: &str) -> PyResult<()> {
    let dimensions = buffer.dimensions();
    if dimensions == 1 {
        Ok(())
    } else {
        Err(PyTypeError::new_err(format!("{field} must have one dimension, not {dimensions}")))
    }
}

fn narrow(token: i64, field: &'static str, position: usize) -> PyResult<i32> {
    i32::try_from(token)
        .map_err(|_| to_py(&Error::TokenOutOfVocabulary { field, position, token, vocab_size: 1 << 31 }))
}
