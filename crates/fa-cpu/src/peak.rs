//! The most operations per second that this CPU's products reach: the figure that a share of peak refers to.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use fa_core::Dtype;

use crate::simd::bf16::{Bf16Kernels, Product16};
use crate::simd::{Init, Isa, Kernels, Order, Product};
use crate::threads::{at_once, cores};

/// How long each kind of loop is measured.
const TIME: Duration = Duration::from_millis(60);

/// Operations of one timed stretch, some tens of microseconds: short enough that some of them are not
/// disturbed by other programs.
const STRETCH: f64 = 2e6;

/// Measured peak of attention's products on `threads` threads at once, in operations per second (2 for each
/// multiply-add); `None` when this CPU does not have `isa`. Threads beyond the cores add nothing.
///
/// Tensors of f32 and f16 are multiplied in f32: the faster of independent chains of multiply-adds in
/// registers and of the kernels' own product of tiles that lie in the first-level cache. bf16 is multiplied
/// in bf16 where `isa` has products of it (AVX512-BF16, AMX), by such a product of tiles. Attention consists
/// of these products and more, so no run is faster. Takes a tenth of a second; the best of many short
/// stretches counts, so that other load on the machine disturbs it little.
pub fn measure(isa: Isa, dtype: Dtype, threads: usize) -> Option<f64> {
    let kernels = Kernels::for_isa(isa)?;
    let threads = threads.clamp(1, cores());
    let rate = |barrier: &Barrier| {
        if let (Dtype::Bf16, Some(tiles)) = (dtype, kernels.bf16()) {
            let mut product = tile16(&tiles);
            product();
            barrier.wait();
            return best(product);
        }
        let (chains, mut product) = (|| kernels.multiply_adds(5_000), tile(&kernels));
        chains();
        product();
        barrier.wait();
        best(chains).max(best(product))
    };
    Some(at_once(threads, rate).iter().sum())
}

/// The highest rate of `work`, which returns its operations.
fn best(mut work: impl FnMut() -> f64) -> f64 {
    let (begin, mut best) = (Instant::now(), 0f64);
    while begin.elapsed() < TIME {
        let (start, mut operations) = (Instant::now(), 0.0);
        while operations < STRETCH {
            operations += work();
        }
        best = best.max(operations / start.elapsed().as_secs_f64());
    }
    best
}

/// A product of f32 tiles of 32 KiB in all; every panel of its columns is of full width.
fn tile(kernels: &Kernels) -> impl FnMut() -> f64 + use<'_> {
    const ROWS: usize = 24;
    const COLUMNS: usize = 48;
    const TERMS: usize = 96;
    let (a, b) = (vec![0.5f32; TERMS * ROWS], vec![0.5f32; TERMS * COLUMNS]);
    let mut c = vec![0f32; ROWS * COLUMNS];
    move || {
        kernels.product(Product {
            m: ROWS,
            n: COLUMNS,
            k: TERMS,
            a: &a,
            lda: ROWS,
            order: Order::Columns,
            b: &b,
            ldb: COLUMNS,
            c: std::hint::black_box(&mut c),
            ldc: COLUMNS,
            init: Init::Zero,
        });
        (2 * ROWS * COLUMNS * TERMS) as f64
    }
}

/// A product of bf16 tiles, likewise.
fn tile16(tiles: &Bf16Kernels) -> impl FnMut() -> f64 + use<'_> {
    const ROWS: usize = 32;
    const COLUMNS: usize = 64;
    const TERMS: usize = 128;
    // 0.5 in bf16, and pairs of it.
    let (a, b) = (vec![0x3f00u16; ROWS * TERMS], vec![0x3f00_3f00u32; TERMS / 2 * COLUMNS]);
    let mut c = vec![0f32; ROWS * COLUMNS];
    move || {
        tiles.product(Product16 {
            shape: [ROWS, COLUMNS, TERMS],
            a: &a,
            lda: TERMS,
            b: &b,
            ldb: COLUMNS,
            c: std::hint::black_box(&mut c),
            ldc: COLUMNS,
            add: false,
        });
        (2 * ROWS * COLUMNS * TERMS) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wider_registers_do_more() {
        let plain = measure(Isa::Portable, Dtype::F32, 1).unwrap();
        assert!(plain > 1e8, "{plain} operations per second");
        for isa in Isa::ALL {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let rate = measure(isa, dtype, 1);
                assert_eq!(rate.is_some(), isa.is_available());
                assert!(rate.is_none_or(|rate| rate > 0.5 * plain), "{isa} {dtype}: {rate:?}, {plain}");
            }
        }
    }

    /// More threads than cores do not raise the peak beyond what can be reached.
    #[test]
    fn threads_beyond_the_cores_add_nothing() {
        let [all, more] = [cores(), 16 * cores()].map(|n| measure(Isa::Portable, Dtype::F32, n).unwrap());
        assert!(more < 3.0 * all, "{more} operations per second, {all} on all cores");
    }

    /// The kernels' own product in the cache, which attention is made of, is no faster.
    #[test]
    fn no_product_exceeds_it() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let peak = measure(isa, Dtype::F32, 1).unwrap();
            let kernels = Kernels::for_isa(isa).unwrap();
            let product = best(tile(&kernels));
            assert!(product < 1.5 * peak, "{isa}: {product:e} of {peak:e}");
        }
    }
}
