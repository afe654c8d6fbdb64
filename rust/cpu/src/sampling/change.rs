//! Bias, penalties and bans: a few logits of a row are changed, in the order that vLLM has.
//!
//! Invariants:
//! 1. A logit is changed once, with one rounding per operation in f32: bias; repetition; frequency; presence.
//! 2. A finite logit stays finite, minus infinity stays minus infinity; a banned one becomes it.

/// What happens to one row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Change<'a> {
    pub(super) bias_ids: &'a [i32],
    pub(super) bias_values: &'a [f32],
    pub(super) presence: f32,
    pub(super) frequency: f32,
    pub(super) repetition: f32,
    /// Prompt, then output.
    pub(super) history: &'a [i32],
    pub(super) num_prompt: usize,
    pub(super) banned: &'a [i32],
}

/// The id is in the history.
const SEEN: u32 = 1;
/// Added for each time that it was generated.
const GENERATED: u32 = 2;

impl Change<'_> {
    pub(super) fn has_effect(&self) -> bool {
        self.has_penalty() || !self.bias_ids.is_empty() || !self.banned.is_empty()
    }

    fn has_penalty(&self) -> bool {
        let is_neutral = self.presence == 0.0 && self.frequency == 0.0 && (self.repetition - 1.0).abs() == 0.0;
        !is_neutral && !self.history.is_empty()
    }

    /// Changes `scores`; `marks` has any length and is all 0 before and after.
    pub(super) fn apply(&self, scores: &mut [f32], marks: &mut Vec<u32>) {
        for (&id, value) in self.bias_ids.iter().zip(self.bias_values) {
            if let Some(score) = scores.get_mut(id as usize) {
                *score += value;
            }
        }
        if self.has_penalty() {
            marks.resize(scores.len(), 0);
            self.penalise(scores, marks);
        }
        for &id in self.banned {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    fn penalise(&self, scores: &mut [f32], marks: &mut [u32]) {
        for (number, &id) in self.history.iter().enumerate() {
            if let Some(mark) = marks.get_mut(id as usize) {
                *mark = (*mark | SEEN) + if number < self.num_prompt { 0 } else { GENERATED };
            }
        }
        for &id in self.history {
            let id = id as usize;
            // An id outside the vocabulary, or one that comes again.
            let Some(mark) = marks.get_mut(id).map(std::mem::take).filter(|&mark| mark != 0) else { continue };
            if scores[id].is_finite() {
                scores[id] = self.penalised(scores[id], mark / GENERATED);
            }
        }
    }

    fn penalised(&self, score: f32, num_generated: u32) -> f32 {
        let repeated = if score > 0.0 { score / self.repetition } else { score * self.repetition };
        let is_present = if num_generated > 0 { 1.0 } else { 0.0 };
        let reduced = repeated - self.frequency * num_generated as f32 - self.presence * is_present;
        reduced.clamp(f32::MIN, f32::MAX)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "each number has one right value")]
mod tests {
    use super::*;

    const MIN: f32 = f32::NEG_INFINITY;

    fn apply(change: Change<'_>, scores: &[f32]) -> Vec<f32> {
        let (mut scores, mut marks) = (scores.to_vec(), Vec::new());
        change.apply(&mut scores, &mut marks);
        assert!(marks.iter().all(|&mark| mark == 0));
        scores
    }

    #[test]
    fn repetition_sees_the_prompt_and_the_others_only_the_output() {
        let change = Change {
            presence: 0.5,
            frequency: 0.25,
            repetition: 2.0,
            history: &[0, 0, 1, 1, 1, 2, 2],
            num_prompt: 4,
            ..Change::default()
        };
        assert_eq!(apply(change, &[4.0, -1.0, 8.0, 3.0]), [2.0, -2.0 - 0.25 - 0.5, 4.0 - 0.5 - 0.5, 3.0]);
    }

    #[test]
    fn what_overflows_stays_finite_and_what_is_impossible_stays_so() {
        let change = Change { repetition: 1e-38, history: &[0, 1, 2], num_prompt: 3, ..Change::default() };
        assert_eq!(apply(change, &[1e30, MIN, 0.0, 1.0]), [f32::MAX, MIN, 0.0, 1.0]);
        let change = Change { repetition: 3e38, history: &[0], num_prompt: 1, ..Change::default() };
        assert_eq!(apply(change, &[-1e30]), [f32::MIN]);
    }

    #[test]
    fn a_ban_stands_whatever_the_bias_and_unknown_ids_are_ignored() {
        let change = Change {
            bias_ids: &[0, 1, 9, -1],
            bias_values: &[100.0, -1.5, 3.0, 3.0],
            repetition: 1.0,
            presence: 1.0,
            history: &[7, -1],
            banned: &[0, 5, -2],
            ..Change::default()
        };
        assert!(change.has_effect());
        assert_eq!(apply(change, &[1.0, 2.0, 3.0]), [MIN, 0.5, 3.0]);
    }
}
