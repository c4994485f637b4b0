//! Compares the counters of a pass with the planner's numbers: products, bytes loaded to shared memory, bank
//! conflicts.

use fa_core::spec::{Traits, operand_columns};
use fa_core::{Arch, KernelSpec, Pass, Problem};
use fa_planner::divide::head_splits;
use fa_planner::work::Work;

use crate::kernels;
use crate::outcome::Counters;

/// The planner's numbers for a pass, summed over its steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Floating-point operations of whole tiles.
    pub tile_flops: f64,
    /// Those of the visible pairs, by the exact count of each product.
    pub problem_flops: f64,
    /// Bytes of Q, K, V and dO tiles, padding included; those of codes beside a Q that TMA loads are apart.
    pub tile_bytes: f64,
    /// Bytes of codes and descales that threads copy beside a Q that TMA loads, padding included.
    pub code_bytes: f64,
    /// Bytes of statistics that a backward loads by bulk copies.
    pub stat_bytes: f64,
    /// Whether matrix loads and stores have no bank conflicts in this layout of shared memory.
    pub conflict_free: bool,
    /// Whether every warp computes every step of its tile: none skips those that its rows do not see.
    pub whole_steps: bool,
}

impl Planned {
    /// For a kernel of `spec` on a GPU of `sms` SMs; `None` for clusters, whose CTAs share their loads, for
    /// keys that several CTAs share, and for lengths that the device alone knows.
    pub fn of(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Option<Planned> {
        if spec.split || !problem.lengths.is_uniform() || spec.score.program.is_some() {
            return None;
        }
        let (tile_m, tile_n) = spec.tile();
        let (m, n) = (f64::from(tile_m), f64::from(tile_n));
        let (hd, hdv) = (f64::from(spec.head_dim), f64::from(spec.head_dim_v));
        // TMA writes whole panels.
        let by_tma = spec.traits().uses_tma();
        let stored = |dim| f64::from(if by_tma { operand_columns(dim) } else { dim });
        let (row, row_v) = (stored(spec.head_dim), stored(spec.head_dim_v));
        let pairs = problem.flops_forward() / (2.0 * (problem.head_dim + problem.head_dim_v) as f64);
        let exact = |of_qk: f64, of_v: f64| {
            2.0 * pairs * (of_qk * problem.head_dim as f64 + of_v * problem.head_dim_v as f64)
        };
        let kernel = kernels::of(&spec.kernel);
        let (conflict_free, whole_steps) = (kernel.is_conflict_free(), kernel.computes_whole_steps(problem));
        let Traits { cluster, packs_gqa: packed, is_latent, .. } = spec.traits();
        // The keys' rows hold the values'.
        let key_row = if is_latent { row } else { row + row_v };
        if cluster > 1 {
            return None;
        }
        let of_steps = |work: &Work| {
            let tiles: f64 = work.classes.iter().filter(|c| c.steps > 0.0).map(|c| c.count).sum();
            (work.steps(), tiles)
        };
        Some(match spec.kernel.pass() {
            Pass::Forward => {
                let tiled = spec.traits().tiled(problem);
                let (steps, tiles) = of_steps(&Work::of(&tiled, tile_m, tile_n, packed));
                // Of packed heads whole groups are loaded.
                let queries = spec.traits().tile_queries(tiled.group_size());
                let rows = (queries * if packed { tiled.group_size() } else { 1 }) as f64;
                let queries = tiles * rows * row * f64::from(spec.elem_bytes());
                // A row of codes has up to two descales.
                let of_row = if spec.reads_codes() { 2.0 * 4.0 } else { 0.0 };
                let keys = steps * n * (key_row * spec.types.kv.bytes_per_number() + of_row);
                let apart = spec.reads_codes() && by_tma;
                Planned {
                    tile_flops: steps * 2.0 * m * n * (hd + hdv),
                    problem_flops: exact(1.0, 1.0),
                    tile_bytes: queries + if apart { 0.0 } else { keys },
                    code_bytes: if apart { keys } else { 0.0 },
                    stat_bytes: 0.0,
                    conflict_free,
                    whole_steps,
                }
            }
            Pass::Backward { .. } => {
                let splits = head_splits(problem, spec, arch, sms);
                let (steps, tiles) = of_steps(&Work::of_keys(problem, tile_m, tile_n, splits));
                Planned {
                    tile_flops: steps * 2.0 * m * n * (3.0 * hd + 2.0 * hdv),
                    problem_flops: exact(3.0, 2.0),
                    tile_bytes: 2.0 * (steps * m + tiles * n) * (row + row_v),
                    code_bytes: 0.0,
                    stat_bytes: steps * 2.0 * m * 4.0,
                    conflict_free,
                    whole_steps,
                }
            }
        })
    }

    /// Differences of the counters of a finished pass.
    pub fn faults(&self, spec: &KernelSpec, counters: &Counters) -> Vec<String> {
        let mut faults = Vec::new();
        let flops = counters.flops as f64;
        if flops > self.tile_flops
            || flops < self.problem_flops
            || (self.whole_steps && flops != self.tile_flops)
        {
            faults.push(format!(
                "products beside the plan: {flops} operations, the tiles that the mask leaves have {} and \
                 the problem {}",
                self.tile_flops, self.problem_flops
            ));
        }
        // cp.async does not read beyond a tensor, so there are fewer bytes.
        let by_tma = spec.traits().uses_tma();
        let (tiles, stats) = (counters.tma_bytes as f64, counters.bulk_bytes as f64);
        let whole = kernels::of(&spec.kernel).loads_whole_tiles();
        let beside = if whole { tiles != self.tile_bytes } else { tiles > self.tile_bytes };
        if by_tma && (beside || stats != self.stat_bytes) {
            faults.push(format!(
                "traffic beside the plan: TMA brought {tiles} bytes of tiles and {stats} of statistics, the \
                 planner counts {} and {}",
                self.tile_bytes, self.stat_bytes
            ));
        }
        let most = if by_tma { self.code_bytes } else { self.tile_bytes + self.stat_bytes };
        if (!by_tma || spec.reads_codes()) && counters.cp_async_bytes as f64 > most {
            faults.push(format!(
                "traffic beside the plan: cp.async brought {} bytes, the planner counts {most} at most",
                counters.cp_async_bytes
            ));
        }
        let (phases, wavefronts) = (
            counters.load_phases + counters.store_phases,
            counters.load_wavefronts + counters.store_wavefronts,
        );
        if self.conflict_free && wavefronts != phases {
            faults.push(format!(
                "bank conflicts beside the plan: {wavefronts} wavefronts for {phases} phases of a layout \
                 without conflicts"
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn parts_of_a_group_need_not_have_as_many_heads_each() {
        let spec = KernelSpec::from_ron(
            "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: window, kernel: Sm90Bwd((tile_m: 96, \
             tile_n: 64, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, sdp_swap_ab: true, \
             dkv_swap_ab: false, dq_swap_ab: true, atom_layout_m_sdp: 2, atom_layout_n_dkv: 1, \
             atom_layout_m_dq: 2, mma_dkv_is_rs: false, dq_via_smem: true, dq_slices: 1, \
             tile_order: Natural, deterministic: true)))",
        )
        .unwrap();
        let square = Problem::square(1, 64, 3, 64, Mask::window(24, 22), Dtype::Bf16);
        let problem = square.with_heads_kv(1);
        // 3 heads in 2 parts: K and V are loaded twice, each head's queries once.
        assert_eq!(head_splits(&problem, &spec, Arch::Sm90, 2), 2);
        let planned = Planned::of(&spec, &problem, Arch::Sm90, 2).unwrap();
        assert_eq!(planned.tile_flops, 3.0 * 5.0 * 2.0 * 96.0 * 64.0 * 64.0);
        assert_eq!(planned.tile_bytes, 2.0 * (3.0 * 96.0 + 2.0 * 64.0) * 128.0);
    }
}
