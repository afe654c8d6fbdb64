//! The largest few of a row, without sorting it: candidates from the blocks that can hold one, then partial selection.

use std::cmp::Ordering;

use crate::sampling::scan::BLOCK;

/// A number and the id that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate<T> {
    pub(super) value: T,
    pub(super) id: usize,
}

/// The order of preference: larger first, then the lower id. The values are no NaN.
pub(super) fn by_preference<T: PartialOrd>(a: &Candidate<T>, b: &Candidate<T>) -> Ordering {
    let larger_first = b.value.partial_cmp(&a.value).unwrap_or(Ordering::Equal);
    larger_first.then(a.id.cmp(&b.id))
}

/// Returns a number that at least `count` values reach, not 0, given the largest of each block; `least` if it is not known.
pub(super) fn floor_of_count<T: PartialOrd + Copy>(
    block_largest: &[T],
    count: usize,
    least: T,
    work: &mut Vec<T>,
) -> T {
    if count > block_largest.len() {
        return least;
    }
    work.clear();
    work.extend_from_slice(block_largest);
    let larger_first = |a: &T, b: &T| b.partial_cmp(a).unwrap_or(Ordering::Equal);
    *work.select_nth_unstable_by(count - 1, larger_first).1
}

/// Puts all values of at least `floor` into `found`, in the order of their ids.
#[inline(always)]
pub(super) fn collect<T: PartialOrd + Copy>(
    values: &[T],
    block_largest: &[T],
    floor: T,
    found: &mut Vec<Candidate<T>>,
) {
    found.clear();
    for (block, (values, largest)) in values.chunks(BLOCK).zip(block_largest).enumerate() {
        if *largest >= floor {
            let candidates = values.iter().enumerate().filter(|(_, value)| **value >= floor);
            found.extend(candidates.map(|(offset, &value)| Candidate { value, id: block * BLOCK + offset }));
        }
    }
}

/// Keeps the `count` preferred candidates, `count` not 0, in the order that they had.
pub(super) fn keep_count<T: PartialOrd + Copy>(
    candidates: &mut Vec<Candidate<T>>,
    count: usize,
    work: &mut Vec<Candidate<T>>,
) {
    if candidates.len() > count {
        work.clone_from(candidates);
        let last = *work.select_nth_unstable_by(count - 1, by_preference).1;
        keep_up_to(candidates, &last);
    }
}

/// Keeps the fewest preferred candidates whose sum reaches `target`, in the order that they had.
///
/// Those of at least `certain` do not reach it, so they stay without being looked at.
pub(super) fn keep_mass(
    candidates: &mut Vec<Candidate<f64>>,
    target: f64,
    certain: f64,
    work: &mut Vec<Candidate<f64>>,
) {
    /// So few are sorted.
    const FEW: usize = 16;
    work.clear();
    // Sum of what comes before `start` below, which does not reach the target.
    let mut mass = 0.0;
    for candidate in &*candidates {
        if candidate.value >= certain {
            mass += candidate.value;
        } else {
            work.push(*candidate);
        }
    }
    let (mut start, mut end) = (0, work.len());
    while end - start > FEW {
        let middle = (end - start) / 2;
        work[start..end].select_nth_unstable_by(middle, by_preference);
        let upper: f64 = work[start..=start + middle].iter().map(|candidate| candidate.value).sum();
        if mass + upper >= target {
            end = start + middle + 1;
        } else {
            mass += upper;
            start += middle + 1;
        }
    }
    work[start..end].sort_unstable_by(by_preference);
    let last = work[start..end].iter().find(|candidate| {
        mass += candidate.value;
        mass >= target
    });
    // Not even all of them: only rounding can do that, and then all stay.
    if let Some(last) = last.copied() {
        keep_up_to(candidates, &last);
    }
}

fn keep_up_to<T: PartialOrd + Copy>(candidates: &mut Vec<Candidate<T>>, last: &Candidate<T>) {
    candidates.retain(|candidate| by_preference(candidate, last) != Ordering::Greater);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(values: &[f64]) -> Vec<Candidate<f64>> {
        values.iter().enumerate().map(|(id, &value)| Candidate { value, id }).collect()
    }

    fn ids(candidates: &[Candidate<f64>]) -> Vec<usize> {
        candidates.iter().map(|candidate| candidate.id).collect()
    }

    #[test]
    fn among_equals_the_lower_ids_stay() {
        let mut kept = candidates(&[0.5, 1.0, 0.5, 0.5]);
        keep_count(&mut kept, 2, &mut Vec::new());
        assert_eq!(ids(&kept), [0, 1]);
        let mut kept = candidates(&[0.5; 100]);
        keep_mass(&mut kept, 10.0, f64::INFINITY, &mut Vec::new());
        assert_eq!(ids(&kept), (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn the_fewest_that_reach_the_mass_stay() {
        for (target, expected) in [(1.0, &[1][..]), (1.01, &[1, 2]), (1.8, &[0, 1, 2]), (9.0, &[0, 1, 2, 3])] {
            let mut kept = candidates(&[0.4, 1.0, 0.5, 0.1]);
            keep_mass(&mut kept, target, f64::INFINITY, &mut Vec::new());
            assert_eq!(ids(&kept), expected, "mass {target}");
        }
    }

    #[test]
    fn selection_equals_a_sort_for_many_values() {
        let values: Vec<f64> = (0..500u32).map(|i| f64::from(i * 7919 % 97) / 97.0).collect();
        let mut sorted = candidates(&values);
        sorted.sort_by(by_preference);
        for count in [1, 2, 16, 17, 250, 499, 500] {
            let mut expected = ids(&sorted[..count]);
            expected.sort_unstable();
            let mut kept = candidates(&values);
            keep_count(&mut kept, count, &mut Vec::new());
            assert_eq!(ids(&kept), expected);
            let mass: f64 = sorted[..count].iter().map(|candidate| candidate.value).sum();
            if sorted[count - 1].value > 0.0 {
                for certain in [f64::INFINITY, sorted[count - 1].value * 1.001] {
                    let mut kept = candidates(&values);
                    keep_mass(&mut kept, mass - sorted[count - 1].value / 2.0, certain, &mut Vec::new());
                    assert_eq!(ids(&kept), expected);
                }
            }
        }
    }
}
