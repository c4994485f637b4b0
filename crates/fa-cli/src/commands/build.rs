//! `fa build`: the shipped kernels compiled for their architectures, or all that the planner lists; planned
//! against actual.

mod args;
mod best;
mod emit;
mod every;

use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context;
use fa_core::{Arch, ShippedSpec, counted};
use fa_kernels::{Cache, Headers, ship, specs};
use fa_lab::{common, read_text};

use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::Steps;
pub(crate) use args::BuildArgs;

/// Runs the command: a bad verdict when a kernel does not compile cleanly within its plan.
///
/// # Errors
/// When there is no compiler, a spec cannot be read, or the bundle cannot be written.
pub(crate) fn command(args: &BuildArgs) -> anyhow::Result<Verdict> {
    if args.all_configs {
        return every::command(args);
    }
    args.headers.choose()?;
    if let Some(count) = args.best {
        return best::command(args, usize::from(count));
    }
    let mut shipped = match &args.specs {
        Some(folder) => read_folder(folder)?,
        None => specs::shipped()
            .map_err(|(path, error)| anyhow::anyhow!("specs/{path}: {error}"))?
            .into_iter()
            .map(|file| file.shipped)
            .collect(),
    };
    if let Some(count) = args.common {
        let is_new = |own: &ShippedSpec| {
            let is_same = |ships: &ShippedSpec| ships.spec == own.spec && ships.archs.contains(&own.archs[0]);
            !shipped.iter().any(is_same)
        };
        let common = common::kernels(&args.arch, usize::from(count)).into_iter().filter(is_new);
        let common: Vec<ShippedSpec> = common.collect();
        shipped.extend(common);
    }
    let wanted = |arch: &&Arch| args.arch.is_empty() || args.arch.contains(arch);
    let jobs = shipped.iter().flat_map(|s| &s.archs).filter(wanted).count();
    if jobs == 0 {
        let place = args.specs.as_ref().map_or("specs/".to_owned(), |folder| folder.display().to_string());
        let message =
            format!("none of the {} specs in {place} is for the architectures asked for", shipped.len());
        return Err(InputError::Usage(message).into());
    }
    probe(&args.out)?;
    let compiler = args.compiler()?;
    if !args.emit.is_empty() {
        return emit::command(args, &shipped, &compiler);
    }
    let steps = Mutex::new(Steps::new(jobs));
    let built = ship::build(
        &shipped,
        &args.arch,
        &compiler,
        &Cache::open_default(),
        &Headers::current()?,
        &|spec, arch| {
            if let Ok(mut steps) = steps.lock() {
                steps.begin(format!("{spec} on {arch}"));
                steps.advance();
            }
        },
    )?;
    drop(steps);
    std::fs::create_dir_all(&args.out).map_err(|e| unwritable(&args.out, &e))?;
    let manifest = ship::write_bundle(&built, &compiler, &args.out)?;
    output::print(&text(&built)?)?;
    output::print(&format!(
        "{} by {} in {}\n",
        counted(manifest.kernels.len(), "kernel"),
        manifest.compiler,
        args.out.display()
    ))?;
    Ok(if built.failures.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// Checks, before minutes of compiling, that the bundle's folder can be made and written to. Folders that it
/// makes for this are removed again, so that nothing is left behind where nothing is compiled.
pub(super) fn probe(folder: &Path) -> Result<(), InputError> {
    let missing: Vec<&Path> =
        folder.ancestors().take_while(|own| !own.as_os_str().is_empty() && !own.exists()).collect();
    let made = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    let probed = made.map(drop).map_err(|e| unwritable(folder, &e));
    for own in missing {
        // Never one with files in it: another program may have begun to use the folder.
        let _ = std::fs::remove_dir(own);
    }
    probed
}

fn unwritable(folder: &Path, error: &std::io::Error) -> InputError {
    InputError::Target { path: folder.to_owned(), reason: error.to_string() }
}

/// Every `.ron` file in a folder and its subfolders.
fn read_folder(folder: &Path) -> anyhow::Result<Vec<ShippedSpec>> {
    if folder.is_file() {
        let message = format!("--specs {}: a file; name the folder of specs that it is in", folder.display());
        return Err(InputError::Usage(message).into());
    }
    let unreadable = |path: &Path, source| InputError::Read { path: path.to_owned(), source };
    let mut shipped = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(|e| unreadable(&folder, e))? {
            paths.push(entry.map_err(|e| unreadable(&folder, e))?.path());
        }
        paths.sort();
        for path in paths {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "ron") {
                let text = read_text(&path)?;
                let spec = ShippedSpec::from_ron(&text).with_context(|| path.display().to_string())?;
                shipped.push(spec);
            }
        }
    }
    Ok(shipped)
}

fn text(built: &ship::Built) -> anyhow::Result<String> {
    let mut table = output::table(&[
        "kernel",
        "arch",
        "regs planned",
        "regs",
        "spill B",
        "smem B",
        "blocks/SM planned",
        "blocks/SM",
        "warnings",
        "cubin B",
    ]);
    for row in &built.rows {
        let spills = row.report.spill_stores + row.report.spill_loads;
        table.add_row([
            row.name.clone(),
            row.arch.to_string(),
            format!("{} of {}", row.planned_registers, row.register_limit),
            row.report.registers.to_string(),
            spills.to_string(),
            row.smem.to_string(),
            row.planned_blocks.to_string(),
            row.actual_blocks.to_string(),
            row.report.warnings.len().to_string(),
            row.cubin_bytes.to_string(),
        ]);
    }
    let mut text = output::table_text(&table);
    for failure in &built.failures {
        writeln!(text, "FAILED {} on {}: {}", failure.name, failure.arch, failure.reason)?;
    }
    Ok(text)
}
