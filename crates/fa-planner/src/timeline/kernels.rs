//! The order of each kernel's main loop, as its device code has it.

use fa_core::{Arch, Kernel, KernelSpec, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd};

use super::lanes::{Activity, Timeline};
use super::schedule::{STEPS, Schedule, Unit};
use crate::cost::{Cost, CostConstants, StepClocks};
use crate::kernels::sm100_fwd::Sm100Tile;

/// Most lanes of warps that are drawn; more take turns as these do.
const LANES: f64 = 4.0;

/// The timeline of a kernel whose launch costs `cost` on `arch`.
pub fn of_kernel(spec: &KernelSpec, arch: Arch, cost: &Cost) -> Timeline {
    let clocks = &cost.step;
    let bytes = |elements: u32| f64::from(elements * spec.elem_bytes());
    // A step's K and V, of all CTAs whose copies are drawn.
    let tile = |tile_n: u32, ctas: usize| ctas as f64 * bytes(tile_n * (spec.head_dim + spec.head_dim_v));
    let rate = |step_bytes: f64| copy_rate(arch, cost, step_bytes);
    let copy = |rate: f64| move |elements: u32| bytes(elements) / rate;
    // What a backward reads and writes in device memory beside its loop is more than what the loop loads.
    let own = CostConstants::of(arch).sm_bytes_per_clock;
    match &spec.kernel {
        Kernel::Sm90Fwd(k) => sm90_fwd(spec, k, copy(rate(tile(k.tile_n, 1))), clocks),
        Kernel::Sm80Fwd(k) => sm80_fwd(spec, k, copy(rate(tile(k.tile_n, sm80_ctas(clocks)))), clocks),
        Kernel::Sm90Bwd(k) => sm90_bwd(spec, k, copy(own), clocks),
        Kernel::Sm80Bwd(k) => sm80_bwd(spec, k, copy(own), clocks),
    }
    .fed(cost.memory_clocks(arch))
}

/// Bytes a clock at which an SM's copies come, of which a step has so many: what the SM takes, or less where
/// device memory has less for each SM.
fn copy_rate(arch: Arch, cost: &Cost, step_bytes: f64) -> f64 {
    let own = CostConstants::of(arch).sm_bytes_per_clock;
    let memory = cost.memory_clocks(arch);
    if memory > 0.0 { own.min(step_bytes / memory) } else { own }
}

/// CTAs of an SM whose lanes are drawn.
fn sm80_ctas(clocks: &StepClocks) -> usize {
    clocks.resident.min(LANES) as usize
}

/// Shares of a forward's products: S, and P V.
fn shares(head_dim: u32, head_dim_v: u32) -> (f64, f64) {
    let all = f64::from(head_dim + head_dim_v);
    (f64::from(head_dim) / all, f64::from(head_dim_v) / all)
}

/// Clocks of the products of a step, with the shared memory that feeds them.
fn products(clocks: &StepClocks) -> f64 {
    clocks.tensor.max(clocks.smem)
}

fn sm90_fwd(spec: &KernelSpec, k: &Sm90Fwd, copy: impl Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
    let groups = k.num_wg as usize;
    let stages = k.kv_stages as usize;
    let (s_share, v_share) = shares(spec.head_dim, spec.head_dim_v);
    let of_group = |clocks: f64| clocks / f64::from(k.num_wg);
    let mut plan = Schedule::default();
    let producer = plan.lane("producer: TMA");
    let lanes: Vec<(usize, usize)> = (0..groups)
        .map(|g| (plan.lane(format!("warpgroup {g}: wgmma")), plan.lane(format!("warpgroup {g}: softmax"))))
        .collect();
    // Tasks of every step: loads of K and V, and by warpgroup S, the softmax and P V.
    let mut k_loads: Vec<usize> = Vec::new();
    let mut v_loads: Vec<usize> = Vec::new();
    let mut s: Vec<Vec<usize>> = vec![Vec::new(); groups];
    let mut softmax: Vec<Vec<usize>> = vec![Vec::new(); groups];
    let mut pv: Vec<Vec<usize>> = vec![Vec::new(); groups];
    for step in 0..STEPS {
        let freed = |of: &[Vec<usize>]| -> Vec<usize> {
            step.checked_sub(stages).map_or(Vec::new(), |before| of.iter().map(|own| own[before]).collect())
        };
        let (k_free, v_free) = (freed(&s), freed(&pv));
        let load = |name| (Activity::Load, name, step);
        k_loads.push(plan.task(producer, Unit::Copy, load("K"), copy(k.tile_n * spec.head_dim), k_free));
        v_loads.push(plan.task(producer, Unit::Copy, load("V"), copy(k.tile_n * spec.head_dim_v), v_free));
        for g in 0..groups {
            let (wgmma, pipes) = lanes[g];
            let last = |of: &[usize]| of.last().copied();
            // With overlap a step's S is issued with the P of the step before at hand, before its P V.
            let ready = if k.overlap_wg { last(&softmax[g]) } else { last(&pv[g]) };
            // Ping-pong: after the products of the warpgroup before this one.
            let turn = if !k.ping_pong {
                None
            } else if g > 0 {
                if k.overlap_wg { last(&pv[g - 1]) } else { last(&s[g - 1]) }
            } else {
                let before = &pv[groups - 1];
                if k.overlap_wg { last(before) } else { last(&s[groups - 1]) }
            };
            let needs = [Some(k_loads[step]), ready, turn].into_iter().flatten();
            let name = (Activity::Product, "S", step);
            let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * s_share), needs);
            s[g].push(own);
            if k.overlap_wg && step > 0 {
                let needs = [v_loads[step - 1], softmax[g][step - 1]];
                let name = (Activity::Product, "P V", step - 1);
                let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * v_share), needs);
                pv[g].push(own);
            }
            let name = (Activity::Exposed, "barriers", step);
            let needs = (k.overlap_wg && step > 1).then(|| pv[g][step - 2]);
            let waits =
                plan.task(pipes, Unit::Own, name, clocks.exposed, needs.into_iter().chain([s[g][step]]));
            let name = (Activity::Softmax, "softmax", step);
            softmax[g].push(plan.task(pipes, Unit::Softmax, name, of_group(clocks.exp), [waits]));
            if !k.overlap_wg {
                let needs = [v_loads[step], softmax[g][step]];
                let name = (Activity::Product, "P V", step);
                let own = plan.task(wgmma, Unit::Tensor, name, of_group(products(clocks) * v_share), needs);
                pv[g].push(own);
            }
        }
    }
    plan.timeline(lanes[0].0, clocks)
}

fn sm80_fwd(spec: &KernelSpec, k: &Sm80Fwd, copy: impl Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
    let ctas = sm80_ctas(clocks);
    let warps = (f64::from(k.num_warps) / 4.0).clamp(1.0, (LANES / ctas as f64).max(1.0)) as usize;
    let (s_share, v_share) = shares(spec.head_dim, spec.head_dim_v);
    let count = (ctas * warps) as f64;
    let stages = k.stages as usize;
    let mut plan = Schedule::default();
    let mut anchor = 0;
    for cta in 0..ctas {
        let copies = plan.lane(format!("CTA {cta}: cp.async"));
        let lanes: Vec<usize> =
            (0..warps).map(|w| plan.lane(format!("CTA {cta}: warps {} to {}", 4 * w, 4 * w + 3))).collect();
        if cta == 0 {
            anchor = lanes[0];
        }
        let mut done: Vec<Vec<usize>> = Vec::new();
        for step in 0..STEPS {
            // A buffer is filled again when all warps are through with it; with one, when they need it.
            let free: Vec<usize> = match step.checked_sub(stages.saturating_sub(1).max(1)) {
                Some(before) => done[before].clone(),
                None => Vec::new(),
            };
            let tile = copy(k.tile_n * (spec.head_dim + spec.head_dim_v));
            let load = plan.task(copies, Unit::Copy, (Activity::Load, "K, V", step), tile, free);
            let step_done: Vec<usize> = lanes
                .iter()
                .map(|&lane| {
                    let name = (Activity::Exposed, "barrier", step);
                    let needs = done.last().cloned().unwrap_or_default().into_iter().chain([load]);
                    plan.task(lane, Unit::Own, name, clocks.exposed, needs);
                    let product = |share: f64| products(clocks) * share / count;
                    plan.task(lane, Unit::Tensor, (Activity::Product, "S", step), product(s_share), []);
                    let name = (Activity::Softmax, "softmax", step);
                    plan.task(lane, Unit::Softmax, name, clocks.exp / count, []);
                    plan.task(lane, Unit::Tensor, (Activity::Product, "P V", step), product(v_share), [])
                })
                .collect();
            done.push(step_done);
        }
    }
    plan.timeline(anchor, clocks)
}

/// Clocks of a backward's five products, each over head_dim or head_dim_v: (S, dK and dQ; dP and dV).
fn five(spec: &KernelSpec, clocks: &StepClocks) -> (f64, f64) {
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let all = 3.0 * hd + 2.0 * hdv;
    (products(clocks) * hd / all, products(clocks) * hdv / all)
}

fn sm90_bwd(spec: &KernelSpec, k: &Sm90Bwd, copy: impl Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
    let groups = k.num_wg as usize;
    let (by_qk, by_v) = five(spec, clocks);
    let of_group = |clocks: f64| clocks / f64::from(k.num_wg);
    let mut plan = Schedule::default();
    let producer = plan.lane("producer: TMA");
    let lanes: Vec<(usize, usize)> = (0..groups)
        .map(|g| (plan.lane(format!("warpgroup {g}: wgmma")), plan.lane(format!("warpgroup {g}: P, dS"))))
        .collect();
    let adder = plan.lane(if k.dq_via_smem { "dQ's warps: bulk add" } else { "dQ: atomics" });
    let (mut dk, mut dv): (Vec<Vec<usize>>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    let mut added: Vec<usize> = Vec::new();
    for step in 0..STEPS {
        let freed = |of: &[Vec<usize>], stages: u32| {
            step.checked_sub(stages as usize).map_or(Vec::new(), |before| of[before].clone())
        };
        let (q_free, do_free) = (freed(&dk, k.q_stages), freed(&dv, k.do_stages));
        let load = |name| (Activity::Load, name, step);
        let product = |name| (Activity::Product, name, step);
        let q = plan.task(producer, Unit::Copy, load("Q"), copy(k.tile_m * spec.head_dim), q_free);
        let dout = plan.task(producer, Unit::Copy, load("dO"), copy(k.tile_m * spec.head_dim_v), do_free);
        let exchanged: Vec<usize> = (0..groups)
            .map(|g| {
                let (wgmma, pipes) = lanes[g];
                let before = dk.last().map(|own: &Vec<usize>| own[g]);
                let needs = before.into_iter().chain([q]);
                let s = plan.task(wgmma, Unit::Tensor, product("S"), of_group(by_qk), needs);
                let dp = plan.task(wgmma, Unit::Tensor, product("dP"), of_group(by_v), [dout]);
                // The model has one term for both.
                let half = of_group(clocks.exp) / 2.0;
                plan.task(pipes, Unit::Softmax, (Activity::Softmax, "P", step), half, [s]);
                let ds = (Activity::Softmax, "dS", step);
                plan.task(pipes, Unit::Softmax, ds, half, [dp]);
                plan.task(pipes, Unit::Own, (Activity::Exposed, "exchange", step), clocks.exposed, [])
            })
            .collect();
        let mut own_dv = Vec::new();
        let mut own_dk = Vec::new();
        let mut own_dq = Vec::new();
        for &(wgmma, _) in &lanes {
            let needs = exchanged.iter().copied();
            own_dv.push(plan.task(wgmma, Unit::Tensor, product("dV"), of_group(by_v), needs));
            let buffer = added.last().copied();
            own_dq.push(plan.task(wgmma, Unit::Tensor, product("dQ"), of_group(by_qk), buffer));
            own_dk.push(plan.task(wgmma, Unit::Tensor, product("dK"), of_group(by_qk), []));
        }
        // Of f32.
        let bytes = copy(k.tile_m * spec.head_dim) * 4.0 / f64::from(spec.elem_bytes());
        added.push(plan.task(adder, Unit::Copy, (Activity::Add, "dQ", step), bytes, own_dq));
        dv.push(own_dv);
        dk.push(own_dk);
    }
    plan.timeline(lanes[0].0, clocks)
}

fn sm80_bwd(spec: &KernelSpec, k: &Sm80Bwd, copy: impl Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
    let ctas = clocks.resident.min(2.0) as usize;
    let (by_qk, by_v) = five(spec, clocks);
    let of_cta = |clocks: f64| clocks / ctas as f64;
    // dQ's share of the first group of warps, which computes it a step later.
    let first = f64::from(k.dq_first) / f64::from((spec.head_dim / 16).max(k.dq_first).max(1));
    let mut plan = Schedule::default();
    let mut anchor = 0;
    for cta in 0..ctas {
        let copies = plan.lane(format!("CTA {cta}: cp.async"));
        let one = plan.lane(format!("CTA {cta}: warps of S, dV"));
        let two = plan.lane(format!("CTA {cta}: warps of dP, dK"));
        if cta == 0 {
            anchor = one;
        }
        let (mut dk, mut dv): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let product = |name| (Activity::Product, name, step);
            let before = |of: &[usize], stages: u32| step.checked_sub(stages as usize).map(|at| of[at]);
            let (q_free, do_free) = (before(&dk, k.q_stages), before(&dv, k.do_stages));
            let load = |name| (Activity::Load, name, step);
            let q = plan.task(copies, Unit::Copy, load("Q"), copy(k.tile_m * spec.head_dim), q_free);
            let dout = copy(k.tile_m * spec.head_dim_v);
            let dout = plan.task(copies, Unit::Copy, load("dO"), dout, do_free);
            let ready = dv.last().copied().into_iter().chain([q]);
            plan.task(one, Unit::Tensor, product("S"), of_cta(by_qk), ready);
            let half = of_cta(clocks.exp) / 2.0;
            let p = plan.task(one, Unit::Softmax, (Activity::Softmax, "P", step), half, []);
            let name = (Activity::Exposed, "barriers", step);
            plan.task(one, Unit::Own, name, clocks.exposed, []);
            let ready = dk.last().copied().into_iter().chain([dout]);
            plan.task(two, Unit::Tensor, product("dP"), of_cta(by_v), ready);
            let ds = plan.task(two, Unit::Softmax, (Activity::Softmax, "dS", step), half, [p]);
            plan.task(two, Unit::Own, name, clocks.exposed, []);
            if k.dq_first > 0 {
                plan.task(one, Unit::Tensor, product("dQ"), of_cta(by_qk) * first, dk.last().copied());
            }
            dv.push(plan.task(one, Unit::Tensor, product("dV"), of_cta(by_v), [p]));
            if first < 1.0 {
                plan.task(two, Unit::Tensor, product("dQ"), of_cta(by_qk) * (1.0 - first), [ds]);
            }
            dk.push(plan.task(two, Unit::Tensor, product("dK"), of_cta(by_qk), [ds]));
        }
    }
    plan.timeline(anchor, clocks)
}

/// The timeline of a shape for tcgen05 whose launch would cost `cost`.
pub fn of_sm100(tile: &Sm100Tile, arch: Arch, cost: &Cost) -> Timeline {
    let clocks = &cost.step;
    let step_bytes = f64::from(2 * tile.tile_n * (tile.head_dim + tile.head_dim_v));
    let bytes_per_clock = copy_rate(arch, cost, step_bytes);
    // Tiles of queries on the SM, of one CTA or two.
    let tiles = (f64::from(tile.q_tiles) * clocks.resident).min(LANES) as usize;
    let (s_share, v_share) = shares(tile.head_dim, tile.head_dim_v);
    let mut plan = Schedule::default();
    let load = plan.lane("load warp: TMA");
    let mma = plan.lane("MMA warp: tcgen05");
    let pipes: Vec<usize> = (0..tiles).map(|t| plan.lane(format!("softmax warps {t}"))).collect();
    let of_tile = |clocks: f64| clocks / tiles as f64;
    let bytes = |dim: u32| f64::from(2 * tile.tile_n * dim) / bytes_per_clock;
    // K and V share a ring: `kv_stages` tiles of either.
    let mut uses: Vec<Vec<usize>> = Vec::new();
    let mut softmax: Vec<Vec<usize>> = Vec::new();
    let mut v_before = None;
    for step in 0..STEPS {
        let free = |used: usize, uses: &[Vec<usize>]| {
            used.checked_sub(tile.kv_stages as usize).and_then(|at| uses.get(at).cloned()).unwrap_or_default()
        };
        let k = plan.task(
            load,
            Unit::Copy,
            (Activity::Load, "K", step),
            bytes(tile.head_dim),
            free(2 * step, &uses),
        );
        let (mut of_k, mut of_v, mut of_step) = (Vec::new(), Vec::new(), Vec::new());
        for t in 0..tiles {
            let clocks_of = |share: f64| of_tile(products(clocks) * share);
            if let Some(v) = v_before {
                let needs = [softmax[step - 1][t], v];
                let name = (Activity::Product, "P V", step - 1);
                of_v.push(plan.task(mma, Unit::Tensor, name, clocks_of(v_share), needs));
            }
            let s = plan.task(mma, Unit::Tensor, (Activity::Product, "S", step), clocks_of(s_share), [k]);
            of_k.push(s);
            plan.task(pipes[t], Unit::Own, (Activity::Exposed, "barriers", step), clocks.exposed, [s]);
            let name = (Activity::Softmax, "softmax", step);
            of_step.push(plan.task(pipes[t], Unit::Softmax, name, of_tile(clocks.exp), []));
        }
        if step > 0 {
            uses.push(of_v);
        }
        uses.push(of_k);
        softmax.push(of_step);
        let v = (Activity::Load, "V", step);
        v_before = Some(plan.task(load, Unit::Copy, v, bytes(tile.head_dim_v), free(2 * step + 1, &uses)));
    }
    plan.timeline(mma, clocks).fed(cost.memory_clocks(arch))
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask, Pass, Problem};

    use super::*;
    use crate::kernels::sm100_fwd;
    use crate::plan::{PlanOptions, explore};

    fn problem(head_dim: usize, mask: Mask) -> Problem {
        Problem::square(4, 4096, 16, head_dim, mask, Dtype::Bf16)
    }

    fn check(name: &str, timeline: &Timeline, clocks: &StepClocks) {
        assert!(timeline.step.is_finite() && timeline.step > 0.0, "{name}: {timeline:?}");
        // No order is faster than the busiest unit.
        let least = clocks.tensor.max(clocks.exp);
        assert!(timeline.step >= 0.99 * least, "{name}: {} of {least}", timeline.step);
        let most = products(clocks) + clocks.exp + 8.0 * clocks.exposed + 4000.0;
        assert!(timeline.step <= most, "{name}: {} of {most}", timeline.step);
        for lane in &timeline.lanes {
            assert!(lane.busy <= 1.0 + 1e-9, "{name}: {lane:?}");
            let ends = lane.spans.windows(2).all(|pair| pair[0].end <= pair[1].begin + 1e-6);
            assert!(ends, "{name}: {lane:?}");
            let inside =
                |span: &super::super::lanes::Span| span.begin >= 0.0 && span.end <= timeline.clocks + 1e-6;
            assert!(lane.spans.iter().all(inside), "{name}: {lane:?}");
            let waits = lane.spans.iter().filter(|span| span.activity == Activity::Wait);
            assert!(
                waits.clone().all(|span| span.begin == 0.0 || !span.label.is_empty()),
                "{name}: {lane:?}"
            );
        }
        let products = timeline.lanes.iter().flat_map(|lane| &lane.spans);
        assert!(products.filter(|span| span.activity == Activity::Product).count() >= 2, "{name}");
    }

    #[test]
    fn every_kernel_that_fits_has_a_timeline_within_its_model() {
        for arch in [Arch::Sm80, Arch::Sm90] {
            for pass in [Pass::Forward, Pass::BACKWARD] {
                for (head_dim, mask) in [(64, Mask::FULL), (128, Mask::CAUSAL), (256, Mask::CAUSAL)] {
                    let options = PlanOptions { pass, ..PlanOptions::default() };
                    let set = explore(&problem(head_dim, mask), arch, &options).expect("plans");
                    for plan in &set.plans {
                        let timeline = of_kernel(&plan.spec, arch, &plan.cost);
                        check(&plan.spec.to_string(), &timeline, &plan.cost.step);
                    }
                }
            }
        }
        let set = sm100_fwd::explore(&problem(128, Mask::CAUSAL), Arch::Sm100, None).expect("plans");
        for plan in &set.plans {
            check("sm100", &of_sm100(&plan.tile, Arch::Sm100, &plan.cost), &plan.cost.step);
        }
    }

    #[test]
    fn overlap_shortens_the_step_and_ping_pong_keeps_the_order() {
        let set = explore(&problem(128, Mask::CAUSAL), Arch::Sm90, &PlanOptions::default()).expect("plans");
        let of = |overlap: bool| {
            let plan = set.plans.iter().find(|plan| {
                let Kernel::Sm90Fwd(k) = &plan.spec.kernel else { return false };
                (k.tile_n, k.num_wg, k.pv_is_rs, k.overlap_wg) == (64, 2, true, overlap)
            });
            let plan = plan.expect("both fit");
            of_kernel(&plan.spec, Arch::Sm90, &plan.cost)
        };
        let (with, without) = (of(true), of(false));
        assert!(with.step < without.step && with.tensor_busy > without.tensor_busy, "{with:?} {without:?}");
        let best = &set.plans[0];
        let timeline = of_kernel(&best.spec, Arch::Sm90, &best.cost);
        let names: Vec<&str> = timeline.lanes.iter().map(|lane| &*lane.name).collect();
        assert_eq!(names[..3], ["producer: TMA", "warpgroup 0: wgmma", "warpgroup 0: softmax"]);
        assert!(timeline.tensor_busy > 0.5 && timeline.tensor_busy <= 1.0 + 1e-9, "{timeline:?}");
    }
    /// A query on many keys: the loop goes at the pace of device memory, and the whole of it takes the time
    /// that is predicted.
    #[test]
    fn copies_of_decode_come_at_the_pace_of_device_memory() {
        let lengths = fa_core::Lengths::uniform(64, 1, 8192);
        let decode = Problem { lengths, heads_kv: 8, ..problem(128, Mask::FULL) };
        let check = |name: &str, timeline: Timeline, cost: &Cost| {
            let clock = Arch::Sm90.limits().clock_ghz * 1e9;
            let memory = cost.memory_clocks(Arch::Sm90);
            assert!(memory > 2.0 * cost.step.total, "{name}: {memory} beside {:?}", cost.step);
            assert_eq!(timeline.memory, memory);
            assert!((timeline.step / memory - 1.0).abs() < 0.05, "{name}: {} of {memory}", timeline.step);
            assert!(timeline.lanes[0].busy > 0.95 && timeline.tensor_busy < 0.5, "{name}: {timeline:?}");
            let all = timeline.step * cost.steps / cost.slots.min(cost.tiles) / clock;
            assert!((0.8..1.1).contains(&(all / cost.seconds)), "{name}: {all} of {}", cost.seconds);
        };
        let set = explore(&decode, Arch::Sm90, &PlanOptions::default()).expect("plans");
        let best = &set.plans[0];
        check("sm90", of_kernel(&best.spec, Arch::Sm90, &best.cost), &best.cost);
        // Prefill is not held up.
        let set = explore(&problem(128, Mask::CAUSAL), Arch::Sm90, &PlanOptions::default()).expect("plans");
        let cost = &set.plans[0].cost;
        assert!(cost.memory_clocks(Arch::Sm90) < 0.5 * cost.step.total, "{cost:?}");
    }
}
