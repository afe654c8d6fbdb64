//! What this machine can do at most, measured: the bounds that benchmarks compare the kernels with.

use std::hint::black_box;
use std::time::Instant;

use crate::buffer::Buffer;
use crate::dispatch::{Isa, Kernels};
use crate::error::Result;
use crate::simd::Simd;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};

/// Independent chains of multiply-adds: more than latency times units on the CPUs that matter here.
const CHAINS: usize = 12;
/// Multiply-adds of each chain in one item.
const CHAIN_LEN: usize = 1 << 16;
/// Bytes that are read: several times the last-level caches of the CPUs that matter here.
const READ_BYTES: usize = 512 << 20;
/// Numbers of one item.
const READ_NUMBERS: usize = 1 << 18;

/// Rates that were measured.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// Floating-point operations a second in registers, two to a multiply-add.
    pub flops: f64,
    /// Bytes a second read from memory.
    pub read_bytes: f64,
}

impl Kernels {
    /// Measures the rates of all threads together, `repeat` times, and returns the median of each.
    ///
    /// Takes 512 MiB of memory and, per repetition, some tens of milliseconds.
    ///
    /// # Errors
    /// [`crate::Error::Forked`].
    pub fn measure_rates(&self, repeat: usize) -> Result<Rates> {
        let mut data = Buffer::<f32>::zeros(READ_BYTES / size_of::<f32>());
        data.fill(1.0);
        let (mut flops, mut read_bytes) = (Vec::new(), Vec::new());
        for _ in 0..repeat.max(1) {
            flops.push(self.measure_flops()?);
            read_bytes.push(self.measure_read(&data)?);
        }
        Ok(Rates { flops: median(&mut flops), read_bytes: median(&mut read_bytes) })
    }

    fn measure_flops(&self) -> Result<f64> {
        let lanes = if self.isa() == Isa::Avx512 { 16 } else { 8 };
        let num_items = 64 * self.num_threads();
        let started = Instant::now();
        self.team()?.run(num_items, true, |_, _| {
            black_box(multiply_adds(self.isa()));
        });
        Ok((2 * num_items * CHAINS * CHAIN_LEN * lanes) as f64 / started.elapsed().as_secs_f64())
    }

    fn measure_read(&self, data: &[f32]) -> Result<f64> {
        let items = data.len() / READ_NUMBERS;
        let started = Instant::now();
        self.team()?.run(items, true, |_, item| {
            let part = &data[item * READ_NUMBERS..][..READ_NUMBERS];
            // SAFETY: as in `measure_flops`.
            black_box(unsafe {
                match self.isa() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => total_avx512(part),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => total_avx2(part),
                    _ => total::<Portable<8>>(part),
                }
            });
        });
        Ok((items * READ_NUMBERS * size_of::<f32>()) as f64 / started.elapsed().as_secs_f64())
    }
}

/// Does nothing but multiply-adds in registers.
pub fn multiply_adds(isa: Isa) -> f32 {
    assert!(isa.is_available());
    // SAFETY: checked just now.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => chains_avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => chains_avx2(),
            _ => chains::<Portable<8>>(),
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn chains<S: Simd>() -> f32 {
    // SAFETY: passed on.
    unsafe {
        let (factor, term) = (S::splat(black_box(0.5)), S::splat(black_box(1.0)));
        let mut chains = [S::splat(0.0); CHAINS];
        for _ in 0..CHAIN_LEN {
            for chain in &mut chains {
                *chain = S::mul_add(*chain, factor, term);
            }
        }
        chains.into_iter().map(|chain| S::max_lane(chain)).sum()
    }
}

/// # Safety
/// As for [`Simd`]; the length of `data` is a multiple of 8 vectors.
#[inline(always)]
unsafe fn total<S: Simd>(data: &[f32]) -> f32 {
    // SAFETY: passed on.
    unsafe {
        let mut sums = [S::splat(0.0); 8];
        for part in data.chunks_exact(8 * S::LANES) {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = S::add(*sum, S::load(part.as_ptr().add(index * S::LANES)));
            }
        }
        sums.into_iter().map(|sum| S::max_lane(sum)).sum()
    }
}

/// # Safety
/// The CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn chains_avx512() -> f32 {
    // SAFETY: this function has the features.
    unsafe { chains::<Avx512>() }
}

/// # Safety
/// The CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn chains_avx2() -> f32 {
    // SAFETY: this function has the features.
    unsafe { chains::<Avx2>() }
}

/// # Safety
/// As for [`total`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn total_avx512(data: &[f32]) -> f32 {
    // SAFETY: passed on; this function has the features.
    unsafe { total::<Avx512>(data) }
}

/// # Safety
/// As for [`total`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn total_avx2(data: &[f32]) -> f32 {
    // SAFETY: passed on; this function has the features.
    unsafe { total::<Avx2>(data) }
}
