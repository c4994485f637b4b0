//! Flags of `fa prove`.

use std::path::PathBuf;

use clap::Args;
use fa_lab::ledger::Tier;
use fa_lab::shape::whole;

use crate::term::failure::InputError;

/// `fa prove`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ProveArgs {
    /// How to prove what has changed: emulated and suite run here, the others on a GPU [default: nothing
    /// runs, and the ledger follows sources whose code is the same]
    #[arg(long, value_parser = tier)]
    pub tier: Option<Tier>,
    /// Write nothing and run nothing: what holds, what has changed, what --tier would run
    #[arg(long)]
    pub check: bool,
    /// Only units whose names contain one of these, as in sm90/hd64,varlen
    #[arg(long, value_name = "TEXT,..", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Prove again what is proven
    #[arg(long, requires = "tier", conflicts_with_all = ["check", "waive"])]
    pub again: bool,
    /// Time for the run; what is left then is left for the next call
    #[arg(long, value_name = "SECONDS", requires = "tier", conflicts_with_all = ["check", "waive"])]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub budget: Option<u64>,
    /// File of the cases that a GPU has judged, from which a stopped run goes on [default:
    /// target/prove.jsonl]
    #[arg(long, value_name = "FILE", requires = "tier", conflicts_with_all = ["check", "waive"])]
    pub state: Option<PathBuf>,
    /// Seconds of random problems for each kernel, of the tier soak [default: 300]
    #[arg(long, value_name = "N", requires = "tier", conflicts_with_all = ["check", "waive"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: Option<u32>,
    /// Seed of the tier soak's problems [default: 1]
    #[arg(long, value_name = "N", requires = "tier", conflicts_with_all = ["check", "waive"])]
    #[arg(value_parser = whole::<u64>)]
    pub seed: Option<u64>,
    /// Time after which a case on the GPU counts as hung [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "tier", conflicts_with_all = ["check", "waive"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub watchdog: Option<u32>,
    /// Threads of the emulation [default: all cores]
    #[arg(long, value_name = "N", requires = "tier", conflicts_with_all = ["check", "waive"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Let what no GPU has judged stand as it is, for this reason
    #[arg(long, value_name = "REASON", conflicts_with_all = ["tier", "check"])]
    pub waive: Option<String>,
    /// Folder of the ledger, proof.ron
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    pub results: PathBuf,
    /// Folder of compiled kernels [default: as FA_CACHE_DIR]
    #[arg(long, value_name = "DIR")]
    pub kernels: Option<PathBuf>,
    /// With --check: device sources instead of the built-in ones, laid out as crates/fa-kernels/cuda
    #[arg(long, value_name = "DIR", requires = "check", conflicts_with_all = ["waive", "again", "budget"])]
    pub headers: Option<PathBuf>,
    /// With --check: print one JSON object, with the hashes of every unit
    #[arg(long, requires = "check", conflicts_with_all = ["waive", "again", "budget"])]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  fa prove --check                           what holds; CI runs it
  fa prove                                   sources whose code is the same: the ledger follows
  fa prove --tier emulated                   changed code, by emulation
  fa prove --tier quick                      changed code, on this GPU, in a minute
  fa prove --tier grid --budget 580          all of it, as much as ten minutes hold; the next call goes on
  fa prove --tier soak --seconds 600         random problems, ten minutes a kernel
  fa prove --check --tier quick              what a GPU would be asked
  fa prove --waive 'no such GPU' --only sm100

A proof is of the code that a GPU executes, of each entry of a kernel in each of its forms, and of what the \
library launches. Comments, names and files do not count: sources with other tokens are compiled by NVRTC, \
and where the code is the same the proof holds.";

fn tier(text: &str) -> Result<Tier, String> {
    let runs = |tier: &&Tier| **tier != Tier::Waived;
    let found = Tier::ALL.iter().filter(runs).find(|tier| tier.name() == text);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = Tier::ALL.iter().filter(runs).map(|tier| tier.name()).collect();
        format!("there is no tier '{text}': use {}", names.join(", "))
    })
}

impl ProveArgs {
    /// Flags that say nothing to the tier that was asked for.
    pub(super) fn check_flags(&self) -> Result<(), InputError> {
        let usage = |message: String| Err(InputError::Usage(message));
        if self.waive.as_deref().is_some_and(|reason| reason.trim().is_empty()) {
            return usage("--waive: say why".to_owned());
        }
        let Some(tier) = self.tier else { return Ok(()) };
        let all_but_suite = [Tier::Emulated, Tier::Quick, Tier::Grid, Tier::Soak, Tier::Sanitized];
        let of_tiers = [
            ("--again", self.again, &[Tier::Emulated, Tier::Quick, Tier::Grid][..]),
            ("--threads", self.threads.is_some(), &[Tier::Emulated]),
            ("--state", self.state.is_some(), &[Tier::Quick, Tier::Grid]),
            ("--watchdog", self.watchdog.is_some(), &[Tier::Quick, Tier::Grid, Tier::Soak]),
            ("--budget", self.budget.is_some(), &all_but_suite),
            ("--seconds", self.seconds.is_some(), &[Tier::Soak]),
            ("--seed", self.seed.is_some(), &[Tier::Soak]),
        ];
        for (flag, is_given, tiers) in of_tiers {
            if is_given && !tiers.contains(&tier) {
                let names: Vec<&str> = tiers.iter().map(|tier| tier.name()).collect();
                return usage(format!("{flag} with --tier {tier}: it is for {}", names.join(", ")));
            }
        }
        Ok(())
    }

    /// Whether a unit is asked for.
    pub(super) fn takes(&self, key: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| key.contains(part.as_str()))
    }

    /// Threads of the emulation.
    pub(super) fn workers(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |count| count.get());
        self.threads.map_or_else(cores, usize::from)
    }
}
