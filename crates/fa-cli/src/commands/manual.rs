//! `fa completions` and `fa man`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Command;
use fa_attn::atomic_file::AtomicFile;

use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use clap::Args;

/// `fa completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa completions bash > ~/.local/share/bash-completion/completions/fa")]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// `fa man`.
#[derive(Debug, Args)]
#[command(after_help = MAN_EXAMPLES)]
pub(crate) struct ManArgs {
    /// A command, such as plan or dist check
    pub command: Vec<String>,
    /// Write every page, fa.1, fa-run.1, fa-dist-plan.1, .., into this folder, which is made if it is missing
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub out: Option<PathBuf>,
}

const MAN_EXAMPLES: &str = "\
Examples:
  fa man | man -l -
  fa man plan > fa-plan.1
  fa man --out ~/.local/share/man/man1";

/// Prints a completion script.
///
/// # Errors
/// When standard output is closed.
pub(crate) fn completions(args: &CompletionsArgs, mut program: Command) -> anyhow::Result<Verdict> {
    let mut script = Vec::new();
    // Into memory first: the generator panics when it cannot write.
    clap_complete::generate(args.shell, &mut program, "fa", &mut script);
    output::print(&String::from_utf8(script)?)?;
    Ok(Verdict::Good)
}

/// Prints a manual page, or writes all of them.
///
/// # Errors
/// [`InputError::Usage`] for a command that does not exist, [`InputError::Target`] for a folder that cannot
/// be written.
pub(crate) fn man(args: &ManArgs, mut program: Command) -> anyhow::Result<Verdict> {
    program.build();
    if let Some(folder) = &args.out {
        return write_pages(folder, &program);
    }
    let mut command = &program;
    for name in &args.command {
        let names: Vec<&str> = shown(command).map(Command::get_name).collect();
        command = shown(command).find(|command| command.get_name() == name).ok_or_else(|| {
            InputError::Usage(format!("there is no command '{name}': use one of {}", names.join(", ")))
        })?;
    }
    output::print(&String::from_utf8(page_of(command.clone())?)?)?;
    Ok(Verdict::Good)
}

/// The commands of a command that its help lists.
fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

/// A command and those below it, but for what `help` repeats.
fn with_commands(command: &Command) -> Vec<&Command> {
    let below = shown(command).filter(|command| command.get_name() != "help");
    std::iter::once(command).chain(below.flat_map(with_commands)).collect()
}

fn page_of(command: Command) -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    // A command has no version of its own, and its page would name none.
    let man = clap_mangen::Man::new(command).source(concat!("fa ", env!("CARGO_PKG_VERSION")));
    man.render(&mut page)?;
    Ok(page)
}

/// Writes the pages of the program and of its commands, and says which.
fn write_pages(folder: &Path, program: &Command) -> anyhow::Result<Verdict> {
    let refuse = |error: std::io::Error| InputError::Target {
        path: folder.to_owned(),
        reason: format!("the folder cannot be made: {error}"),
    };
    std::fs::create_dir_all(folder).map_err(refuse)?;
    let mut written = String::new();
    for command in with_commands(program) {
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        let path = folder.join(format!("{name}.1"));
        let page = page_of(command.clone()).with_context(|| format!("the page of {name}"))?;
        let target = AtomicFile::probe(&path).map_err(InputError::from)?;
        target.write(|writer| writer.write_all(&page)).map_err(InputError::from)?;
        written += &format!("{}\n", path.display());
    }
    output::print(&written)?;
    Ok(Verdict::Good)
}
