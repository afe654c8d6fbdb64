//! Time of attention beside what the machine can do at most: decode as bytes read, prefill as multiply-adds.
//!
//!     cargo run --release -p cbrs-cpu --example attention [threads] [heads] [kv heads] [head size]
#![allow(clippy::print_stdout, reason = "a program")]

use cbrs_cpu::{AttentionArgs, BatchIndex, CacheLayout, CacheRef, Error, Kernels};

const BLOCK_SIZE: usize = 16;
/// Sequences, context and query tokens of each.
const LOADS: [(usize, usize, usize); 9] = [
    (1, 256, 1),
    (1, 8192, 1),
    (1, 131_072, 1),
    (8, 192, 1),
    (64, 192, 1),
    (64, 1024, 1),
    (64, 4096, 1),
    (1, 512, 512),
    (1, 2048, 2048),
];

struct Model {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

/// A cache of one kind of element, its values spread over -0.5..0.5.
enum Cache {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Int8(Vec<i8>),
}

impl Cache {
    fn new(kind: &str, layout: &CacheLayout) -> Self {
        let len = layout.num_elements();
        let number = |index: usize| ((index * 2_654_435_761) % 1021) as f32 / 1021.0 - 0.5;
        if kind == "int8" {
            let mut data = on_large_pages(layout.num_int8_elements());
            // Factors of 2 bytes alike.
            data.extend((0..layout.num_int8_elements()).map(|i| (i * 2_654_435_761 % 61) as i8));
            return Self::Int8(data);
        }
        if kind == "bf16" {
            let mut data = on_large_pages(len);
            data.extend((0..len).map(|i| cbrs_cpu::bf16::from_f32(number(i))));
            return Self::Bf16(data);
        }
        let mut data = on_large_pages(len);
        data.extend((0..len).map(number));
        Self::F32(data)
    }

    fn get(&self) -> CacheRef<'_> {
        match self {
            Self::F32(data) => CacheRef::F32(data),
            Self::Bf16(data) => CacheRef::Bf16(data),
            Self::Int8(data) => CacheRef::Int8(data),
        }
    }
}

/// Room for `len` elements on large pages where the system gives them, as the engine's pool has them.
fn on_large_pages<T>(len: usize) -> Vec<T> {
    let data: Vec<T> = Vec::with_capacity(len);
    if std::env::var_os("SMALL_PAGES").is_none() {
        let start = data.as_ptr().cast::<u8>().addr().next_multiple_of(4096);
        let end = data.as_ptr().wrapping_add(len).cast::<u8>().addr();
        // SAFETY: the range is inside the allocation; the advice changes no content.
        unsafe { libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), libc::MADV_HUGEPAGE) };
    }
    data
}

/// Seconds: of the clock, or with one thread of its processor, which tells the kernels' speed on a machine that others
/// use, too.
fn now(num_threads: usize) -> f64 {
    let clock = if num_threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a value of the right type.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// Seconds of the median call, and of as many loops of multiply-adds on each thread, in turn.
fn time(
    kernels: &Kernels,
    model: &Model,
    caches: [CacheRef<'_>; 2],
    layout: CacheLayout,
    load: (usize, usize, usize),
) -> Result<[f64; 2], Error> {
    let (num_seqs, context, num_queries) = load;
    let columns = context.div_ceil(BLOCK_SIZE);
    // Blocks in no order.
    let mut tables: Vec<i32> = (0..(num_seqs * columns) as i32).collect();
    let mut state = 1_u64;
    for last in (1..tables.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        tables.swap(last, (state >> 33) as usize % (last + 1));
    }
    let row_ids: Vec<i32> = (0..num_seqs as i32).collect();
    let query_start: Vec<i32> = (0..=num_seqs).map(|s| (s * num_queries) as i32).collect();
    let seq_lens = vec![context as i32; num_seqs];
    let len = num_seqs * num_queries * model.num_heads * model.head_dim;
    let query: Vec<f32> = (0..len).map(|i| ((i * 40_503) % 997) as f32 / 997.0 - 0.5).collect();
    let mut out = vec![0.0; len];
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    let num_threads = kernels.num_threads();
    let begun = now(num_threads);
    while times.len() < 5 || (times.len() < 200 && now(num_threads) - begun < 0.4) {
        let started = now(1);
        std::hint::black_box(cbrs_cpu::probe::multiply_adds(kernels.isa()));
        peaks.push(now(1) - started);
        let started = now(num_threads);
        kernels.paged_attention(AttentionArgs {
            out: &mut out,
            query: &query,
            key_cache: caches[0],
            value_cache: caches[1],
            layout,
            num_heads: model.num_heads,
            index: BatchIndex {
                block_tables: &tables,
                max_blocks: columns,
                row_ids: &row_ids,
                query_start: &query_start,
                seq_lens: &seq_lens,
            },
            scale: (model.head_dim as f32).sqrt().recip(),
            sliding_window: None,
        })?;
        times.push(now(num_threads) - started);
    }
    times.sort_by(f64::total_cmp);
    peaks.sort_by(f64::total_cmp);
    Ok([times[times.len() / 2], peaks[peaks.len() / 2]])
}

fn main() -> Result<(), Error> {
    let arguments: Vec<usize> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let argument = |index: usize, default: usize| arguments.get(index).copied().unwrap_or(default);
    let kernels = Kernels::new(argument(0, 2))?;
    let model = Model { num_heads: argument(1, 9), num_kv_heads: argument(2, 3), head_dim: argument(3, 64) };
    let rates = kernels.measure_rates(3)?;
    // 12 chains of 65,536 multiply-adds.
    let lanes = if kernels.isa() == cbrs_cpu::Isa::Avx512 { 16 } else { 8 };
    let loop_flops = f64::from(2 * 12 * (1 << 16) * lanes);
    println!("peak {:.0} GFLOP/s, reading {:.1} GB/s", rates.flops / 1e9, rates.read_bytes / 1e9);
    for (kind, size) in [("bf16", 2.0), ("int8", 1.0 + 2.0 / model.head_dim as f64), ("f32", 4.0)] {
        for load @ (num_seqs, context, num_queries) in LOADS {
            let num_blocks = num_seqs * context.div_ceil(BLOCK_SIZE);
            let layout = CacheLayout::new(num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_dim)?;
            let caches = [0, 1].map(|_| Cache::new(kind, &layout));
            let [seconds, loop_seconds] = time(&kernels, &model, [caches[0].get(), caches[1].get()], layout, load)?;
            let bytes = size * (2 * num_seqs * context * model.num_kv_heads * model.head_dim) as f64;
            let pairs = num_seqs * num_queries * (2 * context - num_queries + 1) / 2;
            let flops = (4 * pairs * model.num_heads * model.head_dim) as f64;
            println!(
                "{kind} {num_seqs} x {context}, {num_queries} queries: {:.0} us; {:.1} MiB, {:.2} of reading them; {:.0} GFLOP/s, {:.2} of the peak",
                1e6 * seconds,
                bytes / f64::from(1 << 20),
                seconds * rates.read_bytes / bytes,
                flops / seconds / 1e9,
                flops / seconds / (loop_flops / loop_seconds * kernels.num_threads() as f64),
            );
        }
    }
    Ok(())
}
