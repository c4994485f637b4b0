//! The headers of programs compile, and hold none of the user's text.

use std::fmt::Write;

use fa_core::program::Program;
use fa_kernels::{Headers, Source};

use crate::random::random_program;

/// A unit that calls every function of each program's header.
fn unit(programs: &[Program]) -> String {
    let mut unit = "#include \"attn/spans.cuh\"\n".to_owned();
    for (i, program) in programs.iter().enumerate() {
        let _ = write!(
            unit,
            "#define Mods Mods_{i}\n{}\n#undef Mods\n",
            program.cuda().replace("#pragma once", "")
        );
        let mut sum = Vec::new();
        if program.mask().is_some() {
            sum.push("(mods.mask(row, column) ? 1.f : 0.f)".to_owned());
        }
        if program.score().is_some() {
            sum.extend(["mods.score(s, row, column)".to_owned(), "mods.slope(s, row, column)".to_owned()]);
        }
        for gradient in 0..program.gradients().len() {
            sum.push(format!("mods.gradient_{gradient}(s, row, column)"));
        }
        let _ = writeln!(
            unit,
            "extern \"C\" __global__ void program_{i}(fa::ProgramParams params, float* x, int n) {{\n    \
             const fa::Mods_{i} mods(params, n, n + 1, n + 2, n + 3, n + 4, n + 5);\n    \
             const auto row = mods.row(n * 7);\n    const auto column = \
             mods.column(n * 5);\n    const float s = x[n];\n    x[n] = {};\n}}",
            sum.join(" + ")
        );
    }
    unit
}

#[test]
fn headers_of_programs_compile() {
    let programs: Vec<_> = (0..64).map(|seed| Program::parse(&random_program(seed)).unwrap()).collect();
    let unit = unit(&programs);
    let headers = Headers::embedded();
    let headers = headers.reachable(&unit).unwrap();
    let headers = headers.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    let source = Source { unit, headers, target: "sm_90a".into() };
    let compiled = crate::nvrtc().compile(&source).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(compiled.cubin.len() > 10_000, "{} bytes", compiled.cubin.len());
}

#[test]
fn headers_hold_nothing_of_the_text() {
    let text = "array evil_asm: f32[_]; scalar system_scalar: i32; let goto_name = q * 3 + k; score = s + \
                evil_asm[goto_name // system_scalar] * f32(goto_name); # a comment";
    let header = Program::parse(text).unwrap().cuda();
    for word in ["evil", "system", "goto", "comment"] {
        assert!(!header.contains(word), "{word} in\n{header}");
    }
    // The address's part that depends on neither row nor column is made once per tile.
    let text = "array bias: bf16[_, _, _, _]; s + bias[b, h, q, k]";
    let header = Program::parse(text).unwrap().cuda();
    for line in [
        "static constexpr bool kAdditive = true;",
        "axis_offset<0>(params.arrays[0], b) + axis_offset<1>(params.arrays[0], h);",
        "axis_offset<3>(params.arrays[0], k);",
    ] {
        assert!(header.contains(line), "no {line} in\n{header}");
    }
}
