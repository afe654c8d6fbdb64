//! One number for everything that a step shows: two runs are the same exactly when their digests are.

use cbrs_core::{Figure, Scheduler};

use crate::rng::mix;

/// Digest of batch, output and counters.
pub(crate) fn digest(scheduler: &Scheduler) -> u64 {
    let (batch, output) = (scheduler.batch(), scheduler.output());
    let updates = &batch.block_table_updates;
    let mut hash = mix(batch.step_id);
    let mut fold = |values: &mut dyn Iterator<Item = u64>| {
        for value in values {
            hash = mix(hash ^ value);
        }
        hash = mix(hash ^ 0xA11A_7E57);
    };
    let narrow: [&[i32]; 27] = [
        &batch.token_ids,
        &batch.positions,
        &batch.query_start,
        &batch.seq_lens,
        &batch.row_ids,
        &batch.choice_ids,
        &batch.logits_index,
        &batch.sample_index,
        &batch.sample_rows,
        &batch.sample_positions,
        &batch.sample_choices,
        &batch.prompt_logits_index,
        &batch.prompt_target_ids,
        &batch.prompt_rows,
        &batch.num_prompt_logprobs,
        &batch.new_rows,
        &batch.freed_rows,
        &updates.rows,
        &updates.first_columns,
        &updates.ids,
        &output.choice_ids,
        &output.logprob_events,
        &output.logprobs.token_ids,
        &output.prompt_logprob_positions,
        &output.prompt_logprobs.token_ids,
        &output.token_ids,
        &output.started_num_cached_tokens,
    ];
    for array in narrow {
        fold(&mut array.iter().map(|&value| value as u64));
    }
    fold(&mut batch.slot_mapping.iter().map(|&slot| slot as u64));
    for ids in [&batch.request_ids, &output.request_ids, &output.started_request_ids] {
        fold(&mut ids.iter().copied());
    }
    fold(&mut output.finish_reasons.iter().map(|&code| u64::from(code)));
    fold(&mut scheduler.submitter().stats().entries().iter().map(|&(_, figure)| match figure {
        Figure::Count(count) => count,
        Figure::Measure(measure) => measure.to_bits(),
    }));
    hash
}
