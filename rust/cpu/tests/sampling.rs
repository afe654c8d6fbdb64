//! Sampling against plain code: every instruction set, any number of threads, refused calls.

mod common;

use cbrs_cpu::sampling::{
    Bans, Bias, EVERYTHING_EXCLUDED, LogprobArgs, Penalties, Ragged, RowLogits, SampleArgs, SampleInput,
    SamplingParameters, UNUSABLE_LOGITS,
};
use cbrs_cpu::{Error, Isa, Kernels};
use common::Random;

const PADDING: usize = 3;

/// A batch of random rows, each with its own parameters.
#[derive(Debug, Clone)]
struct Batch {
    logits: Vec<f32>,
    vocab_size: usize,
    index: Vec<i32>,
    rows: Vec<i32>,
    uniform: Vec<f64>,
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    penalty: Vec<f32>,
    history: Vec<i32>,
    start: Vec<i64>,
    len: Vec<i64>,
    bias: Vec<f32>,
    ban_start: Vec<i64>,
    ban_ids: Vec<i32>,
}

impl Batch {
    fn random(num_rows: usize, vocab_size: usize, random: &mut Random) -> Self {
        let row_len = vocab_size + PADDING;
        let mut order: Vec<i32> = (0..num_rows as i32).collect();
        random.shuffle(&mut order);
        let pick = |random: &mut Random, options: &[f32]| options[random.below(options.len())];
        let history_len = 4;
        Self {
            logits: (0..num_rows * row_len).map(|_| (random.number() * 40.0).round() / 4.0).collect(),
            vocab_size,
            index: order.clone(),
            rows: order.iter().rev().copied().collect(),
            uniform: (0..num_rows).map(|_| f64::from(random.number() + 1.0) / 2.0).collect(),
            temperature: (0..num_rows).map(|_| pick(random, &[0.0, 0.5, 1.0, 4.0])).collect(),
            top_k: (0..num_rows).map(|_| pick(random, &[-1.0, 0.0, 1.0, 5.0, 70.0]) as i32).collect(),
            top_p: (0..num_rows).map(|_| pick(random, &[1.0, 0.9, 0.3])).collect(),
            min_p: (0..num_rows).map(|_| pick(random, &[0.0, 0.0, 0.2])).collect(),
            penalty: (0..num_rows).map(|_| pick(random, &[1.0, 1.5])).collect(),
            history: (0..num_rows * history_len).map(|_| random.below(vocab_size) as i32).collect(),
            start: (0..num_rows).map(|row| (row * history_len) as i64).collect(),
            len: vec![history_len as i64; num_rows],
            bias: (0..num_rows * history_len).map(|_| random.number()).collect(),
            ban_start: (0..=num_rows as i64).collect(),
            ban_ids: (0..num_rows).map(|_| random.below(vocab_size) as i32).collect(),
        }
    }

    fn input(&self) -> SampleInput<'_> {
        let history = Ragged { values: &self.history[..], start: &self.start, len: &self.len };
        SampleInput {
            logits: self.row_logits(),
            rows: &self.rows,
            uniform: &self.uniform,
            parameters: SamplingParameters {
                temperature: &self.temperature,
                top_k: &self.top_k,
                top_p: &self.top_p,
                min_p: &self.min_p,
            },
            penalties: Some(Penalties {
                presence: &self.penalty,
                frequency: &self.penalty,
                repetition: &self.penalty,
                history,
                num_prompt: &self.start,
            }),
            bias: Some(Bias { ids: history, values: &self.bias }),
            bans: Some(Bans { start: &self.ban_start, ids: &self.ban_ids }),
        }
    }

    fn row_logits(&self) -> RowLogits<'_> {
        let row_len = self.vocab_size + PADDING;
        RowLogits { data: &self.logits, row_len, vocab_size: self.vocab_size, index: &self.index }
    }

    fn sample(&self, kernels: &Kernels) -> (Vec<i32>, Vec<u8>) {
        sample(kernels, &self.input()).expect("valid batch")
    }

    /// Ids, values and ranks of token 0 of each row and the 6 most likely.
    fn logprobs(&self, kernels: &Kernels) -> (Vec<i32>, Vec<f32>, Vec<i32>) {
        let (num, columns) = (self.index.len(), 7);
        let (mut ids, mut values, mut ranks) = (vec![-1; num * columns], vec![f32::NAN; num * columns], vec![-1; num]);
        let (targets, counts) = (vec![0; num], vec![6; num]);
        kernels
            .logprobs(LogprobArgs {
                token_ids: &mut ids,
                values: &mut values,
                ranks: &mut ranks,
                columns,
                logits: self.row_logits(),
                targets: &targets,
                num_logprobs: &counts,
            })
            .expect("valid batch");
        (ids, values, ranks)
    }
}

fn sample(kernels: &Kernels, input: &SampleInput<'_>) -> Result<(Vec<i32>, Vec<u8>), Error> {
    let num = input.rows.len();
    let (mut tokens, mut errors) = (vec![-1; num], vec![9; num]);
    kernels.sample(SampleArgs { tokens: &mut tokens, errors: &mut errors, input: *input })?;
    Ok((tokens, errors))
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn every_instruction_set_and_number_of_threads_gives_the_same_tokens() {
    let mut random = Random::new(1);
    for vocab_size in [1, 5, 63, 64, 65, 1000] {
        let batch = Batch::random(200, vocab_size, &mut random);
        let portable = Kernels::with_isa(1, Isa::Portable).expect("anywhere");
        let (tokens, errors) = batch.sample(&portable);
        let (ids, values, ranks) = batch.logprobs(&portable);
        for isa in available() {
            for num_threads in [1, 3] {
                let kernels = Kernels::with_isa(num_threads, isa).expect("available");
                assert_eq!(batch.sample(&kernels), (tokens.clone(), errors.clone()), "{} x {vocab_size}", isa.name());
                let got = batch.logprobs(&kernels);
                assert_eq!((&got.0, &got.2), (&ids, &ranks));
                assert!(got.1.iter().zip(&values).all(|(a, b)| (a - b).abs() < 1e-5));
            }
        }
    }
}

#[test]
fn logprobs_are_those_of_a_plain_softmax() {
    let mut random = Random::new(2);
    let batch = Batch::random(20, 333, &mut random);
    let (ids, values, ranks) = batch.logprobs(&Kernels::new(2).expect("starts"));
    for (item, &index) in batch.index.iter().enumerate() {
        let row = &batch.logits[index as usize * (333 + PADDING)..][..333];
        let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        let mut order: Vec<usize> = (0..333).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        let expected: Vec<i32> = std::iter::once(0).chain(order[..6].iter().map(|id| *id as i32)).collect();
        assert_eq!(ids[item * 7..][..7], expected);
        assert_eq!(ranks[item] as usize, 1 + row.iter().filter(|x| **x > row[0]).count());
        for (value, id) in values[item * 7..][..7].iter().zip(expected) {
            let exact = f64::from(row[id as usize]) - total.ln();
            assert!((f64::from(*value) - exact).abs() < 1e-5);
        }
    }
}

#[test]
fn a_row_is_its_own_error_and_nobody_elses() {
    let mut random = Random::new(3);
    let clean = Batch::random(6, 100, &mut random);
    let kernels = Kernels::new(2).expect("starts");
    let (expected, _) = clean.sample(&kernels);
    let mut batch = clean.clone();
    let row_of = |sample: usize| {
        let start = batch.index[sample] as usize * (100 + PADDING);
        start..start + 100
    };
    let (nan, only_one) = (row_of(2), row_of(4));
    batch.logits[nan.start + 99] = f32::NAN;
    batch.logits[only_one.clone()].fill(f32::NEG_INFINITY);
    batch.logits[only_one.start + batch.ban_ids[4] as usize] = 1.0;
    let (tokens, errors) = batch.sample(&kernels);
    assert_eq!(errors, [0, 0, UNUSABLE_LOGITS, 0, EVERYTHING_EXCLUDED, 0]);
    for sample in [0, 1, 3, 5] {
        assert_eq!(tokens[sample], expected[sample]);
    }
    assert_eq!((tokens[2], tokens[4]), (0, 0));
}

#[test]
fn every_wrong_argument_is_refused_and_nothing_is_written() {
    let mut random = Random::new(4);
    let batch = Batch::random(4, 10, &mut random);
    let kernels = Kernels::new(1).expect("starts");
    let refuse = |change: &dyn Fn(&mut Batch), expected: &str| {
        let mut changed = batch.clone();
        change(&mut changed);
        let error = sample(&kernels, &changed.input()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error} does not say {expected}");
    };
    refuse(&|batch| batch.index[1] = 4, "logits_index[1] is 4, expected 0..4");
    refuse(&|batch| batch.index[1] = -1, "logits_index[1] is -1");
    refuse(&|batch| batch.rows[3] = 4, "rows[3] is 4");
    refuse(&|batch| batch.rows.truncate(3), "elements, expected");
    refuse(&|batch| batch.uniform.truncate(3), "uniform has 3");
    refuse(&|batch| batch.logits.truncate(51), "logits has 51");
    refuse(&|batch| batch.top_k.truncate(3), "top_k has 3");
    refuse(&|batch| batch.penalty.truncate(3), "presence_penalty has 3");
    refuse(&|batch| batch.start[2] = 13, "history: the place of entry 2 is not inside the 16 values");
    refuse(&|batch| batch.start[2] = -1, "history");
    refuse(&|batch| batch.len[0] = i64::MAX, "history: the place of entry 0");
    refuse(&|batch| batch.bias.truncate(3), "bias values has 3");
    refuse(&|batch| batch.ban_start[4] = 5, "bans: the place of entry 3 is not inside the 4 values");
    refuse(&|batch| batch.ban_start[1] = 3, "bans: the place of entry 1");
    refuse(&|batch| batch.vocab_size = 0, "vocab_size must be at least 1");
}
