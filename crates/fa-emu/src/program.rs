//! The headers of programs, compiled for the host, compute what the interpreter of fa-core does.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt::Write;

use fa_core::program::{ArrayView, Element, Outcome, Point, Precision, Program, Value};
use fa_kernels::Headers;

use crate::compiler::Compiler;
use crate::machine::sources_of;

#[path = "../../fa-core/tests/strategies/programs.rs"]
mod random;
#[path = "../../fa-core/tests/strategies/program_values.rs"]
mod values;

use random::{Random, random_program};
use values::Values;

/// `ProgramArray` of `attn/program.cuh`.
#[repr(C)]
struct Array {
    data: *const c_void,
    strides: [i64; 4],
    extents: [i32; 4],
}

/// `ProgramParams`.
#[repr(C)]
struct Params {
    arrays: [Array; 8],
    scalars: [u32; 8],
    offset: i32,
}

/// What a unit's function takes and gives.
#[repr(C)]
struct Score {
    s: f32,
    place: [i32; 8],
    visible: i32,
    score: f32,
    slope: f32,
    by_parts: f32,
    by_exponents: f32,
    gradients: [f32; 64],
    /// First and last query, first and last key.
    tile: [i32; 4],
    /// Bit 0: something may be visible. Bit 1: everything is.
    state: i32,
}

impl Score {
    fn new(s: f32, place: [i32; 8], tile: [i32; 4]) -> Score {
        Score {
            s,
            place,
            visible: 0,
            score: 0.0,
            slope: 0.0,
            by_parts: 0.0,
            by_exponents: 0.0,
            gradients: [0.0; 64],
            tile,
            state: 0,
        }
    }
}

const DECLARATIONS: &str = "struct Score { float s; int place[8]; int visible; float score, slope, by_parts, \
                            by_exponents; float gradients[64]; int tile[4]; int state; };\n";

/// The offset of the mask that a program joins.
const OFFSET: i32 = 3;

/// Programs per unit.
const PER_UNIT: usize = 125;

/// The function of a program, whose header precedes it under the name `Mods_N`.
const FUNCTION: &str = "
extern \"C\" void program_N(const fa::ProgramParams* params, Score* x) {
    const int* at = x->place;
    const fa::Mods_N mods(*params, at[0], at[1], at[2], at[5], at[6], at[7]);
    const auto row = mods.row(at[3]);
    const auto column = mods.column(at[4]);
    x->visible = mods.mask(row, column);
    x->by_exponents = x->by_parts = x->score = mods.score(x->s, row, column);
    if constexpr (fa::Mods_N::kAffine) {
        x->by_parts = x->s * mods.gain(row, column) + mods.addend(row, column);
    }
    if constexpr (fa::Mods_N::kAdditive) {
        x->by_exponents = (x->s * fa::kLog2e + mods.exponent(row, column)) * fa::kLn2;
    }
    x->slope = mods.slope(x->s, row, column);
    GRADIENTS
    const int* t = x->tile;
    const fa::TileState state = mods.tile_state(t[0], t[1], t[2], t[3]);
    x->state = state.visible + 2 * state.full;
}
";

fn unit(programs: &[Program]) -> String {
    let mut unit = format!("#include \"attn/spans.cuh\"\n{DECLARATIONS}");
    for (i, program) in programs.iter().enumerate() {
        let header = program.cuda().replace("#pragma once", "");
        let gradients: String = (0..program.gradients().len())
            .map(|g| format!("x->gradients[{g}] = mods.gradient_{g}(x->s, row, column);\n    "))
            .collect();
        let function = FUNCTION.replace("_N", &format!("_{i}")).replace("GRADIENTS", &gradients);
        let _ = write!(unit, "#define Mods Mods_{i}\n{header}\n#undef Mods\n{function}");
    }
    unit
}

fn params(program: &Program, values: &Values) -> Params {
    let mut params = Params {
        arrays: std::array::from_fn(|_| Array { data: std::ptr::null(), strides: [0; 4], extents: [1; 4] }),
        scalars: [0; 8],
        offset: OFFSET,
    };
    for (slot, decl) in params.arrays.iter_mut().zip(program.arrays()) {
        let ArrayView { strides, extents, .. } = values.view(&decl.name);
        let data = values.pointer(decl.element);
        *slot = Array { data, strides, extents };
    }
    for (slot, decl) in params.scalars.iter_mut().zip(program.scalars()) {
        *slot = match Values::scalar(decl) {
            Value::I32(value) => value as u32,
            Value::F32(value) => (value as f32).to_bits(),
            Value::Bool(value) => value.into(),
        };
    }
    params
}

impl Values {
    fn pointer(&self, element: Element) -> *const c_void {
        match element {
            Element::F32 => self.f32s.as_ptr().cast(),
            Element::F16 | Element::Bf16 => self.halves.as_ptr().cast(),
            Element::I32 => self.i32s.as_ptr().cast(),
            Element::U8 | Element::Bool => self.bytes.as_ptr().cast(),
            Element::Bits => self.words.as_ptr().cast(),
        }
    }
}

/// Whether the header's number is the interpreter's: as far from it as its own f32 rounding is from f64.
fn close(header: f32, f32s: f64, f64s: f64) -> bool {
    let header = f64::from(header);
    if header.is_nan() || f32s.is_nan() || f64s.is_nan() {
        return header.is_nan() == f32s.is_nan() || f32s.is_nan() != f64s.is_nan();
    }
    header == f32s || (header - f32s).abs() <= 1e-4 * (1.0 + f32s.abs()) + 64.0 * (f32s - f64s).abs()
}

/// What differs, or `None`; `Some` of an empty text where rounding decides a branch.
fn difference(score: &Score, f32s: &Outcome, f64s: &Outcome) -> Option<String> {
    let far = |x: f64, y: f64| (x - y).abs() > 1e-3 * (1.0 + x.abs());
    if f32s.visible != f64s.visible || far(f32s.score, f64s.score) || far(f32s.slope, f64s.slope) {
        return Some(String::new());
    }
    let mut differs = String::new();
    if (score.visible != 0) != f32s.visible {
        let _ = write!(differs, "mask {} for {}; ", score.visible, f32s.visible);
    }
    let gradients = f32s.gradients.iter().zip(&f64s.gradients).zip(score.gradients);
    let numbers = [
        (score.score, f32s.score, f64s.score),
        (score.by_parts, f32s.score, f64s.score),
        (score.by_exponents, f32s.score, f64s.score),
        (score.slope, f32s.slope, f64s.slope),
    ];
    for (header, f32s, f64s) in numbers.into_iter().chain(gradients.map(|((&a, &b), c)| (c, a, b))) {
        if !close(header, f32s, f64s) {
            let _ = write!(differs, "{header} for {f32s} (f64 {f64s}); ");
        }
    }
    if differs.is_empty() { None } else { Some(differs) }
}

#[test]
fn headers_compute_what_the_interpreter_does() {
    let folder = tempfile::tempdir().unwrap();
    let Ok(compiler) = Compiler::find(folder.path()) else {
        eprintln!("skipped: no C++ compiler");
        return;
    };
    // A program takes the compiler some 50 ms.
    let all = std::env::var_os("FA_PROGRAMS").is_some_and(|value| value == "all");
    let count: u64 = if all { 1000 } else { 150 };
    let programs: Vec<_> = (0..count).map(|seed| Program::parse(&random_program(seed)).unwrap()).collect();
    let (mut compared, mut undecided, mut proven) = (0, 0, 0);
    for (u, programs) in programs.chunks(PER_UNIT).enumerate() {
        let text = unit(programs);
        let embedded = Headers::embedded();
        let mut files: Vec<_> = sources_of("host/").map(|(n, t)| (n.to_owned(), t.to_owned())).collect();
        files.extend(
            sources_of("machine/")
                .filter(|(n, _)| *n == "interface.h")
                .map(|(n, t)| (n.to_owned(), t.to_owned())),
        );
        for (name, text) in embedded.reachable(&text).unwrap() {
            if !name.starts_with("ptx/") {
                files.push((name.to_owned(), text.to_owned()));
            }
        }
        files.push(("unit.cu".to_owned(), text));
        let flags =
            ["-O0", "-ffp-contract=off", "-D__CUDA_ARCH__=900", "-include", "cuda.h"].map(str::to_owned);
        let path = compiler.library("programs", "programs", &files, "unit.cu", &flags).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { libloading::Library::new(path) }.unwrap();
        for (i, program) in programs.iter().enumerate() {
            let values = Values::new(u as u64 * 1000 + i as u64);
            let params = params(program, &values);
            let inputs = values.inputs(program);
            assert!(program.gradients().len() <= 64, "{} gradients", program.gradients().len());
            let name = format!("program_{i}");
            // SAFETY: the function is as declared in the unit, and its pointers live until it returns.
            let function = unsafe {
                library.get::<unsafe extern "C" fn(*const Params, *mut Score)>(name.as_bytes()).unwrap()
            };
            let mut random = Random(i as u64);
            for _ in 0..20 {
                let [sq, sk] = [1, 2].map(|_| 1 + random.below(60) as i32);
                let h = random.below(4) as i32;
                let place = [
                    random.below(2) as i32,
                    h,
                    h / 2,
                    random.below(40) as i32,
                    random.below(40) as i32,
                    sq,
                    sk,
                    sk - sq,
                ];
                let [q, k] = [place[3], place[4]];
                let tile = [q, q + random.below(6) as i32, k, k + random.below(6) as i32];
                let mut score = Score::new((random.unit() * 6.0) as f32, place, tile);
                // SAFETY: as above.
                unsafe { function(&params, &mut score) };
                let [b, h, hk, q, k, sq, sk, off] = place;
                let point = Point { s: score.s.into(), b, h, hk, q, k, sq, sk, off: off + OFFSET };
                let mut seen = [false; 2];
                for (q, k) in (tile[0]..=tile[1]).flat_map(|q| (tile[2]..=tile[3]).map(move |k| (q, k))) {
                    let at = Point { q, k, ..point };
                    seen[usize::from(program.eval(&inputs, &at, Precision::F32).visible)] = true;
                }
                let wrong = score.state == 0 && seen[1] || score.state == 3 && seen[0] || score.state == 2;
                assert!(!wrong, "state {} of {tile:?}: {seen:?}, {point:?}\n{program}", score.state);
                proven += u64::from(score.state != 1 && program.mask().is_some());
                let [f32s, f64s] = [Precision::F32, Precision::F64]
                    .map(|precision| program.eval(&inputs, &point, precision));
                match difference(&score, &f32s, &f64s) {
                    None => compared += 1,
                    Some(differs) if differs.is_empty() => undecided += 1,
                    Some(differs) => panic!("{differs}at {point:?}\n{program}\n{}", program.cuda()),
                }
            }
        }
    }
    assert!(proven > 3 * count, "{proven} tiles are empty or full");
    assert!(compared > 19 * count && undecided < count, "{compared} compared, {undecided} undecided");
}
