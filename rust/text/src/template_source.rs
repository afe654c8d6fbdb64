//! Bounds on the source of a template, checked before it is compiled.
//!
//! The compiler works recursively and looks at an expression again at each of its levels, so the length of one expression
//! is what bounds its time and stack. Text, string literals and the separators of lists and maps cost nothing here.

use cbrs_core::{Error, Result};

/// Longest source, in bytes.
pub(crate) const MAX_SOURCE_BYTES: usize = 128 << 10;
/// Names, numbers, operators and brackets in one tag.
const MAX_TAG_TOKENS: usize = 400;
/// `elif` tags: a chain of them nests.
const MAX_ELIF_TAGS: usize = 400;
/// Tokens of a template that is flat: each level of a value needs one at least.
const MAX_FLAT_TOKENS: usize = 1_500;

/// Checks the size of `source` and of its tags. What is no valid template may pass; the compiler refuses it.
///
/// Returns whether the template is flat: nothing that it makes can be nested deeper than it has tokens, because variables
/// of a loop do not outlive an iteration and the depth of calls is bounded. Only a namespace can carry a value onwards.
pub(crate) fn check(source: &str) -> Result<bool> {
    limit("bytes of source", source.len(), MAX_SOURCE_BYTES)?;
    let mut rest = source;
    let mut num_elif = 0;
    let mut num_tokens = 0;
    while let Some(start) = rest.find('{') {
        rest = &rest[start + 1..];
        let (tag, after) = match rest.as_bytes().first() {
            Some(b'#') => (None, rest.find("#}").map_or("", |end| &rest[end..])),
            Some(b'%') => tag(&rest[1..], b'%'),
            Some(b'{') => tag(&rest[1..], b'}'),
            _ => continue,
        };
        rest = after;
        if let Some(tag) = tag {
            limit("tokens in one tag", tag.num_tokens, MAX_TAG_TOKENS)?;
            num_elif += usize::from(tag.is_elif);
            num_tokens += tag.num_tokens;
        }
    }
    limit("elif tags", num_elif, MAX_ELIF_TAGS)?;
    Ok(num_tokens <= MAX_FLAT_TOKENS && !source.contains("namespace"))
}

fn limit(what: &str, got: usize, limit: usize) -> Result<()> {
    if got <= limit {
        return Ok(());
    }
    Err(Error::ChatTemplate { message: format!("{got} {what}, but at most {limit} are allowed") })
}

struct Tag {
    num_tokens: usize,
    is_elif: bool,
}

/// Reads a tag up to its end, `close` followed by a brace; returns what follows. A tag without an end takes everything.
fn tag(body: &str, close: u8) -> (Option<Tag>, &str) {
    let bytes = body.as_bytes();
    let mut tag =
        Tag { num_tokens: 0, is_elif: body.trim_start_matches(['-', '+', ' ', '\t', '\n']).starts_with("elif") };
    let mut at = 0;
    let mut depth = 0usize;
    while at < bytes.len() {
        let byte = bytes[at];
        if depth == 0 && byte == close && bytes.get(at + 1) == Some(&b'}') {
            return (Some(tag), &body[at + 2..]);
        }
        at = match byte {
            b'"' | b'\'' => end_of_string(bytes, at),
            _ if is_word(byte) => at + bytes[at..].iter().take_while(|&&byte| is_word(byte)).count(),
            _ => at + 1,
        };
        match byte {
            b'"' | b'\'' | b',' | b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => tag.num_tokens += 1,
        }
    }
    (Some(tag), "")
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Where the string literal that begins at `start` is over.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != bytes[start] {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn message(source: &str) -> String {
        check(source).unwrap_err().to_string()
    }

    #[test]
    fn long_expressions_are_refused_wherever_they_stand() {
        let sum = "+a".repeat(300);
        for source in [
            format!("{{{{ a{sum} }}}}"),
            format!("{{{{ {{'}}}}': {{}}}} {sum} }}}}"),
            format!("{{# {{{{ #}}{{% if a{sum} %}}{{% endif %}}"),
            format!("text {{ {{%- set a = '%}}' {sum} %}}"),
            format!("{{{{ a{sum}"),
            format!("{{{{ '\\'' {sum} }}}}"),
        ] {
            assert!(message(&source).contains("tokens in one tag, but at most 400"), "{source}");
        }
        assert!(message(&"{% elif a %}".repeat(401)).contains("401 elif tags"));
        assert!(message(&"x".repeat(MAX_SOURCE_BYTES + 1)).contains("bytes of source"));
    }

    #[test]
    fn long_texts_strings_and_tables_are_fine() {
        check(&"text + text ".repeat(5_000)).unwrap();
        check(&format!("{{{{ '{}' }}}}", "a + b {{ ".repeat(5_000))).unwrap();
        check(&format!("{{% set names = {{{}}} %}}", "'en': 'English', ".repeat(2_000))).unwrap();
        check(&"{{ a + b }}{% elif a %}".repeat(400)).unwrap();
        check("{# {{ #} { {").unwrap();
    }

    #[test]
    fn a_template_is_flat_without_namespaces_and_with_few_tokens() {
        assert!(check("{% for m in messages %}{{ m.role + '\n' }}{% endfor %}").unwrap());
        assert!(!check("{% set ns = namespace(x=1) %}").unwrap());
        assert!(!check(&"{%set x=[x]%}".repeat(300)).unwrap());
    }
}
