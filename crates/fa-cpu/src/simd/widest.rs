//! Plain Rust compiled for the widest vectors of the CPU at hand. No operation is fused and no sum reordered,
//! so results have the same bits on every CPU.

#[cfg(target_arch = "x86_64")]
use super::isa::Isa;

/// A function to compile for several instruction sets.
pub(crate) trait Work {
    /// Its result.
    type Output;

    /// Runs it. It and all that should use the vectors must be `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

/// Runs the work with the widest vectors of the CPU.
pub(crate) fn widest<W: Work>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if Isa::Avx512.is_available() {
            // SAFETY: the CPU has AVX-512 F.
            return unsafe { avx512(work) };
        }
        if Isa::Avx2.is_available() {
            // SAFETY: the CPU has AVX2.
            return unsafe { avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dot<'a>(&'a [f32], &'a [f32]);

    impl Work for Dot<'_> {
        type Output = f32;

        #[inline(always)]
        fn run(self) -> f32 {
            let mut sums = [0f32; 16];
            for (a, b) in self.0.chunks_exact(16).zip(self.1.chunks_exact(16)) {
                for lane in 0..16 {
                    sums[lane] += a[lane] * b[lane];
                }
            }
            sums.iter().sum()
        }
    }

    #[test]
    fn wider_vectors_do_not_change_a_bit() {
        let a: Vec<f32> = (0..4096).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..4096).map(|i| (i as f32 * 0.73).cos()).collect();
        assert_eq!(widest(Dot(&a, &b)).to_bits(), Dot(&a, &b).run().to_bits());
    }
}
