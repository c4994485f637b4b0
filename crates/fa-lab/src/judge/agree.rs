//! The oracles judge sequence by sequence; fa-cpu's passes over whole batches, on the arrays and memory that
//! a kernel gets, must agree with them.

use fa_attn::device::{DeviceOutput, shapes};
use fa_core::{Dtype, Pass, Problem, TensorLayout};
use fa_cpu::reference::low_precision;
use fa_cpu::{Arguments, OwnedExtras, TensorRef};
use half::bf16;

use super::forward::Oracle;
use super::gradients::GradientOracle;
use crate::grid::{Arrangement, Case, Extent, is_serving, serving, serving_gradients};
use crate::memory::{Gradients, load, load_lse, store};
use crate::sequences::Sequences;
use crate::tensors::{Inputs, dout_placement, random_dout};

/// The gradients that fa-cpu computes with the roundings of a 16-bit kernel, from tensors packed BSHD.
pub(super) fn low_precision_gradients(inputs: &Inputs<bf16>, dout: &[bf16]) -> Gradients<bf16> {
    let [q, k, v, out] = shapes(&inputs.problem);
    let view = |name, values, shape| TensorRef::packed(name, values, shape, TensorLayout::Bshd).unwrap();
    let program = inputs.program();
    let low = low_precision::backward_extras(
        &inputs.problem,
        Arguments { program: program.as_ref(), ..Arguments::default() },
        &view("q", &inputs.values[0], q),
        &view("k", &inputs.values[1], k),
        &view("v", &inputs.values[2], v),
        &view("dout", dout, out),
    )
    .unwrap();
    Gradients { values: [low.dq, low.dk, low.dv], strays: 0, dsinks: low.dsinks, darrays: low.darrays }
}

/// Cases that a test can afford, of every group.
fn affordable(cases: Vec<Case>, most: f64) -> Vec<Case> {
    let of = |case: &Case| {
        let Problem { heads_q, head_dim, types, .. } = case.problem;
        let work = case.sequences().pairs(&case.problem.mask) * (heads_q * head_dim) as f64;
        let rows = case.sequences().q.total() + case.sequences().k.total();
        is_serving(case.group) && types.q == Dtype::Bf16 && work < most && rows < 6000
    };
    let mut seen = std::collections::HashSet::new();
    cases.into_iter().filter(of).filter(|case| seen.insert(case.problem_name())).collect()
}

/// Q, K and V as laid out for a kernel, and the arrays that it gets.
struct Memory {
    tensors: [Vec<bf16>; 3],
    arrays: OwnedExtras,
}

impl Memory {
    fn of(inputs: &Inputs<bf16>) -> Memory {
        Memory { tensors: inputs.stored(), arrays: inputs.arrays() }
    }

    fn views<'a>(&'a self, inputs: &Inputs<bf16>) -> [TensorRef<'a, bf16>; 3] {
        [0, 1, 2].map(|i| {
            let placement = inputs.placements[i];
            TensorRef::new(["q", "k", "v"][i], &self.tensors[i], placement.shape, placement.strides)
                .expect("a tensor within its memory")
        })
    }
}

#[test]
fn whole_batches_pass_the_oracles_of_single_sequences() {
    let cases = affordable(serving(Extent::Quick, 2), 4e6);
    assert!(cases.len() > 40, "{}", cases.len());
    for case in &cases {
        let inputs = case.inputs::<bf16>();
        let memory = Memory::of(&inputs);
        let [q, k, v] = memory.views(&inputs);
        let found = low_precision::forward_extras(&case.problem, &memory.arrays.view(), &q, &k, &v)
            .unwrap_or_else(|error| panic!("{}: {error}", case.name()));
        let Sequences { q: of_q, .. } = &inputs.sequences;
        let packed = Case { arrangement: Arrangement::Bshd, ..case.clone() }.placements()[3];
        // Memory that belongs to no row may hold anything here.
        let (out, _) = load(found.out, of_q, &packed);
        let (lse, _) = load_lse(found.lse, of_q, case.problem.heads_q);
        let oracle = Oracle::new(&inputs, case.seed()).expect("inputs that fit");
        let mut outputs = DeviceOutput { out, lse, strays: 0 };
        let judged = oracle.judge(&inputs, &outputs).expect("outputs that fit");
        assert!(judged.passed, "{}: {}", case.name(), judged.detail);
        let changed = outputs.out.last_mut().map(|last| *last = bf16::from_f32(last.to_f32() + 2.0));
        outputs.strays = 1;
        let wrong = oracle.judge(&inputs, &outputs).expect("outputs that fit");
        assert!(!wrong.passed && wrong.detail.contains("no row's"), "{}: {}", case.name(), wrong.detail);
        let named = wrong.detail.contains("O: ") || wrong.detail.contains("and is not O = 0");
        assert!(named || changed.is_none(), "{}: {}", case.name(), wrong.detail);
    }
}

#[test]
fn gradients_of_whole_batches_pass_the_oracles_of_single_heads() {
    let cases = affordable(serving_gradients(Extent::Quick, 2), 3e6);
    assert!(cases.len() > 20, "{}", cases.len());
    let mut sinks = 0;
    for case in &cases {
        assert!(matches!(case.pass, Pass::Backward { .. }));
        let inputs = case.inputs::<bf16>();
        let dout = random_dout(&inputs, case.seed());
        let (memory, placement) = (Memory::of(&inputs), dout_placement(&inputs.placements));
        let Sequences { q: of_q, k: of_k } = &inputs.sequences;
        let of_dout = store(&dout, of_q, &placement);
        let view = TensorRef::new("dout", &of_dout, placement.shape, placement.strides).expect("it fits");
        let [q, k, v] = memory.views(&inputs);
        let found = low_precision::backward_extras(&case.problem, &memory.arrays.view(), &q, &k, &v, &view)
            .unwrap_or_else(|error| panic!("{}: {error}", case.name()));
        let [p, r, s, _] = Case { arrangement: Arrangement::Bshd, ..case.clone() }.placements();
        let values = [load(found.dq, of_q, &p).0, load(found.dk, of_k, &r).0, load(found.dv, of_k, &s).0];
        let mut gradients = Gradients { values, strays: 0, dsinks: found.dsinks, darrays: found.darrays };
        let oracle = GradientOracle::new(&inputs, &dout, case.seed()).expect("inputs that fit");
        let judged = oracle.judge(&inputs, &dout, &gradients).expect("gradients that fit");
        assert!(judged.passed, "{}: {}", case.name(), judged.detail);
        if case.problem.score.sinks && of_q.total() > 0 {
            sinks += 1;
            gradients.dsinks[0] += 1.0;
            let judged = oracle.judge(&inputs, &dout, &gradients).expect("gradients that fit");
            assert!(!judged.passed && judged.detail.contains("dsinks"), "{}", judged.detail);
        }
    }
    assert!(sinks > 1, "{sinks}");
}
