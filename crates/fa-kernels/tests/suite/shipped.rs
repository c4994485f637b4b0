//! Every shipped kernel compiles for each of its architectures: no spill, no forbidden warning, resources within the plan.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use fa_core::{Family, KernelSpec, ShippedSpec};
use fa_kernels::bundle::Manifest;
use fa_kernels::{Cache, Headers, ship, specs, toolchain};

use crate::nvrtc;

fn shipped() -> Vec<ShippedSpec> {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    files.into_iter().map(|file| file.shipped).collect()
}

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

#[test]
fn shipped_specs_compile_within_their_plans_and_make_a_bundle() {
    // Kept between runs, by content: a kernel is compiled again when its sources change.
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let compiler = nvrtc();
    let built = ship::build(&shipped(), &[], &compiler, &cache, &Headers::embedded(), &|_, _| ()).unwrap();
    let failures: Vec<String> =
        built.failures.iter().map(|f| format!("{} on {}: {}", f.name, f.arch, f.reason)).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for row in &built.rows {
        assert_eq!((row.report.spill_stores, row.report.spill_loads), (0, 0), "{}", row.name);
        assert!(row.actual_blocks >= row.planned_blocks, "{} on {}", row.name, row.arch);
        assert!(row.report.registers <= row.arch.limits().regs_per_thread, "{}", row.name);
        assert!(row.smem <= row.arch.limits().smem_per_block && row.report.static_smem == 0, "{}", row.name);
    }

    let folder = tempfile::tempdir().unwrap();
    let written = ship::write_bundle(&built, &compiler, folder.path()).unwrap();
    assert_eq!(written.kernels.len(), built.rows.len());
    assert_eq!(Manifest::read(folder.path()).unwrap(), written);
    for kernel in &written.kernels {
        check_machine_code(&folder.path().join(&kernel.file), &kernel.spec);
    }
    let cubin = folder.path().join(&written.kernels[0].file);
    std::fs::write(&cubin, b"damaged").unwrap();
    let error = Manifest::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("checksum") && error.contains("cargo xtask build"), "{error}");
}

/// What the machine code of a kernel must hold, and local memory, which nothing may touch whatever the log says of spills.
fn check_machine_code(cubin: &Path, spec: &KernelSpec) {
    // `cargo xtask ci` installs it beside NVRTC; without it the log's word is taken.
    let Some(tool) = toolchain::find_tool("nvdisasm") else { return };
    let done = Command::new(tool).arg("-c").arg(cubin).output().unwrap();
    assert!(done.status.success(), "{spec}: {}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8_lossy(&done.stdout);
    let holds =
        |instruction: &str| text.split_whitespace().any(|word| word.split('.').next() == Some(instruction));
    let wanted: &[&str] = match spec.kernel.family() {
        Family::Sm80 => &["HMMA", "LDSM", "LDGSTS"],
        Family::Sm90 => &["HGMMA", "UTMALDG", "USETMAXREG"],
    };
    let missing: Vec<&str> = wanted.iter().copied().filter(|instruction| !holds(instruction)).collect();
    assert!(missing.is_empty(), "{spec}: no {missing:?} in {}", cubin.display());
    for local in ["LDL", "STL"] {
        assert!(!holds(local), "{spec}: {local} in {}", cubin.display());
    }
}

/// With `--features bundle` and a bundle of the present sources (`cargo xtask build`), no shipped kernel is compiled.
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
    for ShippedSpec { archs, spec } in shipped() {
        for arch in archs {
            let source = Source::new(&spec, arch, Some(smem_bytes(&spec)), &Headers::embedded()).unwrap();
            let cubin =
                bundle.find(&source).unwrap_or_else(|| panic!("{spec} on {arch} is not in the bundle"));
            assert_eq!(&cubin[..4], b"\x7fELF");
        }
    }
}
