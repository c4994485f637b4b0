//! Shipped specs, and bundles of them.

use std::collections::HashSet;
use std::path::Path;

use fa_core::ShippedSpec;
use fa_kernels::bundle::Manifest;
use fa_kernels::{Cache, Headers, ship, specs};

use crate::nvrtc;

#[test]
fn shipped_specs_differ_and_stand_in_the_folder_of_their_kernel() {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    assert!(!files.is_empty());
    let mut names = HashSet::new();
    for file in files {
        let name = file.shipped.spec.to_string();
        assert!(file.path.starts_with(&name[..4]), "{} holds {name}", file.path);
        assert!(!file.shipped.archs.is_empty(), "{} ships for no architecture", file.path);
        assert!(names.insert(name.clone()), "{name} ships twice");
    }
}

/// Of every kernel the first spec for its first architecture: `fa prove` compiles all of them.
#[test]
fn shipped_specs_compile_within_their_plans_and_make_a_bundle() {
    // Kept between runs, by content: a kernel is compiled again when its sources change.
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let compiler = nvrtc();
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    let mut wanted: Vec<ShippedSpec> = Vec::new();
    for ShippedSpec { archs, spec } in files.into_iter().map(|file| file.shipped) {
        if wanted.iter().all(|own| own.spec.kernel.name() != spec.kernel.name()) {
            wanted.push(ShippedSpec { archs: vec![archs[0]], spec });
        }
    }
    assert_eq!(wanted.len(), 7, "{wanted:?}");
    let built = ship::build(&wanted, &[], &compiler, &cache, &Headers::embedded(), &|_, _| ()).unwrap();
    assert!(built.failures.is_empty(), "{:?}", built.failures);
    assert!(built.rows.iter().all(|row| row.actual_blocks >= row.planned_blocks), "{:?}", built.rows);

    let folder = tempfile::tempdir().unwrap();
    let written = ship::write_bundle(&built, &compiler, folder.path()).unwrap();
    assert_eq!(written.kernels.len(), built.rows.len());
    assert_eq!(Manifest::read(folder.path()).unwrap(), written);
    let cubin = folder.path().join(&written.kernels[0].file);
    std::fs::write(&cubin, b"damaged").unwrap();
    let error = Manifest::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("checksum") && error.contains("cargo xtask build"), "{error}");
}

/// With `--features bundle` and a bundle of the present sources (`cargo xtask build`), no shipped kernel is
/// compiled.
#[cfg(feature = "bundle")]
#[test]
fn the_built_in_bundle_holds_every_shipped_kernel() {
    use fa_kernels::bundle::Bundle;
    use fa_kernels::{Source, smem_bytes};
    let bundle = Bundle::embedded();
    if bundle.is_empty() {
        // Built without a bundle at hand: the build script has said so.
        return;
    }
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    for ShippedSpec { archs, spec } in files.into_iter().map(|file| file.shipped) {
        for arch in archs {
            let source = Source::new(&spec, arch, Some(smem_bytes(&spec)), &Headers::embedded()).unwrap();
            let cubin =
                bundle.find(&source).unwrap_or_else(|| panic!("{spec} on {arch} is not in the bundle"));
            assert_eq!(&cubin[..4], b"\x7fELF");
        }
    }
}
