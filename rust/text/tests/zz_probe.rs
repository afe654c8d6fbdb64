#![allow(missing_docs, warnings)]
use cbrs_text::{ChatRequest, ChatTemplate, TemplateLimits};
#[test]
fn probe() {
    let which = std::env::var("PROBE").unwrap();
    let n: usize = std::env::var("N").unwrap().parse().unwrap();
    let mb: usize = std::env::var("MB").unwrap().parse().unwrap();
    let ns = format!("{{% set ns = namespace(x=[]) %}}{{% for i in range({n}) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}");
    let src = match which.as_str() {
        "drop" => ns,
        "show" => ns + "{{ ns.x }}",
        "json" => ns + "{{ ns.x | tojson }}",
        "eq" => ns + "{{ ns.x == [ns.x] }}",
        "slice" => format!("{{% set ns = namespace(x=[1]) %}}{{% for i in range({n}) %}}{{% set ns.x = ns.x[0:] %}}{{% endfor %}}{{{{ns.x|length}}}}"),
        "plus" => format!("{{{{ a{} }}}}", "+a".repeat(n)),
        "pipe" => format!("{{{{ messages{} }}}}", "|list".repeat(n)),
        "attr" => format!("{{{{ a{} }}}}", ".a".repeat(n)),
        "not" => format!("{{{{ {} a }}}}", "not ".repeat(n)),
        "neg" => format!("{{{{ {} 1 }}}}", "-".repeat(n)),
        "tilde" => format!("{{{{ a{} }}}}", "~a".repeat(n)),
        "elif" => format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(n)),
        "ternary" => format!("{{{{ {} 1 }}}}", "1 if a else ".repeat(n)),
        "and" => format!("{{{{ a{} }}}}", " and a".repeat(n)),
        "cmp" => format!("{{{{ a{} }}}}", "<a".repeat(n)),
        "pow" => format!("{{{{ 1{} }}}}", "**1".repeat(n)),
        "set" => format!("{{% set x=[] %}}{}", "{%set x=[x]%}".repeat(n)),
        "call" => format!("{{{{ a{} }}}}", "()".repeat(n)),
        "slicechain" => format!("{{{{ messages{}|length }}}}", "[:]".repeat(n)),
        _ => panic!(),
    };
    let t = std::time::Instant::now();
    let r = std::thread::Builder::new().stack_size(mb << 20).spawn(move || {
        let mut limits = TemplateLimits::default();
        limits.max_source_bytes = 1 << 24;
        match ChatTemplate::new(&src, None, None, limits) {
            Ok(t) => t.render(&ChatRequest::from_json(r#"[{"role":"user","content":"x"}]"#, None, true).unwrap()).map(|s| s.len().to_string()).map_err(|e| e.to_string()),
            Err(e) => Err(format!("compile {e}")),
        }
    }).unwrap().join().unwrap();
    let text = format!("{r:?}");
    eprintln!("{which} {n} {mb}: {} {:?}", &text[..text.len().min(150)], t.elapsed());
}
