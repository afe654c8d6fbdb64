//! Weights in the order in which a product reads them.
//!
//! A panel holds [`PackedMatrix::panel_width`] output features: all weights of the first input, then all of the second
//! and so on. So a product reads memory in one ascending run whatever the number of rows. In bf16 feature `i` of a
//! panel's first half and feature `i` of its second one lie next to each other: one load gives two whole vectors.
//!
//! Invariants:
//! 1. A panel belongs to one part; the features that fill up the last panel of a part have weights of 0.

use crate::bf16;
use crate::buffer::{Buffer, Zeroed};
use crate::dispatch::{Isa, Kernels};
use crate::error::{Error, Result};
use crate::layout::check_len;

/// Weights `[out_features, in_features]`, row by row, as a checkpoint has them.
#[derive(Debug, Clone, Copy)]
pub enum WeightsRef<'a> {
    /// Elements are `f32`.
    F32(&'a [f32]),
    /// Elements are the bits of bf16 numbers.
    Bf16(&'a [u16]),
}

impl WeightsRef<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }
}

/// Packed weights.
#[derive(Debug)]
pub(crate) enum Panels {
    F32(Buffer<f32>),
    Bf16(Buffer<u16>),
}

/// A weight matrix in panels, for one instruction set.
///
/// It may consist of several parts of equal size, such as gate and up projection, which a product can combine.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) panels: Panels,
    in_features: usize,
    out_features: usize,
    num_parts: usize,
    isa: Isa,
}

impl PackedMatrix {
    /// Inputs of a product.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Outputs of a product, those of all parts.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Parts of equal size that the output features are.
    pub fn num_parts(&self) -> usize {
        self.num_parts
    }

    /// Bytes of memory.
    pub fn num_bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(data) => size_of_val::<[f32]>(data),
            Panels::Bf16(data) => size_of_val::<[u16]>(data),
        }
    }

    /// Whether the weights are bf16 numbers.
    pub fn is_bf16(&self) -> bool {
        matches!(self.panels, Panels::Bf16(_))
    }

    /// Output features of a panel.
    pub fn panel_width(&self) -> usize {
        2 * lanes(self.isa)
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn part_features(&self) -> usize {
        self.out_features / self.num_parts
    }

    pub(crate) fn panels_of_part(&self) -> usize {
        self.part_features().div_ceil(self.panel_width())
    }

    /// Reads the weights of one output feature, such as the embedding of a token where the head is the embedding.
    ///
    /// # Errors
    /// [`Error::Index`], [`Error::Length`] for an `out` that does not hold `in_features` numbers.
    pub fn read_feature(&self, feature: usize, out: &mut [f32]) -> Result<()> {
        check_len("out", out.len(), self.in_features)?;
        if feature >= self.out_features {
            let (argument, limit) = ("feature", self.out_features);
            return Err(Error::Index { argument, index: 0, value: feature as i64, limit });
        }
        let (part, in_part) = (feature / self.part_features(), feature % self.part_features());
        let panel = part * self.panels_of_part() + in_part / self.panel_width();
        let (start, column) = (panel * self.in_features * self.panel_width(), in_part % self.panel_width());
        let step = self.panel_width();
        match &self.panels {
            Panels::F32(data) => {
                let weights = data[start..].iter().skip(column).step_by(step);
                out.iter_mut().zip(weights).for_each(|(place, weight)| *place = *weight);
            }
            Panels::Bf16(data) => {
                let weights = data[start..].iter().skip(pair_place(column, step)).step_by(step);
                out.iter_mut().zip(weights).for_each(|(place, weight)| *place = bf16::to_f32(*weight));
            }
        }
        Ok(())
    }
}

/// Lanes of the vectors that products use.
fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => 16,
        Isa::Avx2 | Isa::Portable => 8,
    }
}

/// Where feature `column` of a panel of bf16 numbers lies among the `width` that belong to one input.
fn pair_place(column: usize, width: usize) -> usize {
    2 * (column % (width / 2)) + column / (width / 2)
}

/// Where panels are written, each by one thread.
struct Target<T>(*mut T);

// SAFETY: the pointer stands for an exclusive slice that outlives the round, and panels do not overlap.
unsafe impl<T> Sync for Target<T> {}

impl<T> Target<T> {
    /// # Safety
    /// The range is inside the slice, and no other thread has any of it.
    #[allow(clippy::mut_from_ref, reason = "the callers have disjoint ranges of one slice")]
    unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

impl Kernels {
    /// Packs weights `[out_features, in_features]`, whose features are `num_parts` parts of equal size.
    ///
    /// # Errors
    /// [`Error::ZeroDimension`], [`Error::Parts`], [`Error::Length`], [`Error::MatrixTooLarge`], [`Error::Forked`].
    pub fn pack(
        &self,
        weights: WeightsRef<'_>,
        out_features: usize,
        in_features: usize,
        num_parts: usize,
    ) -> Result<PackedMatrix> {
        let named = [("out_features", out_features), ("in_features", in_features), ("num_parts", num_parts)];
        if let Some(&(dimension, _)) = named.iter().find(|(_, size)| *size == 0) {
            return Err(Error::ZeroDimension { dimension });
        }
        if !out_features.is_multiple_of(num_parts) {
            return Err(Error::Parts { out_features, num_parts });
        }
        let width = 2 * lanes(self.isa());
        let num_panels = num_parts * (out_features / num_parts).div_ceil(width);
        let num_elements = [width, in_features].iter().try_fold(num_panels, |product, size| product.checked_mul(*size));
        let num_elements = num_elements
            .filter(|count| isize::try_from(count.saturating_mul(2 * size_of::<f32>())).is_ok())
            .ok_or(Error::MatrixTooLarge { out_features, in_features })?;
        check_len("weights", weights.len(), out_features * in_features)?;
        let shape = Shape { in_features, part_features: out_features / num_parts, num_panels, num_parts, width };
        let panels = match weights {
            WeightsRef::F32(data) => Panels::F32(self.pack_panels(data, num_elements, shape, |column, _| column)?),
            WeightsRef::Bf16(data) => Panels::Bf16(self.pack_panels(data, num_elements, shape, pair_place)?),
        };
        Ok(PackedMatrix { panels, in_features, out_features, num_parts, isa: self.isa() })
    }

    fn pack_panels<T: Zeroed + Send + Sync>(
        &self,
        weights: &[T],
        num_elements: usize,
        shape: Shape,
        place: impl Fn(usize, usize) -> usize + Sync,
    ) -> Result<Buffer<T>> {
        let Shape { in_features, part_features, num_panels, num_parts, width } = shape;
        let mut packed = Buffer::zeros(num_elements);
        let target = Target(packed.as_mut_ptr());
        self.team()?.run(num_panels, true, |_, panel| {
            let (part, in_part) = (panel / (num_panels / num_parts), panel % (num_panels / num_parts));
            let first = in_part * width;
            let num_columns = width.min(part_features - first);
            let len = in_features * width;
            // SAFETY: `packed` has `num_panels` panels of this length; this item is the only one with this panel.
            let panel = unsafe { target.range(panel * len, len) };
            let rows = &weights[(part * part_features + first) * in_features..][..num_columns * in_features];
            for (column, row) in rows.chunks_exact(in_features).enumerate() {
                let places = panel[place(column, width)..].iter_mut().step_by(width);
                places.zip(row).for_each(|(place, weight)| *place = *weight);
            }
        });
        Ok(packed)
    }
}

/// Sizes of a matrix in panels of `width` features.
#[derive(Debug, Clone, Copy)]
struct Shape {
    in_features: usize,
    part_features: usize,
    num_panels: usize,
    num_parts: usize,
    width: usize,
}
