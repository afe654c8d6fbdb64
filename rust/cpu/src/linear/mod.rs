//! Products of a batch with packed weights: `input W^T + b`, added to something or gated.
//!
//! | module | owns |
//! | --- | --- |
//! | `pack` | weights in the order in which they are read |
//! | `micro` | a few rows of input and a panel or two of weights |
//! | `int8`, `quantize` | the same with int8 weights, for which the input is quantised, too |
//! | `epilogue` | bias, activation, and where the sums go |
//! | `block` | cutting a product into items of rows and panels |
//!
//! Weights are bf16, f32 or int8; inputs, sums and outputs are f32 whatever the weights are, so bf16 costs the rounding of
//! the weights and nothing else. With int8 weights (a scale for each group of 32 inputs of a feature) the input is
//! rounded in the same way, and sums are of integers within a group.
//!
//! Invariants:
//! 1. An output depends on its own row of the input and its own feature's weights only, bit for bit: rows, panels and
//!    threads change which sums are computed together, never how one is.
//! 2. Every shape is verified before the first read or write.

mod block;
mod epilogue;
mod int8;
mod micro;
mod pack;
mod quantize;

pub use epilogue::Activation;
pub use pack::{PackedMatrix, WeightType, WeightsRef};

use block::Product;
pub(crate) use quantize::Quantized;

use crate::dispatch::Kernels;
use crate::error::{Error, Result};
use crate::layout::check_len;
use crate::pool::Team;

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It is written to the output.
    Store,
    /// It is added to what the output holds.
    Add,
    /// The matrix has two parts: the activation of the first one's product, times the second one's, is written.
    Gate(Activation),
}

/// Arguments of [`Kernels::linear`].
#[derive(Debug)]
pub struct LinearArgs<'a> {
    /// Result `[num_rows, out_features]`, of a gated product `[num_rows, out_features / 2]`; written.
    pub out: &'a mut [f32],
    /// Input `[num_rows, in_features]`.
    pub input: &'a [f32],
    /// Rows of input and output.
    pub num_rows: usize,
    /// Weights.
    pub matrix: &'a PackedMatrix,
    /// `[out_features]`, added to the product.
    pub bias: Option<&'a [f32]>,
    /// What becomes of the product.
    pub then: Then,
}

impl LinearArgs<'_> {
    fn check(&self, kernels: &Kernels) -> Result<()> {
        let matrix = self.matrix;
        if matrix.isa() != kernels.isa() {
            return Err(Error::PackedFor { packed: matrix.isa().name(), isa: kernels.isa().name() });
        }
        let is_gated = matches!(self.then, Then::Gate(_));
        if is_gated && matrix.num_parts() != 2 {
            return Err(Error::Gate { num_parts: matrix.num_parts() });
        }
        let out_features = if is_gated { matrix.part_features() } else { matrix.out_features() };
        check_len("input", self.input.len(), self.num_rows.saturating_mul(matrix.in_features()))?;
        check_len("out", self.out.len(), self.num_rows.saturating_mul(out_features))?;
        self.bias.map_or(Ok(()), |bias| check_len("bias", bias.len(), matrix.out_features()))
    }
}

impl Kernels {
    /// Multiplies all rows of a batch with packed weights.
    ///
    /// # Errors
    /// [`Error::PackedFor`], [`Error::Gate`], [`Error::Length`], [`Error::Forked`]; nothing is written then.
    pub fn linear(&self, args: LinearArgs<'_>) -> Result<()> {
        args.check(self)?;
        let team = self.team()?;
        Product::new(args).run(self.isa(), &team, &mut Quantized::default());
        Ok(())
    }

    /// Does the same on threads that the caller has already, with memory that it keeps.
    pub(crate) fn linear_on(&self, team: &Team<'_>, args: LinearArgs<'_>, quantized: &mut Quantized) -> Result<()> {
        args.check(self)?;
        Product::new(args).run(self.isa(), team, quantized);
        Ok(())
    }
}
