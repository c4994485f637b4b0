//! Derivatives of programs against finite differences, and the forms of gradients.

use fa_core::program::{
    ArrayData, ArrayView, GradientForm, Inputs, Point, Precision, Program, ScoreClass, Value,
};

use crate::random::{Random, random_program};
use crate::values::Values;

const STEP: f64 = 1.0 / 4096.0;

/// A derivative from values at three steps on each side, or `None` at an edge.
fn derivative(f: impl Fn(f64) -> f64) -> Option<f64> {
    let [left, right, wide] = [f(0.0) - f(-STEP), f(STEP) - f(0.0), (f(STEP) - f(-STEP)) / 2.0];
    let half = f(STEP / 2.0) - f(-STEP / 2.0);
    let smooth = |a: f64, b: f64| (a - b).abs() <= 2e-3 * (STEP + a.abs());
    (smooth(left, right) && smooth(wide, half)).then_some(half / STEP)
}

#[test]
fn derivatives_are_those_of_differences() {
    let (mut by_score, mut by_array, mut edges) = (0, 0, 0);
    for seed in 0..1000 {
        let program = Program::parse(&random_program(seed)).unwrap();
        if program.score().is_none() {
            continue;
        }
        let mut values = Values::new(seed);
        values.f32s.iter_mut().for_each(|x| *x = (*x * 1024.0).round() / 1024.0);
        let mut random = Random(seed);
        for _ in 0..8 {
            let [sq, sk] = [1, 2].map(|_| 1 + random.below(60) as i32);
            let [b, h, q, k] = [2, 4, 40, 40].map(|end| random.below(end) as i32);
            let s = (random.unit() * 6.0 * 1024.0).round() / 1024.0;
            let point = Point { s, b, h, hk: h / 2, q, k, sq, sk, off: sk - sq };
            let inputs = values.inputs(&program);
            let at = |point: &Point| program.eval(&inputs, point, Precision::F64);
            let outcome = at(&point);
            let mut check = |computed: f64, difference: Option<f64>, count: &mut i32| match difference {
                Some(expected) => {
                    let far = (computed - expected).abs() > 1e-2 * (1.0 + expected.abs());
                    assert!(!far, "{computed} for {expected} at {point:?}\n{program}");
                    *count += 1;
                }
                None => edges += 1,
            };
            let by_s = derivative(|step| at(&Point { s: s + step, ..point }).score);
            check(outcome.slope, by_s, &mut by_score);
            // All elements of an array move by the same: the derivative is the sum over its loads.
            for (slot, array) in program.arrays().iter().enumerate().filter(|(_, a)| a.name != "z") {
                if !array.gradient {
                    continue;
                }
                let moved = |step: f64| {
                    let elements: Vec<f32> = values.f32s.iter().map(|x| x + step as f32).collect();
                    let view = |name: &str| {
                        let mut view = values.view(name);
                        if name == array.name {
                            view.data = ArrayData::F32(&elements);
                        }
                        view
                    };
                    let arrays = program.arrays().iter().map(|array| view(&array.name)).collect();
                    let scalars = program.scalars().iter().map(Values::scalar).collect();
                    let inputs = Inputs::new(&program, arrays, scalars).unwrap();
                    program.eval(&inputs, &point, Precision::F64).score
                };
                let own = program.gradients().iter().zip(&outcome.gradients);
                let sum = own.filter(|(g, _)| g.array == slot).map(|(_, value)| value).sum();
                check(sum, derivative(moved), &mut by_array);
            }
        }
    }
    assert!(
        by_score > 4000 && by_array > 4000,
        "{by_score} by the score, {by_array} by arrays, {edges} edges"
    );
}

#[test]
fn forms_follow_indices() {
    for (load, form) in [
        ("t[b, h, q, k]", GradientForm::Pair),
        ("t[0, h, q, k]", GradientForm::Pair),
        ("t[b, h // 4, 0, k]", GradientForm::Column),
        ("t[b, h, q, 0]", GradientForm::Row),
        ("t[b, h, 0, n]", GradientForm::Tile),
        ("t[0, h, 0, q - k]", GradientForm::Diagonal),
        ("t[0, h, 0, clamp(k - q + 31, 0, 62)]", GradientForm::Diagonal),
        ("t[0, 0, 0, -(q + off - k)]", GradientForm::Diagonal),
        ("t[0, 0, 0, q + k]", GradientForm::Gather),
        ("t[0, 0, 0, 2 * (q - k)]", GradientForm::Gather),
        ("t[b, h, q, q]", GradientForm::Gather),
        ("t[b, h, q, k // 16]", GradientForm::Gather),
        ("t[b, h, q + 1, 0]", GradientForm::Gather),
        ("t[b, h, q, id[k]]", GradientForm::Gather),
    ] {
        let text = format!("array t: bf16[_, _, _, _] grad; array id: i32[_]; scalar n: i32; s + {load}");
        let program = Program::parse(&text).unwrap();
        let [gradient] = program.gradients() else { panic!("{load}: {:?}", program.gradients()) };
        assert_eq!(program.form(gradient.load), form, "{load}");
        assert!(matches!(program.class(), Some(ScoreClass::Additive { .. })), "{load}");
    }
}

/// What is not taken has no influence, however far out of its domain it is.
#[test]
fn branches_that_are_not_taken_give_zero() {
    for (text, slope) in [
        ("where(s > 0.0, log(s), 0.0)", 0.0),
        ("where(s < 0.0, 2.0 * s, sqrt(s))", 2.0),
        ("where(q == 1, s / f32(q - q), s)", 1.0),
        ("max(s, 0.0) * inf", 0.0),
        ("abs(s + 1.0)", 0.0),
        ("max(s, -1.0)", 1.0),
        ("min(-1.0, s)", 0.0),
        ("floor(s) + f32(i32(s))", 0.0),
        // The same operand in both branches of a select within, in the other branch of one without.
        ("let x = log(s + 1.0); where(s == -1.0, 2.0 * s, where(q == 1, -x, x))", 2.0),
        ("let x = sqrt(s); where(s < 0.0, 3.0 * s, x) + where(s < 1.0, s, x)", 4.0),
    ] {
        let program = Program::parse(text).unwrap();
        let inputs = Inputs::new(&program, vec![], vec![]).unwrap();
        let outcome = program.eval(&inputs, &Point { s: -1.0, ..Point::default() }, Precision::F64);
        assert_eq!(outcome.slope, slope, "{text}");
    }
}

/// A gradient that is asked for and not used is there to be 0: it has no load.
#[test]
fn unused_arrays_stay() {
    let program = Program::parse("array t: f32[_] grad; s * 2").unwrap();
    assert_eq!((program.arrays().len(), program.gradients().len()), (1, 0));
    let data = [1.0];
    let view = ArrayView::contiguous(ArrayData::F32(&data), &[1]);
    assert!(Inputs::new(&program, vec![view], vec![]).is_ok());
    let error = Inputs::new(&program, vec![], vec![]).unwrap_err();
    assert_eq!(error.to_string(), "the program takes 1 arrays (t), not 0");
    let error = Inputs::new(&program, vec![view], vec![Value::I32(1)]).unwrap_err();
    assert_eq!(error.to_string(), "the program takes 0 scalars (), not 1");
    let far = ArrayView { strides: [1 << 40, 0, 0, 0], extents: [2, 1, 1, 1], ..view };
    let error = Inputs::new(&program, vec![far], vec![]).unwrap_err();
    assert_eq!(error.to_string(), "the array `t` reaches element 1099511627776 of 1");
}
