//! Whether two arrays have elements in common. K and V in one tensor lie between each other's rows and have
//! none.

use crate::dlpack::View;

/// The most positions that are tried before two arrays count as disjoint: real arrays need a few.
const WORK: usize = 1 << 14;

/// A step between elements, and how often it may be taken.
struct Steps {
    stride: i128,
    least: i128,
    most: i128,
}

/// Whether an element of one array has a byte in common with one of the other. Those of one type begin where
/// the other's do, or share nothing.
pub(crate) fn share_elements(one: &View<'_>, other: &View<'_>) -> bool {
    if one.elements() == 0 || other.elements() == 0 || one.place != other.place {
        return false;
    }
    let bytes = i128::from(other.address()) - i128::from(one.address());
    let sizes = [one, other].map(|view| i128::from(view.element_bytes()));
    // New rows and a cache of codes differ: their bytes are compared, which are one more axis.
    let is_one_type = sizes[0] == sizes[1];
    let unit = if is_one_type { sizes[0] } else { 1 };
    if bytes % unit != 0 {
        return false;
    }
    let axes = |view: &View<'_>, size: i128| {
        let axes = view.shape().iter().zip(view.strides()).filter(|(len, stride)| **len > 1 && **stride > 0);
        let axes = axes.map(|(&len, &stride)| (i128::from(stride) * size / unit, len as i128 - 1));
        axes.chain((size > unit).then_some((1, size - 1))).collect::<Vec<_>>()
    };
    places_meet(&axes(one, sizes[0]), &axes(other, sizes[1]), bytes / unit)
}

/// By how many of its pages another cache lies behind a cache, where the two are of one form and share whole
/// pages alone: K and V in blocks of one buffer, whose tables name apart what they write.
pub(crate) fn pages_between(one: &View<'_>, other: &View<'_>) -> Option<i64> {
    let (page, rows) = one.strides().split_first()?;
    let is_alike = one.shape().get(1..) == other.shape().get(1..)
        && one.strides() == other.strides()
        && one.element_bytes() == other.element_bytes();
    let lengths = one.shape().get(1..)?.iter().zip(rows);
    let extent = lengths.map(|(&len, &stride)| (len as i128 - 1) * i128::from(stride)).sum::<i128>() + 1;
    let step = i128::from(*page) * i128::from(one.element_bytes());
    let bytes = i128::from(other.address()) - i128::from(one.address());
    let is_whole = rows.iter().all(|stride| *stride >= 0) && extent <= i128::from(*page) && bytes % step == 0;
    (is_alike && is_whole)
        .then(|| bytes / step)
        .and_then(|pages| i64::try_from(pages).ok())
        .filter(|pages| *pages != 0)
}

/// Whether steps in one array (stride and most steps of each axis) lead as far as steps in another that
/// begins `apart` elements behind it.
fn places_meet(one: &[(i128, i128)], other: &[(i128, i128)], apart: i128) -> bool {
    let mut steps: Vec<Steps> = vec![];
    let both = one.iter().map(|&(stride, most)| (stride, 0, most));
    for (stride, least, most) in both.chain(other.iter().map(|&(stride, most)| (stride, -most, 0))) {
        match steps.iter_mut().find(|known| known.stride == stride) {
            Some(known) => (known.least, known.most) = (known.least + least, known.most + most),
            None => steps.push(Steps { stride, least, most }),
        }
    }
    steps.sort_by_key(|steps| -steps.stride);
    leads_to(&steps, apart, &mut 0)
}

/// Whether a sum of steps is `to`, the longest first.
fn leads_to(steps: &[Steps], to: i128, tried: &mut usize) -> bool {
    let Some((Steps { stride, least, most }, shorter)) = steps.split_first() else { return to == 0 };
    let [backward, forward] = shorter.iter().fold([0, 0], |[backward, forward], steps| {
        [backward + steps.stride * steps.least, forward + steps.stride * steps.most]
    });
    // What is left must be within the shorter steps' reach.
    let first = (to - forward).div_euclid(*stride) + i128::from((to - forward).rem_euclid(*stride) != 0);
    let last = (to - backward).div_euclid(*stride);
    (first.max(*least)..=last.min(*most)).any(|count| {
        *tried += 1;
        *tried <= WORK && leads_to(shorter, to - stride * count, tried)
    })
}
