//! Every field works or is refused by name.
#![allow(clippy::unwrap_used, clippy::float_cmp, clippy::needless_pass_by_value)]

use cbrs_core::policy::Class;
use serde_json::{Value, json};

use super::fields::{LogitBias, Prompt, Stops};
use super::{ChatBody, CompletionBody, TokenizeBody, parse};
use crate::config::Limits;
use crate::error::ApiError;

fn error_object(error: &ApiError) -> Value {
    let mut out = Vec::new();
    error.write_json(&mut out);
    let envelope: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(error.status, 400, "{envelope}");
    assert_eq!(envelope["error"]["type"], "invalid_request_error");
    envelope["error"].clone()
}

/// What a completion with these fields besides model and prompt is refused for.
fn completion_error(fields: Value) -> Value {
    let mut body = json!({"model": "m", "prompt": "p"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let checked = parse::<CompletionBody>(body.to_string().as_bytes()).and_then(|body| {
        let mut completion = body.check(&Limits::default())?;
        let num_prompts = completion.prompt.len();
        completion.common.take_specs(num_prompts, &Limits::default())
    });
    error_object(&checked.expect_err(&body.to_string()))
}

fn chat(fields: Value) -> Result<super::chat::Chat, ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    parse::<ChatBody>(body.to_string().as_bytes()).and_then(ChatBody::check)
}

#[test]
fn a_prompt_has_four_shapes() {
    let prompt = |value: Value| serde_json::from_value::<Prompt>(value);
    assert_eq!(prompt(json!("a")).unwrap(), Prompt::Texts(vec!["a".into()]));
    assert_eq!(prompt(json!(["a", "b"])).unwrap(), Prompt::Texts(vec!["a".into(), "b".into()]));
    assert_eq!(prompt(json!([1, 2])).unwrap(), Prompt::Ids(vec![vec![1, 2]]));
    assert_eq!(prompt(json!([[1], [2, 3]])).unwrap(), Prompt::Ids(vec![vec![1], vec![2, 3]]));
    assert_eq!(prompt(json!([])).unwrap().len(), 0);
    for wrong in [json!(null), json!(1), json!({}), json!([1, "a"]), json!(["a", 1]), json!([[1], 2]), json!([1.5])] {
        assert!(prompt(wrong.clone()).is_err(), "{wrong}");
    }
}

#[test]
fn every_parameter_reaches_the_core() {
    let body = json!({
        "model": "m", "prompt": "p", "n": 2, "stop": "x", "seed": -1, "temperature": 0.5, "top_p": 0.9,
        "presence_penalty": 1.0, "frequency_penalty": -1, "logit_bias": {"7": -2.5}, "max_tokens": 9, "user": "u",
        "metadata": {"a": "b"}, "store": true, "service_tier": "flex", "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.5, "min_tokens": 3, "ignore_eos": true, "stop_token_ids": [4], "prompt_logprobs": 2,
        "truncate_prompt_tokens": 6, "priority": "batch", "tenant": "t", "ttft_deadline_ms": 10.0, "deadline_ms": 20.0,
        "target_itl_ms": 30.0, "cache_salt": "s", "echo": true, "logprobs": 1, "best_of": 2, "suffix": "",
        "stream": true, "stream_options": {"include_usage": true, "include_obfuscation": false},
        "return_token_ids": true,
    });
    let body: CompletionBody = parse(body.to_string().as_bytes()).unwrap();
    let mut completion = body.check(&Limits::default()).unwrap();
    let (spec, text) = completion.common.take_specs(1, &Limits::default()).unwrap();
    assert_eq!((spec.n, spec.max_tokens, spec.ignore_eos), (2, Some(9), true));
    assert_eq!((spec.stop_token_ids, spec.logit_bias), (vec![4], vec![(7, -2.5)]));
    assert_eq!((spec.tenant.as_deref(), spec.cache_salt.as_deref()), (Some("t"), Some("s")));
    assert_eq!(spec.priority, Some(Class::Batch));
    let times = (spec.ttft_deadline_ms, spec.deadline_ms, spec.target_itl_ms);
    assert_eq!(times, (Some(10.0), Some(20.0), Some(30.0)));
    assert_eq!((spec.truncate_prompt_tokens, spec.prompt_logprobs), (Some(6), Some(2)));
    let sampling = spec.sampling;
    assert_eq!((sampling.seed, sampling.top_k, sampling.min_tokens), (Some(u64::MAX), 5, 3));
    assert_eq!([sampling.temperature, sampling.top_p, sampling.min_p], [0.5, 0.9, 0.1]);
    let penalties = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty];
    assert_eq!(penalties, [1.0, -1.0, 1.5]);
    assert!(!text.stops.is_empty());
    assert!(completion.echo && completion.common.has_usage() && completion.common.return_token_ids);
}

#[test]
fn null_is_as_good_as_absent() {
    let body = json!({"model": "m", "prompt": "p", "n": null, "stop": null, "logit_bias": null, "stream": null,
        "stream_options": null, "max_tokens": null, "suffix": null, "best_of": null, "echo": null, "user": null});
    let body: CompletionBody = parse(body.to_string().as_bytes()).unwrap();
    let mut completion = body.check(&Limits::default()).unwrap();
    let (spec, _) = completion.common.take_specs(1, &Limits::default()).unwrap();
    assert_eq!((spec.n, spec.max_tokens), (1, None));
    assert!(chat(json!({"tools": null, "response_format": null, "tool_choice": null, "audio": null})).is_ok());
}

#[test]
fn a_wrong_field_is_named() {
    for (fields, param) in [
        (json!({"unknown": 1}), "unknown"),
        (json!({"messages": []}), "messages"),
        (json!({"do_not_cache": true}), "do_not_cache"),
        (json!({"max_tokens": "5"}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"n": -1}), "n"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": 2.01}), "temperature"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"stop": 5}), "stop"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (json!({"stop": [""]}), "stop"),
        (json!({"stop": ["a".repeat(257)]}), "stop"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"99999999999": 1}}), "logit_bias"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"stop_token_ids": [i64::MAX]}), "stop_token_ids"),
        (json!({"logprobs": 6}), "logprobs"),
        (json!({"best_of": 3}), "best_of"),
        (json!({"suffix": "s"}), "suffix"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": {"a": 1}}), "prompt"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"other": true}}), "stream_options.other"),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
        ),
        (json!({"stream": 1}), "stream"),
        (json!({"service_tier": "scale"}), "service_tier"),
        (json!({"service_tier": []}), "service_tier"),
        (json!({"service_tier": "flex", "priority": "interactive"}), "service_tier"),
        (json!({"priority": "urgent"}), "priority"),
        (json!({"metadata": {"a": 1}}), "metadata.a"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
        (json!({"prompt": vec!["p"; 129]}), "prompt"),
        (json!({"prompt": ["p", "q"], "n": 65}), "n"),
    ] {
        let error = completion_error(fields.clone());
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert!(error["message"].as_str().unwrap().len() > 10);
    }
}

#[test]
fn a_body_that_is_no_json_is_refused() {
    for body in
        ["", "{", "nonsense", "{\"model\": NaN}", "{\"temperature\": 1e999}", "[]", "\u{7f}", "{\"model\":\"m\"}}"]
    {
        let error = error_object(&parse::<CompletionBody>(body.as_bytes()).unwrap_err());
        assert!(!error["message"].as_str().unwrap().is_empty(), "{body}");
    }
    let error = error_object(&parse::<CompletionBody>(br#"{"prompt": "p"}"#).unwrap_err());
    assert_eq!(error["param"], "model");
    let twice = br#"{"model": "m", "model": "m", "prompt": "p"}"#;
    assert_eq!(error_object(&parse::<CompletionBody>(twice).unwrap_err())["param"], "model");
}

#[test]
fn what_changes_an_answer_and_is_not_there_is_refused() {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (field, value) in [
        ("tools", json!([tool])),
        ("tool_choice", json!("auto")),
        ("tool_choice", tool.clone()),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("parallel_tool_calls", json!(false)),
        ("response_format", json!({"type": "json_object"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "a"})),
        ("prediction", json!({"type": "content"})),
        ("web_search_options", json!({})),
        ("moderation", json!({})),
        ("verbosity", json!("low")),
        ("reasoning_effort", json!("high")),
        ("prompt_cache_retention", json!("24h")),
        ("prompt_cache_options", json!({})),
    ] {
        let error = error_object(&chat(json!({field: value})).unwrap_err());
        assert_eq!(error["param"], field);
        assert_eq!(error["code"], "unsupported_parameter");
    }
    let harmless = json!({"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none",
        "function_call": "none", "safety_identifier": "s", "prompt_cache_key": "k"});
    assert!(chat(harmless).is_ok());
}

#[test]
fn a_chat_has_its_own_names() {
    let asked = chat(json!({"max_completion_tokens": 5, "logprobs": true, "top_logprobs": 3})).unwrap();
    assert_eq!((asked.common.max_tokens, asked.logprobs), (Some(5), Some(3)));
    assert_eq!(asked.max_tokens_name, "max_completion_tokens");
    assert_eq!(chat(json!({"logprobs": true})).unwrap().logprobs, Some(0));
    assert_eq!(chat(json!({"logprobs": false})).unwrap().logprobs, None);
    for (fields, param) in [
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"max_tokens": 4, "max_completion_tokens": 5}), "max_tokens"),
        (json!({"prompt": "p"}), "prompt"),
        (json!({"safety_identifier": "x".repeat(65)}), "safety_identifier"),
    ] {
        assert_eq!(error_object(&chat(fields).unwrap_err())["param"], param);
    }
}

#[test]
fn a_wrong_message_is_named_with_its_place() {
    let image = json!({"type": "image_url", "image_url": {"url": "http://localhost/x"}});
    for (message, param) in [
        (json!({"role": "user"}), "messages[1].content"),
        (json!({"role": "user", "content": null}), "messages[1].content"),
        (json!({"role": "user", "content": []}), "messages[1].content"),
        (json!({"role": "user", "content": 5}), "messages[1].content"),
        (json!({"role": "user", "content": [image]}), "messages[1].content[0]"),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0]"),
        (json!({"role": "robot", "content": "x"}), "messages[1].role"),
        (json!({"role": 5, "content": "x"}), "messages[1].role"),
        (json!({"role": "tool", "content": "x"}), "messages[1].role"),
        (json!({"role": "tool", "content": "x", "tool_call_id": "c"}), "messages[1].tool_call_id"),
        (json!({"role": "assistant", "content": "x", "tool_calls": []}), "messages[1].tool_calls"),
        (json!({"role": "user", "content": "x", "colour": "red"}), "messages[1].colour"),
    ] {
        let messages = json!([{"role": "user", "content": "x"}, message]);
        let error = error_object(&chat(json!({"messages": messages})).unwrap_err());
        assert_eq!(error["param"], param, "{message}: {error}");
    }
    assert_eq!(error_object(&chat(json!({"messages": []})).unwrap_err())["param"], "messages");
}

#[test]
fn a_template_sees_plain_messages() {
    let messages = json!([
        {"role": "developer", "content": "be kind"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "", "refusal": null},
    ]);
    let seen = serde_json::to_value(chat(json!({"messages": messages})).unwrap().messages).unwrap();
    let expected = json!([
        {"role": "system", "content": "be kind"},
        {"role": "user", "name": "ann", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
    ]);
    assert_eq!(seen, expected);
}

#[test]
fn stops_and_biases_keep_their_order() {
    let stops = |value: Value| serde_json::from_value::<Stops>(value).unwrap().0;
    assert_eq!(stops(json!("a")), ["a"]);
    assert_eq!(stops(json!(["b", "a"])), ["b", "a"]);
    let bias: LogitBias = serde_json::from_str(r#"{"9": 1, "3": -0.5, "-1": 2}"#).unwrap();
    assert_eq!(bias.0, [(9, 1.0), (3, -0.5), (-1, 2.0)]);
}

#[test]
fn tokenize_has_one_source() {
    let source = |body: Value| parse::<TokenizeBody>(body.to_string().as_bytes()).and_then(TokenizeBody::source);
    let messages = json!([{"role": "user", "content": "x"}]);
    assert!(source(json!({"prompt": ""})).is_ok());
    assert!(source(json!({"messages": messages, "add_generation_prompt": false})).is_ok());
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": "x", "messages": messages}), "prompt"),
        (json!({"prompt": "x", "add_generation_prompt": true}), "add_generation_prompt"),
        (json!({"messages": messages, "add_special_tokens": true}), "add_special_tokens"),
    ] {
        assert_eq!(error_object(&source(body).unwrap_err())["param"], param);
    }
}
