//! A kernel spec by hand: plain data that says all that a kernel is specialised on. It is read from text,
//! asked what it computes, and on a GPU compiled, launched and compared with the planner's own choice.
//!
//! ```text
//! cargo run --release -p fa-attn --example 05_spec_by_hand
//! ```

use std::error::Error;

use fa_attn::device::{BindOptions, DeviceForward, Gpu, Placement, shapes};
use fa_attn::{Dtype, Engine, KernelSpec, Mask, Pass, Problem, ShippedSpec, TensorLayout, bf16};

/// As the files in `fa-kernels/specs`; `fa plan --format spec` prints the planner's choice in this form.
const SPEC: &str = "(
    archs: [sm80, sm90],
    spec: (
        dtype: bf16, head_dim: 64, head_dim_v: 64, mask: causal, softcap: false,
        kernel: Sm80Fwd((
            tile_m: 128, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1,
            swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true,
            reverse_blocks: true,
        )),
    ),
)";

fn main() -> Result<(), Box<dyn Error>> {
    let spec = read()?;
    let problem = Problem::square(2, 1000, 8, 64, Mask::CAUSAL, Dtype::Bf16);
    println!("{spec}");
    if let Err(why) = spec.serves(&problem.with_mask(Mask::FULL)) {
        println!("not for a full mask: {why}");
    }
    spec.serves(&problem)?;
    let engine = Engine::new()?;
    let Some(gpu) = engine.gpu() else {
        println!("no GPU here to compile it for");
        return Ok(());
    };
    let by_hand = run(gpu, &problem, Some(spec))?;
    let planned = run(gpu, &problem, None)?;
    let most = by_hand.iter().zip(&planned).map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0.0, f32::max);
    println!("by hand and as planned differ by at most {most:.4}");
    Ok(())
}

/// The spec.
pub(crate) fn read() -> Result<KernelSpec, Box<dyn Error>> {
    Ok(ShippedSpec::from_ron(SPEC)?.spec)
}

/// O by this kernel, or by the planner's best.
fn run(gpu: &Gpu, problem: &Problem, spec: Option<KernelSpec>) -> Result<Vec<bf16>, Box<dyn Error>> {
    let forward = gpu.bind(problem, Pass::Forward, &BindOptions::default().with_spec(spec))?.forward()?;
    let placements = shapes(problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
    let values = |len: usize| (0..len).map(|i| bf16::from_f32((i as f32 * 0.618).sin())).collect::<Vec<_>>();
    let [q, k, v, _] = placements.map(|placement| values(placement.elements()));
    let bytes = forward.workspace_bytes();
    let mut tensors = DeviceForward::place(&gpu.stream, problem, bytes, [&q, &k, &v], &placements)?;
    let time = gpu.time(|stream| tensors.run(&forward, stream))?;
    println!("{:>9.1?}  {}", time, forward.kernel().spec);
    Ok(tensors.read(&gpu.stream)?.out)
}
