//! Time of the linear layers of a step (SmolLM2-135M's by default) beside what the machine can do at most.
//!
//!     cargo run --release -p cbrs-cpu --example linear [threads] [layers]
#![allow(clippy::print_stdout, reason = "a program")]

use cbrs_cpu::{Activation, Error, Kernels, LinearArgs, PackedMatrix, Then, WeightType, WeightsRef};

const WIDTH: usize = 576;
const QKV: usize = 960;
const INNER: usize = 1536;
const VOCAB: usize = 49_152;
const BATCHES: [usize; 8] = [1, 2, 4, 8, 32, 64, 128, 512];

struct Layer {
    qkv: PackedMatrix,
    out: PackedMatrix,
    gate_up: PackedMatrix,
    down: PackedMatrix,
}

const TYPES: [WeightType; 3] = [WeightType::Bf16, WeightType::Int8, WeightType::F32];

fn pack(kernels: &Kernels, kind: WeightType, out: usize, input: usize, parts: usize) -> Result<PackedMatrix, Error> {
    let number = |index: usize| ((index * 2_654_435_761) % 1021) as f32 / 1021.0 - 0.5;
    let data: Vec<f32> = (0..out * input).map(number).collect();
    match kind {
        WeightType::F32 => kernels.pack(WeightsRef::F32(&data), out, input, parts),
        WeightType::Bf16 => {
            let data: Vec<u16> = data.iter().map(|number| cbrs_cpu::bf16::from_f32(*number)).collect();
            kernels.pack(WeightsRef::Bf16(&data), out, input, parts)
        }
        WeightType::Int8 => kernels.pack_int8(WeightsRef::F32(&data), out, input, parts),
    }
}

/// Processor time of this thread so far, in seconds: with one thread it tells the kernels' speed on a machine that others use, too.
fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a value of the right type.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// One matrix that stays in the last-level cache, in turn with a loop of nothing but multiply-adds.
fn one_matrix(kernels: &Kernels) -> Result<(), Error> {
    for (kind, (out, input)) in TYPES.into_iter().flat_map(|kind| [(kind, (960, 576)), (kind, (576, 1536))]) {
        let matrix = pack(kernels, kind, out, input, 1)?;
        for num_rows in [1, 4, 6, 8, 12, 32, 64, 128, 510] {
            let data = vec![0.5; num_rows * input];
            let mut result = vec![0.0; num_rows * out];
            let (mut times, mut peaks) = (Vec::new(), Vec::new());
            for _ in 0..60 {
                let started = now();
                std::hint::black_box(cbrs_cpu::probe::multiply_adds(kernels.isa()));
                peaks.push(now() - started);
                let started = now();
                let args = LinearArgs {
                    out: &mut result,
                    input: &data,
                    num_rows,
                    matrix: &matrix,
                    bias: None,
                    then: Then::Store,
                };
                kernels.linear(args)?;
                times.push(now() - started);
            }
            times.sort_by(f64::total_cmp);
            peaks.sort_by(f64::total_cmp);
            let flops = (2 * num_rows * out * input) as f64;
            let peak = (2 * 12 * 8 * (1 << 16)) as f64;
            println!(
                "{kind:?} {out} x {input} rows {num_rows:3}: best {:5.1} of {:5.1} GFLOP/s, median {:5.1} of {:5.1}",
                flops / times[0] / 1e9,
                peak / peaks[0] / 1e9,
                flops / times[30] / 1e9,
                peak / peaks[30] / 1e9
            );
        }
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let kernels = Kernels::new(arguments.next().unwrap_or(2))?;
    let num_layers = arguments.next().unwrap_or(30);
    if num_layers == 0 {
        return one_matrix(&kernels);
    }
    let rates = kernels.measure_rates(5)?;
    println!("{:.0} GFLOP/s, {:.1} GB/s read", rates.flops / 1e9, rates.read_bytes / 1e9);
    for kind in TYPES {
        let layers: Vec<Layer> = (0..num_layers)
            .map(|_| {
                Ok(Layer {
                    qkv: pack(&kernels, kind, QKV, WIDTH, 1)?,
                    out: pack(&kernels, kind, WIDTH, WIDTH, 1)?,
                    gate_up: pack(&kernels, kind, 2 * INNER, WIDTH, 2)?,
                    down: pack(&kernels, kind, WIDTH, INNER, 1)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        let head = pack(&kernels, kind, VOCAB, WIDTH, 1)?;
        let all: Vec<&PackedMatrix> = layers.iter().flat_map(|l| [&l.qkv, &l.out, &l.gate_up, &l.down]).collect();
        let layer_weights: usize = all.iter().map(|m| m.in_features() * m.out_features()).sum();
        let bytes: usize = all.iter().map(|m| m.num_bytes()).sum::<usize>() + head.num_bytes();
        for num_rows in BATCHES {
            let num_logits = if num_rows > 128 { 1 } else { num_rows };
            let mut hidden = vec![0.1; num_rows * WIDTH];
            let mut qkv = vec![0.0; num_rows * QKV];
            let mut inner = vec![0.0; num_rows * INNER];
            let mut logits = vec![0.0; num_logits * VOCAB];
            let mut times = Vec::new();
            for _ in 0..(400 / num_rows).clamp(3, 15) {
                let started = now();
                let linear = |out: &mut [f32], input: &[f32], num_rows: usize, matrix: &PackedMatrix, then: Then| {
                    kernels.linear(LinearArgs { out, input, num_rows, matrix, bias: None, then })
                };
                for layer in &layers {
                    linear(&mut qkv, &hidden, num_rows, &layer.qkv, Then::Store)?;
                    linear(&mut hidden, &inner[..num_rows * WIDTH], num_rows, &layer.out, Then::Store)?;
                    linear(&mut inner, &hidden, num_rows, &layer.gate_up, Then::Gate(Activation::Silu))?;
                    linear(&mut hidden, &inner, num_rows, &layer.down, Then::Store)?;
                }
                linear(&mut logits, &hidden[..num_logits * WIDTH], num_logits, &head, Then::Store)?;
                times.push(now() - started);
            }
            times.sort_by(f64::total_cmp);
            let time = times[times.len() / 2];
            let flops = 2.0 * (layer_weights * num_rows + VOCAB * WIDTH * num_logits) as f64;
            let (by_flops, by_bytes) = (flops / rates.flops, bytes as f64 / rates.read_bytes);
            println!(
                "{kind:?} rows {num_rows:4}: {:8.2} ms, {:5.1} GB/s, {:5.1} GFLOP/s, to the bound {:.2} ({:.2} flops, {:.2} bytes)",
                time * 1e3,
                bytes as f64 / time / 1e9,
                flops / time / 1e9,
                time / by_flops.max(by_bytes),
                time / by_flops,
                time / by_bytes,
            );
        }
    }
    Ok(())
}
