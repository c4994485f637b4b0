//! A unit of one entry, and the memory of its launch.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use fa_core::Arch;
use fa_kernels::Source;
use libloading::Library;
use serde::Deserialize;

use crate::compiler::Compiler;
use crate::error::Error;
use crate::machine::{Access, Launch, Machine, Memory, PAGE, Session, open};
use crate::options::Options;
use crate::unit::{files, flags};

/// A unit of one entry.
#[derive(Debug)]
pub(crate) struct Single {
    machine: Arc<Machine>,
    library: Library,
    name: &'static str,
}

/// CTAs of a launch, threads and bytes of shared memory of each.
pub(crate) struct Shape {
    pub grid: u32,
    pub threads: u32,
    pub smem: u32,
}

/// A run of a [`Single`]: its memory, and one launch.
pub(crate) struct Run<'a> {
    unit: &'a Single,
    session: Session<'a>,
    resident: u32,
}

impl Single {
    pub(crate) fn load(
        compiler: &Compiler,
        machine: Arc<Machine>,
        arch: Arch,
        source: &Source,
        name: &'static str,
    ) -> Result<Single, Error> {
        let path = compiler.library("unit", name, &files(source)?, "kernel.cu", &flags(arch))?;
        Ok(Single { machine, library: open(&path, false)?, name })
    }

    pub(crate) fn start<'a>(&'a self, options: &Options<'a>) -> Run<'a> {
        let session = self.machine.session(&Options { trace_cta: None, progress: None, ..*options }, false);
        Run { unit: self, session, resident: options.resident }
    }
}

impl<'a> Run<'a> {
    /// Guarded memory with these bytes.
    pub(crate) fn memory(&self, name: &str, bytes: &[u8], access: Access) -> Result<Memory<'a>, Error> {
        let mut memory = Memory::new(&self.unit.machine, name, bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        self.session.region(name, memory.address(), bytes.len() as u64, (PAGE, PAGE), access);
        Ok(memory)
    }

    /// Launches the unit; returns the findings.
    ///
    /// # Safety
    /// `params` is the entry's argument, and all that it points at is live memory of [`Run::memory`].
    pub(crate) unsafe fn launch<P>(&self, params: &P, shape: &Shape) -> Vec<String> {
        let arguments = [(&raw const *params).cast::<c_void>()];
        let name = format!("emu_{}", self.unit.name);
        // SAFETY: the unit's own function of this name; only its address is taken.
        let entry = unsafe { self.unit.library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        // SAFETY: the caller's.
        let finished = unsafe {
            self.session.launch(&Launch {
                name: self.unit.name,
                entry: entry.map_or(std::ptr::null(), |entry| *entry as *const c_void),
                arguments: &arguments,
                grid: shape.grid,
                threads: shape.threads,
                cluster: 1,
                resident: self.resident,
                smem_bytes: shape.smem,
                cp_async: false,
                blocks_per_sm: 1,
            })
        };
        faults(&self.session.result(), finished)
    }
}

#[derive(Deserialize)]
struct Found {
    findings: Vec<FoundOne>,
}

#[derive(Deserialize)]
struct FoundOne {
    kind: String,
    text: String,
}

/// The findings of a session's `result`, a line each.
///
/// # Panics
/// On text that is not the machine's JSON.
fn faults(result: &str, finished: bool) -> Vec<String> {
    let found: Found = serde_json::from_str(result).expect("the machine writes JSON");
    let mut faults: Vec<String> =
        found.findings.into_iter().map(|one| format!("{}: {}", one.kind, one.text)).collect();
    if !finished {
        faults.push("the launch was given up".into());
    }
    faults
}
