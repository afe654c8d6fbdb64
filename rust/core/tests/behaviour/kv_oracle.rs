//! The KV oracle is only worth something if it notices faults: each kind once, on the fake memory alone.
//!
//! It is on in every other test of this binary: `Oracle::step` runs each batch through it.

use crate::episode::quietly;
use crate::oracle::Memory;

/// A memory of 4 blocks of 2 tokens in which blocks 2 and 0 hold the prefixes 10, 11, 12.
fn written() -> Memory {
    let mut memory = Memory::new(4, 2);
    memory.write(&[2, 0], &[10, 11, 12], 0, 3);
    memory
}

fn complaint(memory: &Memory, table: &[i32], prefix: &[u64]) -> String {
    quietly(|| memory.check(table, prefix, prefix.len())).err().unwrap_or_default()
}

#[test]
fn reading_ones_own_prefix_is_right() {
    assert_eq!(complaint(&written(), &[2, 0], &[10, 11, 12]), "");
    assert_eq!(complaint(&written(), &[2], &[10, 11]), "", "another sequence may share the beginning");
}

#[test]
fn a_slot_that_nobody_wrote_is_noticed() {
    assert!(
        complaint(&written(), &[2, 0], &[10, 11, 12, 13]).contains("position 3 reads slot 1, which nobody has written")
    );
}

#[test]
fn a_slot_of_another_prefix_is_noticed() {
    assert!(
        complaint(&written(), &[2, 0], &[10, 99]).contains("position 1 reads slot 5, which stands for another prefix")
    );
    assert!(complaint(&written(), &[0, 2], &[10, 11]).contains("another prefix"), "blocks in the wrong order");
}

#[test]
fn what_a_freed_block_or_a_failed_step_left_is_noticed() {
    let mut memory = written();
    memory.poison_block(0);
    assert!(complaint(&memory, &[2, 0], &[10, 11, 12]).contains("nobody has written"));
    let mut memory = written();
    memory.poison(&[2, 0], 1, 2);
    assert!(complaint(&memory, &[2, 0], &[10, 11]).contains("nobody has written"));
}
