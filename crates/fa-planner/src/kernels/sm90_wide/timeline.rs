//! The order of the main loop of the SM90 forward for wide heads, as its device code has it.

use fa_core::{KernelSpec, Sm90Wide};

use crate::cost::predicted::StepClocks;
use crate::timeline::lanes::{Activity, Timeline};
use crate::timeline::parts::{products, shares};
use crate::timeline::schedule::{STEPS, Schedule, Unit};

/// The timeline of a kernel whose step takes `clocks`; `copy` gives the clocks in which an SM loads so many
/// elements.
pub(crate) fn timeline(
    spec: &KernelSpec,
    k: &Sm90Wide,
    copy: &dyn Fn(u32) -> f64,
    clocks: &StepClocks,
) -> Timeline {
    let stages = k.kv_stages as usize;
    let (s_share, v_share) = shares(spec.head_dim, spec.head_dim_v);
    let mut plan = Schedule::default();
    let producer = plan.lane("producer: TMA");
    let leader = plan.lane("leader: wgmma");
    let pipes = plan.lane("leader: softmax");
    let follower = plan.lane("follower: wgmma");
    let (mut of_s, mut of_v): (Vec<Vec<usize>>, Vec<Vec<usize>>) = Default::default();
    for step in 0..STEPS {
        let freed = |of: &[Vec<usize>]| -> Vec<usize> {
            step.checked_sub(stages).map_or(Vec::new(), |before| of[before].clone())
        };
        let load = |name| (Activity::Load, name, step);
        let of_k = if k.latent { &of_v } else { &of_s };
        let key = plan.task(producer, Unit::Copy, load("K"), copy(k.tile_n * spec.head_dim), freed(of_k));
        let value = match k.latent {
            true => key,
            false => {
                plan.task(producer, Unit::Copy, load("V"), copy(k.tile_n * spec.head_dim_v), freed(&of_v))
            }
        };
        let before = of_v.last().map(|of_v| of_v[0]);
        let name = (Activity::Product, "S", step);
        let s = plan.task(
            leader,
            Unit::Tensor,
            name,
            products(clocks) * s_share,
            [Some(key), before].into_iter().flatten(),
        );
        let waits = plan.task(pipes, Unit::Own, (Activity::Exposed, "barriers", step), clocks.exposed, [s]);
        let name = (Activity::Softmax, "softmax", step);
        let p = plan.task(pipes, Unit::Softmax, name, clocks.exp, [waits]);
        let half = products(clocks) * v_share / 2.0;
        let name = (Activity::Product, "P V", step);
        let both = [leader, follower].map(|lane| plan.task(lane, Unit::Tensor, name, half, [p, value]));
        of_s.push(vec![s]);
        of_v.push(both.to_vec());
    }
    plan.timeline(leader, clocks)
}
