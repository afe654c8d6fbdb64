//! How deeply a body is nested, before anything that recurses sees it.

use crate::error::ApiError;

/// Refuses a body with more than `max_depth` arrays and objects within each other. Whether it is JSON is not looked at.
pub(crate) fn check_depth(bytes: &[u8], max_depth: usize) -> Result<(), ApiError> {
    let mut depth = 0_usize;
    let mut is_text = false;
    let mut bytes = bytes.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => is_text = !is_text,
            b'\\' if is_text => _ = bytes.next(),
            b'[' | b'{' if !is_text => {
                depth += 1;
                if depth > max_depth {
                    let message = format!("the body has more than {max_depth} arrays and objects within each other");
                    return Err(ApiError::bad_request(message));
                }
            }
            b']' | b'}' if !is_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_brackets_outside_of_strings_count() {
        for (body, depth) in [
            ("[[]]", 2),
            (r#"{"a": [{}]}"#, 3),
            ("[[],[],[]]", 2),
            (r#"["[[[["]"#, 1),
            (r#"["\"[[["]"#, 1),
            (r#"["\\", [[]]]"#, 3),
            ("1", 0),
            ("]]]", 0),
        ] {
            assert!(check_depth(body.as_bytes(), depth).is_ok(), "{body}");
            assert!(depth == 0 || check_depth(body.as_bytes(), depth - 1).is_err(), "{body}");
        }
    }
}
