//! Golden vectors made by torch in f64 (`scripts/golden.py`): what this crate's oracle itself is checked
//! against.

use fa_core::{Dtype, Problem};
use fa_cpu::Element;
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_cpu::compare::{Comparison, compare, compare_lse};
use fa_cpu::reference::{self, low_precision};
use half::{bf16, f16};

use crate::files::{File, folder};
use crate::inputs::{Inputs, assert_close};
use crate::tiled::{Expected, check_against, isas};

struct Golden<T> {
    problem: Problem,
    inputs: Inputs<T>,
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl<T: Element> Golden<T> {
    fn read(file: &File) -> Self {
        let problem = file.problem();
        for (name, shape) in [
            ("q", q_shape(&problem)),
            ("k", k_shape(&problem)),
            ("v", v_shape(&problem)),
            ("out", out_shape(&problem)),
        ] {
            assert_eq!(file.shape(name), shape, "{}: {name}", file.name);
        }
        let [q, k, v, dout] = ["q", "k", "v", "dout"].map(|name| file.values(name));
        let [out, lse, dq, dk, dv] = ["out", "lse", "dq", "dk", "dv"].map(|name| file.values(name));
        Golden { problem, inputs: Inputs { q, k, v, dout }, out, lse, dq, dk, dv }
    }
}

/// Runs `check` with the file's element type on every golden file.
fn for_each_file(check: [fn(&File); 3]) {
    let files = folder("tests/golden");
    assert!(files.len() >= 30, "{} golden files", files.len());
    for path in files {
        let file = File::read(&path);
        let [check_f32, check_f16, check_bf16] = check;
        match file.problem().types.q {
            Dtype::F32 => check_f32(&file),
            Dtype::F16 => check_f16(&file),
            Dtype::Bf16 => check_bf16(&file),
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                panic!("{}: no files of codes", file.name)
            }
        }
    }
}

#[test]
fn the_oracle_agrees_with_torch_in_f64() {
    fn check<T: Element>(file: &File) {
        let golden = Golden::<T>::read(file);
        let views = golden.inputs.views(&golden.problem);
        let forward = reference::forward(&golden.problem, &views.q, &views.k, &views.v).unwrap();
        let gradients =
            reference::backward(&golden.problem, &views.q, &views.k, &views.v, &views.dout).unwrap();
        for (name, got, expected) in [
            ("out", &forward.out, &golden.out),
            ("lse", &forward.lse, &golden.lse),
            ("dq", &gradients.dq, &golden.dq),
            ("dk", &gradients.dk, &golden.dk),
            ("dv", &gradients.dv, &golden.dv),
        ] {
            assert_close(&format!("{} {name}", file.name), got, expected, 1e-12);
        }
    }
    for_each_file([check::<f32>, check::<f16>, check::<bf16>]);
}

/// The yardstick must not be so coarse that anything passes: its own error stays within a few roundings.
#[test]
fn the_low_precision_twin_is_off_by_few_roundings() {
    fn check<T: Element>(file: &File) {
        let golden = Golden::<T>::read(file);
        let Golden { problem, inputs, .. } = &golden;
        let views = inputs.views(problem);
        let forward = low_precision::forward(problem, &views.q, &views.k, &views.v).unwrap();
        let lse_shape = [problem.lengths.sequences(), problem.heads_q, problem.lengths.max_q()];
        let lse = compare_lse(lse_shape, problem.types.q, &forward.lse, &golden.lse).unwrap();
        assert!(lse.passed(), "{} lse: {lse}", file.name);
        let gradients = low_precision::backward(problem, &views.q, &views.k, &views.v, &views.dout).unwrap();
        for (name, shape, got, expected) in [
            ("out", out_shape(problem), &forward.out, &golden.out),
            ("dq", q_shape(problem), &gradients.dq, &golden.dq),
            ("dk", k_shape(problem), &gradients.dk, &golden.dk),
            ("dv", v_shape(problem), &gradients.dv, &golden.dv),
        ] {
            let found: Comparison = compare::<T, T>(shape, problem.types.q, got, expected, None).unwrap();
            // Scores in the hundreds lose digits before the softmax, and dP - dO . O cancels where P is
            // nearly 1.
            let near = found.passed() || file.name.starts_with("large_scores") && found.cosine > 0.999_99;
            assert!(near, "{} {name}: {found}", file.name);
        }
    }
    for_each_file([check::<f32>, check::<f16>, check::<bf16>]);
}

/// The tiled implementation on every instruction set, measured from torch's results instead of our own
/// oracle's.
#[test]
fn tiled_agrees_with_torch_by_the_rule() {
    fn check<T: Element>(file: &File) {
        let golden = Golden::<T>::read(file);
        let mut expected = Expected::compute(&golden.problem, &golden.inputs, true);
        (expected.forward.out, expected.forward.lse) = (golden.out, golden.lse);
        if let Some((exact, _)) = &mut expected.backward {
            (exact.dq, exact.dk, exact.dv) = (golden.dq, golden.dk, golden.dv);
        }
        for isa in isas() {
            let failures = check_against(&file.name, &golden.problem, &golden.inputs, &expected, isa);
            assert!(failures.is_empty(), "{}", failures.join("\n"));
        }
    }
    for_each_file([check::<f32>, check::<f16>, check::<bf16>]);
}
