//! Injected panics: what a bug at some point would do, for tests.
//!
//! Compiled in with debug assertions only (the profiles `dev` and `checked`); in a release build a point is nothing.
//! A test arms one point by name; the next thread that passes it panics, once.

/// Panics if a test has armed `name`.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn point(_name: &str) {}

#[cfg(debug_assertions)]
pub use armed::{arm, point};

#[cfg(debug_assertions)]
mod armed {
    // Not the loom types: a point is no part of what is model-checked.
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, PoisonError};

    static IS_ARMED: AtomicBool = AtomicBool::new(false);
    static NAME: Mutex<String> = Mutex::new(String::new());

    /// Makes the next passage of the point `name` panic; an empty name disarms. Process-wide.
    pub fn arm(name: &str) {
        name.clone_into(&mut NAME.lock().unwrap_or_else(PoisonError::into_inner));
        IS_ARMED.store(!name.is_empty(), Ordering::Release);
    }

    /// Panics if a test has armed `name`.
    pub fn point(name: &str) {
        if IS_ARMED.load(Ordering::Acquire) {
            hit(name);
        }
    }

    #[cold]
    fn hit(name: &str) {
        let is_hit = {
            let mut armed = NAME.lock().unwrap_or_else(PoisonError::into_inner);
            let is_hit = *armed == name;
            if is_hit {
                armed.clear();
                IS_ARMED.store(false, Ordering::Release);
            }
            is_hit
        };
        assert!(!is_hit, "injected at {name}");
    }
}
