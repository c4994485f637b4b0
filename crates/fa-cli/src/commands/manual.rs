//! `fa completions` and `fa man`.

use clap::Command;

use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use clap::Args;

/// `fa completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa completions bash > ~/.local/share/bash-completion/completions/fa")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// `fa man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa man | man -l -\n  fa man plan > fa-plan.1")]
pub struct ManArgs {
    /// A command, such as plan
    pub command: Option<String>,
}

/// Prints a completion script.
///
/// # Errors
/// When standard output is closed.
pub fn completions(args: &CompletionsArgs, mut program: Command) -> anyhow::Result<Verdict> {
    let mut script = Vec::new();
    // Into memory first: the generator panics when it cannot write.
    clap_complete::generate(args.shell, &mut program, "fa", &mut script);
    output::print(&String::from_utf8(script)?)?;
    Ok(Verdict::Good)
}

/// Prints a manual page.
///
/// # Errors
/// [`InputError::Usage`] for a command that does not exist.
pub fn man(args: &ManArgs, mut program: Command) -> anyhow::Result<Verdict> {
    program.build();
    let command = match &args.command {
        None => program,
        Some(name) => {
            let names: Vec<String> = program.get_subcommands().map(|c| c.get_name().to_owned()).collect();
            program.find_subcommand(name).cloned().ok_or_else(|| {
                InputError::Usage(format!("there is no command '{name}': use one of {}", names.join(", ")))
            })?
        }
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    output::print(&String::from_utf8(page)?)?;
    Ok(Verdict::Good)
}
