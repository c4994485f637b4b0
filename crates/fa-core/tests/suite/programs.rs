//! Programs: texts and their errors, values, derivatives.

use fa_core::program::{
    ArrayData, ArrayView, BiasElement, Deps, Inputs, Point, Precision, Program, ProgramProblem, RowValues,
    ScoreClass, Standard, Type, Value,
};

use crate::random::{Random, random_program};
use crate::values::Values;

fn parsed(text: &str) -> Program {
    Program::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The value of an expression of integers, with q = 7 and k = -3.
fn integer(expression: &str) -> i32 {
    let program = parsed(&format!("score = f32({expression}) + 0.0 * s"));
    let inputs = Inputs::new(&program, vec![], vec![]).unwrap();
    let point = Point { q: 7, k: -3, ..Point::default() };
    program.eval(&inputs, &point, Precision::F64).score as i32
}

#[test]
fn the_canonical_text_is_the_program() {
    for seed in 0..1000 {
        let text = random_program(seed);
        let program = parsed(&text);
        let again = parsed(program.text());
        assert_eq!(again.text(), program.text(), "{text}");
        assert_eq!(again.hash64(), program.hash64());
        let ron = ron::to_string(&program).unwrap();
        assert_eq!(ron::from_str::<Program>(&ron).unwrap(), program);
    }
}

#[test]
fn texts_with_one_meaning_are_one_program() {
    for (a, b) in [
        ("k <= q + off", "off + q >= k"),
        ("0 <= q - k < 4", "q - k < 4 && !(q - k < 0)"),
        ("let x = q // 4; x == k // 4", "k // 4 == q // 4;"),
        ("s * 2", "score = 2.0 * s"),
        ("s + f32(q)", "s + q"),
        ("where(k > q, -inf, s + 1)", "mask = k <= q; score = s + 1.0;"),
        ("array b1: f32[_]; scalar n: i32; s + b1[n]", "scalar n: i32; array b1: f32[_]; b1[n] + s"),
        ("q ** 2 + s", "f32(q) * f32(q) + s"),
    ] {
        assert_eq!(parsed(a), parsed(b), "{a}");
    }
}

#[test]
fn integers_are_those_of_32_bits() {
    for (expression, value) in [
        ("q // 2", 3),
        ("k // 2", -2),
        ("k % 2", 1),
        ("-q % 4", 1),
        ("2147483647 + 1 + q", i32::MIN + 7),
        ("q - -2147483648", i32::MIN + 7),
        ("abs(-2147483648)", i32::MIN),
        ("i32(3e9)", i32::MAX),
        ("i32(-3e9)", i32::MIN),
        ("i32(nan)", 0),
        ("i32(-1.9)", -1),
        ("q << 40", 0),
        ("k >> 40", -1),
        ("k >> 1", -2),
        ("~q & 0xff", 0xf8),
        ("i32(q > k) + i32(true)", 2),
        ("clamp(k, 0, 5)", 0),
        ("-2 ** 2", -4),
        ("2 + 3 * q % 4", 3),
        ("1 | 6 ^ 3 & 2", 5),
    ] {
        assert_eq!(integer(expression), value, "{expression}");
    }
}

#[test]
fn errors_name_what_is_wrong_and_where() {
    let deep = format!("{}q{} == k", "(".repeat(80), ")".repeat(80));
    let long = (0..300).map(|i| format!("(q + {i}) * ")).collect::<String>() + "1 == k";
    for (text, at, message) in [
        ("", 0, "a program ends in an expression"),
        ("q <", 3, "expected an expression, found the end"),
        ("q < kk", 4, "unknown name `kk`: variables are s, b, h"),
        ("q < k; q", 7, "expected an operator, or the end"),
        ("q + 1.5 & 2", 0, "`&` takes two of i32 or bool, not f32 and i32"),
        ("q // k == 0", 0, "an integer divisor is a positive constant"),
        ("q % 0 == 0", 0, "an integer divisor is a positive constant"),
        ("s < 1.0", 0, "a mask cannot depend on the score `s`"),
        ("foo(q)", 0, "unknown function `foo`: there are abs, min"),
        ("min(q)", 0, "`min` takes 2 arguments, not 1"),
        ("array a: f32[_, _]; a[q] < 1.0", 20, "the array `a` has 2 axes, not 1"),
        ("array a: f64[_]; q < k", 9, "`f64` is not an element type"),
        ("array a: i32[_] grad; q < k", 6, "only arrays of f32, f16 or bf16 have gradients"),
        ("array a: f32[_, _, _, _, _]; q < k", 6, "an array has 1 to 4 axes, not 5"),
        ("scalar q: i32; q < k", 7, "the name `q` is taken"),
        ("mask = q; ", 0, "a mask is bool, not i32"),
        ("mask = q < k; mask = k < q", 14, "the mask is set twice"),
        ("s ** s", 0, "the exponent of a power is a constant"),
        ("q < 4294967296", 4, "the number does not fit i32"),
        ("q < 2147483648", 4, "the number does not fit i32"),
        ("s + 1e99", 4, "the number does not fit f32"),
        ("q @ k", 2, "the character '@' is not part of the language"),
        ("q < \u{3bb}", 4, "the character '\u{3bb}' is not part"),
        (&deep, 64, "a program has at most 64 levels of nesting"),
        (&long, 0, "a program has at most 256 nodes"),
        ("select(q, 1, 2) == k", 0, "`select` takes a bool and two of one type"),
    ] {
        let error = Program::parse(text).expect_err(text);
        assert!(error.to_string().starts_with(message), "{text}\n{error}");
        assert_eq!(error.span.start, at, "{text}\n{error}");
    }
    let arrays: String = (0..17).map(|i| format!("array a{i}: f32[_];")).collect();
    let error = Program::parse(&(arrays + "q < k")).unwrap_err();
    assert_eq!(error.problem, ProgramProblem::Limit { what: "arrays", most: 16, given: 17 });
    let chain = format!("mask = {}q < k", "not ".repeat(500));
    assert!(Program::parse(&chain).is_err());
}

/// Any text gives a program or an error, never a panic.
#[test]
fn no_text_panics() {
    let mut random = Random(5);
    for seed in 0..2000 {
        let mut text: Vec<char> = random_program(seed).chars().collect();
        for _ in 0..1 + random.below(4) {
            let at = random.below(text.len());
            match random.below(3) {
                0 => {
                    text[at] = random.one(&['(', ')', '[', ';', '0', '.', '-', '*', '/', '\u{e9}', 'q', '='])
                }
                1 => drop(text.remove(at)),
                _ => text.insert(at, random.one(&['(', '1', 's', ' ', ',', '<', '~', '%', ':'])),
            }
        }
        let text: String = text.into_iter().collect();
        if let Err(error) = Program::parse(&text) {
            assert!(text.is_char_boundary(error.span.start) && !error.to_string().is_empty());
        }
    }
}

#[test]
fn interned_programs_are_one() {
    let a = parsed("q // 3 == k // 3 and q < 1000").intern().unwrap();
    let b = parsed("q < 1000 and k // 3 == q // 3").intern().unwrap();
    assert!(a == b && std::ptr::eq(a.get(), b.get()));
    let ron = ron::to_string(&a).unwrap();
    assert_eq!(ron::from_str::<fa_core::program::Interned>(&ron).unwrap(), a);
}

#[test]
fn classes_and_slopes() {
    let arrays = "array t: f32[_] grad; scalar c: f32;";
    for (text, class, slope) in [
        ("s + t[q] - t[k]", "additive", Some(1.0)),
        ("where(q > k, s + t[q], s)", "additive", Some(1.0)),
        ("-(t[h] - s)", "additive", Some(1.0)),
        ("where(q >= k, s + t[h], -inf)", "additive", Some(1.0)),
        ("s * t[h]", "affine", None),
        ("2 * s + t[h]", "affine", Some(2.0)),
        ("s / 4 + s / 4", "affine", Some(0.5)),
        ("where(q > k, 2 * s, s)", "affine", None),
        ("t[q]", "affine", Some(0.0)),
        ("c * tanh(s / c)", "general", None),
        ("where(s > 0, s, s + 1)", "general", Some(1.0)),
        ("s * s", "general", None),
    ] {
        let program = parsed(&format!("{arrays} {text}"));
        assert_eq!(program.class().map(ScoreClass::name), Some(class), "{text}");
        let slope_node = program.slope().unwrap();
        let constant = program.deps(slope_node) == Deps::NONE;
        if let Some(slope) = slope {
            assert!(constant, "{text}");
            let t = ArrayView::contiguous(ArrayData::F32(&[1.0; 4]), &[4]);
            let arrays = program.arrays().iter().map(|_| t).collect();
            let scalars = program.scalars().iter().map(|_| Value::F32(2.0)).collect();
            let own = Inputs::new(&program, arrays, scalars).unwrap();
            assert_eq!(program.eval(&own, &Point::default(), Precision::F64).slope, slope, "{text}");
        }
    }
}

#[test]
fn arrays_have_the_axes_that_they_are_declared_with() {
    let program = parsed("array t: f32[_, _]; s + t[q, k]");
    let data = [1.0; 24];
    let given = |extents: &[usize]| {
        let array = ArrayView::contiguous(ArrayData::F32(&data), extents);
        Inputs::new(&program, vec![array], vec![]).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(given(&[4, 6]), Ok(()));
    assert_eq!(given(&[4, 6, 1]), Ok(()));
    assert_eq!(given(&[1, 4, 6]), Err("the array `t` has 3 axes, the program declares 2".into()));
    assert_eq!(given(&[4, 0]), Err("the array `t` has no element along axis 1".into()));
    assert_eq!(given(&[5, 6]), Err("the array `t` reaches element 29 of 24".into()));
}

#[test]
fn standard_programs_join_those_of_users() {
    let bias = Standard::Bias { element: BiasElement::Bf16, gradient: true };
    for (standard, arrays, is_mask) in [
        (Standard::Rows, 2, true),
        (Standard::TwoRows, 4, true),
        (Standard::Bits, 1, true),
        (Standard::Chunk, 0, true),
        (bias, 1, false),
    ] {
        let program = standard.program().unwrap();
        assert_eq!((program.arrays().len(), program.mask().is_some()), (arrays, is_mask), "{standard:?}");
        assert_eq!(program.arrays().iter().any(|array| array.gradient), standard == bias);
    }
    let dropout = Standard::Dropout.program().unwrap();
    assert!(dropout.weight().is_some() && dropout.mask().is_none() && dropout.score().is_none());
    let twice = parsed("array w: f32[_]; weight = w[k];").with(&dropout).unwrap();
    let expected = "array fa_kept: bits[_, _, _, _]; array w: f32[_]; scalar fa_kept_factor: f32;
                    weight = w[k] * select(fa_kept[b, h, q, k], fa_kept_factor, 0.0);";
    assert_eq!(twice, parsed(expected));
    for (text, problem) in [
        ("weight = s;", ProgramProblem::ScoreInMask { result: "weight" }),
        ("array w: f32[_] grad; weight = w[k];", ProgramProblem::GradientInWeight { name: "w".to_owned() }),
        (
            "weight = q < k;",
            ProgramProblem::ResultType { result: "weight", needed: Type::F32, given: Type::Bool },
        ),
    ] {
        assert_eq!(Program::parse(text).unwrap_err().problem, problem);
    }
    let own = parsed("scalar c: f32; mask = k <= q; score = c * tanh(s / c)");
    let joined =
        own.with(&bias.program().unwrap()).unwrap().with(&Standard::Bits.program().unwrap()).unwrap();
    let expected = "array fa_bias: bf16[_, _, _, _] grad; array fa_bits: bits[_, _, _, _]; scalar c: f32;
                    mask = k <= q and fa_bits[b, h, q, k]; score = c * tanh(s / c) + fa_bias[b, h, q, k];";
    assert_eq!(joined, parsed(expected));
    let error = own.with(&parsed("scalar c: i32; q < c")).unwrap_err();
    assert_eq!(error.problem, ProgramProblem::Conflict { name: "c".to_owned() });
}

#[test]
fn rows_have_the_values_of_their_points() {
    for seed in 0..200 {
        let program = parsed(&random_program(seed));
        let values = Values::new(seed);
        let inputs = values.inputs(&program);
        let point = Point { b: 1, h: 2, hk: 1, q: 11, sq: 30, sk: 35, off: 5, ..Point::default() };
        let mut row = RowValues::new(&program, &inputs, &point, Precision::F32);
        for k in 0..35 {
            let s = f64::from(k) * 0.25 - 3.0;
            let found = row.at(k, s).to_vec();
            let expected = program.values(&inputs, &Point { k, s, ..point }, Precision::F32);
            // As text, for NaN.
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{program}");
            let outcome = program.eval(&inputs, &Point { k, s, ..point }, Precision::F32);
            assert_eq!(row.visible(), outcome.visible);
            assert!(row.score() == outcome.score || outcome.score.is_nan());
        }
    }
}

/// A score of the lowest number is finite, which its exponent has to be as well: minus infinity hides a key.
#[test]
fn exponents_of_finite_addends_are_finite() {
    let minus_infinity = format!("{:#010x}", f32::NEG_INFINITY.to_bits());
    let lowest = format!("{:#010x}", f32::MIN.to_bits());
    let text = parsed("score = s + select(q % 5 == 3, -3.4028235e38, 0.0);").cuda();
    assert!(text.contains(&lowest) && !text.contains(&minus_infinity), "{text}");
    for text in ["array t: bf16[_, _]; score = s + t[q, k];", "array t: f32[_]; score = s + t[q];"] {
        assert!(parsed(text).cuda().contains("multiply_towards_zero("), "{text}");
    }
}

/// An exponent that is a factor times a distance is two products, one of them for all of a tile's row.
#[test]
fn products_with_distances_are_folded() {
    let text = |score: &str| parsed(&format!("array t: f32[_]; score = {score};")).cuda();
    for score in ["s + t[h] * f32(k - q)", "s - f32(q + off - k) * t[b]", "s + 0.5 * f32(k - q)"] {
        assert!(text(score).contains("fmaf(step, factor, first * factor)"), "{score}");
    }
    // A magnitude bends, a row's factor is no number of the tile, and a sum has more than a product.
    for score in ["s - t[h] * f32(abs(q - k))", "s + t[q] * f32(k - q)", "s + t[h] * f32(k - q) + t[k]"] {
        assert!(!text(score).contains("folded"), "{score}");
    }
}
