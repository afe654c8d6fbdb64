//! Cutting a product into items: a block of rows, and some neighbouring panels.
//!
//! The rows of a block stay in the second-level cache while the panels pass by. A panel is taken in runs of inputs that
//! fit into the first-level cache, each for all tiles of the block. Rows are spread evenly over the tiles, since a tile
//! costs the loads of a panel however few rows it has.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::epilogue::{Destination, MAX_WIDTH, PanelBias, Sums, store, store_gated};
use super::int8::Ints;
use super::micro::{Floats, Weight};
use super::pack::Panels;
use super::quantize::Quantized;
use super::{LinearArgs, PackedMatrix, Then};
use crate::dispatch::Isa;
use crate::pool::Team;
use crate::simd::Simd;
use crate::simd::dot::{Dot, DotSet};
#[cfg(target_arch = "x86_64")]
use crate::simd::dot_x86::Vnni;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};

/// Bytes of input that a block of rows may have: a part of the second-level cache.
const BLOCK_BYTES: usize = 256 << 10;
/// Largest number of rows of a block; its sums lie on the stack.
const MAX_ROWS: usize = 96;
/// Items per thread that there should be, so that all end at about the same time.
const ITEMS_PER_THREAD: usize = 8;
/// Largest number of panels of an item.
const MAX_PANELS: usize = 32;
/// Below this many multiply-adds handing work to another thread costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

/// The output, written by several threads at disjoint places.
#[derive(Debug, Clone, Copy)]
struct Output(*mut f32);

// SAFETY: the pointer stands for a slice that the product borrows exclusively; items write disjoint parts of it.
unsafe impl Sync for Output {}
// SAFETY: as above.
unsafe impl Send for Output {}

/// How the sums of some rows and panels come about.
pub(crate) trait Multiply: Sync {
    /// Vectors of the sums.
    type Numbers: Simd;
    /// Rows that one run over a panel takes.
    const TILE_ROWS: usize;
    /// Whether a few rows take two panels together.
    const HAS_PAIRS: bool;

    /// Writes the sums of some rows and `P` panels, `[rows, P, 2 * LANES]`.
    ///
    /// # Safety
    /// The CPU has the instruction set; rows and panels exist, and there is room for the sums.
    unsafe fn multiply<const P: usize>(&self, rows: &Range<usize>, panels: [usize; P], sums: *mut f32);
}

/// One product, verified.
#[derive(Debug)]
pub(crate) struct Product<'a> {
    out: Output,
    input: &'a [f32],
    num_rows: usize,
    matrix: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    then: Then,
}

/// How a product is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Panels of one part, of a gated product; else all panels.
    num_panels: usize,
    panels_per_item: usize,
    num_blocks: usize,
    rows_per_block: usize,
    /// Panels that a tile takes together: two of a plain product, or a gate's and its up's.
    has_pairs: bool,
}

impl Cut {
    fn new(product: &Product<'_>, tile_rows: usize, may_pair: bool, num_threads: usize) -> Self {
        let matrix = product.matrix;
        let parts = if matches!(product.then, Then::Gate(_)) { 1 } else { matrix.num_parts() };
        let num_panels = parts * matrix.panels_of_part();
        let most_rows = BLOCK_BYTES / (size_of::<f32>() * matrix.in_features());
        let most_rows = (most_rows - most_rows % tile_rows).clamp(tile_rows, MAX_ROWS - MAX_ROWS % tile_rows);
        let num_blocks = product.num_rows.div_ceil(most_rows).max(1);
        let rows_per_block = product.num_rows.div_ceil(num_blocks).next_multiple_of(tile_rows);
        let has_pairs = may_pair && product.num_rows <= tile_rows / 2;
        let items_per_block = (ITEMS_PER_THREAD * num_threads).div_ceil(num_blocks);
        let panels_per_item = num_panels.div_ceil(items_per_block).clamp(1, MAX_PANELS);
        let is_plain = matches!(product.then, Then::Store | Then::Add);
        let panels_per_item = if has_pairs && is_plain { panels_per_item.next_multiple_of(2) } else { panels_per_item };
        Self { num_panels, panels_per_item, num_blocks, rows_per_block, has_pairs }
    }

    fn items_per_block(&self) -> usize {
        self.num_panels.div_ceil(self.panels_per_item)
    }

    fn num_items(&self) -> usize {
        self.num_blocks * self.items_per_block()
    }

    /// Rows and panels of one item; neighbouring items share the rows.
    fn item(&self, item: usize, num_rows: usize) -> (Range<usize>, Range<usize>) {
        let (block, group) = (item / self.items_per_block(), item % self.items_per_block());
        let rows = block * self.rows_per_block..((block + 1) * self.rows_per_block).min(num_rows);
        let panels = group * self.panels_per_item..((group + 1) * self.panels_per_item).min(self.num_panels);
        (rows, panels)
    }
}

/// Cuts rows into tiles of at most `tile_rows`, as even as they go.
pub(crate) fn tiles(rows: Range<usize>, tile_rows: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.len().div_ceil(tile_rows);
    (0..count).map(move |tile| {
        let place = |tile: usize| rows.start + rows.len() * tile / count;
        place(tile)..place(tile + 1)
    })
}

impl<'a> Product<'a> {
    /// Takes arguments that passed their check.
    pub(crate) fn new(args: LinearArgs<'a>) -> Self {
        let LinearArgs { out, input, num_rows, matrix, bias, then } = args;
        Self { out: Output(out.as_mut_ptr()), input, num_rows, matrix, bias, then }
    }

    /// Computes it on the threads of `team`; `quantized` is memory for the input of a product with int8 weights.
    pub(crate) fn run(&self, isa: Isa, team: &Team<'_>, quantized: &mut Quantized) {
        if self.num_rows == 0 {
            return;
        }
        match &self.matrix.panels {
            Panels::F32(data) => self.run_floats(isa, team, data),
            Panels::Bf16(data) => self.run_floats(isa, team, data),
            Panels::Int8(set, data) => self.run_ints(*set, isa, team, data, quantized),
        }
    }

    fn run_floats<W: Weight>(&self, isa: Isa, team: &Team<'_>, data: &[W]) {
        let (input, depth) = (self.input, self.matrix.in_features());
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => self.run_items(team, &Floats::<Avx512, W>::new(data, input, depth), item_avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => self.run_items(team, &Floats::<Avx2, W>::new(data, input, depth), item_avx2),
            _ => self.run_items(team, &Floats::<Portable<8>, W>::new(data, input, depth), Self::run_item),
        }
    }

    fn run_ints(&self, set: DotSet, isa: Isa, team: &Team<'_>, data: &[u8], quantized: &mut Quantized) {
        match set {
            #[cfg(target_arch = "x86_64")]
            DotSet::Vnni => self.run_items(team, &self.ints::<Vnni>(isa, team, data, quantized), item_vnni),
            #[cfg(target_arch = "x86_64")]
            DotSet::Avx512 => self.run_items(team, &self.ints::<Avx512>(isa, team, data, quantized), item_avx512_bytes),
            #[cfg(target_arch = "x86_64")]
            DotSet::Avx2 => self.run_items(team, &self.ints::<Avx2>(isa, team, data, quantized), item_avx2),
            _ => self.run_items(team, &self.ints::<Portable<8>>(isa, team, data, quantized), Self::run_item),
        }
    }

    /// Quantises the input for `D`.
    fn ints<'b, D: Dot>(&self, isa: Isa, team: &Team<'_>, data: &'b [u8], quantized: &'b mut Quantized) -> Ints<'b, D> {
        quantized.fill(isa, team, self.input, self.num_rows);
        Ints::new(data, quantized)
    }

    /// Runs all items; `run_item` is [`Self::run_item`] in a function with the instruction set of `M`.
    fn run_items<M: Multiply>(&self, team: &Team<'_>, multiply: &M, run_item: unsafe fn(&Self, &M, &Cut, usize)) {
        let cut = Cut::new(self, M::TILE_ROWS, M::HAS_PAIRS, team.num_threads());
        let work = self.num_rows * self.matrix.in_features() * self.matrix.out_features();
        team.run(cut.num_items(), work >= PARALLEL_WORK, |_, item| {
            // SAFETY: the arguments were checked, and the matrix is packed for an instruction set that the CPU has.
            unsafe { run_item(self, multiply, &cut, item) }
        });
    }

    /// Computes one item.
    ///
    /// # Safety
    /// The CPU has the instruction set of `M`, for which the matrix is packed; the product passed its check.
    #[allow(clippy::large_stack_arrays, reason = "24 KiB, of threads with 2 MiB")]
    #[inline(always)]
    unsafe fn run_item<M: Multiply>(&self, multiply: &M, cut: &Cut, item: usize) {
        let lanes = M::Numbers::LANES;
        let (rows, mut panels) = cut.item(item, self.num_rows);
        let is_gated = matches!(self.then, Then::Gate(_));
        // Not written before they are needed, since that takes as long as the product of a small batch.
        let mut sums = [const { MaybeUninit::<f32>::uninit() }; 2 * MAX_ROWS * MAX_WIDTH];
        let first = sums.as_mut_ptr().cast::<f32>();
        // Loops and no closures: a closure that the compiler does not inline lacks the instruction set.
        while let Some(panel) = panels.next() {
            let other = if is_gated {
                Some(panel + self.matrix.panels_of_part())
            } else if cut.has_pairs {
                panels.next()
            } else {
                None
            };
            let both = [panel, other.unwrap_or(panel)];
            let (stride, second) = match other {
                Some(_) if cut.has_pairs => (4 * lanes, first.wrapping_add(2 * lanes)),
                _ => (2 * lanes, first.wrapping_add(MAX_ROWS * MAX_WIDTH)),
            };
            // SAFETY: passed on; the rows and panels exist, and there is room for the sums of two panels.
            unsafe {
                if other.is_some() && cut.has_pairs {
                    multiply.multiply::<2>(&rows, both, first);
                } else {
                    for (panel, sums) in both.into_iter().zip([first, second]).take(1 + usize::from(other.is_some())) {
                        multiply.multiply::<1>(&rows, [panel], sums);
                    }
                }
                let sums = [first, second].map(|start| Sums { start, stride });
                self.finish::<M::Numbers>(sums, &rows, both, other.is_some());
            }
        }
    }

    /// Writes the outputs of one panel, or of two.
    ///
    /// # Safety
    /// As for [`Self::run_item`]; the sums are written.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, sums: [Sums; 2], rows: &Range<usize>, panels: [usize; 2], has_two: bool) {
        let biases = [self.panel_bias(panels[0]), self.panel_bias(panels[1])];
        // SAFETY: passed on; no other item has these outputs.
        unsafe {
            if let Then::Gate(activation) = self.then {
                let to = self.destination(rows.start, panels[0]);
                let biases = [biases[0].as_ref(), biases[1].as_ref()];
                return store_gated::<S>(sums, rows.len(), biases, to, activation);
            }
            for index in 0..=usize::from(has_two) {
                let to = self.destination(rows.start, panels[index]);
                let adds = self.then == Then::Add;
                store::<S>(sums[index], rows.len(), biases[index].as_ref(), to, adds);
            }
        }
    }

    /// First output feature of a panel, and how many it has.
    fn features(&self, panel: usize) -> (usize, usize) {
        let (part_features, width) = (self.matrix.part_features(), self.matrix.panel_width());
        let (part, in_part) = (panel / self.matrix.panels_of_part(), panel % self.matrix.panels_of_part());
        (part * part_features + in_part * width, width.min(part_features - in_part * width))
    }

    fn panel_bias(&self, panel: usize) -> Option<PanelBias> {
        let (first, count) = self.features(panel);
        self.bias.map(|bias| PanelBias::new(&bias[first..first + count]))
    }

    fn destination(&self, row: usize, panel: usize) -> Destination {
        let (first, num_features) = self.features(panel);
        let is_gated = matches!(self.then, Then::Gate(_));
        let stride = if is_gated { self.matrix.part_features() } else { self.matrix.out_features() };
        // In range: the check compared the output's length with rows and features.
        Destination { start: self.out.0.wrapping_add(row * stride + first), stride, num_features }
    }
}

/// # Safety
/// As for [`Product::run_item`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
unsafe fn item_vnni<M: Multiply>(product: &Product<'_>, multiply: &M, cut: &Cut, item: usize) {
    // SAFETY: passed on; this function has the features.
    unsafe { product.run_item(multiply, cut, item) }
}

/// # Safety
/// As for [`Product::run_item`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn item_avx512_bytes<M: Multiply>(product: &Product<'_>, multiply: &M, cut: &Cut, item: usize) {
    // SAFETY: passed on; this function has the features.
    unsafe { product.run_item(multiply, cut, item) }
}

/// # Safety
/// As for [`Product::run_item`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn item_avx512<M: Multiply>(product: &Product<'_>, multiply: &M, cut: &Cut, item: usize) {
    // SAFETY: passed on; this function has the features.
    unsafe { product.run_item(multiply, cut, item) }
}

/// # Safety
/// As for [`Product::run_item`]; the CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn item_avx2<M: Multiply>(product: &Product<'_>, multiply: &M, cut: &Cut, item: usize) {
    // SAFETY: passed on; this function has the features.
    unsafe { product.run_item(multiply, cut, item) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_as_even_as_they_go_and_leave_no_row_out() {
        for len in 0..100 {
            let cut: Vec<_> = tiles(3..3 + len, 6).collect();
            assert_eq!(cut.iter().cloned().flatten().collect::<Vec<_>>(), (3..3 + len).collect::<Vec<_>>());
            let heights: Vec<_> = cut.iter().map(Range::len).collect();
            let (most, least) = (heights.iter().max(), heights.iter().min());
            assert!(most.is_none_or(|most| *most <= 6 && most - least.expect("not empty") <= 1));
        }
    }
}
