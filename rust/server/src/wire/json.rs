//! From bytes to a body, with the name of the field at fault.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::error::Category;

use crate::error::ApiError;

/// Reads a body.
///
/// # Errors
/// 400: what is wrong, and in which field.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| explain::<T>(bytes, &error))
}

/// Reads once more what cannot be read, keeping track of the path.
fn explain<T: DeserializeOwned>(bytes: &[u8], error: &serde_json::Error) -> ApiError {
    let message = error.to_string();
    // An enumeration calls what is no string a fault of syntax.
    let is_json = error.classify() == Category::Data || serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
    if !is_json {
        return ApiError::bad_request(format!("the body is not JSON: {message}"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let Err(error) = serde_path_to_error::deserialize::<_, T>(&mut reader) else {
        return ApiError::bad_request(message);
    };
    let path = error.path().to_string();
    let message = error.into_inner().to_string();
    // The path of the body as a whole is a point.
    let path = if path == "." { String::new() } else { path };
    let field = named(&message).filter(|&field| path.rsplit('.').next() != Some(field));
    match (path.is_empty(), field) {
        (true, None) => ApiError::bad_request(message),
        (true, Some(field)) => ApiError::invalid(field.to_owned(), message),
        (false, None) => ApiError::invalid(path.clone(), format!("{path}: {message}")),
        (false, Some(field)) => ApiError::invalid(format!("{path}.{field}"), format!("{path}: {message}")),
    }
}

/// The field that serde names in its message.
fn named(message: &str) -> Option<&str> {
    let kinds = ["unknown field `", "missing field `", "duplicate field `"];
    let rest = kinds.iter().find_map(|kind| message.strip_prefix(kind))?;
    rest.split_once('`').map(|(field, _)| field)
}
