//! The number of heads that a deterministic backward computes side by side, by which the launch orders tiles.

use fa_core::{KernelSpec, Problem};

use crate::work::Work;

/// Steps between one tile's addition to dQ and the next tile's: the addition, and the latency of its
/// semaphore through the L2.
const TURN: f64 = 1.0;

/// Multiple of the heads that fill the GPU, where a head has more turns than a tile has steps (NB-061).
const WAITING_HEADS: f64 = 4.0;

/// Heads (parts of a K/V head's query heads each count as one) whose tiles of keys are drawn side by side, so
/// that each tile of a head finds its turns at dQ as it comes to them. At least 1.
///
/// - Without a mask all tiles of a head start at its first queries, one turn after another. With as many
///   heads as fill the GPU once, they end one turn after another as well, and the tiles of the next heads
///   start in step. More heads would be read from device memory again in every wave.
/// - Where the mask moves with the keys, each tile starts `tile_n / tile_m` steps before the one that it
///   waits for. Where that is less than a turn, further heads in between make up for it.
///
/// `parts` are those of [`crate::divide::head_splits`], `sms` the SMs of the GPU at hand.
pub fn heads_side_by_side(problem: &Problem, spec: &KernelSpec, sms: u32, parts: usize) -> usize {
    let traits = spec.traits();
    let (tile_m, tile_n) = traits.tile;
    let slots = f64::from(sms) * f64::from(traits.blocks_per_sm);
    let heads = if problem.mask.is_full() {
        let tiles = problem.lengths.mean_k().div_ceil(tile_n as usize).max(1);
        let steps = problem.lengths.mean_q().div_ceil(tile_m as usize).max(1);
        let heads = (slots / tiles as f64).round();
        if tiles > steps { heads.max(1.0) * WAITING_HEADS } else { heads }
    } else {
        let work = Work::of_keys(problem, tile_m, tile_n, parts);
        let steps = work.steps() / work.tiles.max(1.0);
        let late = TURN - f64::from(tile_n) / f64::from(tile_m);
        (late * slots / steps.max(1.0)).ceil()
    };
    heads.max(1.0) as usize
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    const SM80: &str = "Sm80Bwd((tile_m: 128, tile_n: 64, num_warps: 8, q_stages: 2, do_stages: 1, \
                        atom_layout_m_sdp: 4, atom_layout_n_dkv: 2, atom_layout_m_dq: 4, dq_first: 64, \
                        blocks_per_sm: 1, tile_order: Natural, deterministic: true))";
    const SM90: &str = "Sm90Bwd((tile_m: 80, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, \
                        pds_stages: 2, sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: true, \
                        atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, atom_layout_m_dq: 1, \
                        mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: Natural, \
                        deterministic: true))";

    fn heads(kernel: &str, mask: Mask, batch: usize, seqlen: usize, heads: usize) -> usize {
        let name = if mask.is_full() { "full" } else { "causal" };
        let text = format!(
            "(dtype: bf16, head_dim: 128, head_dim_v: 128, mask: {name}, softcap: false, kernel: {kernel})"
        );
        let spec = KernelSpec::from_ron(&text).expect("a spec");
        let problem = Problem::square(batch, seqlen, heads, 128, mask, Dtype::Bf16);
        heads_side_by_side(&problem, &spec, 132, 1)
    }

    #[test]
    fn the_measured_orders_are_chosen() {
        // The fastest of 1, 2, 4, 6, 9, 12 and 16 heads on an H100 (NB-059).
        assert_eq!(heads(SM90, Mask::FULL, 1, 4096, 64), 4);
        assert_eq!(heads(SM90, Mask::FULL, 2, 8192, 16), 2);
        assert_eq!(heads(SM90, Mask::CAUSAL, 1, 4096, 64), 1);
        assert_eq!(heads(SM90, Mask::CAUSAL, 2, 8192, 16), 1);
        assert_eq!(heads(SM80, Mask::CAUSAL, 1, 4096, 64), 4);
        // Of 2, 4, 8 and 12; of 1 and 6 (NB-061).
        assert_eq!(heads(SM80, Mask::FULL, 1, 4096, 64), 8);
        assert_eq!(heads(SM80, Mask::FULL, 2, 8192, 16), 4);
    }

    #[test]
    fn any_problem_has_a_head_at_least() {
        for seqlen in [0, 1, 64, 1 << 20] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                assert!(heads(SM90, mask, 1, seqlen, 1) >= 1);
                assert!(heads(SM80, mask, 1, seqlen, 1) >= 1);
            }
        }
    }
}
