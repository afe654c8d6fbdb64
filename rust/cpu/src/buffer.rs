//! Memory for weights and activations: aligned to cache lines, of zeros, and on large pages where the system gives them.
//!
//! A step of a model reads all weights once, in order; with pages of 4 KiB that is a miss of the address cache every few
//! hundred bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every buffer, in bytes: a cache line of the CPUs that matter here.
const LINE: usize = 64;
/// Size of a large page on x86-64 and, mostly, on aarch64.
const LARGE_PAGE: usize = 2 << 20;

/// Types of which all bits being zero is a value.
///
/// # Safety
/// That must be so, and the type must need no drop.
pub(crate) unsafe trait Zeroed: Copy {}

// SAFETY: 0.0 and 0 are all zero bits.
unsafe impl Zeroed for f32 {}
// SAFETY: as above.
unsafe impl Zeroed for u16 {}
// SAFETY: as above.
unsafe impl Zeroed for u8 {}

/// A fixed number of elements.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    /// What was allocated, if anything was.
    allocation: Option<(NonNull<u8>, Layout)>,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Zeroed> Buffer<T> {
    /// Allocates `len` zeros; the system gives the memory when it is first written.
    pub(crate) fn zeros(len: usize) -> Self {
        if len == 0 {
            return Self { allocation: None, start: NonNull::dangling(), len };
        }
        // Aligned by hand: an allocator that is asked for zeros and for more than its usual alignment writes them, which
        // takes as long as filling the buffer, and gives it small pages.
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(LINE));
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, align_of::<T>()).ok());
        // The shapes were checked when the buffer's owner was made.
        let layout = layout.unwrap_or_else(|| panic!("a buffer of {len} elements cannot be addressed"));
        // SAFETY: the layout is not of size 0.
        let Some(first) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        advise(first, layout.size());
        // SAFETY: less than a line ahead, for which there is room.
        let start = unsafe { first.add(first.as_ptr().addr().next_multiple_of(LINE) - first.as_ptr().addr()) };
        Self { allocation: Some((first, layout)), start: start.cast(), len }
    }
}

/// Asks for large pages in the part of the memory that whole ones fit into; only a hint.
#[cfg(target_os = "linux")]
fn advise(start: NonNull<u8>, size: usize) {
    let first = start.as_ptr().addr().next_multiple_of(LARGE_PAGE);
    let end = start.as_ptr().addr() + size;
    if let Some(len) = end.checked_sub(first).map(|len| len - len % LARGE_PAGE).filter(|len| *len > 0) {
        let first = start.as_ptr().wrapping_add(first - start.as_ptr().addr());
        // SAFETY: the range is inside the allocation; the advice changes no content.
        unsafe { libc::madvise(first.cast(), len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_: NonNull<u8>, _: usize) {}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the allocation holds `len` elements, all written (as zeros) when it was made.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some((first, layout)) = self.allocation {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(first.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_of_zeros_whatever_its_length() {
        for len in [0, 1, 63, 5 << 20] {
            let mut buffer = Buffer::<u16>::zeros(len);
            assert!(buffer.as_ptr().addr().is_multiple_of(if len == 0 { align_of::<u16>() } else { LINE }));
            assert!(buffer.iter().all(|element| *element == 0));
            buffer.fill(7);
            assert_eq!(buffer.len(), len);
        }
    }
}
