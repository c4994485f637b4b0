//! The guide's backward configurations as kernels, and back.

use fa_core::Sm90Bwd;
use fa_core::spec::TileOrder;

use super::bwd::BwdConfig;
use super::candidates::BwdSpec;

/// A guide configuration as the kernel's parameters.
pub fn kernel_of(config: &BwdConfig) -> Sm90Bwd {
    Sm90Bwd {
        q_stages: config.q_stage,
        do_stages: config.do_stage,
        pds_stages: config.pds_stage,
        mma_dkv_is_rs: config.mma_dkv_is_rs,
        ..kernel_of_spec(&config.spec())
    }
}

/// A guide candidate as the kernel's parameters, with one buffer of everything.
pub fn kernel_of_spec(spec: &BwdSpec) -> Sm90Bwd {
    Sm90Bwd {
        tile_m: spec.tile_m,
        tile_n: spec.tile_n,
        num_wg: spec.num_wg,
        q_stages: 1,
        do_stages: 1,
        pds_stages: 1,
        sdp_swap_ab: spec.sdp_swap_ab,
        dkv_swap_ab: spec.dkv_swap_ab,
        dq_swap_ab: spec.dq_swap_ab,
        atom_layout_m_sdp: spec.atom_layout_m_sdp,
        atom_layout_n_dkv: spec.atom_layout_n_dkv,
        atom_layout_m_dq: spec.atom_layout_m_dq,
        mma_dkv_is_rs: spec.mma_dkv_is_rs(),
        dq_via_smem: true,
        dq_slices: 1,
        tile_order: TileOrder::Natural,
        deterministic: false,
        persistent: false,
        whole_keys: false,
    }
}

/// The guide's view of a kernel.
pub fn guide_spec(kernel: &Sm90Bwd) -> BwdSpec {
    BwdSpec {
        tile_m: kernel.tile_m,
        tile_n: kernel.tile_n,
        num_wg: kernel.num_wg,
        sdp_swap_ab: kernel.sdp_swap_ab,
        dkv_swap_ab: kernel.dkv_swap_ab,
        dq_swap_ab: kernel.dq_swap_ab,
        atom_layout_m_sdp: kernel.atom_layout_m_sdp,
        atom_layout_n_dkv: kernel.atom_layout_n_dkv,
        atom_layout_m_dq: kernel.atom_layout_m_dq,
    }
}
