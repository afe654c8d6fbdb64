//! Answers whole and in chunks say the same.
#![allow(clippy::unwrap_used)]

use cbrs_core::{FinishReason, LogprobRows};
use cbrs_text::{End, TokenIds, Tokenizer, Update};
use serde_json::{Value, json};

use super::{Answer, ChatAnswer, CompletionAnswer, Echo, Outline, TokenTexts, Usage, write};

fn outline(num_prompts: usize, n: usize, logprobs: Option<u32>) -> Outline {
    Outline {
        id: "id\"1".to_owned(),
        created: 7,
        model: "m".to_owned(),
        num_prompts,
        n,
        logprobs,
        prompt_logprobs: None,
        has_token_ids: true,
        has_usage: true,
        texts: TokenTexts::new(None),
    }
}

fn update(choice: u32, text: &str, token: i32, is_last: bool) -> Update {
    let mut logprobs = LogprobRows::default();
    logprobs.push(&[token, token, 9], &[-0.5, -0.5, f32::NEG_INFINITY], 1);
    Update {
        request_id: 1,
        index: 0,
        choice,
        text: text.into(),
        token_ids: TokenIds::from_slice(&[token]),
        logprobs: Some(Box::new(logprobs)),
        end: is_last.then_some(End {
            finish_reason: FinishReason::Length,
            stop_reason: None,
            error: None,
            num_tokens: 1,
        }),
        prompt_token_ids: None,
        prompt_logprobs: None,
        num_cached_tokens: 0,
        arrival_ns: 0,
        first_scheduled_ns: None,
        first_token_ns: None,
        time_ns: 0,
        is_last,
    }
}

/// The same updates twice: read whole, and as the events of a stream.
fn both(make: impl Fn() -> Box<dyn Answer>, updates: &[(usize, Update)]) -> (Value, Vec<Value>) {
    let (mut whole, mut streamed) = (make(), make());
    let (mut usage, mut events) = (Usage::default(), Vec::new());
    for (prompt, update) in updates {
        usage.add(update);
        whole.add(*prompt, update.clone());
        let choice = streamed.add(*prompt, update.clone());
        streamed.write_chunk(choice, &mut events);
    }
    streamed.write_usage_chunk(&usage, &mut events);
    let mut out = Vec::new();
    whole.write_whole(&usage, &mut out);
    let events = String::from_utf8(events).unwrap();
    let events = events.strip_suffix("\n\n").unwrap().split("\n\n");
    let chunks = events.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap());
    (serde_json::from_slice(&out).unwrap(), chunks.collect())
}

fn with_prompt(update: Update, prompt: &[i32]) -> Update {
    Update { prompt_token_ids: Some(prompt.to_vec()), num_cached_tokens: 1, ..update }
}

#[test]
fn a_chat_whole_and_in_chunks() {
    let updates = [
        (0, with_prompt(update(0, "a\n", 1, false), &[5, 6])),
        (0, update(1, "\"b", 2, true)),
        (0, update(0, "", 3, true)),
    ];
    let (whole, chunks) = both(|| Box::new(ChatAnswer::new(outline(1, 2, Some(2)))), &updates);
    assert_eq!(
        (&whole["id"], &whole["object"], &whole["created"]),
        (&json!("id\"1"), &json!("chat.completion"), &json!(7))
    );
    assert_eq!(whole["prompt_token_ids"], json!([5, 6]));
    assert_eq!(whole["choices"][0]["message"]["content"], "a\n");
    assert_eq!(whole["choices"][0]["token_ids"], json!([1, 3]));
    assert_eq!(whole["choices"][1]["message"]["content"], "\"b");
    let usage = json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1}});
    assert_eq!(whole["usage"], usage);
    assert_eq!(chunks.last().unwrap()["usage"], usage);
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let told = chunks.iter().filter(|chunk| chunk.get("prompt_token_ids").is_some()).count();
    assert_eq!(told, 1);
    for index in 0..2 {
        let mine = || chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).filter(|c| c["index"] == index);
        let text: String = mine().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], text);
        let logprobs: Vec<&Value> =
            mine().filter_map(|choice| choice["logprobs"]["content"].as_array()).flatten().collect();
        assert_eq!(whole["choices"][index]["logprobs"]["content"], json!(logprobs));
        assert_eq!(mine().filter(|choice| !choice["finish_reason"].is_null()).count(), 1);
    }
    let entry = &whole["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&entry["token"], &entry["bytes"]), (&json!("token_id:1"), &Value::Null));
    assert_eq!(entry["top_logprobs"][1]["logprob"], json!(-9999.0), "minus infinity is a number");
}

#[test]
fn a_completion_whole_and_in_chunks() {
    let updates = [
        (1, with_prompt(update(0, "b", 1, false), &[5])),
        (0, with_prompt(update(0, "a", 2, true), &[6, 7])),
        (1, update(0, "c", 3, true)),
    ];
    let (whole, chunks) = both(|| Box::new(CompletionAnswer::new(outline(2, 1, Some(1)), None)), &updates);
    assert_eq!(whole["object"], "text_completion");
    let texts: Vec<&Value> = whole["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a", "bc"]);
    assert_eq!(whole["choices"][1]["prompt_token_ids"], json!([5]));
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
    assert_eq!(chunks.len(), 4);
    let of_second: Vec<&Value> = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == 1).collect();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let joined: Vec<&Value> =
            of_second.iter().flat_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array().unwrap()).collect();
        assert_eq!(whole["choices"][1]["logprobs"][name], json!(joined));
    }
    assert_eq!(whole["choices"][1]["logprobs"]["text_offset"], json!([0, 0]), "without a tokenizer there is no text");
    assert_eq!(chunks[0]["usage"], Value::Null);
}

#[test]
fn strings_are_escaped_and_numbers_finite() {
    let mut out = Vec::new();
    write::string(&mut out, "\"\\\u{0}\u{1f600}\u{2028}");
    assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), "\"\\\u{0}\u{1f600}\u{2028}");
    for (value, expected) in [(f32::NEG_INFINITY, -9999.0), (f32::NAN, -9999.0), (-1e30, -9999.0), (-0.5, -0.5)] {
        out.clear();
        write::logprob(&mut out, value);
        assert!((serde_json::from_slice::<f64>(&out).unwrap() - expected).abs() < f64::EPSILON);
    }
}

/// Ids 0 to 255 are the bytes; then two special tokens.
fn bytes_and_specials() -> Tokenizer {
    let letter = |byte: u32| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => byte,
        0x00..=0x20 => 0x100 + byte,
        0x7F..=0xA0 => 0x121 + byte - 0x7F,
        _ => 0x143,
    };
    let vocab: serde_json::Map<String, Value> =
        (0..256).map(|byte| (char::from_u32(letter(byte)).unwrap().to_string(), json!(byte))).collect();
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({"version": "1.0", "added_tokens": [added(256, "<s>"), added(257, "<end>")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    Tokenizer::from_json(&file.to_string()).unwrap().with_bos("<s>").unwrap()
}

/// The answer to a prompt with an output of these tokens, each of which is told at once with its log-probabilities.
fn echoed(given: Option<&str>, prompt: &[i32], output: &[i32]) -> Value {
    let tokenizer = bytes_and_specials();
    let outline =
        Outline { texts: TokenTexts::new(Some(tokenizer.clone())), prompt_logprobs: Some(1), ..outline(1, 1, Some(3)) };
    let echo = Echo { given: vec![given.map(str::to_owned)], tokenizer: Some(tokenizer.clone()) };
    let mut answer = CompletionAnswer::new(outline, Some(echo));
    let mut rows = LogprobRows::default();
    for &id in &prompt[1..] {
        rows.push(&[id, id, 65, 66], &[-0.5, -0.5, -1.0, -2.0], 1);
    }
    // Text comes when a character is complete, as the engine gives it out.
    let mut told = 0;
    for (place, &id) in output.iter().enumerate() {
        let text = tokenizer.decode(&output[..=place], true);
        let complete = if place + 1 == output.len() { text.len() } else { text.trim_end_matches('\u{FFFD}').len() };
        let mut update = update(0, &text[told.min(complete)..complete], id, place + 1 == output.len());
        told = told.max(complete);
        if place == 0 {
            update = with_prompt(update, prompt);
            update.prompt_logprobs = Some(Box::new(rows.clone()));
        }
        answer.add(0, update);
    }
    let mut out = Vec::new();
    answer.write_whole(&Usage::default(), &mut out);
    serde_json::from_slice::<Value>(&out).unwrap()["choices"][0].clone()
}

#[test]
fn text_offsets_point_into_the_text_that_is_returned() {
    let ids = |text: &str| text.bytes().map(i32::from).collect::<Vec<i32>>();
    let given = "né<end>你";
    // As encoded: a BOS that is not in the text, and the special token that is.
    let prompt = [&[256][..], &ids("né"), &[257], &ids("你")].concat();
    let output = [&ids("🚀 x")[..], &[257], &ids("ß!"), &[257]].concat();
    let reference = |parts: &[(&str, usize)]| {
        // Text of each part, and tokens that begin in it together; a special one that is left out has no text.
        let (mut at, mut offsets) = (0, Vec::new());
        for &(text, num_tokens) in parts {
            offsets.extend(std::iter::repeat_n(at, num_tokens));
            at += text.chars().count();
        }
        offsets
    };
    let of_output = [("🚀", 4), (" ", 1), ("x", 1), ("", 1), ("ß", 2), ("!", 1), ("", 1)];
    let choice = echoed(Some(given), &prompt, &output);
    assert_eq!(choice["text"], "né<end>你🚀 xß!");
    let of_given = [("", 1), ("n", 1), ("é", 2), ("<end>", 1), ("你", 3)];
    assert_eq!(choice["logprobs"]["text_offset"], json!(reference(&[&of_given[..], &of_output].concat())));
    // Given as ids the prompt is told without its special tokens.
    let choice = echoed(None, &prompt, &output);
    assert_eq!(choice["text"], "né你🚀 xß!");
    let of_ids = [("", 1), ("n", 1), ("é", 2), ("", 1), ("你", 3)];
    assert_eq!(choice["logprobs"]["text_offset"], json!(reference(&[&of_ids[..], &of_output].concat())));
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), prompt.len() + output.len());
}

#[test]
fn a_prompts_likely_tokens_are_as_many_as_were_asked_for_there() {
    let choice = echoed(None, &[256, 67, 65], &[68]);
    let rows = choice["prompt_logprobs"].as_array().unwrap();
    // One likely token, which is the token itself; beside the answer there are three.
    let keys: Vec<Vec<&String>> = rows[1..].iter().map(|row| row.as_object().unwrap().keys().collect()).collect();
    assert_eq!(keys, [["67"], ["65"]]);
    assert_eq!(choice["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 3);
}
