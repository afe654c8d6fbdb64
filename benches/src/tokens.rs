//! Token ids that look random and are the same in every run.

/// Ids are below this.
pub const VOCAB_SIZE: u32 = 32_000;

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// `num_tokens` ids that belong to `seed`.
pub fn prompt(seed: u64, num_tokens: usize) -> Vec<i32> {
    let start = mix(seed);
    (0..num_tokens as u64).map(|position| (mix(start.wrapping_add(position)) % u64::from(VOCAB_SIZE)) as i32).collect()
}

/// Puts `items` into an order that belongs to `seed` (Fisher and Yates).
pub fn shuffle<T>(items: &mut [T], seed: u64) {
    let start = mix(seed);
    for end in (1..items.len()).rev() {
        let other = mix(start.wrapping_add(end as u64)) % (end as u64 + 1);
        items.swap(end, other as usize);
    }
}
