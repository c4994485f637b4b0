//! The instructions for tensor memory: the unit that the emulation is tested with assembles for SM100. It was
//! never run on a GPU.

use fa_kernels::{Headers, Source};

use super::nvrtc;

#[test]
fn the_unit_that_is_emulated_assembles_for_sm100() {
    let unit = include_str!("../../../fa-emu/tests/units/tensor_memory.cu");
    let headers = Headers::embedded();
    let headers = headers.reachable(unit).expect("the unit's headers are here");
    let headers: Vec<_> =
        headers.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    for target in ["sm_100f", "sm_103f"] {
        let source = Source { unit: unit.to_owned(), headers: headers.clone(), target: target.into() };
        let compiled = nvrtc().compile(&source).unwrap_or_else(|failure| panic!("{target}: {failure:?}"));
        assert_eq!(compiled.report.fault(), None, "{target}");
        assert!(compiled.report.warnings.is_empty(), "{target}: {:?}", compiled.report.warnings);
    }
}
