//! Ragged sampling parameters, handed to the sampler once per row: when a sequence gets it.

/// What the sampler has to know of each new row, aligned with `Batch::new_rows` (`N` rows).
///
/// Each table is a list of offsets `[N+1]` and the values of all rows. A resumed sequence has a new row and brings its history.
#[derive(Debug, Clone, Default)]
pub struct NewRowTables {
    /// `[N+1]` offsets into `history_ids`.
    pub history_start: Vec<i32>,
    /// Prompt and generated tokens known by now; empty unless the request has a penalty or bad words.
    pub history_ids: Vec<i32>,
    /// `[N]` how many of them are the prompt's.
    pub history_num_prompt: Vec<i32>,
    /// `[N+1]` offsets into `bias_ids` and `bias_values`.
    pub bias_start: Vec<i32>,
    /// Ids whose logits are changed.
    pub bias_ids: Vec<i32>,
    /// What is added to them.
    pub bias_values: Vec<f32>,
    /// `[N+1]` offsets into `banned_ids`.
    pub banned_start: Vec<i32>,
    /// Ids that must not come before `min_tokens`: EOS (unless it is ignored) and stop ids.
    pub banned_ids: Vec<i32>,
    /// `[N+1]` offsets into the words, which `bad_word_start` describes.
    pub bad_words_start: Vec<i32>,
    /// `[W+1]` offsets into `bad_word_ids`.
    pub bad_word_start: Vec<i32>,
    /// Tokens of all bad words.
    pub bad_word_ids: Vec<i32>,
}

/// One row's part of the tables.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NewRow<'a> {
    pub(crate) history: &'a [i32],
    pub(crate) num_prompt_tokens: usize,
    pub(crate) bias: &'a [(i32, f32)],
    pub(crate) banned: [&'a [i32]; 2],
    pub(crate) bad_words: &'a [Vec<i32>],
}

impl NewRowTables {
    /// Tables without a row.
    pub(crate) fn new() -> Self {
        let mut this = Self::default();
        this.clear();
        this
    }

    pub(crate) fn clear(&mut self) {
        for start in [
            &mut self.history_start,
            &mut self.bias_start,
            &mut self.banned_start,
            &mut self.bad_words_start,
            &mut self.bad_word_start,
        ] {
            start.clear();
            start.push(0);
        }
        for ids in [
            &mut self.history_ids,
            &mut self.history_num_prompt,
            &mut self.bias_ids,
            &mut self.banned_ids,
            &mut self.bad_word_ids,
        ] {
            ids.clear();
        }
        self.bias_values.clear();
    }

    pub(crate) fn push(&mut self, row: NewRow<'_>) {
        self.history_ids.extend_from_slice(row.history);
        self.history_start.push(self.history_ids.len() as i32);
        self.history_num_prompt.push(row.num_prompt_tokens as i32);
        for &(id, value) in row.bias {
            self.bias_ids.push(id);
            self.bias_values.push(value);
        }
        self.bias_start.push(self.bias_ids.len() as i32);
        for ids in row.banned {
            self.banned_ids.extend_from_slice(ids);
        }
        self.banned_start.push(self.banned_ids.len() as i32);
        for word in row.bad_words {
            self.bad_word_ids.extend_from_slice(word);
            self.bad_word_start.push(self.bad_word_ids.len() as i32);
        }
        self.bad_words_start.push(self.bad_word_start.len() as i32 - 1);
    }
}
