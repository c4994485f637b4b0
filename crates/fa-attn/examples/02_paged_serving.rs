//! Steps of a server: a new token of each request is appended to a cache in pages, rotated, and attends to
//! its request's keys. On a GPU a step is a CUDA graph: append and forward share cache, page table and
//! lengths, and every layer of a model could share the last two.
//!
//! ```text
//! cargo run --release -p fa-attn --example 02_paged_serving
//! ```
#![allow(unsafe_code)]

use std::error::Error;

use fa_attn::cuda::CudaStream;
use fa_attn::device::args::{AppendArgs, AppendQueries, AppendTable};
use fa_attn::device::{BindOptions, DeviceExtras, DeviceTensor, ForwardCall, Gpu, Placement, capture};
use fa_attn::{
    Append, AppendExtras, AppendTensors, Backend, CpuOptions, Dtype, Engine, Extras, Lengths, Mask, Pass,
    Problem, QueryPositions, Rotary, RotaryPairs, RotaryQueries, Side, Table, Tensor, TensorLayout, Types,
    bf16,
};

/// Requests, rows of a page, pages of the cache, and keys that a request may have.
const REQUESTS: usize = 3;
const PAGE: usize = 16;
const PAGES: usize = 12;
const MOST: usize = 64;
const HEADS: usize = 8;
const HEADS_KV: usize = 2;
const DIM: usize = 64;

/// The pages of each request, in order; -1 where it has no more.
const PAGE_TABLE: [i32; 12] = [7, 2, 9, 0, 3, -1, -1, -1, 11, 5, -1, -1];
/// Keys in the cache at the beginning.
const KEYS: [i32; REQUESTS] = [50, 4, 20];

fn main() -> Result<(), Box<dyn Error>> {
    let steps = 4;
    let on_cpu = on_cpu(steps)?;
    match Engine::new()?.gpu() {
        None => println!("no GPU here: the CPU has computed {steps} steps"),
        Some(gpu) => {
            let on_gpu = on_gpu(gpu, steps)?;
            let difference = on_cpu.iter().flatten().zip(on_gpu.iter().flatten());
            let most = difference.map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0.0, f32::max);
            println!("{}: {steps} steps of one graph, at most {most:.4} from the CPU", gpu.name());
        }
    }
    Ok(())
}

fn problem() -> Problem {
    let lengths = Lengths::of(REQUESTS, Side::padded(1), Side::paged(PAGE, PAGES, MOST));
    Problem::new(lengths, (HEADS, HEADS_KV), (DIM, DIM), Types::same(Dtype::Bf16)).with_mask(Mask::CAUSAL)
}

/// A key for each request; keys and queries are rotated by their positions.
fn append() -> Append {
    let queries = RotaryQueries { rows: Side::padded(1), heads: HEADS, positions: QueryPositions::Following };
    Append {
        sequences: REQUESTS,
        new: Side::padded(1),
        cache: Side::paged(PAGE, PAGES, MOST),
        heads_kv: HEADS_KV,
        head_dim: DIM,
        head_dim_v: DIM,
        dtype: Dtype::Bf16,
        codes: None,
        rotary: Some(Rotary {
            dim: DIM,
            pairs: RotaryPairs::Halves,
            positions: MOST,
            table: Dtype::F32,
            queries: Some(queries),
        }),
    }
}

/// Cosines or sines of every position.
fn table(of: fn(f32) -> f32) -> Vec<f32> {
    let half = DIM / 2;
    let angle = |i: usize| (i / half) as f32 * 10000f32.powf(-((i % half) as f32) / half as f32);
    (0..MOST * half).map(|i| of(angle(i))).collect()
}

/// Some values, other ones in each step.
fn values(shape: [usize; 4], seed: usize) -> Tensor<bf16> {
    let wave = |i: usize| bf16::from_f32(((i * 7 + seed * 13) as f32 * 0.37).sin());
    let mut tensor = Tensor::filled(shape, TensorLayout::Bshd, bf16::ZERO);
    tensor.data.iter_mut().enumerate().for_each(|(i, value)| *value = wave(i));
    tensor
}

/// Q, the new keys and the new values of a step.
fn new(step: usize) -> [Tensor<bf16>; 3] {
    let [q, kv] = [[REQUESTS, 1, HEADS, DIM], [REQUESTS, 1, HEADS_KV, DIM]];
    [values(q, 3 * step), values(kv, 3 * step + 1), values(kv, 3 * step + 2)]
}

/// Keys and values before the first step.
fn cache() -> [Tensor<bf16>; 2] {
    [100, 101].map(|seed| values([PAGES, PAGE, HEADS_KV, DIM], seed))
}

/// The output of each step, on the CPU.
pub(crate) fn on_cpu(steps: usize) -> Result<Vec<Vec<bf16>>, fa_attn::Error> {
    let engine = Engine::with(Backend::Cpu(CpuOptions::default()))?;
    let (append, problem, [mut k, mut v]) = (append(), problem(), cache());
    let (cos, sin) = (table(f32::cos), table(f32::sin));
    let mut keys = KEYS;
    let mut outputs = Vec::new();
    for step in 0..steps {
        let [mut q, k_new, v_new] = new(step);
        let mut after = keys;
        let mut extras = AppendExtras {
            seqused_k: Some(&keys),
            page_table: Some(&PAGE_TABLE),
            used_out: Some(&mut after),
            ..AppendExtras::default()
        };
        let left_out = engine.append(
            &append,
            &mut extras,
            &mut AppendTensors {
                k_new: k_new.view("k_new")?,
                v_new: v_new.view("v_new")?,
                k_cache: k.view_mut("k_cache")?.into(),
                v_cache: v.view_mut("v_cache")?.into(),
                q: Some(q.view_mut("q")?),
                tables: Some([Table::F32(&cos), Table::F32(&sin)]),
            },
        )?;
        assert_eq!(left_out, 0, "the cache is full");
        keys = after;
        let extras = Extras { page_table: Some(&PAGE_TABLE), seqused_k: Some(&keys), ..Extras::NONE };
        outputs.push(engine.forward(&problem, [&q, &k, &v], &extras)?.out.data);
    }
    Ok(outputs)
}

/// The same on a GPU: nothing of a step waits for the host, and the graph is launched as often as there are
/// tokens.
fn on_gpu(gpu: &Gpu, steps: usize) -> Result<Vec<Vec<bf16>>, Box<dyn Error>> {
    // SAFETY: one stream uses all memory below, so that cudarc need not order streams; events that it would
    // record for that cannot be waited for in a capture.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = &gpu.context().new_stream()?;
    let problem = problem();
    let append = gpu.append(&append())?;
    let forward = gpu.bind(&problem, Pass::Forward, &BindOptions::default())?.forward()?;

    let upload = |tensor: &Tensor<bf16>| {
        DeviceTensor::upload(stream, &tensor.view("input")?).map_err(Box::<dyn Error>::from)
    };
    let [host_q, host_k, host_v] = new(0);
    let (mut q, mut k_new, mut v_new) = (upload(&host_q)?, upload(&host_k)?, upload(&host_v)?);
    let [host_k, host_v] = cache();
    let (mut k, mut v) = (upload(&host_k)?, upload(&host_v)?);
    let (cos, sin) = (stream.clone_htod(&table(f32::cos))?, stream.clone_htod(&table(f32::sin))?);
    let placement = Placement::packed([REQUESTS, 1, HEADS, DIM], TensorLayout::Bshd);
    let mut out = DeviceTensor::nan(stream, placement)?;
    let mut workspace = stream.alloc_zeros::<u8>(forward.workspace_bytes().max(16))?;
    let host = Extras { page_table: Some(&PAGE_TABLE), seqused_k: Some(&KEYS), ..Extras::NONE };
    let mut extras = DeviceExtras::upload(stream, &host)?;
    let mut keys = stream.clone_htod(&KEYS)?;

    let mut step = |stream: &CudaStream| {
        let lengths = extras.for_append();
        append.run(
            stream,
            AppendArgs {
                k_new: k_new.input(),
                v_new: v_new.input(),
                k_cache: k.output(),
                v_cache: v.output(),
                queries: Some(AppendQueries::InPlace(q.output())),
                tables: Some([AppendTable::F32(&cos), AppendTable::F32(&sin)]),
                cu_new: None,
                used_new: None,
                seqused_k: Some(&keys),
                page_table: lengths.page_table.map(|table| table as _),
                cu_seqlens_q: None,
                seqused_q: None,
                used_out: lengths.seqused_k.map(|after| after as _),
                dropped: None,
            },
        )?;
        let call = ForwardCall {
            q: &q,
            k: &k,
            v: &v,
            out: &mut out,
            lse: None,
            workspace: &mut workspace,
            extras: &extras,
            page_faults: None,
        };
        call.run(&forward, stream)
    };
    // SAFETY: all that the step uses lives until the last launch has ended.
    let graph = unsafe { capture(stream, || step(stream)) }?;

    let mut outputs = Vec::new();
    for number in 0..steps {
        let [host_q, host_k, host_v] = new(number);
        for (to, from) in [(&mut q, host_q), (&mut k_new, host_k), (&mut v_new, host_v)] {
            stream.memcpy_htod(&from.data, &mut to.data)?;
        }
        graph.launch()?;
        // The next step appends behind what this one has appended.
        if let Some(after) = extras.seqused_k() {
            stream.memcpy_dtod(after, &mut keys)?;
        }
        outputs.push(out.read(stream)?.0);
    }
    Ok(outputs)
}
