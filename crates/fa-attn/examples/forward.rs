//! Attention on the GPU in a handful of lines: a causal problem with grouped heads, by the best kernel, on
//! tensors that stay in the GPU's memory.
//!
//! ```text
//! cargo run --release -p fa-attn --example forward
//! ```

use std::error::Error;
use std::time::Instant;

use fa_attn::device::{BindOptions, DeviceForward, Gpu, Placement, shapes};
use fa_attn::{Dtype, Mask, Pass, Problem, TensorLayout, bf16};

fn main() -> Result<(), Box<dyn Error>> {
    let problem = Problem::square(2, 8192, 16, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(4);

    let gpu = Gpu::open()?;
    let start = Instant::now();
    let forward = gpu.bind(&problem, Pass::Forward, &BindOptions::default())?.forward()?;
    println!("{} ready in {:.0?}", forward.kernel().spec, start.elapsed());

    let values = |len: usize| (0..len).map(|i| bf16::from_f32((i as f32 * 0.618).sin())).collect::<Vec<_>>();
    let placements = shapes(&problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
    let [q, k, v, _] = placements.map(|placement| values(placement.elements()));
    let bytes = forward.workspace_bytes();
    let mut tensors = DeviceForward::place(&gpu.stream, &problem, bytes, [&q, &k, &v], &placements)?;

    const RUNS: u32 = 20;
    // The first launch loads code.
    tensors.run(&forward, &gpu.stream)?;
    gpu.synchronize()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        tensors.run(&forward, &gpu.stream)?;
    }
    let enqueued = start.elapsed() / RUNS;
    gpu.synchronize()?;
    let seconds = start.elapsed().as_secs_f64() / f64::from(RUNS);
    println!("{:.0} TFLOP/s; {enqueued:.1?} of host time per call", problem.flops_forward() / seconds / 1e12);
    println!("LSE of the first rows: {:?}", &tensors.read(&gpu.stream)?.lse[..4]);
    Ok(())
}
