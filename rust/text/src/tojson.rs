//! The `tojson` filter: JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what chat templates
//! were written against, with bounds on size and depth.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Widest `indent` that is accepted.
const MAX_INDENT: usize = 32;
/// Written bytes that cost one unit of fuel.
const BYTES_PER_FUEL: usize = 8;

/// Renders `value`; options are Python's `indent`, `separators`, `sort_keys` and `ensure_ascii`.
pub(crate) fn tojson(
    state: &State,
    value: &Value,
    options: &Kwargs,
    max_bytes: usize,
    max_depth: usize,
) -> Result<String, Error> {
    let indent = read_indent(options.get("indent")?)?;
    let (item, key) = read_separators(options.get("separators")?, indent.is_some())?;
    let writer = Writer {
        out: String::new(),
        indent,
        item,
        key,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        max_bytes,
        max_depth,
        state,
        charged: 0,
    };
    options.assert_all_used()?;
    writer.render(value)
}

fn read_indent(indent: Option<Value>) -> Result<Option<usize>, Error> {
    let Some(value) = indent.filter(|value| !value.is_none()) else { return Ok(None) };
    match value.as_i64().map(usize::try_from) {
        Some(Ok(width)) if width <= MAX_INDENT => Ok(Some(width)),
        _ => Err(invalid(format!("tojson indent is {value}, but must be 0 to {MAX_INDENT}"))),
    }
}

fn read_separators(separators: Option<Value>, is_indented: bool) -> Result<(String, String), Error> {
    let Some(value) = separators.filter(|value| !value.is_none()) else {
        return Ok((if is_indented { "," } else { ", " }.to_owned(), ": ".to_owned()));
    };
    let at = |index| value.get_item_by_index(index).ok().and_then(|text| text.as_str().map(str::to_owned));
    match (at(0), at(1), value.len()) {
        (Some(item), Some(key), Some(2)) => Ok((item, key)),
        _ => Err(invalid("tojson separators must be two strings".to_owned())),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

struct Writer<'a, 'b, 'c> {
    out: String,
    /// Spaces per level; absent = one line.
    indent: Option<usize>,
    item: String,
    key: String,
    sort_keys: bool,
    ensure_ascii: bool,
    max_bytes: usize,
    max_depth: usize,
    state: &'a State<'b, 'c>,
    /// Bytes already paid for.
    charged: usize,
}

impl Writer<'_, '_, '_> {
    fn render(mut self, value: &Value) -> Result<String, Error> {
        self.write(value, 0)?;
        Ok(self.out)
    }

    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > self.max_depth {
            return Err(invalid(format!("tojson: the value is nested deeper than {}", self.max_depth)));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.write_number(value),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.write_list(value, depth)?,
            ValueKind::Map => self.write_map(value, depth)?,
            other => return Err(invalid(format!("tojson cannot write a value of type {other}"))),
        }
        self.check_size()
    }

    fn check_size(&mut self) -> Result<(), Error> {
        if self.out.len() > self.max_bytes {
            return Err(invalid(format!("tojson: more than {} bytes", self.max_bytes)));
        }
        let cost = (self.out.len() - self.charged) / BYTES_PER_FUEL;
        self.charged += cost * BYTES_PER_FUEL;
        self.state.consume_fuel(cost as u64)
    }

    fn write_list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut is_empty = true;
        for item in value.try_iter()? {
            self.start_item(is_empty, depth);
            is_empty = false;
            self.write(&item, depth + 1)?;
        }
        self.end(is_empty, ']', depth);
        Ok(())
    }

    fn write_map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('{');
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let is_empty = keys.is_empty();
        for (index, key) in keys.iter().enumerate() {
            self.start_item(index == 0, depth);
            match key.as_str() {
                Some(text) => self.write_string(text),
                None => self.write_string(&key_text(key)?),
            }
            self.out.push_str(&self.key);
            self.write(&value.get_item(key)?, depth + 1)?;
        }
        self.end(is_empty, '}', depth);
        Ok(())
    }

    fn start_item(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.out.push_str(&self.item);
        }
        self.new_line(depth + 1);
    }

    fn end(&mut self, is_empty: bool, bracket: char, depth: usize) {
        if !is_empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn write_number(&mut self, value: &Value) {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
        } else {
            self.out.push_str(&python_float(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
        }
    }

    fn write_string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                _ if character < ' ' || (self.ensure_ascii && !(' '..='~').contains(&character)) => {
                    let mut units = [0; 2];
                    for unit in character.encode_utf16(&mut units) {
                        write!(self.out, "\\u{unit:04x}").expect("a string takes everything");
                    }
                }
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }
}

/// Python turns keys that are no strings into the JSON text of the key.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(python_float(f64::try_from(key.clone()).unwrap_or(f64::NAN))),
        other => Err(invalid(format!("tojson cannot write a key of type {other}"))),
    }
}

/// The shortest digits that give the number back, in Python's layout (`1e+16`, `1e-05`).
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').expect("the format has an exponent");
        let exponent: i32 = exponent.parse().expect("the exponent is a number");
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{number:?}")
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_look_as_python_writes_them() {
        for (number, text) in [
            (1.0, "1.0"),
            (0.0, "0.0"),
            (-0.5, "-0.5"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (123_456_789.25, "123456789.25"),
            (1e100, "1e+100"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }
}
