//! From a translation unit to a cubin: by NVRTC in this process, or by nvcc.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use fa_core::Arch;

use crate::jit::nvrtc::{Nvrtc, Wanted};
use crate::jit::report::Report;
use crate::jit::source::Source;
use crate::{Error, toolchain};

/// Kinds of compilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompilerKind {
    /// The run-time compiler: one library, no CUDA headers, no host compiler.
    Nvrtc,
    /// The CUDA toolkit's compiler; needs a host C++ compiler too.
    Nvcc,
}

/// A compiler that has been found; it is loaded when first used.
pub struct Compiler {
    kind: CompilerKind,
    path: PathBuf,
    nvrtc: OnceLock<Nvrtc>,
}

/// The result of a compilation.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// The cubin.
    pub cubin: Vec<u8>,
    /// The compiler's messages.
    pub log: String,
    /// The report in them.
    pub report: Report,
}

/// Why a source did not compile.
#[derive(Debug)]
pub enum CompileFailure {
    /// Errors in the source; the compiler's messages.
    Log(String),
    /// The compiler itself failed.
    Compiler(Error),
}

/// Flags for both compilers. Fast arithmetic is chosen in the kernels, instruction by instruction, never by a
/// flag.
const FLAGS: [&str; 2] = ["-std=c++20", "--ptxas-options=-v"];

impl Compiler {
    /// The compiler of this kind that [`toolchain`] finds.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] or [`Error::BadCompiler`].
    pub fn find(kind: CompilerKind) -> Result<Compiler, Error> {
        let path = match kind {
            CompilerKind::Nvrtc => toolchain::find_nvrtc()?,
            CompilerKind::Nvcc => toolchain::find_nvcc()?,
        };
        Ok(Compiler::at(kind, path))
    }

    /// The compiler at `path`.
    pub fn at(kind: CompilerKind, path: PathBuf) -> Compiler {
        Compiler { kind, path, nvrtc: OnceLock::new() }
    }

    /// The kind of compiler.
    pub fn kind(&self) -> CompilerKind {
        self.kind
    }

    /// The library or program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether NVRTC has been loaded; a kernel from the cache does not need it.
    pub fn is_loaded(&self) -> bool {
        self.nvrtc.get().is_some()
    }

    /// Name and version, as in `nvrtc 13.0`. Loads the library (some 50 ms) or runs the program.
    ///
    /// # Errors
    /// [`Error::BadCompiler`].
    pub fn version(&self) -> Result<String, Error> {
        match self.kind {
            CompilerKind::Nvrtc => {
                let (major, minor) = self.nvrtc()?.version();
                Ok(format!("nvrtc {major}.{minor}"))
            }
            CompilerKind::Nvcc => {
                let output = self.run(Command::new(&self.path).arg("--version"))?;
                let version = output.split("release ").nth(1).and_then(|rest| rest.split(',').next());
                version.map(|version| format!("nvcc {version}")).ok_or_else(|| Error::BadCompiler {
                    path: self.path.clone(),
                    reason: format!("--version says {output:?}"),
                })
            }
        }
    }

    /// The flags for a target.
    pub fn flags(&self, target: &str) -> Vec<String> {
        let mut flags = vec![format!("--gpu-architecture={target}")];
        flags.extend(FLAGS.map(str::to_owned));
        flags.push(match self.kind {
            // constexpr functions and unannotated helpers are device code for both compilers.
            CompilerKind::Nvrtc => "-default-device".to_owned(),
            CompilerKind::Nvcc => "--expt-relaxed-constexpr".to_owned(),
        });
        flags
    }

    /// Checks that the compiler knows `arch`.
    ///
    /// # Errors
    /// [`Error::ArchTooNew`].
    pub fn check_arch(&self, arch: Arch) -> Result<(), Error> {
        let (major, minor) = arch.compute_capability();
        if self.kind == CompilerKind::Nvrtc && !self.nvrtc()?.supports(10 * major + minor) {
            let need = match arch {
                // Known before as sm_101, whose code is that of no later name.
                Arch::Sm110 => "13.0",
                Arch::Sm103 | Arch::Sm121 => "12.9",
                Arch::Sm80 | Arch::Sm86 | Arch::Sm89 | Arch::Sm90 | Arch::Sm100 | Arch::Sm120 => "12.8",
            };
            return Err(Error::ArchTooNew { compiler: self.version()?, arch, need });
        }
        Ok(())
    }

    /// Compiles a source to a cubin. Spills and warnings are in the report, not errors here.
    ///
    /// # Errors
    /// [`CompileFailure::Log`] for errors in the source, [`CompileFailure::Compiler`] for those of the
    /// compiler.
    pub fn compile(&self, source: &Source) -> Result<Compiled, CompileFailure> {
        let (mut cubin, mut log) = match self.kind {
            CompilerKind::Nvrtc => self.by_nvrtc(source, &[])?,
            CompilerKind::Nvcc => self.by_nvcc(source)?,
        };
        // Where there is a driver, NVRTC 13 has its own cache, whose results lack ptxas's lines (NB-046).
        if self.kind == CompilerKind::Nvrtc && Report::parse(&log).is_none() {
            tracing::debug!("no resource lines in the log");
            (cubin, log) = self.by_nvrtc(source, &["--no-cache"])?;
        }
        match Report::parse(&log) {
            Some(report) => Ok(Compiled { cubin, log, report }),
            None => {
                let reason = format!("its log has no ptxas resource lines:\n{log}");
                Err(Error::BadCompiler { path: self.path.clone(), reason }.into())
            }
        }
    }

    /// Compiles a source to PTX, for people to read: kernels are cubins.
    ///
    /// # Errors
    /// As [`Compiler::compile`]; nvcc is refused.
    pub fn ptx(&self, source: &Source) -> Result<String, CompileFailure> {
        if self.kind == CompilerKind::Nvcc {
            let reason = "PTX is emitted by NVRTC: leave --nvcc out".to_owned();
            return Err(Error::BadCompiler { path: self.path.clone(), reason }.into());
        }
        let flags = self.flags(&source.target.replace("sm_", "compute_"));
        // What ptxas is told is none of the front end's business.
        let flags: Vec<String> = flags.into_iter().filter(|flag| !flag.contains("ptxas")).collect();
        let output = self.nvrtc()?.compile(&source.unit, &source.headers, &flags, Wanted::Ptx)?;
        match output.code {
            Some(text) => Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()),
            None => Err(CompileFailure::Log(output.log)),
        }
    }

    fn by_nvrtc(&self, source: &Source, more: &[&str]) -> Result<(Vec<u8>, String), CompileFailure> {
        let mut flags = self.flags(&source.target);
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        let output = self.nvrtc()?.compile(&source.unit, &source.headers, &flags, Wanted::Cubin)?;
        match output.code {
            Some(cubin) => Ok((cubin, output.log)),
            None => Err(CompileFailure::Log(output.log)),
        }
    }

    fn by_nvcc(&self, source: &Source) -> Result<(Vec<u8>, String), CompileFailure> {
        let folder = tempfile::tempdir().map_err(|e| Error::io(&std::env::temp_dir(), e))?;
        source.write(folder.path())?;
        let cubin = folder.path().join("kernel.cubin");
        let output = Command::new(&self.path)
            .args(self.flags(&source.target))
            .args(["--cubin", "-I"])
            .arg(folder.path())
            .arg("-o")
            .arg(&cubin)
            .arg(folder.path().join("kernel.cu"))
            .output()
            .map_err(|e| Error::io(&self.path, e))?;
        let log = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(CompileFailure::Log(log.into_owned()));
        }
        Ok((std::fs::read(&cubin).map_err(|e| Error::io(&cubin, e))?, log.into_owned()))
    }

    fn nvrtc(&self) -> Result<&Nvrtc, Error> {
        if let Some(nvrtc) = self.nvrtc.get() {
            return Ok(nvrtc);
        }
        let nvrtc = Nvrtc::load(&self.path)?;
        Ok(self.nvrtc.get_or_init(|| nvrtc))
    }

    fn run(&self, command: &mut Command) -> Result<String, Error> {
        let output = command.output().map_err(|e| Error::io(&self.path, e))?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::BadCompiler { path: self.path.clone(), reason });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl From<Error> for CompileFailure {
    fn from(error: Error) -> Self {
        CompileFailure::Compiler(error)
    }
}
