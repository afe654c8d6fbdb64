//! The order in which query and key rows are stored.
//!
//! Files of the `llama` architecture keep the two numbers that one rotary pair turns next to each
//! other: row `2 i` and row `2 i + 1` of a head. Hugging Face models keep them half a head apart: `i`
//! and `i + head_rows / 2`. [`order`] says which tensors have to be put into the second order, by
//! which number of heads.

use super::GgufFile;
use super::header::TensorInfo;
use super::value::Value;
use crate::decode::RowOrder;
use crate::{ErrorKind, Result};

const ARCHITECTURE_KEY: &str = "general.architecture";

/// Returns the order of the rows of `info`.
///
/// # Errors
/// `Missing`, `WrongType`, `OutOfRange` for the number of heads; `PartialUnit` when the rows cannot
/// be divided among them.
pub(super) fn order(file: &GgufFile, info: &TensorInfo) -> Result<RowOrder> {
    let is_llama = matches!(file.value(ARCHITECTURE_KEY), Some(Value::Text(name)) if name == "llama");
    let Some((layer, is_query)) = projection(&info.name).filter(|_| is_llama) else {
        return Ok(RowOrder::AsStored);
    };
    let heads = num_heads(file, layer, is_query)?;
    let rows = info.shape[0] as u64;
    let refuse = |elements, size| {
        let kind = ErrorKind::PartialUnit { elements, unit: "pairs of rows in heads", size };
        file.error(&format!("tensor {}", info.name), kind)
    };
    if !rows.is_multiple_of(2 * heads) {
        return Err(refuse(rows, 2 * heads));
    }
    let block = info.encoding.block_elements() as u64;
    if info.shape.len() == 1 && block != 1 {
        // A bias is one stored row; its elements can be moved only where they are stored singly.
        return Err(refuse(1, block));
    }
    Ok(RowOrder::Interleaved { head_rows: (rows / heads) as usize })
}

/// Returns the elements that move together: a bias is put in order element by element.
pub(super) fn row_elements(info: &TensorInfo, order: RowOrder) -> usize {
    match (order, info.shape.as_slice()) {
        (RowOrder::Interleaved { .. }, [_]) | (_, []) => 1,
        (RowOrder::Interleaved { .. }, [_, inner @ ..]) => inner.iter().product(),
        (RowOrder::AsStored, [.., row]) => *row,
    }
}

/// Finds the layer in the name of a query (`true`) or key (`false`) projection.
fn projection(name: &str) -> Option<(usize, bool)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_query = match part {
        "attn_q.weight" | "attn_q.bias" => true,
        "attn_k.weight" | "attn_k.bias" => false,
        _ => return None,
    };
    Some((layer.parse().ok()?, is_query))
}

/// Returns the number of heads of a layer; key heads default to query heads.
fn num_heads(file: &GgufFile, layer: usize, is_query: bool) -> Result<u64> {
    let query_key = "llama.attention.head_count";
    let key_key = "llama.attention.head_count_kv";
    let key = if !is_query && file.value(key_key).is_some() { key_key } else { query_key };
    let value = match file.value(key) {
        None => return Err(file.error(key, ErrorKind::Missing)),
        Some(Value::Array(array)) => {
            // One number a layer.
            let element = array.scalars(file.map.bytes()).nth(layer).ok_or_else(|| {
                let (found, expected) = (array.len() as u64, (layer as u64).saturating_add(1));
                file.error(key, ErrorKind::LengthMismatch { found, expected, of: "layers" })
            })?;
            element.map_err(|kind| file.error(key, kind))?
        }
        Some(value) => value.clone(),
    };
    let found = value.as_integer().ok_or_else(|| {
        let found = value.type_name();
        file.error(key, ErrorKind::WrongType { expected: "an integer", found })
    })?;
    let (low, high) = (1, 1 << 16);
    match u64::try_from(found) {
        Ok(heads) if (low..=high).contains(&found) => Ok(heads),
        _ => Err(file.error(key, ErrorKind::OutOfRange { found, low, high })),
    }
}
