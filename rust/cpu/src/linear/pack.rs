//! Weights in the order in which a product reads them.
//!
//! A panel holds [`PackedMatrix::panel_width`] output features: all weights of the first input, then all of the second
//! and so on. So a product reads memory in one ascending run whatever the number of rows. In bf16 feature `i` of a
//! panel's first half and feature `i` of its second one lie next to each other: one load gives two whole vectors.
//! In int8 a panel is a run of groups of 32 inputs, see `int8.rs`; the last group is filled up with weights of 0.
//!
//! Invariants:
//! 1. A panel belongs to one part; the features that fill up the last panel of a part have weights of 0.

use crate::bf16;
use crate::buffer::{Buffer, Zeroed};
use crate::dispatch::{Isa, Kernels};
use crate::error::{Error, Result};
use crate::int8;
use crate::layout::check_len;
use crate::linear::int8::group_bytes;
use crate::simd::dot::{DotSet, GROUP, load_weight, store_weight};

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

    /// Copies some weights as f32.
    fn read(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..start + out.len()]),
            Self::Bf16(data) => {
                out.iter_mut().zip(&data[start..]).for_each(|(place, weight)| *place = bf16::to_f32(*weight));
            }
        }
    }
}

/// Types of packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// As given.
    F32,
    /// As given.
    Bf16,
    /// Rounded to 8-bit integers with a bf16 scale for each group of 32 inputs of a feature.
    Int8,
}

/// Packed weights.
#[derive(Debug)]
pub(crate) enum Panels {
    F32(Buffer<f32>),
    Bf16(Buffer<u16>),
    Int8(DotSet, Buffer<u8>),
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
            Panels::Int8(_, data) => size_of_val::<[u8]>(data),
        }
    }

    /// Type of the weights.
    pub fn weight_type(&self) -> WeightType {
        match self.panels {
            Panels::F32(_) => WeightType::F32,
            Panels::Bf16(_) => WeightType::Bf16,
            Panels::Int8(..) => WeightType::Int8,
        }
    }

    /// Output features of a panel.
    pub fn panel_width(&self) -> usize {
        match self.panels {
            Panels::Int8(set, _) => 2 * set.lanes(),
            _ => 2 * lanes(self.isa),
        }
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
            Panels::Int8(set, data) => {
                let panel = &data[panel * self.in_features.div_ceil(GROUP) * group_bytes(step / 2)..];
                for (out, group) in out.chunks_mut(GROUP).zip(panel.chunks_exact(group_bytes(step / 2))) {
                    let (scales, weights) = group.split_at(step * size_of::<u16>());
                    let place = pair_place(column, step) * size_of::<u16>();
                    let scale = bf16::to_f32(u16::from_ne_bytes([scales[place], scales[place + 1]]));
                    for (input, place) in out.iter_mut().enumerate() {
                        *place = scale * f32::from(load_weight(weights[set.place(column, input)]));
                    }
                }
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
        let shape = Shape::new(weights, out_features, in_features, num_parts, 2 * lanes(self.isa()))?;
        let panels = match weights {
            WeightsRef::F32(data) => Panels::F32(self.pack_panels(data, shape, |column, _| column)?),
            WeightsRef::Bf16(data) => Panels::Bf16(self.pack_panels(data, shape, pair_place)?),
        };
        Ok(PackedMatrix { panels, in_features, out_features, num_parts, isa: self.isa() })
    }

    /// Does the same with the weights rounded to int8; each group of 32 inputs of a feature has its own scale.
    ///
    /// # Errors
    /// As for [`Self::pack`].
    pub fn pack_int8(
        &self,
        weights: WeightsRef<'_>,
        out_features: usize,
        in_features: usize,
        num_parts: usize,
    ) -> Result<PackedMatrix> {
        self.pack_int8_for(DotSet::choose(self.isa()), weights, out_features, in_features, num_parts)
    }

    /// Does it for one of the instruction sets that go with that of the kernels.
    pub(crate) fn pack_int8_for(
        &self,
        set: DotSet,
        weights: WeightsRef<'_>,
        out_features: usize,
        in_features: usize,
        num_parts: usize,
    ) -> Result<PackedMatrix> {
        debug_assert!(set.is_available());
        let shape = Shape::new(weights, out_features, in_features, num_parts, 2 * set.lanes())?;
        let (num_groups, bytes) = (in_features.div_ceil(GROUP), group_bytes(set.lanes()));
        let mut packed = self.weights().zeros(shape.num_panels * num_groups * bytes);
        let target = Target(packed.as_mut_ptr());
        self.team()?.run(shape.num_panels, true, |_, panel| {
            // SAFETY: `packed` has `num_panels` panels of this length; this item is the only one with this panel.
            let groups = unsafe { target.range(panel * num_groups * bytes, num_groups * bytes) };
            // What no feature or input has.
            groups.fill(store_weight(0));
            let (first, num_columns) = shape.features(panel);
            for (index, group) in groups.chunks_exact_mut(bytes).enumerate() {
                let (scales, places) = group.split_at_mut(shape.width * size_of::<u16>());
                scales.fill(0);
                for column in 0..num_columns {
                    let (mut values, mut ints) = ([0.0; GROUP], [0; GROUP]);
                    let num_inputs = GROUP.min(in_features - index * GROUP);
                    weights.read((first + column) * in_features + index * GROUP, &mut values[..num_inputs]);
                    let scale = int8::quantize(&values, &mut ints);
                    let place = pair_place(column, shape.width) * size_of::<u16>();
                    scales[place..place + size_of::<u16>()].copy_from_slice(&scale.to_ne_bytes());
                    for (input, int) in ints.into_iter().enumerate() {
                        places[set.place(column, input)] = store_weight(int);
                    }
                }
            }
        });
        Ok(PackedMatrix { panels: Panels::Int8(set, packed), in_features, out_features, num_parts, isa: self.isa() })
    }

    fn pack_panels<T: Zeroed + Send + Sync>(
        &self,
        weights: &[T],
        shape: Shape,
        place: impl Fn(usize, usize) -> usize + Sync,
    ) -> Result<Buffer<T>> {
        let Shape { in_features, num_panels, width, .. } = shape;
        let mut packed = self.weights().zeros(num_panels * width * in_features);
        let target = Target(packed.as_mut_ptr());
        self.team()?.run(num_panels, true, |_, panel| {
            let (first, num_columns) = shape.features(panel);
            let len = in_features * width;
            // SAFETY: `packed` has `num_panels` panels of this length; this item is the only one with this panel.
            let panel = unsafe { target.range(panel * len, len) };
            let rows = &weights[first * in_features..][..num_columns * in_features];
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

impl Shape {
    /// Checks the sizes of a matrix; all numbers computed from them can be addressed then.
    fn new(
        weights: WeightsRef<'_>,
        out_features: usize,
        in_features: usize,
        num_parts: usize,
        width: usize,
    ) -> Result<Self> {
        let named = [("out_features", out_features), ("in_features", in_features), ("num_parts", num_parts)];
        if let Some(&(dimension, _)) = named.iter().find(|(_, size)| *size == 0) {
            return Err(Error::ZeroDimension { dimension });
        }
        if !out_features.is_multiple_of(num_parts) {
            return Err(Error::Parts { out_features, num_parts });
        }
        let num_panels = num_parts * (out_features / num_parts).div_ceil(width);
        let padded = in_features.checked_next_multiple_of(GROUP);
        let num_elements = padded.and_then(|inputs| inputs.checked_mul(width)?.checked_mul(num_panels));
        num_elements
            .filter(|count| isize::try_from(count.saturating_mul(2 * size_of::<f32>())).is_ok())
            .ok_or(Error::MatrixTooLarge { out_features, in_features })?;
        check_len("weights", weights.len(), out_features * in_features)?;
        Ok(Self { in_features, part_features: out_features / num_parts, num_panels, num_parts, width })
    }

    /// First feature of a panel, and how many it has.
    fn features(&self, panel: usize) -> (usize, usize) {
        let panels_of_part = self.num_panels / self.num_parts;
        let (part, first) = (panel / panels_of_part, panel % panels_of_part * self.width);
        (part * self.part_features + first, self.width.min(self.part_features - first))
    }
}
