//! `BlockPool` alone: finding a cached prompt, publishing a block, taking and giving back a block.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use cbrs_benches::{BLOCK_SIZE, prompt, shuffle};
use cbrs_core::block::{BlockId, BlockPool, Parent, Published};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// A prompt of 4,096 tokens.
const NUM_PROMPT_BLOCKS: usize = 256;
/// Prompts in the cache, so that a chain is not in the processor's first cache by itself.
const NUM_PROMPTS: usize = 64;

/// The prompts' tokens and a hash for each of their blocks. Any hash will do here: the scheduler's own are not public.
struct Prompt {
    tokens: Vec<i32>,
    hashes: Vec<u64>,
}

impl Prompt {
    fn new(number: usize) -> Self {
        let hash = |block: usize| ((number * NUM_PROMPT_BLOCKS + block + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self {
            tokens: prompt(number as u64, NUM_PROMPT_BLOCKS * BLOCK_SIZE),
            hashes: (0..NUM_PROMPT_BLOCKS).map(hash).collect(),
        }
    }

    fn blocks(&self) -> impl Iterator<Item = (u64, &[i32])> {
        self.hashes.iter().copied().zip(self.tokens.chunks_exact(BLOCK_SIZE))
    }
}

/// The root of requests without tenant and salt, as a fresh pool names it.
fn root() -> Parent {
    let mut scheduler = cbrs_core::Scheduler::new(cbrs_core::SchedulerConfig::default()).unwrap();
    let spec = cbrs_core::RequestSpec { max_tokens: Some(1), ..cbrs_core::RequestSpec::new(vec![1; BLOCK_SIZE]) };
    scheduler.submitter().submit(spec).unwrap();
    scheduler.step(None, 0).unwrap();
    let result = cbrs_core::StepResult { token_ids: &[1], ..Default::default() };
    scheduler.step(Some(&result), 0).unwrap();
    scheduler.pool().parent(scheduler.pool().eviction_order().next().unwrap()).unwrap()
}

/// Publishes a prompt in blocks that are taken for it.
fn publish(pool: &mut BlockPool, root: Parent, prompt: &Prompt) -> Vec<BlockId> {
    let mut parent = root;
    let publish_block = |(hash, tokens): (u64, &[i32])| {
        let block = pool.allocate().unwrap();
        assert_eq!(pool.publish(block, parent, hash, tokens), Published::Yes);
        parent = Parent::Block(block);
        block
    };
    prompt.blocks().map(publish_block).collect()
}

fn find_chain(pool: &BlockPool, root: Parent, prompt: &Prompt) -> usize {
    let mut parent = root;
    let mut num_found = 0;
    for (hash, tokens) in prompt.blocks() {
        let Some(block) = pool.find(parent, hash, tokens) else { break };
        parent = Parent::Block(block);
        num_found += 1;
    }
    num_found
}

fn find(criterion: &mut Criterion) {
    let root = root();
    let mut pool = BlockPool::new(NUM_PROMPTS * NUM_PROMPT_BLOCKS, BLOCK_SIZE);
    let prompts: Vec<_> = (0..NUM_PROMPTS).map(Prompt::new).collect();
    for prompt in &prompts {
        publish(&mut pool, root, prompt);
    }
    let mut group = criterion.benchmark_group("prefix");
    group.bench_function("find_4096_tokens/same_prompt", |bencher| {
        bencher.iter(|| assert_eq!(find_chain(&pool, root, black_box(&prompts[0])), NUM_PROMPT_BLOCKS));
    });
    group.bench_function("find_4096_tokens/of_64_prompts", |bencher| {
        let mut next = 0;
        bencher.iter(|| {
            next = (next + 37) % NUM_PROMPTS;
            assert_eq!(find_chain(&pool, root, black_box(&prompts[next])), NUM_PROMPT_BLOCKS);
        });
    });
}

/// Time per block; the blocks are taken beforehand.
fn publish_block(criterion: &mut Criterion) {
    let root = root();
    let prompts: Vec<_> = (0..NUM_PROMPTS).map(Prompt::new).collect();
    let num_blocks = NUM_PROMPTS * NUM_PROMPT_BLOCKS;
    let mut group = criterion.benchmark_group("prefix");
    group.throughput(Throughput::Elements(num_blocks as u64)).sample_size(20);
    group.bench_function("publish_16384_blocks", |bencher| {
        let mut pool = BlockPool::new(num_blocks, BLOCK_SIZE);
        let blocks: Vec<_> = (0..num_blocks).map(|_| pool.allocate().unwrap()).collect();
        bencher.iter_custom(|num_iterations| {
            let mut elapsed = Duration::ZERO;
            for _ in 0..num_iterations {
                pool.reset_prefix_cache();
                let started = Instant::now();
                for (prompt, blocks) in prompts.iter().zip(blocks.chunks_exact(NUM_PROMPT_BLOCKS)) {
                    let mut parent = root;
                    for ((hash, tokens), &block) in prompt.blocks().zip(blocks) {
                        assert_eq!(pool.publish(block, parent, hash, tokens), Published::Yes);
                        parent = Parent::Block(block);
                    }
                }
                elapsed += started.elapsed();
            }
            elapsed
        });
    });
}

/// Taking free blocks in an order without locality, and giving blocks back in such an order; time per block.
fn allocate(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix");
    group.sample_size(20);
    for num_blocks in [1_000, 10_000_000] {
        let mut pool = BlockPool::new(num_blocks, BLOCK_SIZE);
        let mut blocks: Vec<_> = (0..num_blocks).map(|_| pool.allocate().unwrap()).collect();
        shuffle(&mut blocks, 1);
        let mut num_held = num_blocks;
        group.bench_function(BenchmarkId::new("allocate", num_blocks), |bencher| {
            bencher.iter_custom(|num_iterations| {
                let (mut elapsed, mut num_left) = (Duration::ZERO, num_iterations);
                while num_left > 0 {
                    if num_held == num_blocks {
                        for &block in &blocks {
                            pool.release(block).unwrap();
                        }
                        num_held = 0;
                    }
                    let num_taken = num_left.min((num_blocks - num_held) as u64);
                    let started = Instant::now();
                    for _ in 0..num_taken {
                        black_box(pool.allocate().unwrap());
                    }
                    elapsed += started.elapsed();
                    num_held += num_taken as usize;
                    num_left -= num_taken;
                }
                elapsed
            });
        });
        while pool.allocate().is_some() {}
        let mut num_released = 0;
        group.bench_function(BenchmarkId::new("release", num_blocks), |bencher| {
            bencher.iter_custom(|num_iterations| {
                let (mut elapsed, mut num_left) = (Duration::ZERO, num_iterations);
                while num_left > 0 {
                    if num_released == num_blocks {
                        while pool.allocate().is_some() {}
                        num_released = 0;
                    }
                    let num_given = num_left.min((num_blocks - num_released) as u64) as usize;
                    let started = Instant::now();
                    for &block in &blocks[num_released..num_released + num_given] {
                        pool.release(block).unwrap();
                    }
                    elapsed += started.elapsed();
                    num_released += num_given;
                    num_left -= num_given as u64;
                }
                elapsed
            });
        });
    }
}

criterion_group!(benches, find, publish_block, allocate);
criterion_main!(benches);
