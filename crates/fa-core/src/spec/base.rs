//! The kernels to start from when a spec is written by hand and changed field by field. All are valid for head dim 64.

use super::{Scheduler, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, TileOrder};

/// A small tile with every switch on but Q in registers.
impl Default for Sm80Fwd {
    fn default() -> Sm80Fwd {
        Sm80Fwd {
            tile_m: 64,
            tile_n: 64,
            num_warps: 4,
            stages: 2,
            q_in_regs: false,
            blocks_per_sm: 1,
            swizzle: true,
            ldmatrix: true,
            exp2: true,
            fast_math: true,
            loop_split: true,
            reverse_blocks: true,
        }
    }
}

/// A square tile over two warp groups, one block per tile, P in registers, products overlapped with softmax, nothing else.
impl Default for Sm90Fwd {
    fn default() -> Sm90Fwd {
        Sm90Fwd {
            tile_m: 128,
            tile_n: 128,
            num_wg: 2,
            pv_is_rs: true,
            overlap_wg: true,
            q_stages: 1,
            kv_stages: 2,
            ping_pong: false,
            scheduler: Scheduler::PerTile,
            tile_order: TileOrder::Natural,
            cluster_m: 1,
            exp_poly_of_16: 0,
            rescale_threshold: 0,
            pack_gqa: false,
        }
    }
}

/// A square tile over two warp groups, one buffer of everything, nothing transposed, P and dS through shared memory.
impl Default for Sm90Bwd {
    fn default() -> Sm90Bwd {
        Sm90Bwd {
            tile_m: 128,
            tile_n: 128,
            num_wg: 2,
            q_stages: 1,
            do_stages: 1,
            pds_stages: 1,
            sdp_swap_ab: false,
            dkv_swap_ab: false,
            dq_swap_ab: false,
            atom_layout_m_sdp: 2,
            atom_layout_n_dkv: 2,
            atom_layout_m_dq: 2,
            mma_dkv_is_rs: false,
            dq_via_smem: true,
            dq_slices: 1,
            tile_order: TileOrder::Natural,
            deterministic: false,
        }
    }
}

/// A small tile over four warps with as few buffers as there may be.
impl Default for Sm80Bwd {
    fn default() -> Sm80Bwd {
        Sm80Bwd {
            tile_m: 64,
            tile_n: 64,
            num_warps: 4,
            q_stages: 2,
            do_stages: 1,
            atom_layout_m_sdp: 2,
            atom_layout_n_dkv: 2,
            atom_layout_m_dq: 2,
            dq_first: 32,
            blocks_per_sm: 1,
            tile_order: TileOrder::Natural,
            deterministic: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Dtype, Kernel, KernelSpec, MaskKind, ScoreKind, Types};

    #[test]
    fn every_base_is_valid() {
        for kernel in [
            Kernel::Sm80Fwd(Default::default()),
            Kernel::Sm90Fwd(Default::default()),
            Kernel::Sm90Bwd(Default::default()),
            Kernel::Sm80Bwd(Default::default()),
        ] {
            let (types, mask) = (Types::same(Dtype::Bf16), MaskKind::Causal);
            let score = ScoreKind::NONE;
            let spec = KernelSpec { types, head_dim: 64, head_dim_v: 64, mask, score, kernel };
            assert_eq!(spec.check(), Ok(()), "{spec}");
        }
    }
}
