//! The bodies of the requests.
//!
//! Each body follows from the seed and the index of its request alone. As many as fit into
//! [`PREPARED_BYTES`] are written before the clock starts; the rest are written when they are due.

use std::fmt::Write;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::config::{Config, Endpoint};
use crate::error::Result;
use crate::prompts::{Prompt, of_text, read_prompts};
use crate::random::Random;
use crate::trace::Row;

/// Memory for bodies that are written beforehand.
const PREPARED_BYTES: usize = 256 << 20;
/// Bodies written beforehand if only the duration of the load is known.
const PREPARED_REQUESTS: u64 = 16_384;

const DEFAULT_PROMPT_TOKENS: usize = 128;
const DEFAULT_OUTPUT_TOKENS: usize = 64;
/// Many vocabularies keep their special tokens below this id.
const FIRST_ID: u64 = 256;

const RANDOM: u64 = 0x71;
const WARM_UP: u64 = 0x72;
const BLOCK: u64 = 0x73;

/// Common words, each of which most tokenizers take for one token.
const WORDS: [&str; 48] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
];

#[derive(Debug)]
enum Prompts {
    Random,
    Trace(Vec<Row>),
    File(Vec<Prompt>),
}

/// All bodies of a load.
#[derive(Debug)]
pub(crate) struct Workload {
    prompts: Prompts,
    endpoint: Endpoint,
    /// The fields that all requests share: an object without its closing brace.
    shared: String,
    has_prompt: bool,
    has_max_tokens: bool,
    prompt_tokens: Option<usize>,
    output_tokens: Option<usize>,
    length_scale: f64,
    vocab_size: u64,
    seed: u64,
    prepared: Vec<Bytes>,
}

impl Workload {
    /// Reads the prompts; writes no body yet.
    pub(crate) fn new(config: &Config, trace: Option<Vec<Row>>) -> Result<Self> {
        let prompts = match (&config.prompts, trace) {
            (Some(path), _) => Prompts::File(read_prompts(path, config.endpoint)?),
            (None, Some(rows)) => Prompts::Trace(rows),
            (None, None) => Prompts::Random,
        };
        let ignore_eos = config.ignore_eos.unwrap_or(!matches!(prompts, Prompts::File(_)));
        let fields = shared_fields(config, ignore_eos);
        let has = |name: &str| fields.contains_key(name);
        let mut shared = Value::Object(fields.clone()).to_string();
        shared.pop();
        Ok(Self {
            prompts,
            endpoint: config.endpoint,
            has_prompt: has(prompt_field(config.endpoint)),
            has_max_tokens: has("max_tokens") || has("max_completion_tokens"),
            shared,
            prompt_tokens: config.prompt_tokens,
            output_tokens: config.output_tokens,
            length_scale: config.length_scale,
            vocab_size: config.vocab_size as u64,
            seed: config.seed,
            prepared: Vec::new(),
        })
    }

    /// Writes the first bodies, as many as memory is set aside for.
    pub(crate) fn prepare(&mut self, num_requests: Option<u64>) {
        let mut bytes = 0;
        for index in 0..num_requests.unwrap_or(PREPARED_REQUESTS) {
            let body = self.write(index, RANDOM);
            bytes += body.len();
            if bytes > PREPARED_BYTES {
                break;
            }
            self.prepared.push(body);
        }
    }

    /// The body of a request.
    pub(crate) fn body(&self, index: u64) -> Bytes {
        let prepared = usize::try_from(index).ok().and_then(|index| self.prepared.get(index));
        prepared.cloned().unwrap_or_else(|| self.write(index, RANDOM))
    }

    /// The body of a warm-up request: of the same kind, with another random prompt.
    pub(crate) fn warm_up_body(&self, index: u64) -> Bytes {
        self.write(index, WARM_UP)
    }

    fn write(&self, index: u64, stream: u64) -> Bytes {
        let (prompt, max_tokens) = match &self.prompts {
            Prompts::File(prompts) => {
                let prompt = &prompts[(index % prompts.len() as u64) as usize];
                (prompt.json.clone(), prompt.max_tokens.or(self.output_tokens).unwrap_or(DEFAULT_OUTPUT_TOKENS))
            }
            Prompts::Random => {
                let mut random = Random::new(self.seed, stream, index);
                let length = self.prompt_tokens.unwrap_or(DEFAULT_PROMPT_TOKENS);
                let symbols = (0..length).map(|_| random.next_u64());
                (self.random_prompt(length, symbols), self.output_tokens.unwrap_or(DEFAULT_OUTPUT_TOKENS))
            }
            Prompts::Trace(rows) => {
                let row = &rows[(index % rows.len() as u64) as usize];
                let max_tokens = self.scaled(row.output_length, self.output_tokens);
                (self.trace_prompt(row, index, stream), max_tokens)
            }
        };
        let mut body = self.shared.clone();
        if !self.has_max_tokens {
            let _ = write!(body, r#","max_tokens":{max_tokens}"#);
        }
        if !self.has_prompt {
            let _ = write!(body, r#","{}":{prompt}"#, prompt_field(self.endpoint));
        }
        body.push('}');
        Bytes::from(body)
    }

    /// A prompt of the row's length; equal block ids give equal blocks, blocks without an id are random.
    fn trace_prompt(&self, row: &Row, index: u64, stream: u64) -> String {
        let length = self.scaled(row.input_length, self.prompt_tokens);
        let block = ((row.hash_block as f64 * self.length_scale).round() as usize).max(1);
        let mut random = Random::new(self.seed, stream, index);
        let symbols = (0..length).map(|position| {
            if position % block == 0
                && let Some(&id) = row.hash_ids.get(position / block)
            {
                random = Random::new(self.seed, BLOCK, id);
            }
            random.next_u64()
        });
        self.random_prompt(length, symbols)
    }

    fn scaled(&self, length: usize, most: Option<usize>) -> usize {
        let length = ((length as f64 * self.length_scale).round() as usize).max(1);
        length.min(most.unwrap_or(usize::MAX))
    }

    /// Token ids, or for chat words in one message.
    fn random_prompt(&self, length: usize, symbols: impl Iterator<Item = u64>) -> String {
        let mut text = String::with_capacity(length * 6 + 2);
        if self.endpoint == Endpoint::Chat {
            for symbol in symbols {
                text.push_str(WORDS[(symbol % WORDS.len() as u64) as usize]);
                text.push(' ');
            }
            return of_text(text.trim_end(), Endpoint::Chat);
        }
        let first = if self.vocab_size > 2 * FIRST_ID { FIRST_ID } else { 0 };
        text.push('[');
        for symbol in symbols {
            let _ = write!(text, "{},", first + symbol % (self.vocab_size - first));
        }
        text.pop();
        text.push(']');
        text
    }
}

const fn prompt_field(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Completions => "prompt",
        Endpoint::Chat => "messages",
    }
}

fn shared_fields(config: &Config, ignore_eos: bool) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("model".to_owned(), json!(config.model));
    fields.insert("temperature".to_owned(), json!(0));
    fields.insert("stream".to_owned(), json!(config.stream));
    if config.stream {
        fields.insert("stream_options".to_owned(), json!({"include_usage": true}));
    }
    if ignore_eos {
        fields.insert("ignore_eos".to_owned(), json!(true));
    }
    fields.extend(config.extra_body.clone());
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(more: &str, trace: Option<Vec<Row>>) -> Workload {
        let text = format!(r#"{{"url": "http://h:1", "model": "m"{more}}}"#);
        Workload::new(&Config::from_json(&text).expect("valid"), trace).expect("valid")
    }

    fn parse(body: &Bytes) -> Value {
        serde_json::from_slice(body).expect("a body is JSON")
    }

    fn ids(body: &Bytes) -> Vec<u64> {
        serde_json::from_value(parse(body)["prompt"].clone()).expect("token ids")
    }

    #[test]
    fn a_random_prompt_has_its_length_and_ids_of_the_vocabulary() {
        let workload = workload(r#", "prompt_tokens": 2000, "output_tokens": 7, "vocab_size": 600"#, None);
        let body = parse(&workload.body(0));
        assert_eq!(
            (&body["max_tokens"], &body["stream"], &body["ignore_eos"]),
            (&json!(7), &json!(true), &json!(true))
        );
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
        let ids = ids(&workload.body(0));
        assert_eq!(ids.len(), 2000);
        assert_eq!((ids.iter().min(), ids.iter().max()), (Some(&256), Some(&599)));
    }

    #[test]
    fn prepared_bodies_are_those_written_when_due() {
        let mut workload = workload("", None);
        let written: Vec<Bytes> = (0..5).map(|index| workload.body(index)).collect();
        workload.prepare(Some(3));
        assert_eq!(workload.prepared.len(), 3);
        assert_eq!((0..5).map(|index| workload.body(index)).collect::<Vec<_>>(), written);
        assert_ne!(written[0], written[1]);
        assert_ne!(workload.warm_up_body(0), written[0]);
    }

    #[test]
    fn chat_gets_words_in_one_message() {
        let body = parse(&workload(r#", "endpoint": "chat", "prompt_tokens": 9, "stream": false"#, None).body(3));
        let content = body["messages"][0]["content"].as_str().expect("a text");
        assert_eq!(content.split(' ').count(), 9);
        assert!(body.get("stream_options").is_none());
    }

    #[test]
    fn extra_fields_replace_those_of_the_load() {
        let workload = workload(r#", "extra_body": {"max_tokens": 3, "prompt": "x", "user": "u", "zz": {}}"#, None);
        let body = parse(&workload.body(0));
        assert_eq!((&body["max_tokens"], &body["prompt"], &body["zz"]), (&json!(3), &json!("x"), &json!({})));
    }

    #[test]
    fn equal_block_ids_give_equal_tokens() {
        let row = |hash_ids: &[u64]| Row {
            timestamp_ms: None,
            input_length: 1000,
            output_length: 100,
            hash_ids: hash_ids.to_vec(),
            hash_block: 512,
        };
        let workload = workload(
            r#", "length_scale": 0.0625, "output_tokens": 5"#,
            Some(vec![row(&[1, 2]), row(&[1, 3]), row(&[])]),
        );
        let bodies: Vec<Bytes> = (0..4).map(|index| workload.body(index)).collect();
        let [first, second, third, fourth] = [0, 1, 2, 3].map(|index| ids(&bodies[index]));
        assert_eq!((first.len(), third.len()), (63, 63));
        assert_eq!(first[..32], second[..32]);
        assert_ne!(first[32..], second[32..]);
        assert_ne!(first[..32], third[..32]);
        assert_eq!(first, fourth);
        assert_eq!(parse(&bodies[0])["max_tokens"], json!(5));
    }
}
