//! What follows from a spec's parameters and decides how its kernel computes, where the host has to know it
//! too: planner and launch ask here, and CUDA's config has it behind the parameters.

use super::params::Param;
use super::{Kernel, KernelSpec, Sm90Fwd};

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
    /// of adding them to zeros (NB-093): an SM90 backward that adds from shared memory. In a deterministic one
    /// the tile of keys whose turn is the first stores; in others the first to come claims the tile of dQ, and
    /// those that come meanwhile wait for it. It has its sums by then, so that the order of tiles is free.
    pub const fn may_store_dq(&self) -> bool {
        match &self.kernel {
            Kernel::Sm90Bwd(kernel) => kernel.dq_via_smem,
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90Fwd(_) => false,
        }
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
            Kernel::Sm90Bwd(_) => {
                vec![param("may_store_dq", MAY_STORE_DQ, self.may_store_dq())]
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
    " to zeros (NB-093). In a deterministic kernel the tile of keys whose turn is the first stores; in others",
    " the first to come claims the tile of dQ, and those that come meanwhile wait for it. It has its sums by",
    " then, so that the order of tiles is free.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, MaskKind, Reads, ScoreKind, Sm90Bwd, Types};

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
    fn first_sums_are_stored_where_they_leave_through_shared_memory() {
        let of =
            |dq_via_smem| spec(Kernel::Sm90Bwd(Sm90Bwd { dq_via_smem, ..Sm90Bwd::default() })).may_store_dq();
        assert!(of(true) && !of(false));
        assert!(!spec(Kernel::Sm90Fwd(Sm90Fwd::default())).may_store_dq());
    }
}
