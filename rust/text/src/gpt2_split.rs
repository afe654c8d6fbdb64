//! How GPT-2's family cuts a text into words before it is tokenized, without a regular expression:
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
//!
//! What a character is, the same tables say that the regular expression uses.

use std::sync::LazyLock;

use regex_syntax::hir::{Class as HirClass, ClassUnicode, HirKind};

const CONTRACTIONS: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

/// Classes of the characters below U+10000, one byte each; ranges tell about the rest.
struct Classes {
    table: Vec<Class>,
    rest: Vec<(u32, u32, Class)>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::new);

impl Classes {
    fn new() -> Self {
        let mut this = Self { table: vec![Class::Other; 1 << 16], rest: Vec::new() };
        for (pattern, class) in [(r"\p{L}", Class::Letter), (r"\p{N}", Class::Number), (r"\s", Class::Space)] {
            for range in unicode_class(pattern).ranges() {
                let (start, end) = (u32::from(range.start()), u32::from(range.end()));
                for code in start..=end.min(0xFFFF) {
                    this.table[code as usize] = class;
                }
                if end > 0xFFFF {
                    this.rest.push((start, end, class));
                }
            }
        }
        this.rest.sort_unstable_by_key(|&(start, _, _)| start);
        this
    }

    fn of(&self, character: char) -> Class {
        let code = u32::from(character);
        if let Some(&class) = self.table.get(code as usize) {
            return class;
        }
        let after = self.rest.partition_point(|&(start, _, _)| start <= code);
        let range = self.rest[..after].last().filter(|&&(_, end, _)| code <= end);
        range.map_or(Class::Other, |&(_, _, class)| class)
    }
}

fn unicode_class(pattern: &str) -> ClassUnicode {
    let parsed = regex_syntax::parse(pattern).expect("the pattern is valid");
    match parsed.into_kind() {
        HirKind::Class(HirClass::Unicode(class)) => class,
        _ => unreachable!("the pattern is a class of characters"),
    }
}

/// Cuts a text into words; they joined are the text.
pub(crate) struct Words<'a> {
    classes: &'static Classes,
    rest: &'a str,
}

impl<'a> Words<'a> {
    pub(crate) fn of(text: &'a str) -> Self {
        Self { classes: &CLASSES, rest: text }
    }

    /// Class of the character at `at`, and where the next one begins.
    fn at(&self, at: usize) -> Option<(Class, usize)> {
        let byte = *self.rest.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.classes.table[byte as usize], at + 1));
        }
        let character = self.rest[at..].chars().next()?;
        Some((self.classes.of(character), at + character.len_utf8()))
    }

    /// Where the characters of one class that begin at `at` end.
    fn end_of_run(&self, mut at: usize, class: Class) -> usize {
        while let Some((next, after)) = self.at(at).filter(|&(next, _)| next == class) {
            debug_assert_eq!(next, class, "the filter says so");
            at = after;
        }
        at
    }

    /// Where the first word ends.
    fn first_end(&self) -> usize {
        let bytes = self.rest.as_bytes();
        if bytes.first() == Some(&b'\'')
            && let Some(contraction) = CONTRACTIONS.iter().find(|contraction| bytes.starts_with(contraction))
        {
            return contraction.len();
        }
        // A space belongs to the word that follows.
        let start = usize::from(bytes.first() == Some(&b' '));
        if let Some((class, after)) = self.at(start).filter(|&(class, _)| class != Class::Space) {
            return self.end_of_run(after, class);
        }
        let end = self.end_of_run(0, Class::Space);
        if end == bytes.len() {
            return end;
        }
        // The last space is left to what follows, unless it is the only one.
        let last = self.rest[..end].char_indices().next_back().map_or(0, |(at, _)| at);
        if last > 0 { last } else { end }
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (word, rest) = self.rest.split_at(self.first_end());
        self.rest = rest;
        Some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_as_the_expression_says() {
        let words = |text| Words::of(text).collect::<Vec<_>>();
        assert_eq!(words("Hello world"), ["Hello", " world"]);
        assert_eq!(words("they'll  've\n\n x"), ["they", "'ll", " ", " '", "ve", "\n\n", " x"]);
        assert_eq!(words("a   b\t\tc "), ["a", "  ", " b", "\t", "\t", "c", " "]);
        assert_eq!(words("x1²½ \u{3000}é𝔘🚀!"), ["x", "1²½", " ", "\u{3000}", "é𝔘", "🚀!"]);
        assert!(words("").is_empty());
    }

    #[test]
    fn characters_beyond_the_table_are_found_in_their_ranges() {
        for (character, class) in [
            ('\u{10000}', Class::Letter),
            ('\u{1D7CE}', Class::Number),
            ('\u{1F680}', Class::Other),
            ('\u{2FA1D}', Class::Letter),
            ('\u{2FA1E}', Class::Other),
            ('\u{10FFFF}', Class::Other),
            ('\u{2028}', Class::Space),
            ('\u{FFFF}', Class::Other),
        ] {
            assert_eq!(CLASSES.of(character), class, "{character:?}");
        }
    }
}
