//! Chat templates against the vectors of the shared data, and their bounds.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use cbrs_text::{ChatRequest, ChatTemplate, TemplateLimits};
use serde_json::{Value, json};

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>"), None, TemplateLimits::default()).unwrap()
}

fn request(messages: &Value) -> ChatRequest {
    ChatRequest::from_json(&messages.to_string(), None, true).unwrap()
}

fn hello() -> ChatRequest {
    request(&json!([{"role": "user", "content": "Hello"}]))
}

fn error(source: &str) -> String {
    match ChatTemplate::new(source, None, None, TemplateLimits::default()) {
        Ok(template) => template.render(&hello()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn all_vectors_render_to_the_same_text_or_fail() {
    let Some(templates) = common::read("conformance/chat_templates.json") else { return };
    let templates: Value = serde_json::from_str(&templates).unwrap();
    let text = common::read("conformance/chat_template_vectors.jsonl").unwrap();
    let mut count = 0;
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let source = templates[row["template"].as_str().unwrap()]["chat_template"].as_str().unwrap();
        let (bos, eos) = (row["bos_token"].as_str(), row["eos_token"].as_str());
        let template = ChatTemplate::new(source, bos, eos, TemplateLimits::default()).unwrap();
        // Read once more, keeping the order of keys, which the rendered JSON shows.
        let ordered: minijinja::Value = serde_json::from_str(line).unwrap();
        let member = |name| ordered.get_attr(name).unwrap();
        let extra = member("extra");
        let request = ChatRequest {
            messages: member("messages"),
            tools: member("tools"),
            add_generation_prompt: member("add_generation_prompt").is_true(),
            extra: extra.try_iter().unwrap().map(|key| (key.to_string(), extra.get_item(&key).unwrap())).collect(),
        };
        let name = format!("{} {}", row["template"], row["case"]);
        match (row["rendered"].as_str(), template.render(&request)) {
            (Some(expected), Ok(rendered)) => assert_eq!(rendered, expected, "{name}"),
            (None, Err(error)) => check_error(&name, row["error"].as_str().unwrap(), &error.to_string()),
            (Some(_), Err(error)) => panic!("{name}: {error}"),
            (None, Ok(rendered)) => panic!("{name} must fail, but rendered {rendered:?}"),
        }
        count += 1;
    }
    assert_eq!(count, 70);
}

/// What a template says itself is passed on; the engine's own words differ.
fn check_error(name: &str, expected: &str, got: &str) {
    if let Some(message) = expected.strip_prefix("TemplateError: ") {
        assert!(got.contains(message), "{name}: {got}");
    }
}

#[test]
fn i20_hostile_templates_end_in_an_error_within_a_second() {
    let grow = "{% set ns = namespace(x='0123456789') %}{% for i in range(1000) %}{% set ns.x = ";
    let cases = [
        "{{ messages | tojson(indent=1000000000000000000) }}".to_owned(),
        "{{ messages | tojson(indent=-1) }}".to_owned(),
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}".to_owned(),
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        "{% for a in range(1000000000) %}x{% endfor %}".to_owned(),
        "{{ 'x' * 1000000000 }}".to_owned(),
        "{{ ('x' * 1000000000) | length }}".to_owned(),
        "{{ ['x'] * 1000000000 }}".to_owned(),
        format!("{grow} ns.x ~ ns.x %}}{{% endfor %}}"),
        format!("{grow} ns.x.replace('0', ns.x) %}}{{% endfor %}}"),
        format!("{grow} ns.x | replace('', ns.x) %}}{{% endfor %}}"),
        format!("{grow} [ns.x, ns.x] | tojson %}}{{% endfor %}}"),
        format!("{grow} ns.x.join(range(1000)) %}}{{% endfor %}}"),
        "{{ '%1000000000d' | format(1) }}".to_owned(),
        "{{ '{:>1000000000}'.format('x') }}".to_owned(),
        "{{ 'a\\nb' | indent(1000000000) }}".to_owned(),
        "{{ 'x' | center(1000000000) }}".to_owned(),
        "{{ range(1000000000) | list | length }}".to_owned(),
        "{{ 9 ** 9 ** 9 }}".to_owned(),
        "{% include 'x' %}".to_owned(),
        "{{".to_owned(),
        "{% if %}".to_owned(),
        format!("{}1{}", "{{ ".to_owned() + &"(".repeat(100_000), ")".repeat(100_000)),
        format!("{}x{}", "{% if true %}".repeat(5_000), "{% endif %}".repeat(5_000)),
        format!("{{{{ a{} }}}}", "~a".repeat(60_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(9_000)),
        "x".repeat((1 << 20) + 1),
    ];
    for case in cases {
        let start = Instant::now();
        let message = error(&case);
        let shown = &case[..case.len().min(70)];
        assert!(message.starts_with("chat template: "), "{shown}: {message}");
        assert!(message.len() < 2_000, "{shown}: {message}");
        assert!(start.elapsed() < Duration::from_secs(1), "{shown} took {:?}", start.elapsed());
    }
}

#[test]
fn deeply_nested_values_do_not_overflow_the_stack() {
    let nest = |value: &str| {
        format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for i in range(90000) %}}{{% set ns.x = {value} %}}{{% endfor %}}"
        )
    };
    let nested = "{% set ns = namespace(x=[1]) %}{% for i in range(40000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    for source in [
        nest("[ns.x]"),
        nest("{'a': ns.x}"),
        nest("ns.x[0:]"),
        nest("ns.x | batch(1)"),
        nest("ns.x | map('upper')"),
        nest("ns.x | reverse"),
        format!("{nested}{{{{ ns.x }}}}"),
        format!("{nested}{{{{ ns.x | tojson }}}}"),
        format!("{nested}{{{{ ns.x == [ns.x] }}}}"),
        format!("{nested}{{{{ [ns.x, ns.x] | sort }}}}"),
        format!("{nested}{{{{ {{ns.x: 1}} }}}}"),
        "{% set x = [] %}".to_owned() + &"{%set x=[x]%}".repeat(9_000) + "{{ x }}",
    ] {
        let start = Instant::now();
        // Whether it ends in an error or not, it ends.
        let _ = template(&source).render(&hello());
        assert!(start.elapsed() < Duration::from_secs(1), "{} took {:?}", &source[..90], start.elapsed());
    }
}

#[test]
fn nobody_waits_for_a_slow_template_and_no_second_rendering_joins_it() {
    let source = "{% set ns = namespace(x=0) %}{% for i in range(1000 if messages[0].content == 'slow' else 0) %}\
                  {% for j in range(1000) %}{% set ns.x = j %}{% endfor %}{% endfor %}done";
    let limits = TemplateLimits { fuel: 1 << 40, max_time: Duration::from_millis(10), ..TemplateLimits::default() };
    let template = ChatTemplate::new(source, None, None, limits).unwrap();
    let render = |content: &str| template.render(&request(&json!([{"role": "user", "content": content}])));
    let start = Instant::now();
    assert!(render("slow").unwrap_err().to_string().contains("takes more than 10 ms"));
    assert!(render("fast").unwrap_err().to_string().contains("takes more than 10 ms"), "the slow one still runs");
    while render("fast").ok().as_deref() != Some("done") {
        assert!(start.elapsed() < Duration::from_secs(20), "the slow rendering never ended");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_message_without_role_or_content_is_a_clear_error() {
    let template = template("{{ messages[0].content }}");
    let render = |message: Value| template.render(&request(&json!([message]))).map_err(|error| error.to_string());
    for (message, expected) in [
        (json!({"role": "user"}), "messages[0] has no content"),
        (json!({"role": "user", "content": null}), "messages[0] has no content"),
        (json!({"role": "assistant", "content": null, "tool_calls": []}), "messages[0] has no content"),
        (json!({"content": "x"}), "messages[0] needs a role"),
        (json!({"role": 1, "content": "x"}), "messages[0] needs a role"),
        (json!({"role": "user", "content": [{"type": "image_url"}]}), "must be a string, not a sequence"),
        (json!("x"), "messages[0] must be a map, not a string"),
    ] {
        let message = render(message).unwrap_err();
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(render(json!({"role": "user", "content": ""})).unwrap(), "");
    assert!(render(json!({"role": "assistant", "content": null, "tool_calls": [{"id": 1}]})).is_ok());
    assert!(template.render(&request(&json!({"role": "user"}))).unwrap_err().to_string().contains("must be a list"));
    let not_json = ChatRequest::from_json("[", None, true).unwrap_err().to_string();
    assert!(not_json.contains("messages cannot be read"), "{not_json}");
}

#[test]
fn variables_of_a_request_cannot_replace_those_of_the_engine() {
    let template = template("{{ bos_token }}{{ mood }}");
    let mut request = hello();
    request.extra.insert("mood".to_owned(), "happy".into());
    assert_eq!(template.render(&request).unwrap(), "<s>happy");
    for name in ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "raise_exception", "range"] {
        let mut request = hello();
        request.extra.insert(name.to_owned(), "x".into());
        let message = template.render(&request).unwrap_err().to_string();
        assert!(message.contains(&format!("{name:?} is set by the engine")), "{message}");
    }
}

#[test]
fn the_usual_helpers_work_as_in_python() {
    let render = |source: &str| template(source).render(&hello()).unwrap();
    let value = r#"{"b": [1, 2.0, none, true], "a": "é\"<\n"}"#;
    assert_eq!(render(&format!("{{{{ {value} | tojson }}}}")), r#"{"b": [1, 2.0, null, true], "a": "é\"<\n"}"#);
    assert_eq!(
        render("{{ {'b': [1, {}], 'a': []} | tojson(indent=2, sort_keys=true) }}"),
        "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {}\n  ]\n}"
    );
    assert_eq!(render("{{ ['é', 1] | tojson(ensure_ascii=true, separators=(',', ':')) }}"), "[\"\\u00e9\",1]");
    assert_eq!(render("  {% if true %}\nyes\n  {% endif %}\nno\n"), "yes\nno");
    assert_eq!(render("{{ none }}{{ true }}{{ undefined_name }}"), "NoneTrue");
    assert_eq!(render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"), "01");
    assert_eq!(render("{{ strftime_now('%Y') | length }}"), "4");
    assert_eq!(render("{{ messages[0].content.upper() }}{{ messages[-1]['role'] }}"), "HELLOuser");
    assert!(error("{{ raise_exception('no cats') }}").contains("no cats"));
    assert!(error("{{ nobody.name }}").contains("undefined"));
}

#[test]
fn a_long_conversation_is_within_the_bounds() {
    let source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>\n' }}{% endfor %}";
    let messages: Vec<Value> = (0..2_000).map(|_| json!({"role": "user", "content": "word ".repeat(200)})).collect();
    let rendered = template(source).render(&request(&json!(messages))).unwrap();
    assert!(rendered.len() > 1_900_000);
}
