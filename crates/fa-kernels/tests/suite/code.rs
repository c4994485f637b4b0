//! What a change of the sources changes of the code that a GPU executes, entry by entry.

use std::collections::BTreeMap;

use fa_core::{Arch, KernelSpec, Reads};
use fa_kernels::{Cache, Headers, Source, entry_codes, smem_bytes, specs};

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

/// Programs of shipped kernels in forms with a plan and with divided keys. Their entries are those of the
/// unit whole, which the emulation compiles, and have its code.
#[test]
fn programs_have_the_code_of_the_unit() {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    let mut compared = 0;
    for file in files {
        let (arch, spec) = (file.shipped.archs[0], file.shipped.spec);
        let is_one =
            ["sm90/hd64-causal-bf16.ron", "sm90/hd64-causal-bf16-bwd.ron", "sm80/hd64-causal-bf16.ron"]
                .contains(&file.path);
        if !is_one {
            continue;
        }
        let split = !spec.kernel.is_backward();
        let spec = KernelSpec { reads: Reads { varied: true, paged: false }, split, ..spec };
        let (smem, headers) = (Some(smem_bytes(&spec)), Headers::embedded());
        let whole = codes(&Source::new(&spec, arch, smem, &headers).unwrap());
        let programs = Source::programs(&spec, arch, smem, &headers).unwrap();
        assert_eq!(programs.len(), 2 + usize::from(split), "{spec}");
        let of_programs: Vec<_> = programs.iter().map(codes).collect();
        assert_eq!(of_programs[1].keys().collect::<Vec<_>>(), ["fa_plan"]);
        let joined: BTreeMap<_, _> = of_programs.into_iter().flatten().collect();
        assert_eq!(joined, whole, "{spec}");
        compared += 1;
    }
    assert_eq!(compared, 3);
}

/// Specs with equal tiles and masks share the program of their plan, which is compiled once for all.
#[test]
fn specs_share_the_programs_of_their_plans() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(Some(folder.path().to_owned()), 1 << 30);
    let (compiler, headers) = (nvrtc(), Headers::embedded());
    let spec = KernelSpec { reads: Reads { varied: true, paged: false }, ..sm80_spec() };
    let mut sinks = spec.clone();
    sinks.score.sinks = true;
    let mut programs = Vec::new();
    for (spec, entries) in [(&spec, 2), (&sinks, 3)] {
        let own = Source::programs(spec, Arch::Sm80, Some(smem_bytes(spec)), &headers).unwrap();
        let compiled = cache.get_all(&compiler, spec, &own).unwrap();
        assert_eq!((compiled.len(), cache.len()), (2, entries), "{spec}");
        programs.push(own);
    }
    assert_ne!(programs[0][0], programs[1][0]);
    assert_eq!(programs[0][1], programs[1][1]);
    assert!(!programs[0][1].unit.contains("config"), "{}", programs[0][1].unit);
    // A damaged program of several is compiled anew, the others are not.
    let plan = std::fs::read_dir(folder.path()).unwrap().map(|own| own.unwrap().path());
    let plan = plan.filter(|own| own.join("source.cu").is_file());
    let plan = plan.filter(|own| !own.join("spec.json").is_file()).collect::<Vec<_>>();
    assert_eq!(plan.len(), 1);
    let before = cache.get_all(&compiler, &spec, &programs[0]).unwrap();
    std::fs::write(plan[0].join("kernel.cubin"), b"damaged").unwrap();
    let again = Cache::open(Some(folder.path().to_owned()), 1 << 30);
    let after = again.get_all(&compiler, &spec, &programs[0]).unwrap();
    assert!(after.iter().zip(&before).all(|(own, other)| own.cubin == other.cubin));
    assert_eq!(again.len(), 3);
    assert!(std::fs::read(plan[0].join("kernel.cubin")).unwrap().starts_with(b"\x7fELF"));
}
