//! Quick rates of the tiled implementation:
//! `cargo run --release -p fa-cpu --example cpu_bench -- [fwd|bwd|both] [f32|bf16|f16] [hd,..] [N[xM],..]
//! [full|causal|both] [threads] [isa] [heads[:kv]] [batch] [bshd|bhsd]`

use std::time::Instant;

use fa_core::{Dtype, Lengths, Mask, Problem, TensorLayout};
use fa_cpu::simd::Isa;
use fa_cpu::tiled::{BackwardInputs, Options, backward_with, forward_with};
use fa_cpu::{Element, TensorMut, TensorRef, check};
use half::{bf16, f16};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize, default: &str| arguments.get(i).map_or(default.to_owned(), Clone::clone);
    let numbers =
        |text: String| -> Vec<usize> { text.split(',').map(|n| n.parse().expect("a number")).collect() };
    let threads: usize = argument(5, "2").parse().expect("a number of threads");
    let isa: Isa = argument(6, Isa::detect().name()).parse().expect("an instruction set");
    let heads = argument(7, "8");
    let (heads, heads_kv) = heads.split_once(':').unwrap_or((&heads, &heads));
    let [heads, heads_kv]: [usize; 2] = [heads, heads_kv].map(|n| n.parse().expect("a number of heads"));
    let batch: usize = argument(8, "1").parse().expect("a number of sequences");
    let layout = match argument(9, "bshd").as_str() {
        "bhsd" => TensorLayout::Bhsd,
        _ => TensorLayout::Bshd,
    };
    let options = Options { isa: Some(isa), threads: Some(threads) };
    let dtype: Dtype = argument(1, "f32").parse().expect("a dtype");
    let peak =
        fa_cpu::peak::measure(isa, dtype, threads).expect("an instruction set that this CPU has") / 1e9;
    println!("{isa}, {threads} threads, peak of {dtype} products {peak:.0} GFLOP/s");
    let masks: &[Mask] = match argument(4, "both").as_str() {
        "full" => &[Mask::FULL],
        "causal" => &[Mask::CAUSAL],
        _ => &[Mask::FULL, Mask::CAUSAL],
    };
    for mode in ["fwd", "bwd"] {
        if argument(0, "both") != "both" && argument(0, "both") != mode {
            continue;
        }
        for &hd in &numbers(argument(2, "64,128")) {
            for &mask in masks {
                for lengths in argument(3, "512,1024,2048,4096").split(',') {
                    let (q, k) = lengths.split_once('x').unwrap_or((lengths, lengths));
                    let [q, k] = [q, k].map(|n| n.parse().expect("a length"));
                    let square = Problem::square(batch, q, heads, hd, mask, dtype);
                    let problem = square.with_lengths(Lengths::uniform(batch, q, k)).with_heads_kv(heads_kv);
                    let seconds = match dtype {
                        Dtype::F16 => time::<f16>(options, &problem, mode, layout),
                        Dtype::Bf16 => time::<bf16>(options, &problem, mode, layout),
                        Dtype::F32 => time::<f32>(options, &problem, mode, layout),
                        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
                            panic!("nothing computes in {dtype}: use f32, f16 or bf16")
                        }
                    };
                    let flops =
                        if mode == "fwd" { problem.flops_forward() } else { problem.flops_backward() };
                    let [best, median, busy] = seconds.map(|seconds| flops / seconds / 1e9);
                    println!(
                        "{mode} {dtype} hd {hd:3} N {lengths:5} {:6} best {:8.3} ms {best:7.1} GFLOP/s \
                         ({:4.1} % of peak), median {median:7.1}, per CPU second {busy:6.1}",
                        mask.to_string(),
                        seconds[0] * 1e3,
                        best / peak * 100.0,
                    );
                }
            }
        }
    }
}

/// CPU time of all threads so far (Linux; 0 elsewhere): on a busy machine more telling than the clock on the
/// wall.
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let nanoseconds = |task: std::fs::DirEntry| -> Option<f64> {
        std::fs::read_to_string(task.path().join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    tasks.flatten().filter_map(nanoseconds).sum::<f64>() / 1e9
}

/// Best and median seconds of a call, and the mean CPU seconds.
fn time<T: Element>(options: Options, problem: &Problem, mode: &str, layout: TensorLayout) -> [f64; 3] {
    let noise = |seed: u64, shape: [usize; 4]| -> Vec<T> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..shape.iter().product()).map(|_| T::from_f32(next() + next() + next())).collect()
    };
    let (shape, of_keys) = (check::q_shape(problem), check::k_shape(problem));
    let [q, dout] = [1, 4].map(|seed| noise(seed, shape));
    let [k, v] = [2, 3].map(|seed| noise(seed, of_keys));
    fn read<T>(data: &[T], shape: [usize; 4], layout: TensorLayout) -> TensorRef<'_, T> {
        TensorRef::packed("input", data, shape, layout).unwrap()
    }
    let [q, dout] = [&q, &dout].map(|data| read(data, shape, layout));
    let [k, v] = [&k, &v].map(|data| read(data, of_keys, layout));
    let mut out = vec![T::from_f32(0.0); shape.iter().product()];
    let mut dq = out.clone();
    let [mut dk, mut dv] = [(); 2].map(|()| vec![T::from_f32(0.0); of_keys.iter().product()]);
    let mut lse = vec![0f32; check::lse_len(problem)];
    fn view<T>(data: &mut [T], shape: [usize; 4], layout: TensorLayout) -> TensorMut<'_, T> {
        TensorMut::packed("output", data, shape, layout).unwrap()
    }
    let mut run_forward = || {
        let out = &mut view(&mut out, shape, layout);
        forward_with(options, problem, &q, &k, &v, out, Some(&mut lse)).unwrap();
    };
    run_forward();
    let (mut times, mut busy) = (Vec::new(), 0.0);
    let mut timed = |run: &mut dyn FnMut()| {
        // Call after call: in a pause between them, threads would go to sleep.
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        while times.len() < 5 || begin.elapsed().as_secs_f64() < 0.4 {
            let start = Instant::now();
            run();
            times.push(start.elapsed().as_secs_f64());
        }
        busy = cpu_seconds() - cpu;
    };
    if mode == "fwd" {
        timed(&mut run_forward);
    } else {
        let out = read(&out, shape, layout);
        let inputs = BackwardInputs { q, k, v, out, lse: &lse, dout };
        timed(&mut || {
            let dq = &mut view(&mut dq, shape, layout);
            let [mut dk, mut dv] = [&mut dk, &mut dv].map(|data| view(data, of_keys, layout));
            backward_with(options, problem, &inputs, dq, &mut dk, &mut dv).unwrap();
        });
    }
    let busy = busy / times.len() as f64;
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2], busy]
}
