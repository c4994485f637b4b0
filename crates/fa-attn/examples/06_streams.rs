//! Streams: two problems on streams of their own, which a GPU may compute at the same time. A bound kernel is
//! shared; tensors and workspace are each stream's. Needs a GPU.
//!
//! ```text
//! cargo run --release -p fa-attn --example 06_streams
//! ```

use std::error::Error;

use fa_attn::device::{BindOptions, DeviceForward, Placement, shapes};
use fa_attn::{Dtype, Engine, Mask, Pass, Problem, TensorLayout, bf16};

fn main() -> Result<(), Box<dyn Error>> {
    let engine = Engine::new()?;
    let Some(gpu) = engine.gpu() else {
        println!("no GPU here: the CPU has no streams");
        return Ok(());
    };
    let problem = Problem::square(1, 2048, 4, 128, Mask::CAUSAL, Dtype::Bf16);
    let forward = gpu.bind(&problem, Pass::Forward, &BindOptions::default())?.forward()?;
    let placements = shapes(&problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
    let values = |len: usize| (0..len).map(|i| bf16::from_f32((i as f32 * 0.618).sin())).collect::<Vec<_>>();
    let [q, k, v, _] = placements.map(|placement| values(placement.elements()));

    let mut streams = Vec::new();
    for _ in 0..2 {
        let stream = gpu.context().new_stream()?;
        let bytes = forward.workspace_bytes();
        let tensors = DeviceForward::place(&stream, &problem, bytes, [&q, &k, &v], &placements)?;
        streams.push((stream, tensors));
    }
    // Launches of both are in flight before anything is waited for.
    for _ in 0..10 {
        for (stream, tensors) in &mut streams {
            tensors.run(&forward, stream)?;
        }
    }
    let mut outputs = Vec::new();
    for (stream, tensors) in &streams {
        outputs.push(tensors.read(stream)?);
    }
    println!(
        "{} on {} streams: equal bits {}",
        forward.kernel().spec,
        streams.len(),
        outputs[0].same_bits(&outputs[1])
    );
    Ok(())
}
