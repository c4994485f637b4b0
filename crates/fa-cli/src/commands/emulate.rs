//! `fa emulate`: kernels run on the host, without a GPU, and what is found in them.

mod args;
mod case;
mod grid;
mod mutations;
mod one;
mod random;
mod report;
mod sample;

use fa_emu::{Emulator, mutate};

pub(crate) use args::EmulateArgs;

use crate::term::destinations::target;
use crate::term::failure::{InputError, Verdict};
use crate::term::progress;

/// Runs the command.
///
/// # Errors
/// Bad input, and a machine that cannot emulate; findings are a verdict, not an error.
pub(crate) fn command(args: &EmulateArgs) -> anyhow::Result<Verdict> {
    if args.threads.is_some() && args.spec.is_some() && !args.mutate {
        let message = "--threads is for --sample, --random and --mutate: one kernel takes one thread";
        return Err(InputError::Usage(message.into()).into());
    }
    // Checked here: clap does not require a flag that conflicts with another.
    let of_random = [
        ("--log", args.log.is_some()),
        ("--from", args.from.is_some()),
        ("--kernels", !args.kernels.is_empty()),
    ];
    if let Some((flag, _)) = of_random.into_iter().find(|(_, given)| *given && args.random.is_none()) {
        return Err(InputError::Usage(format!("{flag} is for --random: give --random N too")).into());
    }
    // Flags that other commands have as well.
    let of_one = [
        ("--causal", args.mask.causal),
        ("--window", args.mask.window.is_some()),
        ("--query-offset", args.mask.query_offset != 0),
        ("--kv-dtype", args.kv.kv_dtype.is_some()),
        ("--kv-descale", args.kv.kv_descale.is_some()),
        ("--out-dtype", args.kv.out_dtype.is_some()),
    ];
    if let (true, None, Some((flag, _))) =
        (args.mutate, &args.spec, of_one.into_iter().find(|(_, given)| *given))
    {
        let message = format!("--mutate without SPEC has its own problems: name a SPEC, or leave out {flag}");
        return Err(InputError::Usage(message).into());
    }
    let page = args.report.as_deref().map(|path| target(path, args.spec.as_slice())).transpose()?;
    let emulator = progress::spinner("compiling the machine", Emulator::new)?;
    match &args.spec {
        _ if args.sample.is_some() => sample::sampled(args, &emulator),
        _ if args.random.is_some() => random::random(args, &emulator),
        None => mutations::mutations(args, &emulator, fa_emu::subjects::subjects()),
        Some(path) => {
            let (spec, arch) = case::read(args, path)?;
            if args.mutate {
                let case = case::case(args, &spec)?;
                let subject = mutate::Subject { spec, arch, case };
                return mutations::mutations(args, &emulator, vec![("the kernel", vec![subject])]);
            }
            if args.grid {
                grid::grid(args, &emulator, &spec, arch)
            } else {
                one::one(args, &emulator, &spec, arch, page.as_ref())
            }
        }
    }
}
