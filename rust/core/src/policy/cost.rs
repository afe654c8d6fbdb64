//! Temporary.
#![allow(missing_docs)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    pub new_tokens: u64,
    pub kv_tokens_read: u64,
    pub attn_pairs: u64,
}
#[derive(Debug, Clone, Default)]
pub struct CostModel {}
impl CostModel {
    pub fn observe(&mut self, _: StepWork, _: u64) {}
    pub fn is_ready(&self) -> bool {
        false
    }
    pub fn predict_ns(&self, _: StepWork) -> Option<f64> {
        None
    }
    pub fn relative_error(&self) -> f64 {
        0.0
    }
    pub fn coefficients(&self) -> [f64; 4] {
        [0.0; 4]
    }
    pub fn chunk_ns(&self, _: u64, _: u64) -> f64 {
        0.0
    }
    pub fn decode_ns(&self, _: u64, _: u64) -> f64 {
        0.0
    }
    pub fn max_chunk(&self, _: f64, _: u64, wanted: u64) -> u64 {
        wanted
    }
}
