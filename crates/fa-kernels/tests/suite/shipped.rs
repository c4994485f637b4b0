//! Every shipped kernel compiles for each of its architectures: no spill, no forbidden warning, resources
//! within the plan.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use fa_core::Family;
use fa_kernels::bundle::{BundledKernel, Manifest};
use fa_kernels::{Cache, Headers, ship, specs, toolchain};
use rayon::prelude::*;

use crate::compiled::{List, Wanted};
use crate::nvrtc;

/// Shipped kernels that are known to compile.
pub(crate) const LIST: List = List { path: "docs/results/compiled.ron", of: "Shipped kernels" };

/// The shipped kernels by their files.
pub(crate) fn kernels() -> Vec<Wanted> {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    files.into_iter().map(|file| Wanted { name: file.path.to_owned(), shipped: file.shipped }).collect()
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

/// Compiles the shipped specs that [`List::today`] names.
#[test]
fn shipped_specs_compile_within_their_plans_and_make_a_bundle() {
    // Kept between runs, by content: a kernel is compiled again when its sources change.
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let compiler = nvrtc();
    let kernels = kernels();
    let wanted = LIST.today(&compiler, &kernels);

    // Threads of its own: a compilation takes seconds, and other tests wait for the threads that all share.
    let pool = rayon::ThreadPoolBuilder::new().build().unwrap();
    let built = pool
        .install(|| ship::build(&wanted, &[], &compiler, &cache, &Headers::embedded(), &|_, _| ()))
        .unwrap();
    let mut failures: Vec<String> =
        built.failures.iter().map(|f| format!("{} on {}: {}", f.name, f.arch, f.reason)).collect();
    for row in &built.rows {
        let name = format!("{} on {}", row.name, row.arch);
        let report = &row.report;
        let mut expect = |holds: bool, what: &str| {
            if !holds {
                failures.push(format!("{name}: {what}"));
            }
        };
        expect((report.spill_stores, report.spill_loads) == (0, 0), "spills");
        expect(row.actual_blocks >= row.planned_blocks, "fewer blocks per SM than planned");
        expect(report.registers <= row.arch.limits().regs_per_thread, "too many registers");
        expect(row.smem <= row.arch.limits().smem_per_block, "too much shared memory");
        expect(report.static_smem == 0, "static shared memory");
    }

    let folder = tempfile::tempdir().unwrap();
    let written = ship::write_bundle(&built, &compiler, folder.path()).unwrap();
    assert_eq!(written.kernels.len(), built.rows.len());
    assert_eq!(Manifest::read(folder.path()).unwrap(), written);
    // Disassembling all takes ten seconds: what an earlier run has checked is known by its code.
    let stamps = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checked.txt");
    let checked = std::fs::read_to_string(&stamps).unwrap_or_default();
    let checked: HashSet<&str> = checked.lines().collect();
    let of_code = |kernel: &BundledKernel| check_machine_code(&folder.path().join(&kernel.file), kernel);
    let new = written.kernels.par_iter().filter(|kernel| !checked.contains(kernel.cubin_sha256.as_str()));
    failures.extend(pool.install(|| new.flat_map(of_code).collect::<Vec<_>>()));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    if toolchain::find_tool("nvdisasm").is_some() {
        let all: Vec<&str> = written.kernels.iter().map(|kernel| kernel.cubin_sha256.as_str()).collect();
        std::fs::write(&stamps, all.join("\n")).unwrap();
    }

    let cubin = folder.path().join(&written.kernels[0].file);
    std::fs::write(&cubin, b"damaged").unwrap();
    let error = Manifest::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("checksum") && error.contains("cargo xtask build"), "{error}");
    LIST.write(&compiler, &kernels, &built.rows);
}

/// What is wrong with the machine code of a kernel: instructions that it must hold, and local memory, which
/// nothing may touch whatever the log says of spills.
fn check_machine_code(cubin: &Path, kernel: &BundledKernel) -> Vec<String> {
    // `cargo xtask ci` installs it beside NVRTC; without it the log's word is taken.
    let Some(tool) = toolchain::find_tool("nvdisasm") else { return Vec::new() };
    let name = format!("{} on {}", kernel.name, kernel.arch);
    let done = Command::new(tool).arg("-c").arg(cubin).output().unwrap();
    if !done.status.success() {
        return vec![format!("{name}: nvdisasm: {}", String::from_utf8_lossy(&done.stderr))];
    }
    let text = String::from_utf8_lossy(&done.stdout);
    let words: HashSet<&str> = text.split_whitespace().filter_map(|word| word.split('.').next()).collect();
    let wanted: &[&str] = match kernel.spec.kernel.family() {
        Family::Sm80 => &["HMMA", "LDSM", "LDGSTS"],
        Family::Sm90 => &["HGMMA", "UTMALDG", "USETMAXREG"],
        Family::Sm100 => &["UTCHMMA", "UTCBAR", "LDTM", "STTM", "UTMALDG", "USETMAXREG"],
    };
    let missing =
        wanted.iter().filter(|word| !words.contains(*word)).map(|word| format!("{name}: no {word}"));
    let local =
        ["LDL", "STL"].into_iter().filter(|word| words.contains(word)).map(|word| format!("{name}: {word}"));
    missing.chain(local).collect()
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
