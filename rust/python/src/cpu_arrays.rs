//! Arrays of Python as the CPU kernels take them: checked for type and shape, and borrowed for a call.

use std::fmt::Display;
use std::ops::Range;

use cbrs_cpu::{CacheLayout, CacheMut, CacheRef, int8};
use numpy::ndarray::{Dimension, Ix4};
use numpy::{Element, PyArray, PyArrayMethods, PyReadonlyArray, PyReadwriteArray};
use numpy::{PyUntypedArrayMethods, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A cache to read: float32, bf16 bits, or int8 with factors.
pub(crate) enum ReadCache<'py> {
    F32(PyReadonlyArray<'py, f32, Ix4>),
    Bf16(PyReadonlyArray<'py, u16, Ix4>),
    Int8(PyReadonlyArray<'py, i8, Ix4>),
}

impl<'py> ReadCache<'py> {
    pub(crate) fn new(array: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if array.is_instance_of::<PyArray<u16, Ix4>>() {
            read(array, name).map(Self::Bf16)
        } else if array.is_instance_of::<PyArray<i8, Ix4>>() {
            read(array, name).map(Self::Int8)
        } else {
            read(array, name).map(Self::F32)
        }
    }

    /// Shape and whether it has factors.
    pub(crate) fn shape(&self) -> (&[usize], bool) {
        match self {
            Self::F32(array) => (array.shape(), false),
            Self::Bf16(array) => (array.shape(), false),
            Self::Int8(array) => (array.shape(), true),
        }
    }

    pub(crate) fn slice(&self, name: &str) -> PyResult<CacheRef<'_>> {
        Ok(match self {
            Self::F32(array) => CacheRef::F32(slice(array, name)?),
            Self::Bf16(array) => CacheRef::Bf16(slice(array, name)?),
            Self::Int8(array) => CacheRef::Int8(slice(array, name)?),
        })
    }
}

/// A cache to write: float32, bf16 bits, or int8 with factors.
pub(crate) enum WriteCache<'py> {
    F32(PyReadwriteArray<'py, f32, Ix4>),
    Bf16(PyReadwriteArray<'py, u16, Ix4>),
    Int8(PyReadwriteArray<'py, i8, Ix4>),
}

impl<'py> WriteCache<'py> {
    pub(crate) fn new(array: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if array.is_instance_of::<PyArray<u16, Ix4>>() {
            write(array, name).map(Self::Bf16)
        } else if array.is_instance_of::<PyArray<i8, Ix4>>() {
            write(array, name).map(Self::Int8)
        } else {
            write(array, name).map(Self::F32)
        }
    }

    /// Shape and whether it has factors.
    pub(crate) fn shape(&self) -> (&[usize], bool) {
        match self {
            Self::F32(array) => (array.shape(), false),
            Self::Bf16(array) => (array.shape(), false),
            Self::Int8(array) => (array.shape(), true),
        }
    }

    pub(crate) fn slice(&mut self, name: &str) -> PyResult<CacheMut<'_>> {
        let refuse = |_| not_contiguous(name);
        Ok(match self {
            Self::F32(array) => CacheMut::F32(array.as_slice_mut().map_err(refuse)?),
            Self::Bf16(array) => CacheMut::Bf16(array.as_slice_mut().map_err(refuse)?),
            Self::Int8(array) => CacheMut::Int8(array.as_slice_mut().map_err(refuse)?),
        })
    }
}

pub(crate) fn value_error(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn at_least_1(value: i64, name: &str) -> PyResult<usize> {
    let size = usize::try_from(value).ok().filter(|size| *size > 0);
    size.ok_or_else(|| PyValueError::new_err(format!("{name} must be at least 1, got {value}")))
}

pub(crate) fn not_contiguous(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name} must be C-contiguous"))
}

fn cast<'a, 'py, T: Element, D: Dimension>(
    array: &'a Bound<'py, PyAny>,
    name: &str,
) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
    array.cast::<PyArray<T, D>>().map_err(|_| {
        let got = array.repr().map_or_else(|_| "an object".to_owned(), |text| text.to_string());
        let got: String = got.chars().take(60).collect();
        let (wanted, ndim) = (dtype::<T>(array.py()), D::NDIM.unwrap_or_default());
        PyValueError::new_err(format!("{name} must be a {ndim}-dimensional numpy array of {wanted}, got {got}"))
    })
}

pub(crate) fn read<'py, T: Element, D: Dimension>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadonlyArray<'py, T, D>> {
    let array = cast::<T, D>(array, name)?;
    array.try_readonly().map_err(|error| value_error(format!("{name}: {error}")))
}

pub(crate) fn write<'py, T: Element, D: Dimension>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let array = cast::<T, D>(array, name)?;
    if !array.is_c_contiguous() {
        return Err(not_contiguous(name));
    }
    array.try_readwrite().map_err(|error| value_error(format!("{name}: {error}")))
}

pub(crate) fn slice<'a, T: Element, D: Dimension>(
    array: &'a PyReadonlyArray<'_, T, D>,
    name: &str,
) -> PyResult<&'a [T]> {
    // `as_slice` takes Fortran's order as well.
    let slice = array.is_c_contiguous().then(|| array.as_slice().ok()).flatten();
    slice.ok_or_else(|| not_contiguous(name))
}

/// The layout of two caches, from shapes and whether they have factors.
pub(crate) fn layout(key_cache: (&[usize], bool), value_cache: (&[usize], bool)) -> PyResult<CacheLayout> {
    check_shape("value_cache", value_cache.0, key_cache.0)?;
    let has_scales = key_cache.1;
    let [num_blocks, num_kv_heads, block_size, row_len] = *key_cache.0 else {
        return Err(PyValueError::new_err("key_cache must have 4 dimensions"));
    };
    let head_dim = if has_scales { row_len.saturating_sub(int8::SCALE_BYTES) } else { row_len };
    CacheLayout::new(num_blocks, num_kv_heads, block_size, head_dim).map_err(value_error)
}

pub(crate) fn check_shape(name: &str, shape: &[usize], expected: &[usize]) -> PyResult<()> {
    if shape == expected {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{name} has shape {shape:?}, expected {expected:?}")))
}

/// Name of an argument and the addresses it covers.
pub(crate) type Named<'a> = (&'a str, Range<usize>);

pub(crate) fn span<T>(data: &[T]) -> Range<usize> {
    let range = data.as_ptr_range();
    range.start.addr()..range.end.addr()
}

pub(crate) fn span_ref(cache: &CacheRef<'_>) -> Range<usize> {
    match cache {
        CacheRef::F32(data) => span(data),
        CacheRef::Bf16(data) => span(data),
        CacheRef::Int8(data) => span(data),
    }
}

pub(crate) fn span_mut(cache: &CacheMut<'_>) -> Range<usize> {
    match cache {
        CacheMut::F32(data) => span(data),
        CacheMut::Bf16(data) => span(data),
        CacheMut::Int8(data) => span(data),
    }
}

/// Refuses written memory that another array shares: numpy cannot tell for views of tensors.
pub(crate) fn disjoint(written: &[Named], read: &[Named]) -> PyResult<()> {
    for (index, (name, span)) in written.iter().enumerate() {
        for (other_name, other) in written[index + 1..].iter().chain(read) {
            if span.start < other.end && other.start < span.end {
                let message = format!("{name} and {other_name} share memory");
                return Err(PyValueError::new_err(message));
            }
        }
    }
    Ok(())
}
