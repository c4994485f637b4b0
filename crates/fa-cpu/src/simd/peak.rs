//! The peak rate of multiply-adds in registers.
#![allow(unsafe_code)]

use super::vector::Vector;

/// Independent chains, enough to hide the latency of two multiply-adders.
pub(super) const CHAINS: usize = 12;

/// `rounds * CHAINS` vector multiply-adds without memory traffic; the result keeps them from being optimised
/// away.
#[inline(always)]
pub(super) unsafe fn multiply_adds<V: Vector>(rounds: usize) -> f32 {
    // SAFETY: registers only; the caller vouches for the instruction set.
    unsafe {
        let mut sums = [V::splat(1.0); CHAINS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = V::splat(i as f32);
        }
        let (factor, addend) = (V::splat(core::hint::black_box(0.5)), V::splat(core::hint::black_box(1.0)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = sum.mul_add(factor, addend);
            }
        }
        let mut total = V::splat(0.0);
        for sum in sums {
            total = total.add(sum);
        }
        let mut lanes = [0f32; 16];
        total.store(lanes.as_mut_ptr());
        lanes.iter().sum()
    }
}
