//! The list of shipped kernels that are known to compile: by the fingerprint of their sources, for which
//! architectures, with how many registers. What it holds need not be compiled again for every architecture.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fa_core::Arch;
use fa_kernels::ship::Row;
use fa_kernels::specs::ShippedFile;
use fa_kernels::{Compiler, Headers, Source, smem_bytes};
use fa_planner::account::{Occupancy, account};
use serde::{Deserialize, Serialize};

/// The list's file in the workspace.
pub const LIST: &str = "docs/results/compiled.ron";

const HEAD: &str = "\
// Shipped kernels that compile within their plans: no spill, no forbidden warning, no local memory, the
// instructions that they are written for. Written by `cargo xtask ci --all-archs`; CI compiles what is not
// here, and everything by another compiler.
";

/// The list.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    /// Name and version of the compiler.
    compiler: String,
    /// Its flags, but for the target.
    flags: Vec<String>,
    /// By the spec's file.
    kernels: BTreeMap<String, Kernel>,
}

/// One spec.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// [`Source::fingerprint`].
    code: String,
    /// Registers of a thread on each architecture that it was compiled for.
    pub registers: BTreeMap<Arch, u32>,
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(LIST)
}

fn code(file: &ShippedFile) -> String {
    let spec = &file.shipped.spec;
    let source = Source::new(spec, file.shipped.archs[0], Some(smem_bytes(spec)), &Headers::embedded());
    source.unwrap_or_else(|error| panic!("specs/{}: {error}", file.path)).fingerprint()
}

impl Compiled {
    fn empty(compiler: &Compiler) -> Compiled {
        let mut flags = compiler.flags("");
        flags.retain(|flag| !flag.starts_with("--gpu-architecture"));
        Compiled { compiler: compiler.version().unwrap(), flags, kernels: BTreeMap::new() }
    }

    /// The list if it is by this compiler with these flags, else an empty one.
    pub fn read(compiler: &Compiler) -> Compiled {
        let empty = Compiled::empty(compiler);
        let Ok(text) = std::fs::read_to_string(path()) else { return empty };
        let list: Compiled = ron::from_str(&text).unwrap_or_else(|error| panic!("{LIST}: {error}"));
        if (&list.compiler, &list.flags) == (&empty.compiler, &empty.flags) { list } else { empty }
    }

    /// What came of compiling all of `files`.
    pub fn of(compiler: &Compiler, files: &[ShippedFile], rows: &[Row]) -> Compiled {
        let kernel = |file: &ShippedFile| {
            let name = file.shipped.spec.to_string();
            let registers =
                rows.iter().filter(|row| row.name == name).map(|row| (row.arch, row.report.registers));
            (file.path.to_owned(), Kernel { code: code(file), registers: registers.collect() })
        };
        Compiled { kernels: files.iter().map(kernel).collect(), ..Compiled::empty(compiler) }
    }

    /// The entry of a spec, if its sources are the same.
    pub fn find(&self, file: &ShippedFile) -> Option<&Kernel> {
        self.kernels.get(file.path).filter(|kernel| kernel.code == code(file))
    }

    /// Writes the list, one spec a line.
    pub fn write(&self) {
        fn ron(value: &impl Serialize) -> String {
            ron::to_string(value).expect("plain data serialises")
        }
        let mut text = format!(
            "{HEAD}(\n    compiler: {},\n    flags: {},\n    kernels: {{\n",
            ron(&self.compiler),
            ron(&self.flags)
        );
        for (file, kernel) in &self.kernels {
            text += &format!("        {}: {},\n", ron(file), ron(kernel));
        }
        std::fs::write(path(), text + "    },\n)\n").unwrap();
    }
}

impl Kernel {
    /// The registers keep to the present plan and limits, which may have changed since they were listed.
    pub fn check(&self, file: &ShippedFile) {
        let spec = &file.shipped.spec;
        for (&arch, &registers) in &self.registers {
            let plan = account(spec, arch).unwrap_or_else(|reason| panic!("{}: {reason}", file.path));
            let blocks = Occupancy::of(arch.limits(), smem_bytes(spec), registers, spec.threads()).blocks();
            assert!(
                blocks >= plan.blocks_per_sm && registers <= arch.limits().regs_per_thread,
                "specs/{} on {arch}: {registers} registers leave {blocks} blocks per SM, the plan counts on \
                 {}",
                file.path,
                plan.blocks_per_sm
            );
        }
    }
}

#[test]
fn an_entry_holds_for_the_very_sources_alone() {
    let files = fa_kernels::specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    let file = &files[0];
    let registers = BTreeMap::from([(file.shipped.archs[0], 128)]);
    let list = |code: String| {
        let kernel = Kernel { code, registers: registers.clone() };
        Compiled { kernels: BTreeMap::from([(file.path.to_owned(), kernel)]), ..Compiled::default() }
    };
    assert_eq!(list(code(file)).find(file).map(|kernel| &kernel.registers), Some(&registers));
    assert_eq!(list("0".repeat(64)).find(file), None);
    assert_eq!(list(code(file)).find(&files[1]), None);
}

#[test]
fn the_list_names_shipped_specs_and_their_architectures() {
    let text = std::fs::read_to_string(path()).unwrap();
    let list: Compiled = ron::from_str(&text).unwrap_or_else(|error| panic!("{LIST}: {error}"));
    let files = fa_kernels::specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    for (name, kernel) in &list.kernels {
        let file = files.iter().find(|file| file.path == name);
        let file = file.unwrap_or_else(|| panic!("{LIST} names {name}, which does not ship"));
        assert_eq!(kernel.code.len(), 64, "{name}");
        for arch in kernel.registers.keys() {
            assert!(file.shipped.archs.contains(arch), "{LIST}: {name} does not ship for {arch}");
        }
    }
}
