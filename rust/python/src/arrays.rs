//! Numbers and token ids from Python.

use std::ptr;

use cbrs_core::Error;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};

use crate::errors::to_py;

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

/// Reads a number that need not be whole; one beyond a float becomes infinite, so that the range check names the limit.
pub(crate) fn number(value: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    if value.is_instance_of::<PyBool>() {
        return Err(wrong_type(name, "a number", value));
    }
    match value.extract::<f64>() {
        Err(err) if err.is_instance_of::<PyOverflowError>(value.py()) => Ok(f64::INFINITY),
        number => number.map_err(|_| wrong_type(name, "a number", value)),
    }
}

/// A `TypeError` that says what a value must be.
pub(crate) fn wrong_type(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{name} must be {expected}, not {}", type_name(value)))
}

/// The value of an `int` (no subclass) of at most 64 bits.
///
/// # Safety
/// `value` is a live object.
#[inline]
#[allow(unsafe_code)]
unsafe fn plain_integer(value: *mut ffi::PyObject) -> Option<i64> {
    // SAFETY: `value` is live, and for an exact `int` the conversion runs no Python code and raises nothing.
    unsafe {
        if ffi::PyLong_CheckExact(value) == 0 {
            return None;
        }
        let mut overflow = 0;
        let number = ffi::PyLong_AsLongLongAndOverflow(value, &raw mut overflow);
        (overflow == 0).then_some(number)
    }
}

/// Reads a list from its start for as long as its items are plain integers that fit: the common case, without a reference taken.
fn plain_integers(list: &Bound<'_, PyList>) -> Vec<i32> {
    let len = list.len();
    let mut ids = Vec::with_capacity(len);
    for position in 0..len {
        // SAFETY: `position` is below the length, which nothing changes: no Python code runs in between and the GIL is held. The item is
        // the list's, so it is live.
        #[allow(unsafe_code)]
        let number = unsafe { plain_integer(ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t)) };
        let Some(Ok(id)) = number.map(i32::try_from) else { break };
        ids.push(id);
    }
    ids
}

/// Reads a list of integers.
fn list_token_ids(list: &Bound<'_, PyList>, field: &'static str) -> PyResult<Vec<i32>> {
    let mut ids = plain_integers(list);
    // Whatever else converts to an integer may run code of its own, which may change the list.
    for (position, item) in list.iter().enumerate().skip(ids.len()) {
        ids.push(narrow(integer(&item, field)?, field, position)?);
    }
    Ok(ids)
}

/// Copies a contiguous int32 array of one dimension into `copy`, replacing what it holds; returns whether `value` is one.
///
/// The fast way for what comes with every step and most requests: no buffer is exported, no Python code runs.
pub(crate) fn copy_int32(value: &Bound<'_, PyAny>, copy: &mut Vec<i32>) -> bool {
    let Ok(array) = value.cast::<PyArray1<i32>>() else { return false };
    if !array.is_c_contiguous() {
        return false;
    }
    let len = array.len();
    copy.clear();
    copy.reserve(len);
    // SAFETY: the array is contiguous, so `len` numbers of 4 bytes stand at its address (perhaps unaligned, hence bytes), and it lives as
    // long as the reference to it; `copy` has room for them. Code that writes to it without the GIL (numpy and torch may) can make the copy
    // some other numbers, which are checked as any are; nothing else depends on them.
    #[allow(unsafe_code)]
    unsafe {
        ptr::copy_nonoverlapping(array.data().cast::<u8>(), copy.as_mut_ptr().cast::<u8>(), len * size_of::<i32>());
        copy.set_len(len);
    }
    true
}

/// Reads token ids from an int32 or int64 buffer, or from any iterable of integers.
pub(crate) fn token_ids(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<i32>> {
    let py = value.py();
    let mut ids = Vec::new();
    if copy_int32(value, &mut ids) {
        return Ok(ids);
    }
    if let Ok(list) = value.cast::<PyList>() {
        return list_token_ids(list, field);
    }
    if let Ok(buffer) = PyBuffer::<i32>::get(value) {
        return one_dimension(&buffer, field).and_then(|()| buffer.to_vec(py));
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(value) {
        one_dimension(&buffer, field)?;
        let wide = buffer.to_vec(py)?;
        return wide.iter().enumerate().map(|(position, &token)| narrow(token, field, position)).collect();
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
