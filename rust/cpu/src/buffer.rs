//! Memory for weights and activations: aligned to cache lines, of zeros, and on large pages where the system gives them.
//!
//! A step of a model reads all weights once, in order; with pages of 4 KiB that is a miss of the address cache every few
//! hundred bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every buffer, in bytes: a cache line of the CPUs that matter here.
const LINE: usize = 64;
/// Size of a large page on x86-64 and, mostly, on aarch64.
const LARGE_PAGE: usize = 2 << 20;
/// Size of a chunk that buffers share; those of more than a quarter of it have one of their own.
const SHARED_BYTES: usize = 32 << 20;

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

/// Memory of buffers; given back with the last of them.
#[derive(Debug)]
struct Chunk {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is only memory; who may touch which part of it is the buffers' business.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Allocates zeros for `size` bytes, not none, from a multiple of [`LINE`] on.
    fn new(size: usize) -> Self {
        // Aligned by hand: an allocator that is asked for zeros and for more than its usual alignment writes them, which
        // takes as long as filling the buffer, and gives it small pages.
        let layout = size.checked_add(LINE).and_then(|size| Layout::from_size_align(size, align_of::<u64>()).ok());
        // The shapes were checked when the buffer's owner was made.
        let layout = layout.unwrap_or_else(|| panic!("a buffer of {size} bytes cannot be addressed"));
        // SAFETY: the layout is not of size 0.
        let Some(first) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        advise(first, layout.size());
        Self { first, layout }
    }

    /// The first aligned byte.
    fn start(&self) -> NonNull<u8> {
        let address = self.first.as_ptr().addr();
        // SAFETY: less than a line ahead, for which there is room.
        unsafe { self.first.add(address.next_multiple_of(LINE) - address) }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// Where buffers come from that are read one after the other, such as the matrices of a model: small ones lie side by side
/// on the same large pages, which none of them would fill alone.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// Chunk with room for more, and bytes of it that have been handed out.
    current: Mutex<Option<(Arc<Chunk>, usize)>>,
}

impl Arena {
    /// Hands out `len` zeros; the system gives the memory when it is first written.
    pub(crate) fn zeros<T: Zeroed>(&self, len: usize) -> Buffer<T> {
        let size = buffer_bytes::<T>(len);
        if size > SHARED_BYTES / 4 {
            return Buffer::zeros(len);
        }
        // Nothing is left half done under this lock.
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_none_or(|(_, used)| used + size > SHARED_BYTES) {
            *current = Some((Arc::new(Chunk::new(SHARED_BYTES)), 0));
        }
        let Some((chunk, used)) = current.as_mut() else { return Buffer::zeros(len) };
        // SAFETY: the chunk has room for so many bytes from there, which nobody else has or had.
        let start = unsafe { chunk.start().add(*used) };
        *used += size;
        Buffer { start: start.cast(), len, _chunk: Some(Arc::clone(chunk)) }
    }
}

/// Bytes that a buffer takes of a chunk: whole lines.
fn buffer_bytes<T>(len: usize) -> usize {
    let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(LINE));
    // The shapes were checked when the buffer's owner was made.
    bytes.unwrap_or_else(|| panic!("a buffer of {len} elements cannot be addressed"))
}

/// A fixed number of elements.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
    /// What it lies in, if it has elements.
    _chunk: Option<Arc<Chunk>>,
}

// SAFETY: it owns its elements as a `Vec` does; a chunk's other parts belong to others.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Zeroed> Buffer<T> {
    /// Allocates `len` zeros; the system gives the memory when it is first written.
    pub(crate) fn zeros(len: usize) -> Self {
        if len == 0 {
            return Self { start: NonNull::dangling(), len, _chunk: None };
        }
        let chunk = Chunk::new(buffer_bytes::<T>(len));
        Self { start: chunk.start().cast(), len, _chunk: Some(Arc::new(chunk)) }
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

    #[test]
    fn buffers_of_an_arena_are_apart_and_outlive_it() {
        let arena = Arena::default();
        let mut buffers: Vec<Buffer<u16>> =
            [3, 0, 64, SHARED_BYTES / 8, SHARED_BYTES / 2, SHARED_BYTES / 8, SHARED_BYTES / 8, SHARED_BYTES / 8, 5]
                .into_iter()
                .map(|len| arena.zeros(len))
                .collect();
        drop(arena);
        for (number, buffer) in (1..).zip(&mut buffers) {
            assert!(buffer.is_empty() || buffer.as_ptr().addr().is_multiple_of(LINE));
            assert!(buffer.iter().all(|element| *element == 0));
            buffer.fill(number);
        }
        for (number, buffer) in (1..).zip(&buffers) {
            assert!(buffer.iter().all(|element| *element == number));
        }
    }
}
