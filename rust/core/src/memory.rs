//! Advice about memory: tables that grow with pool and rows are read at random, so they want huge pages (in 4 KiB pages each read would also
//! miss the TLB) and early notice.
//!
//! The system and the processor are only told; nothing depends on what they make of it.

/// Smaller tables lie in few pages anyway.
const MIN_BYTES: usize = 1 << 20;

/// A table of zeros, whose memory is taken as it is used.
pub(crate) fn zeroed_table(len: usize) -> Vec<i32> {
    let table = vec![0; len];
    ask_for_huge_pages(table.as_ptr().cast(), len * size_of::<i32>());
    table
}

/// A table of equal entries.
pub(crate) fn table_of<T: Copy>(entry: T, len: usize) -> Vec<T> {
    let mut table: Vec<T> = Vec::with_capacity(len);
    // Before the first touch decides which pages it gets.
    ask_for_huge_pages(table.as_ptr().cast(), len * size_of::<T>());
    table.resize(len, entry);
    table
}

/// Has an entry fetched that will be read soon, without waiting for it.
#[inline]
pub(crate) fn prefetch<T>(table: &[T], index: usize) {
    debug_assert!(index < table.len());
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "a hint of the processor")]
    // SAFETY: the instruction reads nothing and cannot fault, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(table.as_ptr().wrapping_add(index).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (table, index);
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: *const u8, num_bytes: usize) {
    if num_bytes < MIN_BYTES {
        return;
    }
    #[expect(unsafe_code, reason = "calls into libc")]
    // SAFETY: no memory is passed.
    let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    // Whole pages inside the table: nothing of its neighbours.
    let num_skipped = start.align_offset(page_size);
    let num_advised = num_bytes.saturating_sub(num_skipped) / page_size * page_size;
    #[expect(unsafe_code, reason = "calls into libc")]
    // SAFETY: the range lies inside one live allocation and begins at a page; the advice changes no content. A refusal changes nothing.
    unsafe {
        libc::madvise(start.add(num_skipped).cast_mut().cast(), num_advised, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_start: *const u8, _num_bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_what_they_were_made_of() {
        for len in [0, 1, MIN_BYTES, 3 * MIN_BYTES + 7] {
            assert!(zeroed_table(len).iter().all(|&entry| entry == 0));
            let table = table_of(7u64, len);
            assert!(table.len() == len && table.iter().all(|&entry| entry == 7));
        }
    }
}
