//! The scheduler inside somebody else's engine: a loop without a model, whose next token is the last one plus one.
//!
//! `cargo run -p cbrs-core --example embed`

use std::collections::BTreeMap;
use std::io::Write;

use cbrs_core::{FinishReason, RequestSpec, Result, Scheduler, SchedulerConfig, StepResult};

fn main() -> Result<()> {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        num_blocks: 32,
        max_model_len: 64,
        block_size: 4,
        ..SchedulerConfig::default()
    })?;
    let submitter = scheduler.submitter();
    let mut texts = BTreeMap::new();
    for len in [3, 9, 20, 6, 5, 12] {
        let spec = RequestSpec { max_tokens: Some(len), ..RequestSpec::new((0..len as i32).collect()) };
        texts.insert(submitter.submit(spec)?.as_u64(), Vec::new());
    }
    scheduler.step(None, 0)?;
    while scheduler.batch().num_seqs() > 0 {
        let batch = scheduler.batch();
        let samples = batch.sample_index.iter().map(|&sample| batch.logits_index[sample as usize]);
        let next_tokens: Vec<i32> = samples.map(|token| batch.token_ids[token as usize] + 1).collect();
        scheduler.step(Some(&StepResult { token_ids: &next_tokens, ..StepResult::default() }), 0)?;
        let output = scheduler.output();
        for event in 0..output.len() {
            let text = texts.get_mut(&output.request_ids[event]).expect("events are about submitted requests");
            text.push(output.token_ids[event]);
            if output.finish_reasons[event] == FinishReason::Length as u8 {
                let id = output.request_ids[event];
                writeln!(std::io::stdout(), "request {id} is done: {text:?}").expect("stdout is open");
            }
        }
    }
    scheduler.check_drained();
    Ok(())
}
