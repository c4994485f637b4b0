//! The cache survives damage, races, missing write permission and its own limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::SystemTime;

use fa_kernels::{Cache, Compiled, Error, Source};

use crate::{child, nvrtc, sm80_spec, small_source};

const ROOMY: u64 = 1 << 30;

fn open(root: &Path) -> Cache {
    Cache::open(Some(root.to_owned()), ROOMY)
}

fn get(cache: &Cache, source: &Source) -> Compiled {
    let kernel = cache.get(&nvrtc(), &sm80_spec(), source).unwrap_or_else(|error| panic!("{error}"));
    (*kernel).clone()
}

/// The one entry of a cache with one kernel.
fn entry(root: &Path) -> PathBuf {
    let mut found = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("kernel.cubin").is_file());
    let entry = found.next().expect("a kernel is stored");
    assert_eq!(found.next(), None);
    entry
}

fn written(root: &Path) -> SystemTime {
    fs::metadata(entry(root).join("kernel.cubin")).unwrap().modified().unwrap()
}

#[test]
fn an_entry_holds_all_that_made_the_kernel() {
    let root = tempfile::tempdir().unwrap();
    let kernel = get(&open(root.path()), &small_source(1));
    let entry = entry(root.path());
    assert_eq!(fs::read(entry.join("kernel.cubin")).unwrap(), kernel.cubin);
    assert_eq!(fs::read_to_string(entry.join("log.txt")).unwrap(), kernel.log);
    assert_eq!(fs::read_to_string(entry.join("source.cu")).unwrap(), small_source(1).unit);
    let spec = fs::read(entry.join("spec.json")).unwrap();
    assert_eq!(serde_json::from_slice::<fa_core::KernelSpec>(&spec).unwrap(), sm80_spec());
    assert_eq!(&kernel.cubin[..4], b"\x7fELF");
    assert!(kernel.report.registers > 0);
}

#[test]
fn a_second_process_reads_what_the_first_compiled_without_loading_the_compiler() {
    let root = tempfile::tempdir().unwrap();
    let first = get(&open(root.path()), &small_source(2));
    let stored = written(root.path());
    let compiler = nvrtc();
    let again = open(root.path()).get(&compiler, &sm80_spec(), &small_source(2)).unwrap();
    assert_eq!(*again, first);
    assert_eq!(written(root.path()), stored);
    assert!(!compiler.is_loaded());
}

#[test]
fn what_a_kernel_is_made_of_names_it() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path());
    let base = small_source(3);
    let mut header = base.clone();
    header.headers[0].1.push_str("// a comment\n");
    let target = Source { target: "sm_90".into(), ..base.clone() };
    for (count, source) in [base, header, target, small_source(4)].iter().enumerate() {
        get(&cache, source);
        get(&cache, source);
        assert_eq!(cache.len(), count + 1);
    }
}

#[test]
fn damaged_entries_are_compiled_anew() {
    let flip = |file: PathBuf| {
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let damages: [(&str, &dyn Fn(PathBuf)); 6] = [
        ("kernel.cubin", &flip),
        ("kernel.cubin", &|file| fs::write(file, b"").unwrap()),
        ("kernel.cubin", &|file| fs::remove_file(file).unwrap()),
        ("entry.json", &|file| fs::write(file, "{\"compiler\": ").unwrap()),
        // An entry as it was written in RON.
        ("entry.json", &|file| fs::rename(&file, file.with_extension("ron")).unwrap()),
        ("log.txt", &|file| fs::remove_file(file).unwrap()),
    ];
    for (name, damage) in damages {
        let root = tempfile::tempdir().unwrap();
        let whole = get(&open(root.path()), &small_source(5));
        damage(entry(root.path()).join(name));
        // The log tells the time that ptxas took; the code is the same.
        assert!(get(&open(root.path()), &small_source(5)).cubin == whole.cubin);
        assert_eq!(
            fs::read(entry(root.path()).join("kernel.cubin")).unwrap(),
            whole.cubin,
            "{name} is not mended"
        );
    }
}

#[test]
fn processes_that_race_all_get_the_kernel_and_leave_one_entry() {
    let root = tempfile::tempdir().unwrap();
    let mut racers: Vec<_> = (0..4)
        .map(|_| {
            child("cache::racer").env("FA_TEST_CACHE", root.path()).stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    for racer in &mut racers {
        assert!(racer.wait().unwrap().success());
    }
    let cache = open(root.path());
    assert_eq!(cache.len(), 3);
    let left: Vec<_> = fs::read_dir(root.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(".tmp"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
    let compiler = nvrtc();
    for salt in 10..13 {
        cache.get(&compiler, &sm80_spec(), &small_source(salt)).unwrap();
    }
    assert!(!compiler.is_loaded(), "an entry is damaged");
}

#[test]
#[ignore = "run by processes_that_race_all_get_the_kernel_and_leave_one_entry"]
fn racer() {
    let Some(root) = std::env::var_os("FA_TEST_CACHE") else { return };
    let cache = open(Path::new(&root));
    for salt in 10..13 {
        assert_eq!(&get(&cache, &small_source(salt)).cubin[..4], b"\x7fELF");
    }
}

#[test]
fn a_folder_that_cannot_be_written_costs_only_the_storing() {
    let root = tempfile::tempdir().unwrap();
    // A file where the folder should be: not even root can write below it.
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = Cache::open(Some(file.join("cache")), ROOMY);
    let kernel = get(&cache, &small_source(6));
    assert_eq!((cache.len(), cache.size()), (0, 0));
    // In memory it is kept all the same.
    let compiler = nvrtc();
    let again = cache.get(&compiler, &sm80_spec(), &small_source(6)).unwrap();
    assert_eq!(*again, kernel);
}

#[test]
#[cfg(unix)]
fn a_read_only_folder_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let kernel = get(&open(root.path()), &small_source(7));
    let lock = |mode| fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).unwrap();
    lock(0o555);
    let compiler = nvrtc();
    let again = open(root.path()).get(&compiler, &sm80_spec(), &small_source(7)).unwrap();
    assert!(!compiler.is_loaded());
    let other = get(&open(root.path()), &small_source(8));
    lock(0o755);
    assert_eq!(*again, kernel);
    assert_eq!(&other.cubin[..4], b"\x7fELF");
}

#[test]
#[cfg(unix)]
fn a_folder_that_others_can_write_to_is_refused_before_a_kernel_is_loaded() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let kernel = get(&open(root.path()), &small_source(30));
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let refused = |of: &Path| {
        let error = open(root.path()).get(&nvrtc(), &sm80_spec(), &small_source(30)).expect_err("refused");
        assert!(matches!(&error, Error::UntrustedCache { path, .. } if path == of), "{error}");
        let said = error.to_string();
        assert!(said.contains("every user may write to it (mode 777)"), "{said}");
        assert!(said.contains(&format!("`chmod go-w {}`", of.display())), "{said}");
    };
    mode(root.path(), 0o777);
    refused(root.path());
    assert!(open(root.path()).check().is_err());
    mode(root.path(), 0o700);
    let entry = entry(root.path());
    mode(&entry, 0o777);
    refused(&entry);
    mode(&entry, 0o755);
    assert_eq!(get(&open(root.path()), &small_source(30)), kernel);
    open(root.path()).check().unwrap();
}

#[test]
#[cfg(unix)]
fn a_folder_made_for_kernels_is_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;
    let above = tempfile::tempdir().unwrap();
    let root = above.path().join("a/b");
    get(&open(&root), &small_source(31));
    assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o022, 0);
}

#[test]
fn memory_alone_does() {
    let cache = Cache::open(None, ROOMY);
    let kernel = get(&cache, &small_source(9));
    assert_eq!(get(&cache, &small_source(9)), kernel);
    assert!(cache.is_empty() && cache.root().is_none());
}

#[test]
fn the_oldest_entries_make_room() {
    let root = tempfile::tempdir().unwrap();
    get(&open(root.path()), &small_source(20));
    let one = open(root.path()).size();
    let cache = Cache::open(Some(root.path().to_owned()), one * 5 / 2);
    get(&cache, &small_source(21));
    assert_eq!(cache.len(), 2);
    get(&cache, &small_source(22));
    get(&cache, &small_source(23));
    assert!(cache.size() <= one * 5 / 2);
    let is_stored = |salt: u32| {
        let compiler = nvrtc();
        open(root.path()).get(&compiler, &sm80_spec(), &small_source(salt)).unwrap();
        !compiler.is_loaded()
    };
    assert!(is_stored(23) && is_stored(22));
    assert!(!is_stored(20));
}

#[test]
fn a_kernel_larger_than_the_limit_is_still_kept() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache::open(Some(root.path().to_owned()), 1);
    get(&cache, &small_source(24));
    assert_eq!(cache.len(), 1);
    get(&cache, &small_source(25));
    assert_eq!(cache.len(), 1);
}

#[test]
fn errors_in_a_source_name_the_log_that_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let broken =
        Source { unit: "extern \"C\" __global__ void fa_kernel() { x = 1; }".into(), ..small_source(0) };
    let error = open(root.path()).get(&nvrtc(), &sm80_spec(), &broken).unwrap_err();
    let Error::Compile { log_file: Some(file), log, .. } = &error else { panic!("{error}") };
    assert_eq!(&fs::read_to_string(file).unwrap(), log);
    assert!(error.to_string().contains("identifier \"x\" is undefined"), "{error}");
    assert!(error.to_string().contains(&file.display().to_string()), "{error}");
}

#[test]
fn what_does_not_compile_is_compiled_once_in_a_process() {
    let broken =
        Source { unit: "extern \"C\" __global__ void fa_kernel() { x = 2; }".into(), ..small_source(0) };
    // A cache on disk knows the compiler's version.
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path());
    let first = cache.get(&nvrtc(), &sm80_spec(), &broken).unwrap_err();
    let compiler = nvrtc();
    let second = cache.get(&compiler, &sm80_spec(), &broken).unwrap_err();
    assert_eq!(second.to_string(), first.to_string());
    assert!(second.is_of_kernel() && !compiler.is_loaded());
}

#[test]
fn spills_and_lost_performance_are_refused_with_the_log() {
    let root = tempfile::tempdir().unwrap();
    let spilling = "extern \"C\" __global__ void __launch_bounds__(1024, 2) fa_kernel(float* x) {\n\
                    float a[100];\n#pragma unroll\nfor (int i = 0; i < 100; ++i) a[i] = x[1024 * i + \
                    threadIdx.x];\n\
                    __syncthreads();\n#pragma unroll\nfor (int i = 0; i < 100; ++i) x[1024 * i + \
                    threadIdx.x] = a[99 - i] * a[7 * i % 100];\n}\n";
    // No launch bounds, so ptxas cannot know the registers at entry.
    let ignored = "extern \"C\" __global__ void fa_kernel(float* x) {\n\
                   asm volatile(\"setmaxnreg.inc.sync.aligned.u32 240;\");\nx[0] = 1.f;\n}\n";
    for (unit, part) in [(spilling, "spill"), (ignored, "C7508")] {
        let source = Source { unit: unit.into(), headers: vec![], target: "sm_90a".into() };
        let error = open(root.path()).get(&nvrtc(), &sm80_spec(), &source).unwrap_err();
        let Error::Refused { fault, log_file: Some(file), .. } = &error else { panic!("{error}") };
        assert!(fault.to_string().contains(part), "{fault}");
        assert!(fs::read_to_string(file).unwrap().contains("registers"));
        // Refused again without compiling again.
        let compiler = nvrtc();
        let again = open(root.path()).get(&compiler, &sm80_spec(), &source).unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
        assert!(!compiler.is_loaded());
    }
}
