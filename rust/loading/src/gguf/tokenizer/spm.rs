//! The `llama` tokenizer model: SentencePiece BPE with byte fallback.
//!
//! SentencePiece merges the pair whose joined piece has the best score and stores no merges. The same
//! ids come from ordinary BPE with one merge for every way to cut a piece into two pieces, ranked by
//! the score of the joined piece.

use serde_json::{Value, json};

use super::super::GgufFile;
use super::json::{Bpe, BpeOptions, TokenizerJson};
use super::vocabulary::{TokenKind, Vocabulary};
use super::{ADD_SPACE_PREFIX_KEY, SCORES_KEY, TOKENS_KEY, flag, special_token_id, tokenizer};
use crate::limits::{MAX_MERGES, MAX_PIECE_BYTES};
use crate::{ErrorKind, Result};

/// What stands for a space inside a piece.
const SPACE: &str = "\u{2581}";

/// Builds the tokenizer.
///
/// # Errors
/// `Missing` (scores), `AboveLimit` (a piece that is too long).
pub(super) fn build<'a>(file: &'a GgufFile, vocabulary: &'a Vocabulary<'a>) -> Result<TokenizerJson<'a>> {
    let num_bytes = vocabulary.kinds.iter().filter(|&&kind| kind == TokenKind::Byte).count();
    let has_unknown = special_token_id(file, "unk");
    let options = BpeOptions {
        unk_token: has_unknown.map(|id| vocabulary.tokens[id as usize]),
        byte_fallback: num_bytes == 256,
        ignore_merges: false,
    };
    let model = Bpe::new(options, &vocabulary.tokens, merges(file, vocabulary)?);
    let adds_space = flag(file, ADD_SPACE_PREFIX_KEY) != Some(false);
    Ok(tokenizer(normalizer(adds_space), Value::Null, decoder(adds_space), model))
}

fn normalizer(adds_space: bool) -> Value {
    let prepend = json!({"type": "Prepend", "prepend": SPACE});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    if adds_space { json!({"type": "Sequence", "normalizers": [prepend, replace]}) } else { replace }
}

fn decoder(adds_space: bool) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if adds_space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

/// One way to make a piece out of two.
struct Merge<'a> {
    score: f32,
    id: u32,
    parts: (&'a str, &'a str),
    part_ids: (u32, u32),
}

/// Rebuilds the merges, best score first; equal scores in the order of the ids.
fn merges<'a>(file: &GgufFile, vocabulary: &Vocabulary<'a>) -> Result<Vec<(&'a str, &'a str)>> {
    let scores = vocabulary.scores.as_deref().ok_or_else(|| file.error(SCORES_KEY, ErrorKind::Missing))?;
    let mut merges = Vec::new();
    let pieces = (0..).zip(&vocabulary.tokens).zip(scores).zip(&vocabulary.kinds);
    for (((id, &piece), &score), &kind) in pieces {
        if kind != TokenKind::Normal {
            continue;
        }
        ErrorKind::check_limit(piece.len() as u64, MAX_PIECE_BYTES)
            .map_err(|kind| file.error(&format!("{TOKENS_KEY}[{id}]"), kind))?;
        for (at, _) in piece.char_indices().skip(1) {
            let parts = piece.split_at(at);
            if let (Some(left), Some(right)) = (normal(vocabulary, parts.0), normal(vocabulary, parts.1)) {
                merges.push(Merge { score, id, parts, part_ids: (left, right) });
            }
        }
        ErrorKind::check_limit(merges.len() as u64, MAX_MERGES).map_err(|kind| file.error(TOKENS_KEY, kind))?;
    }
    merges.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| (a.id, a.part_ids).cmp(&(b.id, b.part_ids))));
    Ok(merges.into_iter().map(|merge| merge.parts).collect())
}

/// Finds the id of a piece that merges may use.
fn normal(vocabulary: &Vocabulary<'_>, piece: &str) -> Option<u32> {
    let id = *vocabulary.ids.get(piece)?;
    (vocabulary.kinds[id as usize] == TokenKind::Normal).then_some(id)
}
