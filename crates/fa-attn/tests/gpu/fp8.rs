//! Forwards of e4m3 tensors on a GPU: values, sums of many keys, and rates.

use fa_attn::device::{DeviceExtras, DeviceForward, Gpu, Placement};
use fa_attn::{Extras, TensorRef};
use fa_core::quantize::e4m3;
use fa_core::{
    DescaleForm, Descales, Dtype, Kernel, KernelSpec, LaunchPlan, Lengths, Mask, Problem, TensorLayout, Types,
};
use fa_kernels::Forward;
use half::bf16;

use crate::{bind_forward, gpu};

/// Numbers about normal, of sums of uniform ones, by a counter.
fn normal(seed: &mut u64) -> f32 {
    let mut uniform = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 40) as f32 / (1 << 24) as f32
    };
    (0..12).map(|_| uniform()).sum::<f32>() - 6.0
}

pub(crate) fn problem(
    batch: usize,
    (q, k): (usize, usize),
    heads: (usize, usize),
    head_dim: usize,
    mask: Mask,
) -> Problem {
    Problem::new(Lengths::uniform(batch, q, k), heads, (head_dim, head_dim), Types::fp8(Dtype::Bf16))
        .with_mask(mask)
        .with_descales(Descales::all(DescaleForm::SequenceHead))
}

/// Q, K and V as codes, with descales of Q, K and V.
#[derive(Clone)]
pub(crate) struct Inputs {
    shapes: [[usize; 4]; 3],
    pub(crate) codes: [Vec<u8>; 3],
    pub(crate) descales: [Vec<f32>; 3],
}

impl Inputs {
    pub(crate) fn of(problem: &Problem, descales: [f32; 3], value: impl Fn(f32) -> f32) -> Inputs {
        let (lengths, hd) = (problem.lengths, problem.head_dim);
        let batch = lengths.sequences();
        let keys = [batch, lengths.max_k(), problem.heads_kv, hd];
        let shapes = [[batch, lengths.max_q(), problem.heads_q, hd], keys, keys];
        let mut seed = 7;
        let codes = [0, 1, 2].map(|i| {
            let of = |x: f32| if i == 2 { value(x) } else { x };
            (0..shapes[i].iter().product()).map(|_| e4m3::encode(of(normal(&mut seed)))).collect()
        });
        let each = batch * problem.heads_kv;
        let descales = descales.map(|own| (0..each).map(|i| own * (1.0 + (i % 3) as f32 / 4.0)).collect());
        Inputs { shapes, codes, descales }
    }

    fn upload(&self, gpu: &Gpu, problem: &Problem, workspace: usize) -> DeviceForward<bf16, u8, u8> {
        let names = ["q", "k", "v"];
        let [q, k, v] = [0, 1, 2].map(|i| {
            TensorRef::packed(names[i], &self.codes[i], self.shapes[i], TensorLayout::Bshd)
                .expect("its shape")
        });
        let out = Placement::packed(self.shapes[0], TensorLayout::Bshd);
        let mut tensors =
            DeviceForward::upload_with(&gpu.stream, problem, workspace, &q, [&k, &v], out).unwrap();
        let [q, k, v] = self.descales.each_ref().map(|own| Some(own.as_slice()));
        let extras = Extras { q_descale: q, k_descale: k, v_descale: v, ..Extras::NONE };
        tensors.extras = DeviceExtras::upload(&gpu.stream, &extras).unwrap();
        tensors
    }

    fn element(&self, tensor: usize, [entry, row, head, column]: [usize; 4]) -> f64 {
        let [_, len, heads, dim] = self.shapes[tensor];
        f64::from(e4m3::decode(self.codes[tensor][((entry * len + row) * heads + head) * dim + column]))
    }

    /// O and LSE of a row in f64.
    pub(crate) fn row(&self, problem: &Problem, [entry, query, head]: [usize; 3]) -> (Vec<f64>, f64) {
        let kv_head = head / problem.group_size();
        let descale = |i: usize| f64::from(self.descales[i][entry * problem.heads_kv + kv_head]);
        let (all, keys) = (problem.lengths.max_q(), problem.lengths.max_k());
        let product = |key: usize, column: usize| {
            self.element(0, [entry, query, head, column]) * self.element(1, [entry, key, kv_head, column])
        };
        let factor = problem.scale() * descale(0) * descale(1);
        let visible = problem.mask.keys(query, all, keys);
        let scores: Vec<f64> = visible
            .clone()
            .map(|key| factor * (0..problem.head_dim).map(|column| product(key, column)).sum::<f64>())
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let column = |column: usize| {
            let value = |(key, p): (usize, &f64)| p * self.element(2, [entry, key, kv_head, column]);
            visible.clone().zip(&weights).map(value).sum::<f64>() / sum * descale(2)
        };
        ((0..problem.head_dim_v).map(column).collect(), max + sum.ln())
    }
}

fn run(gpu: &Gpu, forward: &Forward, inputs: &Inputs) -> (Vec<bf16>, Vec<f32>) {
    let mut tensors = inputs.upload(gpu, forward.problem(), forward.workspace_bytes());
    tensors.run(forward, &gpu.stream).unwrap();
    let output = tensors.read(&gpu.stream).unwrap();
    (output.out, output.lse)
}

#[test]
#[ignore = "needs a GPU"]
fn e4m3_tensors_give_o_and_lse() {
    let gpu = gpu();
    for (problem, name) in [
        (problem(2, (300, 700), (4, 2), 128, Mask::FULL), "full"),
        (problem(2, (700, 700), (4, 2), 128, Mask::CAUSAL), "causal"),
        (problem(1, (257, 1000), (2, 1), 64, Mask::CAUSAL), "causal"),
        (problem(1, (200, 500), (2, 2), 256, Mask::FULL), "full"),
        (problem(1, (300, 500), (2, 1), 192, Mask::window(100, 20)), "window"),
        (problem(2, (1, 3000), (8, 1), 128, Mask::CAUSAL), "decode"),
        (problem(1, (130, 333), (2, 1), 80, Mask::FULL), "full"),
    ] {
        let forward = bind_forward(&gpu, &problem, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        let spec = &forward.launch_plan().spec;
        let inputs = Inputs::of(&problem, [0.5, 0.8, 1.5], |x| x);
        let (out, lse) = run(&gpu, &forward, &inputs);
        let (batch, all) = (problem.lengths.sequences(), problem.lengths.max_q());
        let (mut errors, mut squares, mut worst) = (0.0, 0.0, 0f64);
        for entry in 0..batch {
            for head in 0..problem.heads_q {
                for query in (0..all).step_by(7) {
                    let (truth, of_row) = inputs.row(&problem, [entry, query, head]);
                    let found = f64::from(lse[(entry * problem.heads_q + head) * all + query]);
                    assert!(
                        (found - of_row).abs() < 1e-4 * (1.0 + of_row.abs()),
                        "{spec}: LSE {found}, not {of_row}"
                    );
                    let at = ((entry * all + query) * problem.heads_q + head) * problem.head_dim_v;
                    for (column, truth) in truth.into_iter().enumerate() {
                        let error = f64::from(out[at + column].to_f32()) - truth;
                        (errors, squares) = (errors + error * error, squares + truth * truth);
                        worst = worst.max(error.abs());
                    }
                }
            }
        }
        let relative = f64::sqrt(errors / squares);
        println!("{spec}: RMS error {relative:.4} of O's, largest {worst:.4}");
        assert!(relative < 0.035, "{spec}: RMS error {relative} of O's");
    }
}

/// A spec with one level of sums.
fn one_level(spec: &KernelSpec) -> KernelSpec {
    let Kernel::Sm90FwdFp8(kernel) = &spec.kernel else { panic!("{spec}") };
    KernelSpec { kernel: fa_core::Sm90FwdFp8 { two_level: false, ..kernel.clone() }.into(), ..spec.clone() }
}

/// V = 1 gives O = 1, however many keys there are.
#[test]
#[ignore = "needs a GPU"]
fn sums_of_many_keys_lose_nothing() {
    let gpu = gpu();
    for head_dim in [64, 128, 256] {
        for keys in [4096, 16384, 131_072] {
            let problem = problem(1, (128, keys), (1, 1), head_dim, Mask::FULL);
            let forward = bind_forward(&gpu, &problem, None).unwrap();
            let inputs = Inputs::of(&problem, [1.0; 3], |_| 1.0);
            let mean =
                |out: &[bf16]| out.iter().map(|own| f64::from(own.to_f32())).sum::<f64>() / out.len() as f64;
            let (out, _) = run(&gpu, &forward, &inputs);
            let spec = one_level(&forward.launch_plan().spec);
            let other =
                gpu.kernels.forward(&problem, &LaunchPlan::whole(spec)).map(|own| run(&gpu, &own, &inputs).0);
            let other = other.map_or_else(|error| error.to_string(), |own| format!("{:.4}", mean(&own)));
            println!("{}: {keys} keys: {:.4}; one level: {other}", forward.launch_plan().spec, mean(&out));
            let far = out.iter().map(|own| (own.to_f32() - 1.0).abs()).fold(0.0, f32::max);
            assert!(far <= 1.0 / 256.0, "{keys} keys, head dim {head_dim}: {far} from 1");
        }
    }
}
