//! Prompts of a file: JSON lines with one of the usual fields, or plain lines.

use std::io::BufRead;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::config::Endpoint;
use crate::error::{Error, Result};
use crate::trace::open;

/// One prompt, ready to be put into a body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prompt {
    /// The JSON of `prompt` (completions) or `messages` (chat).
    pub(crate) json: String,
    /// Output tokens that the line asks for.
    pub(crate) max_tokens: Option<usize>,
}

/// The fields that are read; others (ids, categories) do not matter for a load.
#[derive(Deserialize)]
struct Line {
    prompt: Option<String>,
    question: Option<String>,
    /// The turns of a user; only the first is sent, since the next would need the answer.
    turns: Option<Vec<String>>,
    messages: Option<Value>,
    max_tokens: Option<usize>,
}

/// Reads all prompts of a file: JSON lines if its first line is an object, else a prompt a line.
///
/// # Errors
/// `Unreadable`, `Line`, `Empty`.
pub(crate) fn read_prompts(path: &Path, endpoint: Endpoint) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    let mut is_json = None;
    for (index, line) in open(path)?.lines().enumerate() {
        let line = line.map_err(|source| Error::Unreadable { path: path.to_owned(), source })?;
        if line.trim().is_empty() {
            continue;
        }
        let is_json = *is_json.get_or_insert_with(|| line.trim_start().starts_with('{'));
        let prompt = if is_json {
            parse_line(&line, endpoint)
        } else {
            Ok(Prompt { json: of_text(line.trim_end_matches('\r'), endpoint), max_tokens: None })
        };
        prompts.push(prompt.map_err(|reason| Error::Line { path: path.to_owned(), line: index + 1, reason })?);
    }
    if prompts.is_empty() { Err(Error::Empty { path: path.to_owned() }) } else { Ok(prompts) }
}

fn parse_line(line: &str, endpoint: Endpoint) -> std::result::Result<Prompt, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let max_tokens = line.max_tokens;
    if let Some(messages) = line.messages {
        return match endpoint {
            Endpoint::Chat => Ok(Prompt { json: messages.to_string(), max_tokens }),
            Endpoint::Completions => Err("messages are for the endpoint chat".to_owned()),
        };
    }
    let first_turn = line.turns.and_then(|turns| turns.into_iter().next());
    match line.prompt.or(line.question).or(first_turn) {
        Some(text) => Ok(Prompt { json: of_text(&text, endpoint), max_tokens }),
        None => Err("none of prompt, question, turns and messages".to_owned()),
    }
}

/// The JSON of `prompt` or `messages` for one text.
pub(crate) fn of_text(text: &str, endpoint: Endpoint) -> String {
    let text = Value::from(text);
    match endpoint {
        Endpoint::Completions => text.to_string(),
        Endpoint::Chat => format!(r#"[{{"role":"user","content":{text}}}]"#),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(content: &str, endpoint: Endpoint) -> Result<Vec<Prompt>> {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(content.as_bytes()).expect("it can be written");
        read_prompts(file.path(), endpoint)
    }

    fn json_of(content: &str, endpoint: Endpoint) -> Vec<String> {
        read(content, endpoint).expect("valid").into_iter().map(|prompt| prompt.json).collect()
    }

    #[test]
    fn reads_each_of_the_usual_fields() {
        let lines = "{\"id\": 1, \"prompt\": \"a\\n\"}\n\n{\"question\": \"b\"}\n{\"turns\": [\"c\", \"d\"]}\n";
        assert_eq!(json_of(lines, Endpoint::Completions), [r#""a\n""#, r#""b""#, r#""c""#]);
        assert_eq!(json_of(lines, Endpoint::Chat)[1], r#"[{"role":"user","content":"b"}]"#);
        let messages = r#"{"messages": [{"role": "system", "content": "x"}], "max_tokens": 3}"#;
        let prompts = read(messages, Endpoint::Chat).expect("valid");
        assert_eq!(prompts[0].max_tokens, Some(3));
        assert!(prompts[0].json.contains(r#""role":"system""#));
    }

    #[test]
    fn plain_lines_are_prompts() {
        assert_eq!(json_of("one \"two\"\r\n\nthree\n", Endpoint::Completions), [r#""one \"two\"""#, r#""three""#]);
    }

    #[test]
    fn says_what_is_wrong_where() {
        let message = |content, endpoint| read(content, endpoint).expect_err("it is wrong").to_string();
        assert!(message("", Endpoint::Chat).ends_with("is empty"));
        let nothing = message("{\"prompt\": \"a\"}\n{\"id\": 1}", Endpoint::Chat);
        assert!(nothing.ends_with("line 2: none of prompt, question, turns and messages"), "{nothing}");
        let messages = message("{\"messages\": []}", Endpoint::Completions);
        assert!(messages.ends_with("messages are for the endpoint chat"), "{messages}");
    }
}
