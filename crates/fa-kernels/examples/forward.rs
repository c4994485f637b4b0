//! Attention on the GPU in a handful of lines: a causal problem with grouped heads, by the planner's best kernel.
//!
//! ```text
//! cargo run --release -p fa-kernels --example forward
//! ```

use std::error::Error;
use std::time::Instant;

use fa_core::{Dtype, Mask, Problem, TensorLayout};
use fa_kernels::{ForwardArgs, Input, Kernels, Output, driver};
use half::bf16;

fn main() -> Result<(), Box<dyn Error>> {
    let problem = Problem { heads_kv: 4, ..Problem::square(2, 8192, 16, 128, Mask::CAUSAL, Dtype::Bf16) };
    let Problem { batch, seqlen_q, heads_q, heads_kv, head_dim, .. } = problem;

    let context = driver::context(0)?;
    let stream = context.default_stream();
    let start = Instant::now();
    let kernels = Kernels::new(&context)?;
    let forward = kernels.forward(&problem)?;
    println!("{} ready in {:.0?}", forward.kernel().spec, start.elapsed());

    let values = |len: usize| (0..len).map(|i| bf16::from_f32((i as f32 * 0.618).sin())).collect::<Vec<_>>();
    let (rows_q, rows_kv) = (batch * seqlen_q * heads_q, batch * seqlen_q * heads_kv);
    let q = stream.clone_htod(&values(rows_q * head_dim))?;
    let k = stream.clone_htod(&values(rows_kv * head_dim))?;
    let v = stream.clone_htod(&values(rows_kv * head_dim))?;
    let mut out = stream.alloc_zeros::<bf16>(rows_q * head_dim)?;
    let mut lse = stream.alloc_zeros::<f32>(rows_q)?;
    let mut workspace = stream.alloc_zeros::<u8>(forward.workspace_bytes().max(1))?;

    let strides_q = TensorLayout::Bshd.strides(seqlen_q, heads_q, head_dim);
    let strides_kv = TensorLayout::Bshd.strides(seqlen_q, heads_kv, head_dim);
    let mut run = || {
        forward.run(
            &stream,
            ForwardArgs {
                q: Input { data: &q, strides: strides_q },
                k: Input { data: &k, strides: strides_kv },
                v: Input { data: &v, strides: strides_kv },
                out: Output { data: &mut out, strides: strides_q },
                lse: Some(&mut lse),
                workspace: Some(&mut workspace),
            },
        )
    };
    const RUNS: u32 = 20;
    run()?;
    stream.synchronize()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        run()?;
    }
    let enqueued = start.elapsed() / RUNS;
    stream.synchronize()?;
    let seconds = start.elapsed().as_secs_f64() / f64::from(RUNS);
    println!("{:.0} TFLOP/s; {enqueued:.1?} of host time per call", problem.flops_forward() / seconds / 1e12);
    println!("LSE of the first rows: {:?}", &stream.clone_dtoh(&lse)?[..4]);
    Ok(())
}
