//! Compiles one spec and shows what the compiler says: the tool for writing kernels.
//!
//! ```text
//! cargo run -p fa-kernels --example compile -- SPEC.ron sm90 [--out DIR] [--sass] [--nvcc]
//! ```
//!
//! `SPEC.ron` holds a `KernelSpec` or a `ShippedSpec`; `-` reads it from standard input. The headers are read
//! from the `cuda` folder as they are now, so nothing is rebuilt between two tries. `--out` keeps the unit,
//! the log and the cubin; `--sass` prints the machine code (nvdisasm from `cargo xtask toolkit`). NVRTC is
//! found as in `fa_kernels::toolchain`.

use std::error::Error;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use fa_core::{Arch, KernelSpec, ShippedSpec};
use fa_kernels::{CompileFailure, Compiler, CompilerKind, Headers, Source, toolchain};

fn main() -> ExitCode {
    match run() {
        Ok(clean) => ExitCode::from(u8::from(!clean)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, Box<dyn Error>> {
    let (mut files, mut out, mut sass, mut kind) = (Vec::new(), None, false, CompilerKind::Nvrtc);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--out" => out = Some(PathBuf::from(args.next().ok_or("--out needs a folder")?)),
            "--sass" => sass = true,
            "--nvcc" => kind = CompilerKind::Nvcc,
            _ => files.push(arg),
        }
    }
    let [spec, arch] = files.as_slice() else {
        return Err("usage: compile SPEC.ron ARCH [--out DIR] [--sass] [--nvcc]".into());
    };
    let (spec, arch) = (read_spec(spec)?, arch.parse::<Arch>()?);

    let headers = Headers::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda"))?;
    let smem = fa_kernels::smem_bytes(&spec);
    let source = Source::new(&spec, arch, Some(smem), &headers)?;
    let compiler = Compiler::find(kind)?;
    compiler.check_arch(arch)?;
    println!("{spec} for {} by {} ({})", source.target, compiler.version()?, compiler.path().display());

    let start = Instant::now();
    let compiled = match compiler.compile(&source) {
        Ok(compiled) => compiled,
        Err(CompileFailure::Log(log)) => return Err(log.into()),
        Err(CompileFailure::Compiler(error)) => return Err(error.into()),
    };
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", compiled.log.trim_end());
    println!("{} ({} B cubin, {seconds:.2} s)", compiled.report, compiled.cubin.len());
    println!("{smem} B dynamic shared memory planned");
    let fault = compiled.report.fault();
    if let Some(fault) = &fault {
        println!("REFUSED: {fault}");
    }

    let keep = out.is_some();
    let folder =
        out.unwrap_or_else(|| std::env::temp_dir().join(format!("fa-compile-{}", std::process::id())));
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("kernel.cubin"), &compiled.cubin)?;
    if keep {
        source.write(&folder)?;
        std::fs::write(folder.join("log.txt"), &compiled.log)?;
    }
    if sass {
        let tool = toolchain::find_tool("nvdisasm").ok_or("no nvdisasm: run `cargo xtask toolkit`")?;
        Command::new(tool).args(["-c", "-hex"]).arg(folder.join("kernel.cubin")).status()?;
    }
    if !keep {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(fault.is_none())
}

fn read_spec(file: &str) -> Result<KernelSpec, Box<dyn Error>> {
    let text = if file == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        text
    } else {
        std::fs::read_to_string(file)?
    };
    Ok(match ShippedSpec::from_ron(&text) {
        Ok(shipped) => shipped.spec,
        Err(_) => KernelSpec::from_ron(&text)?,
    })
}
