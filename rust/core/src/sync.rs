//! The one door to atomics, cells and locks: the standard library normally, loom's models of them under `cfg(loom)`.
//!
//! Invariant: `queue`, `control`, `slots`, `admission`, `overload`, `snapshot`, `histogram`, `trace` and `waker` take every shared primitive from here, so that
//! `tests/loom.rs` explores the very code that ships. Ordinary `Arc`s and single-threaded state need not.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Condvar, Mutex,
        atomic::{Ordering, fence},
    },
};
#[cfg(loom)]
pub(crate) use modelled::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex,
    atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// `std::cell::UnsafeCell` with the face of loom's, which sees where an access begins and ends.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Lends the address of the value; whether it may be read or written is for the caller to argue.
    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Tables of atomics that are zero at first.
pub(crate) trait ZeroedTable: Sized {
    /// A table of `len` zeros; its memory is taken as it is used.
    fn zeroed_table(len: usize) -> Box<[Self]>;
}

#[cfg(not(loom))]
macro_rules! zeroed_table {
    ($atomic:ty, $integer:ty) => {
        impl ZeroedTable for $atomic {
            fn zeroed_table(len: usize) -> Box<[Self]> {
                const { assert!(align_of::<$atomic>() == align_of::<$integer>(), "one allocation serves both") };
                let table = vec![<$integer>::default(); len].into_boxed_slice();
                #[expect(unsafe_code, reason = "the standard library makes no table of atomics without writing each")]
                // SAFETY: the atomic has the size and the valid bits of the integer, and its alignment, as was asserted. Nobody else has the
                // table.
                unsafe {
                    Box::from_raw(Box::into_raw(table) as *mut [$atomic])
                }
            }
        }
    };
}

#[cfg(loom)]
macro_rules! zeroed_table {
    ($atomic:ty, $integer:ty) => {
        impl ZeroedTable for $atomic {
            fn zeroed_table(len: usize) -> Box<[Self]> {
                (0..len).map(|_| <$atomic>::new(0)).collect()
            }
        }
    };
}

zeroed_table!(AtomicU32, u32);
zeroed_table!(AtomicU64, u64);

/// loom's atomics, with a scheduling point before each load that keeps loom from skipping interleavings.
///
/// To find the orders that are worth trying, loom (0.7) compares an access with the *last* access to the same atomic
/// only, and takes two loads for independent. A thread that loads and then stores, as every claim loop does, thus hides
/// behind its own load the earlier load of another thread, and the order "store, then the other's load" is never tried:
/// a consumer that runs first would find the queue empty in every interleaving. So each load is preceded by an exchange
/// that always fails, on a flag of the atomic's own which is never written. Exchanges depend on one another, hence the
/// loads of one atomic are tried in all orders; and as the flag is never written, the exchange adds no synchronisation
/// and forces no load to see a newer value.
#[cfg(loom)]
mod modelled {
    use std::ops::Deref;

    use loom::sync::atomic::{self, Ordering};

    #[derive(Debug)]
    pub(crate) struct Scheduled<A> {
        never_written: atomic::AtomicBool,
        atomic: A,
    }

    /// Everything but `new` and `load` is loom's own.
    impl<A> Deref for Scheduled<A> {
        type Target = A;

        fn deref(&self) -> &A {
            &self.atomic
        }
    }

    macro_rules! scheduled {
        ($($name:ident $([$parameter:ident])? holds $value:ty;)*) => {$(
            pub(crate) type $name$(<$parameter>)? = Scheduled<atomic::$name$(<$parameter>)?>;

            impl$(<$parameter>)? $name$(<$parameter>)? {
                pub(crate) fn new(value: $value) -> Self {
                    Self { never_written: atomic::AtomicBool::new(false), atomic: atomic::$name::new(value) }
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    let result = self.never_written.compare_exchange(true, true, Ordering::Relaxed, Ordering::Relaxed);
                    debug_assert!(result.is_err());
                    self.atomic.load(order)
                }
            }
        )*};
    }

    scheduled! {
        AtomicBool holds bool;
        AtomicPtr[T] holds *mut T;
        AtomicU32 holds u32;
        AtomicU64 holds u64;
        AtomicUsize holds usize;
    }
}
