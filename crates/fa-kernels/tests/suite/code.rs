//! What a change of the sources changes of the code that a GPU executes, entry by entry.

use std::collections::BTreeMap;

use fa_core::{Arch, KernelSpec, Reads};
use fa_kernels::{Headers, Source, entry_codes, smem_bytes};

use crate::{nvrtc, sm80_spec, sm90_spec};

/// The source of a packed kernel.
fn source(spec: KernelSpec, arch: Arch) -> Source {
    let spec = KernelSpec { reads: Reads { varied: true, paged: false }, ..spec };
    Source::new(&spec, arch, Some(smem_bytes(&spec)), &Headers::embedded()).unwrap()
}

fn codes(source: &Source) -> BTreeMap<String, String> {
    let compiled = nvrtc().compile(source).unwrap_or_else(|failure| panic!("{failure:?}"));
    entry_codes(&compiled.cubin).expect("a cubin")
}

/// The source with `from` as `to` in those of its headers whose names start with `folder`.
fn changed(source: &Source, folder: &str, from: &str, to: &str) -> Source {
    let mut other = source.clone();
    let mut found = false;
    for (name, text) in other.headers.iter_mut().filter(|(name, _)| name.starts_with(folder)) {
        found |= text.contains(from);
        assert!(folder.is_empty() || text.contains(from), "{name} has no {from}");
        *text = text.replace(from, to);
    }
    assert!(found, "no header has {from}");
    assert_ne!(other.fingerprint(), source.fingerprint());
    other
}

#[test]
fn names_are_no_code_and_a_line_is_that_of_its_entry() {
    for (spec, arch) in [(sm80_spec(), Arch::Sm80), (sm90_spec(), Arch::Sm90)] {
        let source = source(spec, arch);
        let before = codes(&source);
        assert_eq!(before.keys().collect::<Vec<_>>(), ["fa_kernel", "fa_plan"]);
        // A function of ptx/warp.cuh gets another name everywhere.
        let renamed = changed(&source, "", "shuffle_xor", "exchanged");
        assert_eq!(before, codes(&renamed), "{arch}: a rename");
        let after =
            codes(&changed(&source, "attn/plan.cuh", "length, params.shift)", "length, params.shift + 1)"));
        assert_eq!(before["fa_kernel"], after["fa_kernel"], "{arch}");
        assert_ne!(before["fa_plan"], after["fa_plan"], "{arch}");
    }
}
