//! Chat templates: the Jinja source of a checkpoint, rendered in a sandbox with bounds.
//!
//! 1. A template reads what it is given and the date, nothing else: it has no files, no other templates, no network.
//! 2. Work, memory, output, time and depth are bounded; a template that exceeds a bound ends in an error.
//! 3. Variables that a request brings can add names, never replace those of the engine.
//!
//! A template that can nest values without end is rendered on a thread of its own: its stack is deep enough for any
//! nesting that the bound on work allows, and the caller can stop waiting for it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, ErrorKind, State, Value};
use serde::Serialize;

use cbrs_core::{Error, Result};

use crate::strftime::strftime;
use crate::template_source;
use crate::tojson::tojson;

/// Bounds on one template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateLimits {
    /// Work and memory: one unit is an instruction, or 64 bytes of data that the template makes.
    pub fuel: u64,
    /// Bytes of rendered text.
    pub max_output_bytes: usize,
    /// Time of one rendering, looked at when text is written; nobody waits longer than four times as long.
    pub max_time: Duration,
}

impl Default for TemplateLimits {
    /// 400,000 units (at most 25 MiB of data), 4 MiB of text, 200 ms.
    fn default() -> Self {
        Self { fuel: 400_000, max_output_bytes: 4 << 20, max_time: Duration::from_millis(200) }
    }
}

/// Nesting of blocks and macro calls.
const MAX_DEPTH: usize = 100;
/// Nesting of lists and maps.
const MAX_VALUE_DEPTH: usize = 64;
/// Stack of a rendering; only the part that is used takes memory.
const STACK_BYTES: usize = 64 << 20;
const NAME: &str = "chat template";
/// Variables that only the engine sets.
const RESERVED: [&str; 7] =
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "loop"];

/// What one rendering is about.
#[derive(Debug, Clone, Default)]
pub struct ChatRequest {
    /// List of messages: maps with `role` and `content`.
    pub messages: Value,
    /// List of tool descriptions; undefined = none.
    pub tools: Value,
    /// End the text where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables of the template, e.g. `enable_thinking`.
    pub extra: BTreeMap<String, Value>,
}

impl ChatRequest {
    /// Reads messages, and optionally tools, from JSON.
    ///
    /// # Errors
    /// `ChatTemplate` if one of them is not JSON.
    pub fn from_json(messages: &str, tools: Option<&str>, add_generation_prompt: bool) -> Result<Self> {
        let tools = tools.map(|tools| read_json("tools", tools)).transpose()?;
        Ok(Self {
            messages: read_json("messages", messages)?,
            tools: tools.unwrap_or_default(),
            add_generation_prompt,
            extra: BTreeMap::new(),
        })
    }

    /// Takes anything that serializes to a list of messages.
    pub fn from_messages(messages: &impl Serialize, add_generation_prompt: bool) -> Self {
        Self { messages: Value::from(Serde(messages)), add_generation_prompt, ..Self::default() }
    }

    /// Adds further variables of the template, given as a JSON object.
    ///
    /// # Errors
    /// `ChatTemplate` if it is not one; whether a name is free is found at `ChatTemplate::render`.
    pub fn with_variables_json(mut self, variables: &str) -> Result<Self> {
        let variables: BTreeMap<String, Value> =
            serde_json::from_str(variables).map_err(|error| refused(format!("variables cannot be read: {error}")))?;
        self.extra.extend(variables);
        Ok(self)
    }

    fn validate(&self, environment: &Environment<'_>) -> Result<()> {
        if self.messages.kind() != ValueKind::Seq {
            return Err(refused(format!("messages must be a list, not a {}", self.messages.kind())));
        }
        for (index, message) in self.messages.try_iter().map_err(|error| explain(&error))?.enumerate() {
            validate_message(index, &message)?;
        }
        if !matches!(self.tools.kind(), ValueKind::Seq | ValueKind::Undefined | ValueKind::None) {
            return Err(refused(format!("tools must be a list, not a {}", self.tools.kind())));
        }
        let is_taken = |name: &str| RESERVED.contains(&name) || environment.globals().any(|(global, _)| global == name);
        match self.extra.keys().find(|name| is_taken(name)) {
            Some(name) => Err(refused(format!("the variable {name:?} is set by the engine; choose another name"))),
            None => Ok(()),
        }
    }
}

fn read_json(what: &str, json: &str) -> Result<Value> {
    serde_json::from_str(json).map_err(|error| refused(format!("{what} cannot be read: {error}")))
}

fn validate_message(index: usize, message: &Value) -> Result<()> {
    if message.kind() != ValueKind::Map {
        return Err(refused(format!("messages[{index}] must be a map, not a {}", message.kind())));
    }
    let field = |name: &str| message.get_attr(name).unwrap_or_default();
    if field("role").as_str().is_none() {
        return Err(refused(format!("messages[{index}] needs a role that is a string")));
    }
    let content = field("content");
    let is_missing = content.is_undefined() || content.is_none();
    if is_missing && field("tool_calls").is_true() {
        return Ok(());
    }
    if is_missing {
        return Err(refused(format!("messages[{index}] has no content; give a string (it may be empty)")));
    }
    if content.as_str().is_none() {
        return Err(refused(format!("messages[{index}].content must be a string, not a {}", content.kind())));
    }
    Ok(())
}

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    compiled: Arc<Compiled>,
}

impl ChatTemplate {
    /// Compiles `source`. The BOS and EOS tokens are variables of the template; an absent one is undefined.
    ///
    /// # Errors
    /// `ChatTemplate` if the source is malformed or too long.
    pub fn new(source: &str, bos_token: Option<&str>, eos_token: Option<&str>, limits: TemplateLimits) -> Result<Self> {
        let is_flat = template_source::check(source)?;
        let mut environment = environment(limits);
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| explain(&error))?;
        let tokens = [("bos_token", bos_token), ("eos_token", eos_token)];
        let special_tokens = tokens.into_iter().filter_map(|(name, token)| Some((name, token?.to_owned()))).collect();
        let overdue = Mutex::default();
        Ok(Self { compiled: Arc::new(Compiled { environment, special_tokens, limits, is_flat, overdue }) })
    }

    /// Whether a rendering may wait for a thread of its own.
    pub fn may_wait(&self) -> bool {
        !self.compiled.is_flat
    }

    /// Renders the prompt of a conversation.
    ///
    /// # Errors
    /// `ChatTemplate` if a message lacks its role or content, if the template refuses the messages, or at a bound.
    pub fn render(&self, request: &ChatRequest) -> Result<String> {
        cbrs_core::fault::point("render");
        request.validate(&self.compiled.environment)?;
        let context = self.compiled.context(request);
        if self.compiled.is_flat { self.compiled.render(context) } else { self.render_apart(context) }
    }

    /// Renders on a thread of its own and waits for it.
    fn render_apart(&self, context: Value) -> Result<String> {
        let too_long = || refused(format!("takes more than {} ms", self.compiled.limits.max_time.as_millis()));
        let overdue = || self.compiled.overdue.lock().unwrap_or_else(PoisonError::into_inner);
        if overdue().strong_count() > 0 {
            return Err(too_long());
        }
        let running = Arc::new(());
        let is_running = Arc::downgrade(&running);
        let (sender, receiver) = sync_channel(1);
        let compiled = Arc::clone(&self.compiled);
        let thread = std::thread::Builder::new().name("cbrs-template".to_owned()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            // Nobody may be waiting any more.
            let _ = sender.send(compiled.render(context));
            drop(running);
        });
        spawned.map_err(|error| refused(format!("cannot be rendered: {error}")))?;
        match receiver.recv_timeout(self.compiled.limits.max_time * 4) {
            Ok(rendered) => rendered,
            Err(RecvTimeoutError::Timeout) => {
                *overdue() = is_running;
                Err(too_long())
            }
            Err(RecvTimeoutError::Disconnected) => Err(refused("broke the template engine".to_owned())),
        }
    }
}

struct Compiled {
    environment: Environment<'static>,
    special_tokens: BTreeMap<&'static str, String>,
    limits: TemplateLimits,
    /// Nothing that it makes is deeply nested.
    is_flat: bool,
    /// Alive while a rendering that nobody waits for any more is running: no other one is begun beside it.
    overdue: Mutex<Weak<()>>,
}

impl Compiled {
    fn render(&self, context: Value) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|error| explain(&error))?;
        let mut out = BoundedOutput::new(self.limits);
        match template.render_captured_to(context, &mut out) {
            Ok(_) => Ok(String::from_utf8(out.bytes).expect("the engine writes whole strings")),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => {
                Err(refused(format!("needs more than {} units of work and memory", self.limits.fuel)))
            }
            Err(error) => Err(explain(&error)),
        }
    }

    fn context(&self, request: &ChatRequest) -> Value {
        let absent = || Value::from(());
        let tools = if request.tools.is_undefined() { absent() } else { request.tools.clone() };
        let mut variables: BTreeMap<String, Value> = request.extra.clone();
        for (name, token) in &self.special_tokens {
            variables.insert((*name).to_owned(), Value::from(token.as_str()));
        }
        variables.insert("messages".to_owned(), request.messages.clone());
        variables.insert("tools".to_owned(), tools);
        variables.insert("documents".to_owned(), absent());
        variables.insert("add_generation_prompt".to_owned(), Value::from(request.add_generation_prompt));
        Value::from(variables)
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").field("limits", &self.limits).finish_non_exhaustive()
    }
}

fn refused(message: String) -> Error {
    Error::ChatTemplate { message }
}

/// The innermost reason that the engine gives, with the place in the template.
fn explain(error: &minijinja::Error) -> Error {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        message = format!("{message}: {inner}");
        source = inner.source();
    }
    refused(message)
}

fn environment(limits: TemplateLimits) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(MAX_DEPTH);
    environment.set_fuel(Some(limits.fuel));
    environment.set_unknown_method_callback(python_method);
    environment.add_filter("tojson", move |state: &State, value: &Value, options: Kwargs| {
        tojson(state, value, &options, limits.max_output_bytes, MAX_VALUE_DEPTH)
    });
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| strftime(format, SystemTime::now()));
    environment
}

/// Python's methods of strings, lists and maps. `str.format` only fills in: a width in a format specification could ask
/// for any amount of memory.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    if method == "format" && value.as_str().is_some_and(|format| format.contains(':')) {
        let message = "str.format with a format specification is not supported";
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// Takes the rendered text up to the bounds.
struct BoundedOutput {
    bytes: Vec<u8>,
    limits: TemplateLimits,
    started: Instant,
}

impl BoundedOutput {
    fn new(limits: TemplateLimits) -> Self {
        Self { bytes: Vec::new(), limits, started: Instant::now() }
    }
}

impl Write for BoundedOutput {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        let limit = self.limits.max_output_bytes;
        if self.bytes.len() + part.len() > limit {
            return Err(io::Error::other(format!("more than {limit} bytes of text")));
        }
        if self.started.elapsed() > self.limits.max_time {
            return Err(io::Error::other(format!("more than {} ms", self.limits.max_time.as_millis())));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
