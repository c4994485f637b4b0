//! What a kernel has beside its tile, in words.

use fa_core::{Kernel, KernelSpec};

/// The parameters of a kernel beside its tile.
pub fn of_spec(spec: &KernelSpec) -> String {
    let on = |name: &'static str, on: bool| if on { Some(name.to_owned()) } else { None };
    let knobs = match &spec.kernel {
        Kernel::Sm80Fwd(k) => vec![
            Some(format!("{} warps", k.num_warps)),
            Some(stages(k.stages)),
            on("Q in regs", k.q_in_regs),
            on("pack GQA", k.pack_gqa),
            on("split", spec.split),
        ],
        Kernel::Sm90Fwd(k) => vec![
            Some(format!("{} wg", k.num_wg)),
            Some(if k.pv_is_rs { "P in regs" } else { "P in smem" }.to_owned()),
            on("overlap", k.overlap_wg),
            Some(stages(k.kv_stages)),
            on("ping-pong", k.ping_pong),
            on("pack GQA", k.pack_gqa),
            on("gather", k.gather),
            on("split", spec.split),
        ],
        Kernel::Sm80Bwd(k) => {
            vec![
                Some(format!("{} warps", k.num_warps)),
                Some(format!("{}/{} stages", k.q_stages, k.do_stages)),
                Some(format!("{} of dQ first", k.dq_first)),
                on("deterministic", k.deterministic),
            ]
        }
        Kernel::Sm90Bwd(k) => {
            let swaps = [("SdP", k.sdp_swap_ab), ("dKV", k.dkv_swap_ab), ("dQ", k.dq_swap_ab)];
            let swaps: Vec<&str> = swaps.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
            vec![
                Some(format!("{} wg", k.num_wg)),
                (!swaps.is_empty()).then(|| format!("swap {}", swaps.join(" "))),
                Some(format!("atoms {} {} {}", k.atom_layout_m_sdp, k.atom_layout_n_dkv, k.atom_layout_m_dq)),
                Some(format!("dK/dV from {}", if k.mma_dkv_is_rs { "regs" } else { "smem" })),
                Some(format!("stages {} {} {}", k.q_stages, k.do_stages, k.pds_stages)),
                on("dQ by atomics", !k.dq_via_smem),
                (k.dq_slices > 1).then(|| format!("dQ in {} slices", k.dq_slices)),
                on("deterministic", k.deterministic),
            ]
        }
    };
    knobs.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn stages(stages: u32) -> String {
    if stages == 1 { "1 stage".to_owned() } else { format!("{stages} stages") }
}
