//! Which pre-tokenizer a name in `tokenizer.ggml.pre` stands for.
//!
//! A pre-tokenizer cuts the text into words before merges are applied. The names and the cuts belong
//! to the models: each regular expression here is the one of the model family that introduced it.
//! Several names stand for the same cut.
//!
//! Invariant: [`by_name`] answers only for names whose cut is known exactly.

use serde_json::{Value, json};

/// The name that a file without one is read as.
///
/// Files from before the key existed say nothing; most of them hold GPT-2's tokenizer.
pub(super) const DEFAULT: &str = "default";

/// GPT-2: contractions, words, numbers and punctuation, each with the space before it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Llama 3: at most three digits a word, line ends stay with the punctuation before them.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2: as Llama 3 with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 3.5: as Qwen 2, combining marks stay with their letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral Nemo: words change at capitals, single digits.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Falcon: punctuation and these signs apart from everything else.
const FALCON_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
/// Chinese characters, Japanese kana and Hangul, as the DeepSeek models delimit them.
const DEEPSEEK_CJK: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";
const DEEPSEEK_PUNCTUATION: &str = "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+";
/// The letters with case, as the first DeepSeek models list them.
const DEEPSEEK_LETTERS: &str = "\\s?[\
    A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\
    \u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\
    \u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\
    \u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\
    \u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\
    \u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\
    \u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\
    \u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\
    \u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\
    \u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\
    \u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\
    \u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\
    \u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\
    \u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\
    \u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\
    \u{1e900}-\u{1e943}]+";

/// A pre-tokenizer and what a tokenizer with it does besides.
#[derive(Clone, Debug)]
pub(super) struct Pre {
    /// As in a `tokenizer.json`.
    pub(super) json: Value,
    /// Whether the text is composed (NFC) first.
    pub(super) composes: bool,
    /// Whether a word that is a token is taken whole, without merges.
    pub(super) ignores_merges: bool,
    /// Whether BOS is added unless the file says otherwise.
    pub(super) adds_bos: bool,
}

impl Pre {
    fn new(json: Value) -> Self {
        Self { json, composes: false, ignores_merges: false, adds_bos: false }
    }

    /// Says whether the whole cut is GPT-2's.
    pub(super) fn is_plain_byte_level(&self) -> bool {
        self.json["type"] == "ByteLevel"
    }
}

/// Returns the pre-tokenizer with this name, `None` when it is not known.
pub(super) fn by_name(name: &str) -> Option<Pre> {
    Some(match name {
        DEFAULT | "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" => Pre::new(byte_level(false, true)),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
            Pre::new(sequence(&[json!({"type": "Digits", "individual_digits": true}), byte_level(false, true)]))
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" => {
            Pre { ignores_merges: true, adds_bos: true, ..splits(&[LLAMA3]) }
        }
        "dbrx" | "smaug-bpe" => splits(&[LLAMA3]),
        "qwen2" | "deepseek-r1-qwen" => Pre { composes: true, ..splits(&[QWEN2]) },
        "qwen35" => splits(&[QWEN35]),
        "tekken" => Pre { ignores_merges: true, adds_bos: true, ..splits(&[TEKKEN]) },
        "falcon" => splits(&[FALCON_PUNCTUATION, GPT2, "[0-9][0-9][0-9]"]),
        "deepseek-llm" => splits(&["[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", DEEPSEEK_CJK, r"\p{N}+"]),
        "deepseek-coder" => splits(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
        _ => return None,
    })
}

/// Cuts at every match of each expression in turn, then maps bytes to letters.
fn splits(expressions: &[&str]) -> Pre {
    let split = |expression: &&str| {
        let pattern = json!({"Regex": expression});
        json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
    };
    let steps: Vec<Value> = expressions.iter().map(split).chain([byte_level(false, false)]).collect();
    Pre::new(sequence(&steps))
}

fn sequence(steps: &[Value]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// The mapping of bytes to letters, alone or behind GPT-2's cut.
pub(super) fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": true,
        "use_regex": use_regex,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_names_have_a_pre_tokenizer() {
        for name in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-llm", "falcon"] {
            assert!(by_name(name).is_some(), "{name}");
        }
        for name in ["", "GPT-2", "smollm2", "llama"] {
            assert!(by_name(name).is_none(), "{name}");
        }
    }
}
