//! The compiler is found where it should be; where there is none, the error says what to do.

use std::path::Path;
use std::process::Command;

use fa_kernels::{Compiler, CompilerKind, toolchain};

use crate::{child, nvrtc};

/// The child without any variable that leads to a compiler, in a folder of its own.
fn bare(name: &str, folder: &Path) -> Command {
    let mut command = child(name);
    for variable in
        ["CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "PATH"]
    {
        command.env_remove(variable);
    }
    command.env_remove(toolchain::NVRTC_VARIABLE).current_dir(folder);
    command
}

fn text_of(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn nvrtc_says_its_version_and_what_it_compiles_for() {
    let compiler = nvrtc();
    let version = compiler.version().unwrap();
    assert!(version.starts_with("nvrtc 1"), "{version}");
    for arch in fa_core::Arch::ALL {
        compiler.check_arch(arch).unwrap();
    }
}

#[test]
fn the_variable_goes_first_and_must_name_a_library() {
    let folder = tempfile::tempdir().unwrap();
    let library = nvrtc().path().to_owned();
    for named in [library.as_path(), library.parent().unwrap()] {
        let found = text_of(bare("toolchain::find", folder.path()).env(toolchain::NVRTC_VARIABLE, named));
        assert!(found.contains(&format!("found {}", library.display())), "{found}");
    }
    let found = text_of(bare("toolchain::find", folder.path()).env(toolchain::NVRTC_VARIABLE, "/nowhere"));
    assert!(found.contains("/nowhere cannot be used: FA_NVRTC names neither"), "{found}");
    // Nothing is searched for then, wherever a library may lie.
    let home = library.parent().unwrap();
    let mut none = bare("toolchain::find", folder.path());
    let found = text_of(none.env(toolchain::NVRTC_VARIABLE, "none").env("LD_LIBRARY_PATH", home));
    assert!(found.contains("no NVRTC found (looked in nowhere, since FA_NVRTC is none)"), "{found}");
}

#[test]
fn a_virtual_environment_and_a_cuda_home_are_looked_into() {
    let folder = tempfile::tempdir().unwrap();
    for (variable, below) in [
        ("VIRTUAL_ENV", "lib/python3.12/site-packages/nvidia/cu13/lib"),
        ("VIRTUAL_ENV", "lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib"),
        ("CUDA_HOME", "lib64"),
        ("LD_LIBRARY_PATH", ""),
    ] {
        let home = tempfile::tempdir().unwrap();
        let lib = home.path().join(below);
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("libnvrtc.so.13"), "").unwrap();
        std::fs::write(lib.join("libnvrtc-builtins.so.13.0"), "").unwrap();
        let found = text_of(bare("toolchain::find", folder.path()).env(variable, home.path()));
        let expected = lib.join("libnvrtc.so.13");
        // Where the system has a library of its own, that one stands before the virtual environment.
        let system = found.contains("found /usr/");
        assert!(system || found.contains(&format!("found {}", expected.display())), "{found}");
    }
}

#[test]
#[ignore = "run by the tests above"]
fn find() {
    match toolchain::find_nvrtc() {
        Ok(path) => println!("found {}", path.display()),
        Err(error) => println!("error {error}"),
    }
}

#[test]
fn without_a_compiler_the_error_says_how_to_get_one() {
    // A copy of this program outside the target folder, so that it does not find the workspace's toolkit.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("suite");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut command = bare("toolchain::find", folder.path());
    let args: Vec<_> = command.get_args().map(|arg| arg.to_owned()).collect();
    command = {
        let mut copy = Command::new(&program);
        copy.args(args).env_clear().current_dir(folder.path());
        copy
    };
    let found = text_of(&mut command);
    let system = found.contains("found /usr/");
    assert!(system || found.contains("run `cargo xtask toolkit`"), "{found}");
    assert!(system || found.contains("pip install nvidia-cuda-nvrtc"), "{found}");
}

#[test]
fn a_file_that_is_no_library_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnvrtc.so.13");
    std::fs::write(&file, "not a library").unwrap();
    let error = Compiler::at(CompilerKind::Nvrtc, file.clone()).version().unwrap_err();
    assert!(error.to_string().contains(&format!("{} cannot be used", file.display())), "{error}");
}
