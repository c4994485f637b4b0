//! What plans and pages show of a kernel besides its tile.

use fa_core::spec::Scheduler;
use fa_core::{
    Kernel, KernelSpec, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm90FwdFp8, Sm90Wide, Sm100Fwd, each_kernel,
};
use fa_planner::banks::Access;

/// Bytes of an element: GPU kernels hold 16-bit types.
const ELEMENT: u64 = 2;

/// A kernel as plans and pages show it.
pub(crate) trait ShownKernel {
    /// Its parameters beside the tile, in words.
    fn knobs(&self, spec: &KernelSpec) -> Vec<String>;

    /// The row of the tile map that it belongs to.
    fn group(&self) -> Group;

    /// What its warps issue to shared memory, by the tile that they access.
    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued>;

    /// Whether rows of shared memory are swizzled.
    fn swizzles(&self) -> bool;
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn ShownKernel {
    each_kernel!(kernel, params => params)
}

/// A row of the tile map: an ordering key and a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    key: [u32; 3],
    /// What the row's candidates have in common.
    pub label: String,
}

impl Group {
    /// Rows are ordered by `key`.
    pub(crate) fn new(key: [u32; 3], label: String) -> Group {
        Group { key, label }
    }

    /// SM80-class tiles, by their rows and warps.
    fn of_warps(tile_m: u32, num_warps: u32) -> Group {
        Group::new([tile_m, num_warps, 0], format!("tile_m {tile_m}, {num_warps} warps"))
    }

    /// Tiles of an SM100 forward, by their rows.
    pub(crate) fn of_tensor_memory(tile_m: u32) -> Group {
        Group::new([tile_m, 0, 0], format!("tile_m {tile_m}"))
    }

    /// The tiles of an SM90 backward, by the queries of a step and the warpgroups.
    pub(crate) fn of_backward(tile_m: u32, num_wg: u32) -> Group {
        Group::new([tile_m, num_wg, 0], format!("tile_m {tile_m} queries per step, {num_wg} wg"))
    }
}

/// An access of a kernel: what it is for, the tile's rows and columns, and how its lanes lie.
pub(crate) struct Issued {
    pub what: String,
    pub tile: (u32, u32),
    pub access: Access,
}

fn issued(what: impl Into<String>, tile: (u32, u32), access: Access) -> Issued {
    Issued { what: what.into(), tile, access }
}

fn cp_async(head_dim: u32) -> Access {
    Access::cp_async_for(u64::from(head_dim) * ELEMENT)
}

/// The words whose switch is on.
fn switched_on<const N: usize>(words: [(bool, &str); N]) -> impl Iterator<Item = String> {
    words.into_iter().filter(|(on, _)| *on).map(|(_, word)| word.to_owned())
}

fn stages(stages: u32) -> String {
    if stages == 1 { "1 stage".to_owned() } else { format!("{stages} stages") }
}

impl ShownKernel for Sm80Fwd {
    fn knobs(&self, spec: &KernelSpec) -> Vec<String> {
        let switches = [
            (self.divide_keys, "keys divided"),
            (self.q_in_regs, "Q in regs"),
            (self.pack_gqa, "pack GQA"),
            (spec.split, "split"),
        ];
        let mut knobs = vec![format!("{} warps", self.num_warps), stages(self.stages)];
        knobs.extend(switched_on(switches));
        knobs
    }

    fn group(&self) -> Group {
        Group::of_warps(self.tile_m, self.num_warps)
    }

    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm80Fwd { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
        let (a, b, v) = if self.ldmatrix {
            (Access::Ldmatrix, Access::Ldmatrix, Access::LdmatrixTrans)
        } else {
            (Access::FragmentA, Access::FragmentB, Access::FragmentBTrans)
        };
        vec![
            issued("cp.async of K", (tile_n, hd), cp_async(hd)),
            issued(format!("Q by {a}"), (tile_m, hd), a),
            issued(format!("K by {b}"), (tile_n, hd), b),
            issued(format!("V by {v}"), (tile_n, hdv), v),
        ]
    }

    fn swizzles(&self) -> bool {
        self.swizzle
    }
}

impl ShownKernel for Sm90Fwd {
    fn knobs(&self, spec: &KernelSpec) -> Vec<String> {
        let mut knobs = vec![
            format!("{} wg", self.num_wg),
            if self.pv_is_rs { "P in regs" } else { "P in smem" }.to_owned(),
        ];
        knobs.extend(switched_on([(self.overlap_wg, "overlap")]));
        knobs.push(stages(self.kv_stages));
        knobs.extend(switched_on([
            (self.ping_pong, "ping-pong"),
            (self.pack_gqa, "pack GQA"),
            (self.gather, "gather"),
            (spec.split, "split"),
        ]));
        knobs.extend((self.blocks_per_sm > 1).then(|| format!("{} blocks an SM", self.blocks_per_sm)));
        knobs
    }

    fn group(&self) -> Group {
        let Sm90Fwd { tile_m, num_wg, pv_is_rs, overlap_wg, .. } = *self;
        Group::new(
            [num_wg, u32::from(!pv_is_rs), u32::from(!overlap_wg)],
            format!(
                "tile_m {tile_m} ({num_wg} wg), P in {}{}",
                if pv_is_rs { "regs" } else { "smem" },
                if overlap_wg { ", overlap" } else { "" }
            ),
        )
    }

    /// wgmma's descriptors read core matrices of 8 rows x 16 bytes, as ldmatrix does. O goes from registers
    /// to global memory.
    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm90Fwd { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
        let mut list = vec![
            issued("wgmma reads Q (8 rows x 16 B)", (tile_m, hd), Access::Ldmatrix),
            issued("wgmma reads K (8 rows x 16 B)", (tile_n, hd), Access::Ldmatrix),
            issued("wgmma reads V transposed", (tile_n, hdv), Access::LdmatrixTrans),
        ];
        if !self.pv_is_rs {
            list.push(issued("stmatrix of P", (tile_m, tile_n), Access::Stmatrix));
        }
        list
    }

    fn swizzles(&self) -> bool {
        true
    }
}

impl ShownKernel for Sm90Wide {
    fn knobs(&self, spec: &KernelSpec) -> Vec<String> {
        let mut knobs = vec!["2 wg share the columns of O".to_owned()];
        knobs.extend(switched_on([(self.latent, "V is K's first columns"), (self.overlap, "overlap")]));
        knobs.push(stages(self.kv_stages));
        knobs.extend(switched_on([
            (self.pack_gqa, "pack GQA"),
            (self.gather, "gather"),
            (spec.split, "split"),
        ]));
        if self.head_parts > 1 {
            knobs.push(format!("{} parts of a group's heads", self.head_parts));
        }
        knobs
    }

    fn group(&self) -> Group {
        let Sm90Wide { tile_m, latent, pack_gqa, .. } = *self;
        let form = if latent { "latents" } else { "wide heads" };
        let rows = if pack_gqa { ", heads packed" } else { "" };
        Group::new([tile_m, u32::from(latent), u32::from(pack_gqa)], format!("tile_m {tile_m}, {form}{rows}"))
    }

    /// As the SM90 forward's; the follower reads P from shared memory.
    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm90Wide { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
        vec![
            issued("wgmma reads Q (8 rows x 16 B)", (tile_m, hd), Access::Ldmatrix),
            issued("wgmma reads K (8 rows x 16 B)", (tile_n, hd), Access::Ldmatrix),
            issued("wgmma reads V transposed", (tile_n, hdv), Access::LdmatrixTrans),
            issued("stmatrix of P", (tile_m, tile_n), Access::Stmatrix),
        ]
    }

    fn swizzles(&self) -> bool {
        true
    }
}

impl ShownKernel for Sm90FwdFp8 {
    fn knobs(&self, _: &KernelSpec) -> Vec<String> {
        let mut knobs = vec![format!("{} wg", self.num_wg)];
        knobs.extend(switched_on([(self.overlap_wg, "overlap"), (!self.two_level, "one level of sums")]));
        knobs.push(stages(self.kv_stages));
        knobs.extend(switched_on([(self.ping_pong, "ping-pong"), (self.pack_gqa, "pack GQA")]));
        knobs
    }

    fn group(&self) -> Group {
        let Sm90FwdFp8 { tile_m, num_wg, overlap_wg, .. } = *self;
        let overlap = if overlap_wg { ", overlap" } else { "" };
        Group::new([num_wg, 0, u32::from(!overlap_wg)], format!("tile_m {tile_m} ({num_wg} wg){overlap}"))
    }

    /// wgmma's descriptors read core matrices of 8 rows x 16 bytes, as ldmatrix does; a pair of columns of
    /// 8-bit tiles is one of 16 bits. O goes from registers to global memory.
    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm90FwdFp8 { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim / 2, spec.head_dim_v / 2);
        vec![
            issued("wgmma reads Q (8 rows x 16 B)", (tile_m, hd), Access::Ldmatrix),
            issued("wgmma reads K (8 rows x 16 B)", (tile_n, hd), Access::Ldmatrix),
            issued("V by ldmatrix.x4.trans", (tile_n, hdv), Access::LdmatrixTrans),
            issued("stmatrix of V transposed", (spec.head_dim_v, tile_n / 2), Access::Stmatrix),
            issued(
                "wgmma reads V transposed (8 rows x 16 B)",
                (spec.head_dim_v, tile_n / 2),
                Access::Ldmatrix,
            ),
        ]
    }

    fn swizzles(&self) -> bool {
        true
    }
}

impl ShownKernel for Sm100Fwd {
    fn knobs(&self, _: &KernelSpec) -> Vec<String> {
        let tiles =
            if self.q_tiles == 1 { "1 Q tile".to_owned() } else { format!("{} Q tiles", self.q_tiles) };
        let scheduler = match self.scheduler {
            Scheduler::PerTile => "a CTA for each tile",
            Scheduler::Static => "a CTA for each SM",
            Scheduler::Dynamic => "tiles drawn from a counter",
        };
        vec![tiles, stages(self.kv_stages), scheduler.to_owned()]
    }

    fn group(&self) -> Group {
        Group::of_tensor_memory(self.tile_m)
    }

    /// Descriptors of tcgen05.mma read core matrices of 8 rows x 16 bytes, as ldmatrix does.
    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm100Fwd { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
        vec![
            issued("tcgen05.mma reads Q (8 rows x 16 B)", (tile_m, hd), Access::Ldmatrix),
            issued("tcgen05.mma reads K (8 rows x 16 B)", (tile_n, hd), Access::Ldmatrix),
            issued("tcgen05.mma reads V transposed", (tile_n, hdv), Access::LdmatrixTrans),
        ]
    }

    fn swizzles(&self) -> bool {
        true
    }
}

impl ShownKernel for Sm80Bwd {
    fn knobs(&self, _: &KernelSpec) -> Vec<String> {
        let mut knobs = vec![
            format!("{} warps", self.num_warps),
            format!("{}/{} stages", self.q_stages, self.do_stages),
            format!("{} of dQ first", self.dq_first),
        ];
        knobs.extend(switched_on([(self.deterministic, "deterministic")]));
        knobs
    }

    fn group(&self) -> Group {
        Group::of_warps(self.tile_m, self.num_warps)
    }

    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm80Bwd { tile_m, tile_n, .. } = *self;
        let hd = spec.head_dim;
        vec![
            issued("cp.async of Q", (tile_m, hd), cp_async(hd)),
            issued("Q, K, dO and V by ldmatrix.x4", (tile_m, hd), Access::Ldmatrix),
            issued("Q, K and dO by ldmatrix.x4.trans", (tile_m, hd), Access::LdmatrixTrans),
            issued("stores of P and dS, pairs of accumulators", (tile_m, tile_n), Access::FragmentC),
            issued("P and dS by ldmatrix.x4.trans", (tile_m, tile_n), Access::LdmatrixTrans),
        ]
    }

    fn swizzles(&self) -> bool {
        true
    }
}

impl ShownKernel for Sm90Bwd {
    fn knobs(&self, _: &KernelSpec) -> Vec<String> {
        let swaps = [(self.sdp_swap_ab, "SdP"), (self.dkv_swap_ab, "dKV"), (self.dq_swap_ab, "dQ")];
        let swaps: Vec<String> = switched_on(swaps).collect();
        let atoms = [self.atom_layout_m_sdp, self.atom_layout_n_dkv, self.atom_layout_m_dq];
        let mut knobs = vec![format!("{} wg", self.num_wg)];
        if !swaps.is_empty() {
            knobs.push(format!("swap {}", swaps.join(" ")));
        }
        knobs.extend([
            format!("atoms {} {} {}", atoms[0], atoms[1], atoms[2]),
            format!("dK/dV from {}", if self.mma_dkv_is_rs { "regs" } else { "smem" }),
            format!("stages {} {} {}", self.q_stages, self.do_stages, self.pds_stages),
        ]);
        let by_atomics = !self.dq_via_smem && !self.whole_keys;
        knobs.extend(switched_on([(by_atomics, "dQ by atomics"), (self.whole_keys, "whole keys")]));
        if self.dq_slices > 1 {
            knobs.push(format!("dQ in {} slices", self.dq_slices));
        }
        knobs.extend(switched_on([(self.deterministic, "deterministic")]));
        knobs
    }

    fn group(&self) -> Group {
        Group::of_backward(self.tile_m, self.num_wg)
    }

    fn accesses(&self, spec: &KernelSpec) -> Vec<Issued> {
        let Sm90Bwd { tile_m, tile_n, .. } = *self;
        let (hd, hdv) = (spec.head_dim, spec.head_dim_v);
        let stored = if self.mma_dkv_is_rs { "stmatrix of dS" } else { "stmatrix of P and dS" };
        vec![
            issued("wgmma reads Q and K (8 rows x 16 B)", (tile_m, hd), Access::Ldmatrix),
            issued("wgmma reads Q and K transposed", (tile_m, hd), Access::LdmatrixTrans),
            issued("wgmma reads dO transposed", (tile_m, hdv), Access::LdmatrixTrans),
            issued(stored, (tile_m, tile_n), Access::Stmatrix),
            issued("wgmma reads dS transposed", (tile_m, tile_n), Access::LdmatrixTrans),
            issued("stmatrix of dK", (tile_n, hd), Access::Stmatrix),
            issued("stmatrix of dV", (tile_n, hdv), Access::Stmatrix),
        ]
    }

    fn swizzles(&self) -> bool {
        true
    }
}
