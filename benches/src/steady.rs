//! Steady decode: every sequence gets one token a step, nobody comes or goes.
//!
//! All prompts end in the same step, so their lengths stay as they are made: one sequence in sixteen crosses a block boundary in each step.

use cbrs_core::{RequestSpec, Scheduler, SchedulerConfig, StepResult};

use crate::scatter::scatter_free_blocks;
use crate::{BLOCK_SIZE, VOCAB_SIZE, prompt};

/// Prompt tokens of a request that only waits.
const NUM_WAITING_TOKENS: usize = 32;

/// What a steady load consists of.
#[derive(Debug, Clone, Copy)]
pub struct SteadyParams {
    /// Sequences that decode.
    pub num_seqs: usize,
    /// Tokens of the longest one at the first step.
    pub context: usize,
    /// Requests that wait for a row.
    pub num_waiting: usize,
    /// Steps that the load lasts.
    pub num_steps: usize,
    /// Blocks of the pool, in an order without any locality; absent = just enough, in the order of a fresh pool.
    pub num_scattered_blocks: Option<usize>,
}

impl SteadyParams {
    /// `num_seqs` sequences of about 512 tokens, alone.
    pub fn new(num_seqs: usize, num_steps: usize) -> Self {
        Self { num_seqs, context: 512, num_waiting: 0, num_steps, num_scattered_blocks: None }
    }

    fn config(&self) -> SchedulerConfig {
        let max_model_len = self.context + self.num_steps + 2;
        let mut config = SchedulerConfig {
            max_num_seqs: self.num_seqs,
            max_num_batched_tokens: self.num_seqs * self.context,
            num_blocks: self.num_seqs * max_model_len.div_ceil(BLOCK_SIZE),
            max_model_len,
            block_size: BLOCK_SIZE,
            vocab_size: Some(VOCAB_SIZE),
            queue_capacity: self.num_seqs + self.num_waiting,
            ..SchedulerConfig::default()
        };
        if let Some(num_blocks) = self.num_scattered_blocks {
            crate::scatter::widen(&mut config, num_blocks);
        }
        config
    }
}

/// A scheduler in the middle of a steady load.
#[derive(Debug)]
pub struct Steady {
    scheduler: Scheduler,
    tokens: Vec<i32>,
    num_steps_left: usize,
}

impl Steady {
    /// Runs the prompts, and lets the waiting requests arrive.
    ///
    /// # Panics
    /// If the parameters make no steady load.
    pub fn new(params: SteadyParams) -> Self {
        let mut scheduler = Scheduler::new(params.config()).expect("the limits are valid");
        let submitter = scheduler.submitter();
        if params.num_scattered_blocks.is_some() {
            scatter_free_blocks(&mut scheduler);
        }
        for sequence in 0..params.num_seqs {
            let num_tokens = params.context - sequence % BLOCK_SIZE;
            let spec = RequestSpec {
                max_tokens: Some((params.num_steps + 2) as u64),
                ..RequestSpec::new(prompt(sequence as u64, num_tokens))
            };
            submitter.submit(spec).expect("there is room for every sequence");
        }
        scheduler.step(None, 0).expect("nothing is in flight");
        while scheduler.batch().num_samples() == 0 {
            scheduler.step(None, 0).expect("a chunk of a prompt needs no token");
        }
        assert_eq!(scheduler.batch().num_samples(), params.num_seqs, "all prompts end in the same step");
        for request in 0..params.num_waiting {
            let spec = RequestSpec {
                max_tokens: Some(2),
                ..RequestSpec::new(prompt((params.num_seqs + request) as u64, NUM_WAITING_TOKENS))
            };
            submitter.submit(spec).expect("the queue holds what waits");
        }
        let tokens = prompt(u64::MAX, params.num_seqs);
        let mut this = Self { scheduler, tokens, num_steps_left: params.num_steps + 1 };
        if params.num_waiting > 0 && params.num_scattered_blocks.is_none() {
            assert_eq!(params.num_seqs, this.scheduler.config().max_num_seqs, "no waiting request finds a row");
        }
        this.step(crate::step);
        this
    }

    /// Steps before somebody ends.
    pub fn num_steps_left(&self) -> usize {
        self.num_steps_left
    }

    /// One step, made by `step`.
    ///
    /// # Panics
    /// If the load is over.
    #[inline]
    pub fn step(&mut self, step: impl FnOnce(&mut Scheduler, &StepResult<'_>)) {
        assert!(self.num_steps_left > 0, "a sequence would end in this step");
        self.num_steps_left -= 1;
        step(&mut self.scheduler, &StepResult { token_ids: &self.tokens, ..StepResult::default() });
    }

    /// Checks that the last step was a steady one.
    ///
    /// # Panics
    /// If it was not.
    pub fn check(&self) {
        let batch = self.scheduler.batch();
        assert_eq!((batch.num_decodes, batch.num_tokens()), (self.tokens.len(), self.tokens.len()), "only decodes run");
        assert_eq!(self.scheduler.output().len(), self.tokens.len(), "every sequence got a token");
        assert!(self.scheduler.output().finish_reasons.iter().all(|&reason| reason == 0), "nobody ended");
    }

    /// The scheduler, to look at or to send cancels to.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }
}
