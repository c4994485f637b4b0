//! What follows from a spec's parameters and decides how its kernel computes, where the host has to know it
//! too: planner and launch ask here, and CUDA's config has it behind the parameters.

use super::params::Param;
use super::values::{MaskKind, TileOrder};
use super::{Kernel, KernelSpec, Sm90Bwd, Sm90Fwd};

/// Registers per thread for a soft cap's two ways beside S, P and O: by consumer warpgroups (one or two, or
/// three), fewer with lengths on the device.
const fn near_cap_registers(num_wg: u32, varied: bool) -> u32 {
    match num_wg {
        3 => 0,
        _ if varied => 176,
        _ => 256,
    }
}

impl Sm90Fwd {
    /// Whether P is computed against the current maximum, and its sum shows that the scores have outgrown it.
    /// In the tiles (nearly all) where they have not, no maximum is taken and O is not rescaled. Any
    /// reference within `2^rescale_threshold` of the maximum gives the same relative precision.
    pub const fn lazy_max(&self) -> bool {
        self.overlap_wg && self.pv_is_rs && self.rescale_threshold > 0
    }
}

impl KernelSpec {
    /// Whether tiles whose scores are all at most half a soft cap take it as a polynomial, on the FMA units
    /// alone (NB-080): an SM90 forward with registers for both ways.
    pub const fn near_cap(&self) -> bool {
        match &self.kernel {
            Kernel::Sm90Fwd(kernel) => self.near_cap_of(kernel),
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) => false,
        }
    }

    const fn near_cap_of(&self, kernel: &Sm90Fwd) -> bool {
        let need = kernel.tile_n / 4 * 3 + self.head_dim_v / 2;
        let fits = need <= near_cap_registers(kernel.num_wg, self.reads.varied);
        self.score.softcap && !self.score.alibi && kernel.lazy_max() && fits
    }

    /// Whether the kernel can store the first of the sums that come to a tile of dQ, by bulk copies, in place
    /// of adding them to zeros (NB-082): an SM90 backward. Of uniform lengths the tile of keys that does so
    /// was drawn before the others: the first one under a full mask; under a causal one the last that the
    /// queries see, as tiles are drawn with the last keys first. Of other lengths it is the first to come, or
    /// in deterministic kernels the one whose turn is the first (NB-093).
    pub const fn may_store_dq(&self) -> bool {
        match &self.kernel {
            Kernel::Sm90Bwd(kernel) => self.may_store_dq_of(kernel),
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90Fwd(_) => false,
        }
    }

    const fn may_store_dq_of(&self, kernel: &Sm90Bwd) -> bool {
        let is_drawn_first = match self.mask {
            MaskKind::Full => true,
            MaskKind::Causal => kernel.deterministic || matches!(kernel.tile_order, TileOrder::LongestFirst),
            MaskKind::Window => false,
        };
        kernel.dq_via_smem && (self.reads.varied || is_drawn_first)
    }

    /// What CUDA's config of this kernel has beside [`KernelSpec::params`], in the order of declaration.
    pub fn derived(&self) -> Vec<Param> {
        let param = |name, doc, on: bool| Param { name, doc, value: on.into() };
        match &self.kernel {
            Kernel::Sm90Fwd(kernel) => {
                vec![
                    param("lazy_max", LAZY_MAX, kernel.lazy_max()),
                    param("near_cap", NEAR_CAP, self.near_cap_of(kernel)),
                ]
            }
            Kernel::Sm90Bwd(kernel) => {
                vec![param("may_store_dq", MAY_STORE_DQ, self.may_store_dq_of(kernel))]
            }
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) => Vec::new(),
        }
    }
}

const LAZY_MAX: &[&str] = &[
    " P is computed against the current maximum, and its sum shows whether the scores have outgrown it. In",
    " the tiles (nearly all) where they have not, no maximum is taken and O is not rescaled. Any reference",
    " within 2^rescale_threshold of the maximum gives the same relative precision.",
];
const NEAR_CAP: &[&str] = &[
    " Tiles whose scores are all at most half the soft cap take it as a polynomial, on the FMA units alone",
    " (NB-080). Both ways need registers beside S, P and O.",
];
const MAY_STORE_DQ: &[&str] = &[
    " The first of the sums that come to a tile of dQ can be stored, by bulk copies, in place of being added",
    " to zeros (NB-082). Of uniform lengths the tile of keys that does so was drawn before the others: the",
    " first one under a full mask; under a causal one the last that the queries see, as tiles are drawn with",
    " the last keys first. Of other lengths it is the first to come, or in deterministic kernels the one",
    " whose turn is the first (NB-093).",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Reads, ScoreKind, Types};

    fn spec(kernel: Kernel) -> KernelSpec {
        KernelSpec {
            types: Types::same(Dtype::Bf16),
            head_dim: 128,
            head_dim_v: 128,
            mask: MaskKind::Causal,
            score: ScoreKind { softcap: true, ..ScoreKind::NONE },
            reads: Reads::UNIFORM,
            split: false,
            kernel,
        }
    }

    #[test]
    fn a_soft_cap_by_polynomial_needs_registers_and_a_lazy_maximum() {
        let lazy = Sm90Fwd { rescale_threshold: 8, ..Sm90Fwd::default() };
        let of = |kernel: &Sm90Fwd| spec(Kernel::Sm90Fwd(kernel.clone()));
        assert!(of(&lazy).near_cap());
        assert!(!of(&Sm90Fwd { rescale_threshold: 0, ..lazy.clone() }).near_cap());
        assert!(!of(&Sm90Fwd { num_wg: 3, tile_m: 192, ..lazy.clone() }).near_cap());
        let uncapped = KernelSpec { score: ScoreKind::NONE, ..of(&lazy) };
        let score = ScoreKind { alibi: true, ..of(&lazy).score };
        let sloped = KernelSpec { score, ..of(&lazy) };
        assert!(!uncapped.near_cap() && !sloped.near_cap());
        // 128 keys and values of 256 take 96 + 128 registers: too many beside lengths on the device.
        let wide = KernelSpec { head_dim_v: 256, ..of(&lazy) };
        let varied = KernelSpec { reads: Reads { varied: true, paged: false }, ..wide.clone() };
        assert!(wide.near_cap() && !varied.near_cap());
    }

    #[test]
    fn first_sums_are_stored_where_their_tile_is_drawn_first() {
        let of = |mask, tile_order, deterministic| {
            let kernel = Sm90Bwd { tile_order, deterministic, ..Sm90Bwd::default() };
            KernelSpec { mask, ..spec(Kernel::Sm90Bwd(kernel)) }.may_store_dq()
        };
        let (natural, longest) = (TileOrder::Natural, TileOrder::LongestFirst);
        assert!(of(MaskKind::Full, natural, false) && of(MaskKind::Causal, longest, false));
        assert!(!of(MaskKind::Causal, natural, false) && of(MaskKind::Causal, natural, true));
        assert!(!of(MaskKind::Window, longest, true));
        // Of lengths on the device whoever comes first stores.
        let packed = spec(Kernel::Sm90Bwd(Sm90Bwd::default()));
        let reads = Reads { varied: true, paged: false };
        assert!(KernelSpec { mask: MaskKind::Window, reads, ..packed }.may_store_dq());
        let red = Sm90Bwd { dq_via_smem: false, ..Sm90Bwd::default() };
        assert!(!KernelSpec { mask: MaskKind::Full, ..spec(Kernel::Sm90Bwd(red)) }.may_store_dq());
    }
}
