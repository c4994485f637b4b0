//! Lists of kernels that are known to compile: by the fingerprint of their sources, for which architectures,
//! with how many registers. What they hold need not be compiled again for every architecture.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fa_core::{Arch, ShippedSpec};
use fa_kernels::ship::Row;
use fa_kernels::{Compiler, Headers, Source, smem_bytes};
use fa_planner::account::{Occupancy, account};
use serde::{Deserialize, Serialize};

use crate::{serving, shipped};

/// Compiles every kernel of the lists for all of its architectures, and writes the lists of what compiled.
pub(crate) const ALL_ARCHS: &str = "FA_ALL_ARCHS";

/// In so many days every listed kernel is compiled once.
pub(crate) const TURNS: usize = 6;

/// A file of the workspace with a list.
pub(crate) struct List {
    pub path: &'static str,
    /// What its kernels are.
    pub of: &'static str,
}

const HEAD: &str = "\
that compile within their plans: no spill, no forbidden warning, no local memory, the
// instructions that they are written for. Written by `cargo xtask ci --all-archs`; CI compiles what is not
// here, and everything by another compiler.
";

/// What a list holds.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Compiled {
    /// Name and version of the compiler.
    compiler: String,
    /// Its flags, but for the target.
    flags: Vec<String>,
    /// By name: of a shipped spec the file.
    kernels: BTreeMap<String, Kernel>,
}

/// One spec.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    /// [`Source::fingerprint`].
    code: String,
    /// Registers of a thread on each architecture that it was compiled for.
    pub registers: BTreeMap<Arch, u32>,
}

/// A kernel that a list may hold.
pub(crate) struct Wanted {
    pub name: String,
    pub shipped: ShippedSpec,
}

impl Wanted {
    fn code(&self) -> String {
        let ShippedSpec { archs, spec } = &self.shipped;
        let source = Source::new(spec, archs[0], Some(smem_bytes(spec)), &Headers::embedded());
        source.unwrap_or_else(|error| panic!("{}: {error}", self.name)).fingerprint()
    }
}

impl List {
    fn file(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(self.path)
    }

    /// What the file holds.
    fn held(&self) -> Option<Compiled> {
        let text = std::fs::read_to_string(self.file()).ok()?;
        Some(ron::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", self.path)))
    }

    /// What it holds if that is by this compiler with these flags, else nothing.
    pub(crate) fn read(&self, compiler: &Compiler) -> Compiled {
        let empty = Compiled::empty(compiler);
        let same = |held: &Compiled| (&held.compiler, &held.flags) == (&empty.compiler, &empty.flags);
        self.held().filter(same).unwrap_or(empty)
    }

    /// What is compiled today: each kernel for the architectures for which the list does not hold it with
    /// these very sources, and of those that it holds every [`TURNS`]th, others each day, for its first one.
    /// With [`ALL_ARCHS`], all.
    pub(crate) fn today(&self, compiler: &Compiler, kernels: &[Wanted]) -> Vec<ShippedSpec> {
        let all = std::env::var_os(ALL_ARCHS).is_some();
        let held = self.read(compiler);
        let day =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |own| own.as_secs() / 86400) as usize;
        let needed = |(number, kernel): (usize, &Wanted)| {
            let ShippedSpec { archs, spec } = &kernel.shipped;
            let known = held.find(kernel);
            known.iter().for_each(|known| known.check(kernel));
            let needed = |(i, arch): (usize, &Arch)| {
                let listed = known.is_some_and(|known| known.registers.contains_key(arch));
                (all || !listed || (i == 0 && (number + day).is_multiple_of(TURNS))).then_some(*arch)
            };
            let archs: Vec<Arch> = archs.iter().enumerate().filter_map(needed).collect();
            (!archs.is_empty()).then(|| ShippedSpec { archs, spec: spec.clone() })
        };
        let needed: Vec<ShippedSpec> = kernels.iter().enumerate().filter_map(needed).collect();
        assert!(!needed.is_empty(), "a sixth of {} kernels is compiled each day", kernels.len());
        let jobs: usize = needed.iter().map(|shipped| shipped.archs.len()).sum();
        if !all && jobs > kernels.len() / TURNS + 1 {
            // Past the test's capture: it explains the time that CI takes.
            let more = jobs - kernels.len() / TURNS;
            let _ = writeln!(
                std::io::stderr(),
                "{more} compilations are not in {}: `cargo xtask ci --all-archs` lists them",
                self.path
            );
        }
        needed
    }

    /// With [`ALL_ARCHS`], writes what came of compiling all of `kernels`, one a line.
    pub(crate) fn write(&self, compiler: &Compiler, kernels: &[Wanted], rows: &[Row]) {
        if std::env::var_os(ALL_ARCHS).is_none() {
            return;
        }
        fn ron(value: &impl Serialize) -> String {
            ron::to_string(value).expect("plain data serialises")
        }
        let Compiled { compiler, flags, .. } = Compiled::empty(compiler);
        let mut lines: Vec<String> = kernels
            .iter()
            .map(|kernel| {
                let name = kernel.shipped.spec.to_string();
                let own = rows.iter().filter(|row| row.name == name);
                let registers = own.map(|row| (row.arch, row.report.registers)).collect();
                let entry = Kernel { code: kernel.code(), registers };
                format!("        {}: {},\n", ron(&kernel.name), ron(&entry))
            })
            .collect();
        lines.sort();
        let text = format!(
            "// {} {HEAD}(\n    compiler: {},\n    flags: {},\n    kernels: {{\n{}    }},\n)\n",
            self.of,
            ron(&compiler),
            ron(&flags),
            lines.concat()
        );
        std::fs::write(self.file(), text).unwrap();
    }
}

impl Compiled {
    fn empty(compiler: &Compiler) -> Compiled {
        let mut flags = compiler.flags("");
        flags.retain(|flag| !flag.starts_with("--gpu-architecture"));
        Compiled { compiler: compiler.version().unwrap(), flags, kernels: BTreeMap::new() }
    }

    /// The entry of a kernel, if its sources are the same.
    pub(crate) fn find(&self, kernel: &Wanted) -> Option<&Kernel> {
        self.kernels.get(&kernel.name).filter(|own| own.code == kernel.code())
    }
}

impl Kernel {
    /// The registers keep to the present plan and limits, which may have changed since they were listed.
    fn check(&self, kernel: &Wanted) {
        let Wanted { name, shipped: ShippedSpec { spec, .. } } = kernel;
        for (&arch, &registers) in &self.registers {
            let plan = account(spec, arch).unwrap_or_else(|reason| panic!("{name}: {reason}"));
            let blocks = Occupancy::of(arch.limits(), smem_bytes(spec), registers, spec.threads()).blocks();
            assert!(
                blocks >= plan.blocks_per_sm && registers <= arch.limits().regs_per_thread,
                "{name} on {arch}: {registers} registers leave {blocks} blocks per SM, the plan counts on {}",
                plan.blocks_per_sm
            );
        }
    }
}

#[test]
fn an_entry_holds_for_the_very_sources_alone() {
    let kernels = shipped::kernels();
    let kernel = &kernels[0];
    let registers = BTreeMap::from([(kernel.shipped.archs[0], 128)]);
    let list = |code: String| {
        let own = Kernel { code, registers: registers.clone() };
        Compiled { kernels: BTreeMap::from([(kernel.name.clone(), own)]), ..Compiled::default() }
    };
    assert_eq!(list(kernel.code()).find(kernel).map(|own| &own.registers), Some(&registers));
    assert_eq!(list("0".repeat(64)).find(kernel), None);
    assert_eq!(list(kernel.code()).find(&kernels[1]), None);
}

#[test]
fn the_lists_name_shipped_specs_and_first_choices_and_their_architectures() {
    for (list, kernels) in [(shipped::LIST, shipped::kernels()), (serving::LIST, serving::kernels())] {
        let held = list.held().unwrap_or_else(|| panic!("{} is not there", list.path));
        for (name, own) in &held.kernels {
            let kernel = kernels.iter().find(|kernel| kernel.name == *name);
            let Some(kernel) = kernel else {
                // The same run drops from the list what is no longer chosen.
                let renewed = std::env::var_os(ALL_ARCHS).is_some();
                assert!(renewed, "{} names {name}: none of {}", list.path, list.of);
                continue;
            };
            assert_eq!(own.code.len(), 64, "{name}");
            for arch in own.registers.keys() {
                assert!(kernel.shipped.archs.contains(arch), "{}: {name} is not for {arch}", list.path);
            }
        }
    }
}
