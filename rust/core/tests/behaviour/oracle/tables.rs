//! What the sampler is told about each row: scalars by row, and ragged tables with each new row.

use cbrs_core::Scheduler;

use super::model::Model;
use super::plan::Plan;

/// Part `index` of the values that `start` divides.
fn part<'a, T>(start: &[i32], values: &'a [T], index: usize) -> &'a [T] {
    &values[start[index] as usize..start[index + 1] as usize]
}

impl Model {
    /// Checks the tables of new rows, in order, and the scalars of all.
    pub(crate) fn check_row_tables(&self, scheduler: &Scheduler, plan: &Plan) {
        let tables = &scheduler.batch().new_row_tables;
        let num_rows = plan.started.len();
        let lens = [&tables.history_start, &tables.bias_start, &tables.banned_start, &tables.bad_words_start];
        assert_eq!(lens.map(Vec::len), [num_rows + 1; 4], "the tables are not aligned with the new rows");
        for (order, &index) in plan.started.iter().enumerate() {
            let choice = &self.choices[index];
            let (spec, sampling) = (&choice.spec, &choice.spec.sampling);
            let needs_history = sampling.has_penalty() || !spec.bad_words_token_ids.is_empty();
            let (history, num_prompt): (&[i32], usize) =
                if needs_history { (&choice.tokens, choice.num_prompt()) } else { (&[], 0) };
            assert_eq!(part(&tables.history_start, &tables.history_ids, order), history, "choice {index}: history");
            assert_eq!(tables.history_num_prompt[order] as usize, num_prompt, "choice {index}: prompt in its history");
            let bias: Vec<(i32, f32)> = part(&tables.bias_start, &tables.bias_ids, order)
                .iter()
                .copied()
                .zip(part(&tables.bias_start, &tables.bias_values, order).iter().copied())
                .collect();
            assert_eq!(bias, spec.logit_bias, "choice {index}: bias");
            let mut banned = Vec::new();
            if sampling.min_tokens > 0 {
                let eos = self.config.eos_token_ids.iter().filter(|_| !spec.ignore_eos);
                banned.extend(eos.chain(&spec.stop_token_ids).copied());
            }
            assert_eq!(part(&tables.banned_start, &tables.banned_ids, order), banned, "choice {index}: banned ids");
            let words: Vec<&[i32]> = (tables.bad_words_start[order]..tables.bad_words_start[order + 1])
                .map(|word| part(&tables.bad_word_start, &tables.bad_word_ids, word as usize))
                .collect();
            assert_eq!(words, spec.bad_words_token_ids, "choice {index}: bad words");
        }
        self.check_scalars_by_row(scheduler);
    }

    fn check_scalars_by_row(&self, scheduler: &Scheduler) {
        let (rows, batch) = (scheduler.sampling(), scheduler.batch());
        for (row, choice) in self.rows.iter().enumerate() {
            let Some(choice) = choice.map(|index| &self.choices[index]) else { continue };
            let asked = &choice.spec.sampling;
            let given = [
                rows.temperature[row],
                rows.top_p[row],
                rows.min_p[row],
                rows.presence_penalty[row],
                rows.frequency_penalty[row],
                rows.repetition_penalty[row],
            ];
            let wanted = [
                asked.temperature,
                asked.top_p,
                asked.min_p,
                asked.presence_penalty,
                asked.frequency_penalty,
                asked.repetition_penalty,
            ];
            assert_eq!(given.map(f32::to_bits), wanted.map(f32::to_bits), "row {row} samples otherwise");
            let given = (rows.top_k[row], rows.min_tokens[row], rows.num_logprobs[row]);
            let wanted = (asked.top_k, asked.min_tokens as i32, asked.logprobs.map_or(-1, |count| count as i32));
            assert_eq!(given, wanted, "row {row} samples otherwise");
        }
        let has_extras = |(&row, &position): (&i32, &i32)| {
            let choice = &self.choices[self.rows[row as usize].expect("a sampled row has a choice")];
            let (spec, sampling) = (&choice.spec, &choice.spec.sampling);
            let has_tables = !spec.logit_bias.is_empty() || !spec.bad_words_token_ids.is_empty();
            let is_held = (position as u32) < sampling.min_tokens;
            has_tables || sampling.has_penalty() || is_held || sampling.logprobs.is_some()
        };
        let wanted = batch.sample_rows.iter().zip(&batch.sample_positions).any(has_extras);
        assert_eq!(batch.has_sampling_extras, wanted, "has_sampling_extras");
    }
}
