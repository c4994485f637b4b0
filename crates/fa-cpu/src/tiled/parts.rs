//! Results of panels over stretches of the keys that several threads have: each stretch is stored, then all
//! are added in order, as a thread that has all of them does.

use std::sync::{Mutex, PoisonError};

use super::long::{Accumulated, Stretches};
use crate::simd::Kernels;

/// Room for every panel's result over every stretch, of the units whose keys are divided.
pub(super) struct Parts<'a> {
    kernels: Kernels,
    slots: Vec<Mutex<Slot<'a>>>,
    /// Values of O.
    len: usize,
    /// Queries of a panel.
    width: usize,
}

/// A panel's result over a stretch.
struct Slot<'a> {
    /// O, maxima and sums.
    values: &'a mut [f32],
    started: bool,
}

/// Values of a slot.
pub(super) fn slot_len(len: usize, width: usize) -> usize {
    (len + 2 * width).next_multiple_of(16)
}

impl<'a> Parts<'a> {
    /// In `room`, as many values as the slots have; panels have `len` values of O and `width` queries.
    pub(super) fn new(kernels: Kernels, room: &'a mut [f32], len: usize, width: usize) -> Parts<'a> {
        let slots = room.chunks_exact_mut(slot_len(len, width));
        let slots = slots.map(|values| Mutex::new(Slot { values, started: false })).collect();
        Parts { kernels, slots, len, width }
    }

    /// A panel has come to the end of a stretch, perhaps its last: the result is stored in a slot, where
    /// other threads have other stretches, or joins what was before.
    pub(super) fn end(
        &self,
        slot: Option<usize>,
        before: &mut Stretches,
        stretch: Accumulated<'_>,
        is_last: bool,
    ) {
        match slot {
            Some(slot) => self.put(slot, stretch),
            None if is_last => before.finish(self.kernels, stretch),
            None => before.end(self.kernels, stretch),
        }
    }

    fn put(&self, slot: usize, mut stretch: Accumulated<'_>) {
        let mut to = self.slots[slot].lock().unwrap_or_else(PoisonError::into_inner);
        to.started = *stretch.started;
        if to.started {
            let (o, rest) = to.values.split_at_mut(self.len);
            let (max, sum) = rest.split_at_mut(self.width);
            o.copy_from_slice(stretch.o);
            max.copy_from_slice(stretch.max);
            sum[..self.width].copy_from_slice(stretch.sum);
        }
        stretch.reset();
    }

    /// Adds up these stretches of a panel.
    pub(super) fn merge(
        &self,
        slots: impl Iterator<Item = usize>,
        mut to: Accumulated<'_>,
        sums: &mut Stretches,
    ) {
        to.reset();
        sums.clear();
        for slot in slots {
            let slot = self.slots[slot].lock().unwrap_or_else(PoisonError::into_inner);
            if slot.started {
                let (o, rest) = slot.values.split_at(self.len);
                let (max, sum) = rest.split_at(self.width);
                sums.add(self.kernels, [o, max, &sum[..self.width]]);
            }
        }
        sums.give(to);
    }
}
