//! The SM90 forwards of e4m3 tensors that are tried for a problem.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Arch, Division, KernelSpec, MaskKind, Problem, Reads, Sm90FwdFp8};

use super::account::smem;
use crate::kernels::{has_idle_warps, packings, split_choices};

/// Keys per step that are tried.
pub const TILE_N: [u32; 7] = [64, 96, 128, 160, 192, 224, 256];

/// Of 16 exponentials those by polynomial: none, since the issue slots that they take are worth more (on an
/// H200 4 of 16 cost 1 to 8 %, 8 of 16 6 to 19 %).
const POLY_OF_16: u32 = 0;

/// Every forward that is tried for `problem`. In order: warpgroups, keys per step, intra-warpgroup overlap or
/// not, heads of a group packed or not, keys in one piece or shared by several CTAs. All add in two levels.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    division: Division,
) -> impl Iterator<Item = KernelSpec> {
    let problem = *problem;
    // Tiles of equal length are assigned statically; others are drawn, the longest first.
    let alike = MaskKind::of(&problem.mask) == MaskKind::Full && !Reads::of(&problem).varied;
    let (scheduler, tile_order) = if alike {
        (Scheduler::Static, TileOrder::Natural)
    } else {
        (Scheduler::Dynamic, TileOrder::LongestFirst)
    };
    (1..=3u32)
        .flat_map(|num_wg| TILE_N.into_iter().map(move |tile_n| (num_wg, tile_n)))
        .flat_map(|tile| [true, false].into_iter().map(move |overlap_wg| (tile, overlap_wg)))
        .flat_map(move |((num_wg, tile_n), overlap_wg)| {
            let has_rows = move |pack_gqa: &&bool| !has_idle_warps(&problem, 64 * num_wg, **pack_gqa);
            let packings = packings(&problem, 64 * num_wg, division).iter().filter(has_rows);
            let choices = packings.flat_map(move |&pack_gqa| {
                let splits = split_choices(&problem, 64 * num_wg, tile_n, pack_gqa, division);
                splits.iter().map(move |&split| (pack_gqa, split))
            });
            choices.map(move |(pack_gqa, split)| {
                let kernel = Sm90FwdFp8 {
                    tile_m: 64 * num_wg,
                    tile_n,
                    num_wg,
                    overlap_wg,
                    two_level: true,
                    q_stages: 2,
                    kv_stages: 2,
                    v_stages: 2,
                    ping_pong: num_wg >= 2,
                    scheduler,
                    tile_order,
                    exp_poly_of_16: POLY_OF_16,
                    pack_gqa,
                };
                let spec_of = |kernel: Sm90FwdFp8| KernelSpec {
                    split,
                    ..KernelSpec::for_problem(&problem, [head_dim, head_dim_v], kernel)
                };
                with_room(kernel, spec_of)
            })
        })
        .filter(|spec| spec.check().is_ok())
}

/// The spec of `kernel` with one buffer of V as it is loaded, and then of Q, where shared memory has no room
/// for two.
fn with_room(mut kernel: Sm90FwdFp8, spec_of: impl Fn(Sm90FwdFp8) -> KernelSpec) -> KernelSpec {
    let limit = Arch::Sm90.limits().smem_per_block;
    let fits = |kernel: &Sm90FwdFp8| smem(&spec_of(kernel.clone()), kernel).total <= limit;
    if !fits(&kernel) {
        kernel.v_stages = 1;
    }
    if !fits(&kernel) {
        kernel.q_stages = 1;
    }
    spec_of(kernel)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Family, Lengths, Mask, Side, Types};

    use super::*;
    use crate::plan::{PlanError, PlanOptions, plan};

    const BASE: Problem =
        Problem::square(4, 8192, 16, 128, Mask::FULL, Dtype::Bf16).with_types(Types::fp8(Dtype::Bf16));

    #[test]
    fn e4m3_problems_have_plans_on_sm90() {
        for (problem, tflops) in [
            (BASE, 700.0),
            (BASE.with_mask(Mask::CAUSAL), 700.0),
            (BASE.with_head_dims(64, 64), 480.0),
            (BASE.with_head_dims(256, 256), 900.0),
            (BASE.with_head_dims(192, 128), 800.0),
            (BASE.with_head_dims(80, 80).with_mask(Mask::window(500, 0)), 100.0),
            (
                BASE.with_heads_kv(2).with_lengths(Lengths::of(
                    4,
                    Side::packed(9000, 8192),
                    Side::padded(8192).with_used(),
                )),
                500.0,
            ),
        ] {
            let plans = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("a plan");
            assert!(plans[0].spec.kernel.computes_in_8_bits() && plans[0].spec.serves(&problem).is_ok());
            assert!(plans[0].cost.tflops > tflops, "{}: {:.0}", plans[0].spec, plans[0].cost.tflops);
            assert!(plans[0].cost.tflops < Arch::Sm90.limits().peak_tensor_flops_of(Dtype::E4m3) / 1e12);
        }
    }

    #[test]
    fn what_no_kernel_computes_in_e4m3_is_refused_by_name() {
        let of = |problem: Problem, arch, family| {
            plan(&problem, arch, &PlanOptions::default().with_family(family)).expect_err("no plan")
        };
        assert!(matches!(of(BASE, Arch::Sm80, None), PlanError::NoFp8 { family: Family::Sm80, .. }));
        assert!(matches!(of(BASE, Arch::Sm90, Some(Family::Sm80)), PlanError::NoFp8 { .. }));
        let text = of(BASE.with_types(Types::fp8(Dtype::F16)), Arch::Sm90, None).to_string();
        assert!(text.contains("out_dtype = f16 with K and V in e4m3"), "{text}");
    }
}
