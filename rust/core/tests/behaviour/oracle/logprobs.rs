//! Log-probabilities: which ones a step has to ask for and to tell.

use std::ops::Range;

use cbrs_core::{LogprobRows, Scheduler, StepOutput};

use super::model::{Flying, Model};
use crate::fake::{self, Place, Row};

/// What a step must tell besides its events.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// By index of the event.
    output: Vec<(i32, Row)>,
    /// By request and position.
    prompt: Vec<(u64, i32, Row)>,
}

impl Model {
    /// How many prompt tokens of the request of a choice still lack what was asked for.
    pub(crate) fn num_untold(&self, index: usize) -> usize {
        let choice = &self.choices[index];
        let is_wanted = choice.spec.prompt_logprobs.is_some();
        if is_wanted { choice.num_prompt() - 1 - self.request_of(index).num_told } else { 0 }
    }

    /// Positions in `start..end` whose logits must be asked for.
    pub(crate) fn wanted_logits(&self, index: usize, start: usize, end: usize) -> Range<usize> {
        if self.num_untold(index) == 0 {
            return 0..0;
        }
        let first = start.max(self.request_of(index).num_told);
        first..end.min(self.choices[index].num_prompt() - 1).max(first)
    }

    /// How many of the next `num_tokens` tokens can be scheduled if so many logits are left.
    pub(crate) fn limit_by_logits(&self, index: usize, num_tokens: usize, num_left: usize) -> usize {
        let start = self.choices[index].computed;
        let fits = |num_tokens: &usize| self.wanted_logits(index, start, start + num_tokens).len() <= num_left;
        (0..=num_tokens).rev().find(fits).expect("no token needs no logits")
    }

    /// Checks which logits of prompts a batch asks for.
    pub(crate) fn check_prompt_logits(&self, scheduler: &Scheduler) {
        let batch = scheduler.batch();
        let (mut token, mut wanted) = (0, Vec::new());
        for flying in &self.flight {
            let choice = &self.choices[flying.choice];
            for position in flying.prompt_logits.clone() {
                let num_logprobs = choice.spec.prompt_logprobs.expect("it wants some") as i32;
                let at = token + position - flying.start;
                wanted.push((at as i32, choice.tokens[position + 1], flying.row as i32, num_logprobs));
            }
            token += flying.end - flying.start;
        }
        assert!(wanted.len() <= self.config.max_prompt_logits, "{} prompt tokens need logits", wanted.len());
        let lens = [batch.prompt_target_ids.len(), batch.prompt_rows.len(), batch.num_prompt_logprobs.len()];
        assert_eq!(lens, [batch.prompt_logits_index.len(); 3], "the arrays of prompt logits differ in length");
        let told: Vec<_> = (0..batch.prompt_rows.len())
            .map(|index| {
                let logits = batch.logits_index[batch.prompt_logits_index[index] as usize];
                (logits, batch.prompt_target_ids[index], batch.prompt_rows[index], batch.num_prompt_logprobs[index])
            })
            .collect();
        assert_eq!(told, wanted, "(token, target, row, count) of the prompt logits");
        let num_logits = batch.logits_index.len();
        assert_eq!(num_logits, told.len() + batch.num_samples(), "logits that nobody wants are asked for");
        assert!(batch.logits_index.windows(2).all(|pair| pair[0] < pair[1]), "logits are asked for twice");
    }

    /// A step has computed what it was asked about a prompt.
    pub(crate) fn tell_prompt(&mut self, flying: &Flying) {
        for position in flying.prompt_logits.clone() {
            let choice = &self.choices[flying.choice];
            let (id, num_logprobs) = (choice.id.as_u64(), choice.spec.prompt_logprobs.expect("it wants some"));
            let (position, token) = (position + 1, choice.tokens[position + 1]);
            let row = fake::row(id, Place::Prompt { position }, token, num_logprobs as usize);
            self.told.prompt.push((id, position as i32, row));
            self.seen.prompt_logprobs += 1;
            self.seen.resumed_prompt_logprobs += u64::from(choice.lost > 0 || choice.number > 0);
            let request = choice.request;
            self.requests[request].num_told += 1;
            assert_eq!(self.requests[request].num_told, position, "a prompt's logits are asked for out of order");
        }
    }

    /// The next event brings a token.
    pub(crate) fn tell_output(&mut self, index: usize, token: i32) {
        let choice = &self.choices[index];
        if let Some(num_logprobs) = choice.spec.sampling.logprobs {
            let place = Place::Output { choice: choice.number as i32, position: choice.num_output() };
            let row = fake::row(choice.id.as_u64(), place, token, num_logprobs as usize);
            self.told.output.push((self.events.len() as i32, row));
        }
    }

    /// Compares what a step told with what it had to tell.
    pub(crate) fn check_told(&mut self, output: &StepOutput) {
        let wanted = std::mem::take(&mut self.told);
        let told: Vec<_> = output.logprob_events.iter().copied().zip(rows(&output.logprobs)).collect();
        assert_eq!(told, wanted.output, "the log-probabilities of tokens are wrong");
        let places = output.prompt_logprob_requests.iter().zip(&output.prompt_logprob_positions);
        let told: Vec<_> = places
            .zip(rows(&output.prompt_logprobs))
            .map(|((&request, &position), row)| (request, position, row))
            .collect();
        assert_eq!(told, wanted.prompt, "the log-probabilities of prompts are wrong");
        let lens = [output.logprobs.len(), output.prompt_logprobs.len(), output.prompt_logprob_positions.len()];
        let wanted = [output.logprob_events.len(), told.len(), output.prompt_logprob_requests.len()];
        assert_eq!(lens, wanted, "arrays of log-probabilities differ in length");
    }
}

fn rows(rows: &LogprobRows) -> Vec<Row> {
    let row = |index| {
        let (token_ids, values, rank) = rows.row(index);
        Row { token_ids: token_ids.to_vec(), values: values.to_vec(), rank }
    };
    (0..rows.len()).map(row).collect()
}
