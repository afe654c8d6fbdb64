//! What happens to the sums of a tile: bias, gate, and where they go.

use crate::simd::{Simd, gate};

/// Largest width of a panel.
pub(crate) const MAX_WIDTH: usize = 32;

/// Activation of a gated product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

impl Activation {
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn apply<S: Simd>(self, x: S::Vector) -> S::Vector {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Silu => gate::<S>(x, x),
                Self::GeluTanh => {
                    // (1 + tanh u) / 2 is the sigmoid of 2 u.
                    let scale = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
                    let cubic = S::mul_add(S::mul(x, x), S::splat(0.044_715 * scale), S::splat(scale));
                    gate::<S>(x, S::mul(x, cubic))
                }
            }
        }
    }
}

/// Bias of the features of one panel, filled up with 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PanelBias([f32; MAX_WIDTH]);

impl PanelBias {
    pub(crate) fn new(bias: &[f32]) -> Self {
        let mut padded = Self([0.0; MAX_WIDTH]);
        padded.0[..bias.len()].copy_from_slice(bias);
        padded
    }
}

/// Where the numbers of a panel go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination {
    /// Place of the panel's first feature in the first row of the tile.
    pub(crate) start: *mut f32,
    /// Elements from a row to the next.
    pub(crate) stride: usize,
    /// Features of the panel that there are.
    pub(crate) num_features: usize,
}

impl Destination {
    /// Writes, or adds, one row of a panel.
    ///
    /// # Safety
    /// As for [`Simd`]; the destination's row `row` is this thread's.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, row: usize, values: [S::Vector; 2], adds: bool) {
        // SAFETY: the caller promises the row, of which `num_features` elements are written.
        unsafe {
            let place = self.start.add(row * self.stride);
            if self.num_features == 2 * S::LANES {
                for (half, mut value) in values.into_iter().enumerate() {
                    let place = place.add(half * S::LANES);
                    if adds {
                        value = S::add(S::load(place), value);
                    }
                    S::store(place, value);
                }
                return;
            }
            let mut numbers = [0.0; MAX_WIDTH];
            for (half, value) in values.into_iter().enumerate() {
                S::store(numbers.as_mut_ptr().add(half * S::LANES), value);
            }
            for (index, number) in numbers[..self.num_features].iter().enumerate() {
                let place = place.add(index);
                *place = if adds { *place + number } else { *number };
            }
        }
    }
}

/// Sums of a panel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums {
    /// Those of the first row.
    pub(crate) start: *const f32,
    /// Elements from a row to the next.
    pub(crate) stride: usize,
}

/// Loads one row of sums and adds the bias.
///
/// # Safety
/// As for [`Simd`]; the sums have that row.
#[inline(always)]
unsafe fn biased<S: Simd>(sums: Sums, row: usize, bias: Option<&PanelBias>) -> [S::Vector; 2] {
    // SAFETY: the caller promises the row; a bias has MAX_WIDTH numbers, at least two vectors.
    unsafe {
        let place = sums.start.add(row * sums.stride);
        let mut values = [S::load(place), S::load(place.add(S::LANES))];
        if let Some(PanelBias(bias)) = bias {
            for (half, value) in values.iter_mut().enumerate() {
                *value = S::add(*value, S::load(bias.as_ptr().add(half * S::LANES)));
            }
        }
        values
    }
}

/// Writes a panel, or adds it.
///
/// # Safety
/// As for [`Simd`]; there are sums of `num_rows` rows, and the destination's rows are this thread's.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(
    sums: Sums,
    num_rows: usize,
    bias: Option<&PanelBias>,
    to: Destination,
    adds: bool,
) {
    for row in 0..num_rows {
        // SAFETY: passed on.
        unsafe { to.put::<S>(row, biased::<S>(sums, row, bias), adds) };
    }
}

/// Writes a gated panel: the activation of the first sums times the second ones.
///
/// # Safety
/// As for [`store`], for both sums.
#[inline(always)]
pub(crate) unsafe fn store_gated<S: Simd>(
    [gates, ups]: [Sums; 2],
    num_rows: usize,
    bias: [Option<&PanelBias>; 2],
    to: Destination,
    activation: Activation,
) {
    for row in 0..num_rows {
        // SAFETY: passed on.
        unsafe {
            let (gate, up) = (biased::<S>(gates, row, bias[0]), biased::<S>(ups, row, bias[1]));
            let low = S::mul(activation.apply::<S>(gate[0]), up[0]);
            let high = S::mul(activation.apply::<S>(gate[1]), up[1]);
            to.put::<S>(row, [low, high], false);
        }
    }
}
