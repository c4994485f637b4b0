//! The most f32 operations per second that this CPU's multiply-adders do: the figure that a share of peak
//! refers to.

use std::time::{Duration, Instant};

use crate::simd::{Isa, Kernels};

/// Measured peak of f32 multiply-adds (2 operations each) on `threads` threads at once, in operations per
/// second; `None` when this CPU does not have `isa`.
///
/// Independent chains of multiply-adds in registers, no memory. Takes about a tenth of a second; the best of
/// several rounds counts, so that other load on the machine disturbs it little.
pub fn measure_fma(isa: Isa, threads: usize) -> Option<f64> {
    let kernels = Kernels::for_isa(isa)?;
    let threads = threads.max(1);
    let barrier = std::sync::Barrier::new(threads);
    let rate = || {
        kernels.multiply_adds(100_000);
        barrier.wait();
        let (begin, mut best) = (Instant::now(), 0f64);
        while begin.elapsed() < Duration::from_millis(100) {
            let start = Instant::now();
            let operations = kernels.multiply_adds(20_000);
            best = best.max(operations / start.elapsed().as_secs_f64());
        }
        best
    };
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(rate)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).collect()
    });
    Some(rates.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wider_registers_do_more() {
        let plain = measure_fma(Isa::Portable, 1).unwrap();
        assert!(plain > 1e8, "{plain} operations per second");
        for isa in Isa::ALL {
            let rate = measure_fma(isa, 1);
            assert_eq!(rate.is_some(), isa.is_available());
            assert!(rate.is_none_or(|rate| rate > 0.5 * plain), "{isa}: {rate:?} against {plain}");
        }
    }
}
