//! The wgmma products of a CTA: their shape rule, their accumulators, and what they read from shared memory.

use crate::head_dims::HeadDims;

use super::candidates::{BwdSpec, FwdSpec};
use super::reject::{Axis, MmaName, Reason};

/// A product as the tensor cores see it, after a swap of its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mma {
    /// Which product.
    pub name: MmaName,
    /// Rows of the output.
    pub m: u32,
    /// Columns of the output.
    pub n: u32,
    /// Warpgroups along the rows.
    pub atom_m: u32,
    /// Warpgroups along the columns.
    pub atom_n: u32,
}

/// Rows of a wgmma instruction (PTX ISA, "wgmma": m64nNk16).
pub const WGMMA_M: u32 = 64;

/// wgmma's N is a multiple of this (same section).
pub const WGMMA_N_STEP: u32 = 8;

/// Threads of a warpgroup.
pub const WG_THREADS: u32 = 128;

impl Mma {
    /// The product with output `(m, n)` by `num_wg` warpgroups, `atom_m` of them along `m` (a divisor of
    /// `num_wg`). `swap` transposes output and warpgroups alike. Without a warpgroup along an axis it is a
    /// product of none, which [`Mma::check`] refuses.
    pub const fn new(name: MmaName, (m, n): (u32, u32), num_wg: u32, atom_m: u32, swap: bool) -> Mma {
        let atom_n = quotient(num_wg, atom_m);
        if swap {
            Mma { name, m: n, n: m, atom_m: atom_n, atom_n: quotient(num_wg, atom_n) }
        } else {
            Mma { name, m, n, atom_m, atom_n }
        }
    }

    /// Checks that every warpgroup gets whole instructions: rows in multiples of 64, columns in multiples of
    /// 8.
    ///
    /// # Errors
    /// [`Reason::MmaShape`], with the rows or columns and the multiple that they have to be of.
    pub const fn check(&self) -> Result<(), Reason> {
        let (need_m, need_n) = (WGMMA_M * self.atom_m, WGMMA_N_STEP * self.atom_n);
        if need_m == 0 || !self.m.is_multiple_of(need_m) {
            Err(Reason::MmaShape { mma: self.name, axis: Axis::M, need: need_m, have: self.m })
        } else if need_n == 0 || !self.n.is_multiple_of(need_n) {
            Err(Reason::MmaShape { mma: self.name, axis: Axis::N, need: need_n, have: self.n })
        } else {
            Ok(())
        }
    }

    /// f32 accumulator registers per thread.
    pub const fn regs(&self) -> u32 {
        quotient(self.m * self.n, WG_THREADS * self.atom_m * self.atom_n)
    }

    /// Bytes of shared memory read by all instructions of the product with `k` summed elements of 16 bits:
    /// each of the `m / 64 * atom_n` instructions reads its 64 rows of A (none when A is in registers) and
    /// its share of B's columns.
    pub const fn smem_reads(&self, k: u32, a_in_regs: bool) -> u32 {
        let instructions = self.m / WGMMA_M * self.atom_n;
        let a = if a_in_regs { 0 } else { WGMMA_M * k * 2 };
        instructions * (a + quotient(self.n, self.atom_n) * k * 2)
    }
}

/// `a / b`, or 0 where `b` is.
const fn quotient(a: u32, b: u32) -> u32 {
    match a.checked_div(b) {
        Some(quotient) => quotient,
        None => 0,
    }
}

/// The two products of a forward step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FwdMmas {
    /// `Q K^T`: `[tile_m, tile_n]`.
    pub s: Mma,
    /// `P V`: `[tile_m, hdv]`.
    pub o: Mma,
}

impl FwdMmas {
    /// The products of a candidate: every warpgroup owns 64 rows of both.
    pub fn new(dims: HeadDims, spec: &FwdSpec) -> FwdMmas {
        let mma = |name, n| Mma::new(name, (spec.tile_m, n), spec.num_wg, spec.num_wg, false);
        FwdMmas { s: mma(MmaName::S, spec.tile_n), o: mma(MmaName::O, dims.head_dim_v) }
    }
}

/// The products of a backward step. S and dP have one shape and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BwdMmas {
    /// `Q K^T` and `dO V^T`: `[tile_m, tile_n]`.
    pub sdp: Mma,
    /// `dS^T Q`: `[tile_n, hd]`.
    pub dk: Mma,
    /// `P^T dO`: `[tile_n, hdv]`.
    pub dv: Mma,
    /// `dS K`: `[tile_m, hd]`.
    pub dq: Mma,
}

impl BwdMmas {
    /// The products of a candidate.
    pub const fn new(dims: HeadDims, spec: &BwdSpec) -> BwdMmas {
        let HeadDims { head_dim: hd, head_dim_v: hdv } = dims;
        let BwdSpec { tile_m, tile_n, num_wg, atom_layout_n_dkv: atom_dkv, dkv_swap_ab, .. } = *spec;
        BwdMmas {
            sdp: Mma::new(MmaName::SdP, (tile_m, tile_n), num_wg, spec.atom_layout_m_sdp, spec.sdp_swap_ab),
            dk: Mma::new(MmaName::DK, (tile_n, hd), num_wg, atom_dkv, dkv_swap_ab),
            dv: Mma::new(MmaName::DV, (tile_n, hdv), num_wg, atom_dkv, dkv_swap_ab),
            dq: Mma::new(MmaName::DQ, (tile_m, hd), num_wg, spec.atom_layout_m_dq, spec.dq_swap_ab),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_exchanges_sides_and_warp_groups() {
        let plain = Mma::new(MmaName::SdP, (80, 128), 2, 1, false);
        assert_eq!(
            plain.check(),
            Err(Reason::MmaShape { mma: MmaName::SdP, axis: Axis::M, need: 64, have: 80 })
        );
        let swapped = Mma::new(MmaName::SdP, (80, 128), 2, 1, true);
        assert_eq!((swapped.m, swapped.n, swapped.atom_m, swapped.atom_n), (128, 80, 2, 1));
        assert_eq!((swapped.check(), swapped.regs()), (Ok(()), 40));
    }

    #[test]
    fn columns_are_shared_out_in_eights() {
        let mma = Mma::new(MmaName::DK, (64, 128), 3, 1, false);
        assert_eq!(
            mma.check(),
            Err(Reason::MmaShape { mma: MmaName::DK, axis: Axis::N, need: 24, have: 128 })
        );
    }

    #[test]
    fn reads_count_a_per_instruction_and_b_per_share() {
        let mma = Mma::new(MmaName::S, (128, 96), 2, 2, false);
        assert_eq!(mma.smem_reads(64, false), 2 * (64 * 64 * 2 + 96 * 64 * 2));
        assert_eq!(mma.smem_reads(64, true), 2 * 96 * 64 * 2);
        // Two warpgroups along the columns each read all of A and half of B.
        let wide = Mma::new(MmaName::S, (128, 96), 2, 1, false);
        assert_eq!(wide.smem_reads(64, false), 4 * (64 * 64 * 2 + 48 * 64 * 2));
    }
}
