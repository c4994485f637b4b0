//! Whether the first sums of a tile of dQ are stored instead of being added to zeros: the launch orders its
//! tiles accordingly, and preprocess writes no zeros.

use fa_core::{Arch, KernelSpec, MaskKind, Problem};

/// The heads of a section in the natural order of tiles, if one tile of keys stores its sums of dQ for the
/// others to add to; `None` if all sums are added to zeros that preprocess writes. With uniform lengths,
/// storing requires that every query sees a key, but under a program's mask. `sms`: SMs of the GPU at hand.
pub fn storing_heads(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Option<usize> {
    if !spec.backward().is_some_and(|traits| traits.may_store_dq) {
        return None;
    }
    // The first tile of keys to arrive claims a tile of dQ; one that none visits is known by that.
    if spec.score.masks() {
        return Some(1);
    }
    let traits = spec.traits();
    let (max_q, max_k) = (problem.lengths.max_q(), problem.lengths.max_k());
    if spec.reads.varied {
        // Under a full mask the tiles of a head start at different queries: what all concurrent heads share
        // has to stay in the L2.
        let at_once = (sms as usize).div_ceil(max_k.div_ceil(traits.tile.1 as usize).max(1));
        let fits = head_bytes(problem, at_once) <= arch.limits().l2_bytes * 2 / 5;
        let stores = spec.mask != MaskKind::Full || traits.pass.deterministic() || fits;
        return stores.then_some(1);
    }
    let all_see_keys = max_k > 0 && (spec.mask == MaskKind::Full || max_q <= max_k);
    if !all_see_keys {
        return None;
    }
    let is_alone = max_k <= traits.tile.1 as usize;
    if is_alone || traits.pass.deterministic() {
        return Some(1);
    }
    match spec.mask {
        MaskKind::Causal => Some(1),
        // A tile of keys begins with the queries whose last keys it has, as under a causal mask, unless many
        // of the others begin with the same ones.
        MaskKind::Window => {
            problem.mask.limits()[1].is_some_and(|right| right <= i64::from(traits.tile.1)).then_some(1)
        }
        MaskKind::Full => full_storing_heads(problem, arch, sms),
    }
}

/// Under a full mask the heads of a section, whose first keys store while others still wait for an SM: as
/// many as half the SMs, where what they share stays in the L2 until all keys are done; with fewer, the other
/// keys wait for the first (NB-082). None for heads that share keys: their tiles hold several heads' queries.
fn full_storing_heads(problem: &Problem, arch: Arch, sms: u32) -> Option<usize> {
    if problem.group_size() > 1 {
        return None;
    }
    let heads = problem.heads_q.saturating_mul(problem.lengths.sequences());
    let own = (sms as usize / 2).max(1);
    let room = arch.limits().l2_bytes * 2 / 5;
    (heads >= 2 * own && head_bytes(problem, 1).saturating_mul(own as u64) <= room).then_some(own)
}

/// Bytes that the CTAs of `heads` query heads share: Q, dO and dQ's accumulators.
pub fn head_bytes(problem: &Problem, heads: usize) -> u64 {
    let row = (problem.head_dim + problem.head_dim_v) * problem.types.q.bytes() + problem.head_dim * 4;
    (problem.lengths.max_q() as u64).saturating_mul(row as u64).saturating_mul(heads as u64)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, Pass};

    use super::*;
    use crate::plan::{PlanOptions, best};

    /// Of the planner's first choice on an H100.
    fn stores(problem: &Problem) -> Option<usize> {
        let options = PlanOptions::default().with_pass(Pass::BACKWARD);
        let plan = best(problem, Arch::Sm90, &options).expect("a plan");
        storing_heads(&plan.spec, problem, Arch::Sm90, 132)
    }

    #[test]
    fn sums_are_stored_where_nobody_waits_for_them() {
        let causal = Problem::square(4, 4096, 32, 128, Mask::CAUSAL, Dtype::Bf16);
        assert_eq!(stores(&causal), Some(1));
        // 999 keys: the first of 1,000 queries sees none.
        assert_eq!(stores(&causal.with_lengths(Lengths::uniform(4, 1000, 999))), None);
        assert_eq!(stores(&causal.with_mask(Mask::causal_window(512))), Some(1));
        assert_eq!(stores(&causal.with_mask(Mask::window(64, 64))), Some(1));
        assert_eq!(stores(&causal.with_mask(Mask::window(64, 1000))), None);
        assert_eq!(stores(&causal.with_mask(Mask::band(Some(64), None))), None);
        // Under a program's mask whoever comes first, also where queries see nothing.
        let program = fa_core::program::Program::parse("q % 3 == k % 3").unwrap().intern().unwrap();
        let masked = fa_core::ScoreMod::NONE.with_program(Some(program));
        assert_eq!(stores(&causal.with_score(masked).with_lengths(Lengths::uniform(4, 1000, 999))), Some(1));
        // A full mask: half the SMs' number of heads side by side, whose queries stay in the L2.
        let full = Problem::square(32, 512, 16, 64, Mask::FULL, Dtype::Bf16);
        assert_eq!(stores(&full), Some(66));
        assert_eq!(stores(&full.with_heads_kv(4)), None);
        assert_eq!(stores(&full.with_lengths(Lengths::uniform(32, 8192, 8192))), None);
        assert_eq!(stores(&full.with_lengths(Lengths::uniform(32, 512, 77))), Some(1));
    }
}
