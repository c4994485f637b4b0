//! The headers in `cuda` are what the Rust types say.

use std::path::Path;

use fa_core::Arch;
use fa_kernels::{Headers, Source, generated};

use crate::{nvrtc, sm80_spec, sm90_spec};

#[test]
fn generated_headers_are_current() {
    for header in generated() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda").join(header.path);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(text, header.text, "{} is stale: run `cargo xtask codegen`", header.path);
    }
}

#[test]
fn every_header_that_a_kernel_includes_is_embedded_as_it_is_on_disk() {
    let on_disk = Headers::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")).unwrap();
    let embedded = Headers::embedded();
    for (spec, arch) in [(sm80_spec(), Arch::Sm80), (sm90_spec(), Arch::Sm90)] {
        let source = Source::new(&spec, arch, None, &embedded).unwrap();
        assert_eq!(source, Source::new(&spec, arch, None, &on_disk).unwrap());
        let names: Vec<&str> = source.headers.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"config.cuh") && names.contains(&"fwd_params.cuh"), "{names:?}");
    }
}

#[test]
fn both_sides_agree_on_every_size_and_offset() {
    // The assertions stand in the header; compiling it checks them with the device compiler.
    let headers = generated().into_iter().map(|h| (h.path.to_owned(), h.text)).collect();
    let source = Source {
        unit: "#include \"config.cuh\"\n#include \"fwd_params.cuh\"\n#include \"bwd_params.cuh\"\n\
               #include \"append/append_params.cuh\"\n#include \"merge/merge_params.cuh\"\n\
               #include \"dropout/dropout_params.cuh\"\n\
               extern \"C\" __global__ void fa_kernel(const __grid_constant__ fa::FwdParams params, \
               const __grid_constant__ fa::TensorMap map) {}\n\
               static_assert(sizeof(fa::TensorMap) == 128 && alignof(fa::TensorMap) == 64);\n"
            .into(),
        headers,
        target: "sm_90a".into(),
    };
    let compiled = nvrtc().compile(&source).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert_eq!(compiled.report.warnings, Vec::<String>::new());
}

#[test]
fn a_wrong_offset_does_not_compile() {
    let headers = generated()
        .into_iter()
        .map(|h| {
            (
                h.path.to_owned(),
                h.text.replace("FA_OFFSETOF(FwdParams, lse) == 128", "FA_OFFSETOF(FwdParams, lse) == 136"),
            )
        })
        .collect();
    let unit = "#include \"fwd_params.cuh\"\nextern \"C\" __global__ void fa_kernel() {}\n".into();
    let source = Source { unit, headers, target: "sm_80".into() };
    assert!(nvrtc().compile(&source).is_err());
}

#[test]
fn a_plan_that_accounts_differently_does_not_compile() {
    let spec = sm80_spec();
    let bytes = fa_kernels::smem_bytes(&spec);
    let source = Source::new(&spec, Arch::Sm80, Some(bytes + 16), &Headers::embedded()).unwrap();
    match nvrtc().compile(&source) {
        Err(fa_kernels::CompileFailure::Log(log)) => {
            assert!(log.contains("shared memory differs from the plan"), "{log}");
        }
        other => panic!("compiled, or failed otherwise: {other:?}"),
    }
}
