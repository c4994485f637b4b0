//! `fa build --emit`: the texts of kernels, for people who write them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use fa_core::{Arch, KernelSpec, ShippedSpec};
use fa_kernels::{CompileFailure, Compiler, Headers, Source, smem_bytes, toolchain};

use super::args::{BuildArgs, Emitted};
use crate::term::failure::Verdict;
use crate::term::output;

/// Writes the texts asked for of every kernel on each of its architectures, and their files' names.
///
/// # Errors
/// A source that does not compile, no disassembler for SASS, and files that cannot be written.
pub(super) fn command(
    args: &BuildArgs,
    shipped: &[ShippedSpec],
    compiler: &Compiler,
) -> anyhow::Result<Verdict> {
    let headers = Headers::current()?;
    std::fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    for ShippedSpec { archs, spec, .. } in shipped {
        for arch in archs.iter().filter(|arch| args.arch.is_empty() || args.arch.contains(arch)) {
            let source = Source::new(spec, *arch, Some(smem_bytes(spec)), &headers)?;
            for text in &args.emit {
                let path = args.out.join(format!("{spec}.{arch}.{}", ending(*text)));
                write(*text, &source, compiler, &path).with_context(|| failed(spec, *arch))?;
                output::print(&format!("{}\n", path.display()))?;
            }
        }
    }
    Ok(Verdict::Good)
}

fn failed(spec: &KernelSpec, arch: Arch) -> String {
    format!("{spec} for {arch}")
}

/// A file's ending; sources are a folder.
fn ending(text: Emitted) -> &'static str {
    match text {
        Emitted::Source => "source",
        Emitted::Ptx => "ptx",
        Emitted::Sass => "sass",
    }
}

fn write(text: Emitted, source: &Source, compiler: &Compiler, path: &Path) -> anyhow::Result<()> {
    let said = |failure| match failure {
        CompileFailure::Log(log) => anyhow::anyhow!("it does not compile:\n{log}"),
        CompileFailure::Compiler(error) => error.into(),
    };
    match text {
        Emitted::Source => {
            std::fs::create_dir_all(path)?;
            Ok(source.write(path)?)
        }
        Emitted::Ptx => Ok(std::fs::write(path, compiler.ptx(source).map_err(said)?)?),
        Emitted::Sass => {
            let tool = toolchain::find_tool("nvdisasm").context(
                "--emit sass needs nvdisasm: run `cargo xtask toolkit` in the fa workspace, or set \
                 CUDA_HOME to a \
                 CUDA toolkit",
            )?;
            let compiled = compiler.compile(source).map_err(said)?;
            let cubin = tempfile::NamedTempFile::new()?;
            std::fs::write(cubin.path(), &compiled.cubin)?;
            let done = Command::new(&tool).arg("-c").arg(cubin.path()).output();
            let done = done.with_context(|| format!("{} does not start", tool.display()))?;
            ensure!(done.status.success(), "nvdisasm: {}", String::from_utf8_lossy(&done.stderr));
            Ok(std::fs::write(path, done.stdout)?)
        }
    }
}
