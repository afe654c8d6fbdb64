//! Fields that may have one of several shapes.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A field whose value is refused, whatever it is.
pub(crate) type Refused = Option<IgnoredAny>;

/// `prompt`: one or several texts or lists of token ids.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Texts(Vec<String>),
    Ids(Vec<Vec<i64>>),
}

impl Prompt {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Ids(lists) => lists.len(),
        }
    }
}

/// The first entry of a list, which says what the list is.
#[derive(Deserialize)]
#[serde(untagged)]
enum First {
    Text(String),
    Id(i64),
    Ids(Vec<i64>),
}

const PROMPT: &str = "a text, a list of texts, a list of token ids, or a list of such lists";

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;

        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(PROMPT)
            }

            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text.to_owned()]))
            }

            fn visit_string<E>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                let first = list.next_element().map_err(|_| serde::de::Error::custom(format!("expected {PROMPT}")))?;
                Ok(match first {
                    None => Prompt::Texts(Vec::new()),
                    Some(First::Text(first)) => Prompt::Texts(rest(first, list)?),
                    Some(First::Id(first)) => Prompt::Ids(vec![rest(first, list)?]),
                    Some(First::Ids(first)) => Prompt::Ids(rest(first, list)?),
                })
            }
        }

        deserializer.deserialize_any(PromptVisitor)
    }
}

/// `first` and what follows, all of one kind.
fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut list: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        all.push(next);
    }
    Ok(all)
}

/// `stop`: one string or several.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Stops(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopsVisitor;

        impl<'de> Visitor<'de> for StopsVisitor {
            type Value = Stops;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E>(self, stop: &str) -> Result<Stops, E> {
                Ok(Stops(vec![stop.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stops, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = list.next_element()? {
                    stops.push(stop);
                }
                Ok(Stops(stops))
            }
        }

        deserializer.deserialize_any(StopsVisitor)
    }
}

/// `logit_bias`: an object of biases by token id, in the order of the body. However it is written, no id comes twice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LogitBias(pub(crate) Vec<(i64, f64)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;

        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of biases by token id")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let (mut biases, mut seen) = (Vec::new(), HashSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    let Ok(id) = key.parse() else {
                        let shown: String = key.chars().take(40).collect();
                        return Err(serde::de::Error::custom(format!("{shown:?} is not a token id")));
                    };
                    if !seen.insert(id) {
                        return Err(serde::de::Error::custom(format!("token {id} comes twice")));
                    }
                    biases.push((id, map.next_value()?));
                }
                Ok(LogitBias(biases))
            }
        }

        deserializer.deserialize_map(BiasVisitor)
    }
}

/// `stream_options`.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) include_obfuscation: Option<bool>,
}
