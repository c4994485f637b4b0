//! The panels of the backward's operands in shared memory.
//!
//! A tile of 16-bit elements is stored in panels of 64, 32 or 16 columns, swizzled over 128, 64 or 32 bytes.
//! Rows of a head dim that is no multiple of 32 have a panel at the end that is half empty. Where a product
//! splits the columns of a tile among warpgroups, a panel belongs to one warpgroup. TMA
//! copies a panel row by row, so narrow panels take longer: layouts with the same count of bytes differ by up
//! to a fifth.

use fa_core::spec::{operand_panel, panel as widest};
use fa_core::{KernelSpec, Sm90Bwd};

use crate::head_dims::HeadDims;

/// Columns of a panel of each operand, as in the kernel's `BwdLayout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BwdPanels {
    /// Q: dK contracts over its rows.
    pub q: u32,
    /// K: dQ contracts over its rows.
    pub k: u32,
    /// V: no product contracts over its rows.
    pub v: u32,
    /// dO: dV contracts over its rows.
    pub dout: u32,
}

impl BwdPanels {
    /// The panels of a kernel that passed its check.
    pub fn of(spec: &KernelSpec, kernel: &Sm90Bwd) -> BwdPanels {
        BwdPanels::new(HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v }, kernel)
    }

    fn new(dims: HeadDims, kernel: &Sm90Bwd) -> BwdPanels {
        let HeadDims { head_dim, head_dim_v } = dims;
        // Warpgroups that do not split the rows of a product split these columns, unless it is transposed.
        let across = |columns: u32, swap: bool, atoms: u32| {
            let share = if swap { columns } else { columns * atoms / kernel.num_wg };
            if share == columns { operand_panel(columns) } else { widest(columns).min(widest(share)) }
        };
        let dkv = |columns| across(columns, kernel.dkv_swap_ab, kernel.atom_layout_n_dkv);
        BwdPanels {
            q: dkv(head_dim),
            k: across(head_dim, kernel.dq_swap_ab, kernel.atom_layout_m_dq),
            v: operand_panel(head_dim_v),
            dout: dkv(head_dim_v),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guide::bwd;
    use crate::guide::candidates::BwdSpec;
    use crate::guide::kernel::kernel_of;

    fn panels(dims: HeadDims, spec: &BwdSpec) -> BwdPanels {
        BwdPanels::new(dims, &kernel_of(&bwd::check(dims, spec).expect("it fits")))
    }

    #[test]
    fn a_panel_lies_within_one_share() {
        let plain = BwdSpec {
            tile_m: 64,
            tile_n: 128,
            num_wg: 2,
            sdp_swap_ab: false,
            dkv_swap_ab: false,
            dq_swap_ab: false,
            atom_layout_m_sdp: 1,
            atom_layout_n_dkv: 1,
            atom_layout_m_dq: 1,
        };
        // A warpgroup has 48 columns of a head dim of 96, and 64 of 128.
        let hd96 = HeadDims { head_dim: 96, head_dim_v: 96 };
        assert_eq!(panels(hd96, &plain), BwdPanels { q: 16, k: 16, v: 32, dout: 16 });
        let hd128 = HeadDims { head_dim: 128, head_dim_v: 128 };
        assert_eq!(panels(hd128, &plain), BwdPanels { q: 64, k: 64, v: 64, dout: 64 });
        let by_rows = BwdSpec { atom_layout_n_dkv: 2, ..plain };
        assert_eq!(panels(hd96, &by_rows), BwdPanels { q: 32, k: 16, v: 32, dout: 32 });
        // The third panel of 80 columns is half empty.
        let hd80 = HeadDims { head_dim: 80, head_dim_v: 80 };
        let whole = BwdSpec { tile_m: 128, atom_layout_m_sdp: 2, atom_layout_m_dq: 2, ..by_rows };
        assert_eq!(panels(hd80, &whole), BwdPanels { q: 32, k: 32, v: 32, dout: 32 });
    }
}
