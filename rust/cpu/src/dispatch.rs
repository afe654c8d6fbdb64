//! Which instruction set runs, found once at construction, and the kernels' owner.
//!
//! Invariants:
//! 1. A [`Kernels`] only ever holds an instruction set that this CPU has; that is what makes the calls into
//!    functions with a `target_feature` sound.

use crate::attention::element::Element;
use crate::attention::plan::WorkItem;
use crate::attention::tile::{Problem, Scratch, attend, finish};
use crate::buffer::Arena;
use crate::error::{Error, Result};
use crate::pool::{Pool, Team};
use crate::simd::Simd;
use crate::simd::dot::DotSet;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};

/// Instruction sets that have a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512F, 16 lanes (x86-64).
    Avx512,
    /// AVX2 with FMA, 8 lanes (x86-64).
    Avx2,
    /// Plain Rust, 8 lanes; NEON on aarch64.
    Portable,
}

impl Isa {
    /// All of them, fastest first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Portable];

    /// Returns the fastest one that this CPU has.
    pub fn detect() -> Self {
        let available = Self::ALL.into_iter().find(|isa| isa.is_available());
        available.unwrap_or(Self::Portable)
    }

    /// Tells whether this CPU has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            match self {
                Self::Avx512 => avx2 && is_x86_feature_detected!("avx512f"),
                Self::Avx2 => avx2,
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// Returns its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// The code for one instruction set and vector width; the width must divide the head size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    Avx512,
    Avx2,
    Portable8,
    Portable1,
}

impl Variant {
    fn choose(isa: Isa, head_dim: usize) -> Self {
        match isa {
            Isa::Avx512 if head_dim.is_multiple_of(16) => Self::Avx512,
            // AVX-512 includes AVX2.
            Isa::Avx512 | Isa::Avx2 if head_dim.is_multiple_of(8) => Self::Avx2,
            Isa::Portable if head_dim.is_multiple_of(8) => Self::Portable8,
            _ => Self::Portable1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512 x16",
            Self::Avx2 => "avx2 x8",
            Self::Portable8 => "portable x8",
            Self::Portable1 => "portable x1",
        }
    }
}

/// The CPU kernels: an instruction set and the threads to run on.
///
/// ```
/// let kernels = cbrs_cpu::Kernels::new(2)?;
/// assert_eq!(kernels.num_threads(), 2);
/// # Ok::<(), cbrs_cpu::Error>(())
/// ```
#[derive(Debug)]
pub struct Kernels {
    pool: Pool,
    isa: Isa,
    /// Memory of packed weights.
    weights: Arena,
}

impl Kernels {
    /// Starts `num_threads - 1` sleeping threads; the calling thread is the other one.
    ///
    /// # Errors
    /// [`Error::NumThreads`], [`Error::Threads`].
    pub fn new(num_threads: usize) -> Result<Self> {
        Self::with_isa(num_threads, Isa::detect())
    }

    /// The same with a given instruction set.
    ///
    /// # Errors
    /// [`Error::Isa`] if this CPU lacks it; [`Error::NumThreads`], [`Error::Threads`].
    pub fn with_isa(num_threads: usize, isa: Isa) -> Result<Self> {
        if !isa.is_available() {
            return Err(Error::Isa { isa: isa.name() });
        }
        let pool = Pool::new(num_threads)?;
        Ok(Self { pool, isa, weights: Arena::default() })
    }

    /// Instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that work on a call, the calling one included.
    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    pub(crate) fn weights(&self) -> &Arena {
        &self.weights
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Lends the threads to one call.
    pub(crate) fn team(&self) -> Result<Team<'_>> {
        self.pool.team()
    }

    /// Runs one work item with the variant that fits.
    ///
    /// # Safety
    /// As for [`attend`] or [`finish`], but for the instruction set, which this type vouches for.
    pub(crate) unsafe fn run_item<E: Element>(
        &self,
        problem: &Problem<'_, E>,
        item: &WorkItem,
        job: Job,
        scratch: &mut Scratch,
    ) {
        // SAFETY: the caller promises the problem; `isa` was detected at construction, and `choose` returns a
        // variant of it whose width divides the head size.
        unsafe {
            match Variant::choose(self.isa, problem.layout.head_dim()) {
                #[cfg(target_arch = "x86_64")]
                Variant::Avx512 => run_avx512(problem, item, job, scratch),
                #[cfg(target_arch = "x86_64")]
                Variant::Avx2 => run_avx2(problem, item, job, scratch),
                #[cfg(not(target_arch = "x86_64"))]
                Variant::Avx512 | Variant::Avx2 => unreachable!("not available on this CPU"),
                Variant::Portable8 => run::<Portable<8>, E>(problem, item, job, scratch),
                Variant::Portable1 => run::<Portable<1>, E>(problem, item, job, scratch),
            }
        }
    }
}

/// What is to be done for a work item.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Job {
    /// [`attend`].
    Attend,
    /// [`finish`].
    Finish,
}

/// Returns the kernel that a head size gets on this CPU, for reports.
pub fn kernel_name(head_dim: usize) -> &'static str {
    Variant::choose(Isa::detect(), head_dim).name()
}

/// Returns what multiplies int8 weights on this CPU, for reports.
pub fn int8_name() -> &'static str {
    DotSet::choose(Isa::detect()).name()
}

/// # Safety
/// As for [`attend`] or [`finish`].
#[inline(always)]
unsafe fn run<S: Simd, E: Element>(problem: &Problem<'_, E>, item: &WorkItem, job: Job, scratch: &mut Scratch) {
    // SAFETY: passed on.
    unsafe {
        match job {
            Job::Attend => attend::<S, E>(problem, item, scratch),
            Job::Finish => finish::<S, E>(problem, item, scratch),
        }
    }
}

/// # Safety
/// As for [`run`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn run_avx512<E: Element>(problem: &Problem<'_, E>, item: &WorkItem, job: Job, scratch: &mut Scratch) {
    // SAFETY: passed on; this function has the features.
    unsafe { run::<Avx512, E>(problem, item, job, scratch) }
}

/// # Safety
/// As for [`run`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<E: Element>(problem: &Problem<'_, E>, item: &WorkItem, job: Job, scratch: &mut Scratch) {
    // SAFETY: passed on; this function has the features.
    unsafe { run::<Avx2, E>(problem, item, job, scratch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variant_is_as_wide_as_the_head_size_allows() {
        assert_eq!(Variant::choose(Isa::Avx512, 64), Variant::Avx512);
        assert_eq!(Variant::choose(Isa::Avx512, 8), Variant::Avx2);
        assert_eq!(Variant::choose(Isa::Avx2, 80), Variant::Avx2);
        assert_eq!(Variant::choose(Isa::Avx2, 12), Variant::Portable1);
        assert_eq!(Variant::choose(Isa::Portable, 8), Variant::Portable8);
        assert_eq!(Variant::choose(Isa::Portable, 3), Variant::Portable1);
    }

    #[test]
    fn an_instruction_set_that_the_cpu_lacks_is_refused_by_name() {
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            let error = Kernels::with_isa(1, isa).expect_err("not available");
            assert_eq!(error.to_string(), format!("this CPU does not run {}", isa.name()));
        }
        assert!(Isa::detect().is_available());
    }
}
