//! Whether the time of a look-up tells how near a guess is to a key: Welch's t-test over tries in random order.
//!
//! Timed, so only `make soak` runs it. The same measurement finds a comparison that ends at the first difference. Noise that hits both kinds of
//! guesses alike widens the variances and nothing else; the slowest tenth, where the machine was busy elsewhere, is left out.

use std::hint::black_box;
use std::time::Instant;

use cbrs_server::{ApiKey, Keyring};

const SECRET: &[u8; 64] = b"sk-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY";
const NUM_TRIES: usize = 100_000;
/// Look-ups of one try, so that the clock is fine enough.
const NUM_REPEATS: usize = 8;
/// Usual in tests for leaks by time: chance exceeds it once in 100,000 times.
const MAX_T: f64 = 4.5;

/// A guess that differs in the last byte, and one that differs in the first.
fn guesses() -> [[u8; 64]; 2] {
    let (mut near, mut far) = (*SECRET, *SECRET);
    near[63] ^= 1;
    far[0] ^= 1;
    [near, far]
}

/// Welch's t of the times that `look_up` takes for the two guesses.
fn t_of(mut look_up: impl FnMut(&[u8]) -> bool) -> f64 {
    let guesses = guesses();
    let mut times: [Vec<f64>; 2] = Default::default();
    // One buffer for both: where a guess lies must not count.
    let mut buffer = [0; 64];
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    while times.iter().any(|times| times.len() < NUM_TRIES) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let kind = (random >> 40 & 1) as usize;
        buffer.copy_from_slice(&guesses[kind]);
        let start = Instant::now();
        for _ in 0..NUM_REPEATS {
            assert!(!black_box(look_up(black_box(&buffer))), "no guess is right");
        }
        times[kind].push(start.elapsed().as_nanos() as f64);
    }
    welch(&times)
}

fn welch(times: &[Vec<f64>; 2]) -> f64 {
    let mut pooled: Vec<f64> = times.iter().flatten().copied().collect();
    pooled.sort_by(f64::total_cmp);
    let longest = pooled[pooled.len() * 9 / 10];
    let [near, far] = times.each_ref().map(|times| {
        let kept: Vec<f64> = times.iter().copied().filter(|time| *time <= longest).collect();
        let count = kept.len() as f64;
        let mean = kept.iter().sum::<f64>() / count;
        let variance = kept.iter().map(|time| (time - mean) * (time - mean)).sum::<f64>() / (count - 1.0);
        (mean, variance / count)
    });
    (near.0 - far.0) / (near.1 + far.1).sqrt()
}

/// What a look-up must not be.
fn is_equal_so_far(secret: &[u8], guess: &[u8]) -> bool {
    secret.len() == guess.len() && secret.iter().zip(guess).all(|(one, other)| black_box(one) == black_box(other))
}

#[test]
#[ignore = "timed: make soak"]
fn near_and_far_guesses_take_the_same_time() {
    let others = (0..9).map(|index| ApiKey::new(&format!("other {index}"), ApiKey::digest(&[index])));
    let key = ApiKey::new("mine", ApiKey::digest(SECRET));
    let keys = Keyring::new(others.chain([key]).collect()).expect("they differ");
    assert!(keys.find(SECRET).is_some());
    let control = t_of(|guess| is_equal_so_far(SECRET, guess));
    assert!(control.abs() > MAX_T, "the measurement finds nothing: t = {control:.1}");
    let t = t_of(|guess| keys.find(guess).is_some());
    assert!(t.abs() < MAX_T, "the time tells how near a guess is: t = {t:.1}");
}
