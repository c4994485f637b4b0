//! Flags of `fa validate`.

use std::path::PathBuf;

use clap::Args;
use fa_core::quantize::Codes;
use fa_core::{DescaleForm, Dtype, Family, Pass};
use fa_lab::configs::HEAD_DIMS;
use fa_lab::grid::{Extent, check_group};
use fa_lab::shape::{HeadDim, whole};
use fa_lab::spec_file::read_spec_of;
use fa_lab::validate::{Cases, Kind, Options};

use crate::flags::{self, HeadersArgs, parse_codes, parse_descale, pass_of};

/// Flags that validate a grid or a kernel. Flags of other validations name these as well: clap does not
/// require a flag that conflicts with another.
const OF_GRID: [&str; 11] = [
    "quick",
    "full",
    "filter",
    "groups",
    "dtype",
    "kv_dtype",
    "kv_descale",
    "latent",
    "spec",
    "repeat",
    "sanitize",
];

/// Validations whose problems are drawn, or listed by head dims.
const OTHERS: [&str; 3] = ["soak", "sanitize", "all_configs"];

/// `fa validate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ValidateArgs {
    #[command(flatten)]
    pub headers: HeadersArgs,
    /// Kernels to validate [default: the fastest that the GPU runs]
    #[arg(long, alias = "arch", conflicts_with = "spec", value_parser = flags::family())]
    pub family: Option<Family>,
    /// Which pass to validate; gradients are computed after a forward
    #[arg(long, value_parser = flags::one_pass(), default_value = "fwd")]
    pub mode: Pass,
    /// Run a part of the grid, in less than a minute (the default)
    #[arg(long, conflicts_with_all = ["spec", "soak", "sanitize", "all_configs"])]
    pub quick: bool,
    /// Run the whole grid
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,
    /// Only cases whose names contain this, as in 'windows/' or 'hd256'
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Only cases of these groups, as in packed,used,paged,split (the first parts of names)
    #[arg(long = "group", value_name = "GROUP,..", value_delimiter = ',', value_parser = check_group)]
    #[arg(conflicts_with_all = ["spec", "soak", "all_configs"])]
    pub groups: Vec<String>,
    /// Only cases with a Q of this type: bf16, f16, or e4m3 of Q, K and V
    #[arg(long, value_name = "DTYPE", conflicts_with_all = OTHERS)]
    pub dtype: Option<Dtype>,
    /// Only cases with K and V in codes: e4m3, int8, int4
    #[arg(long, value_name = "TYPE", value_parser = parse_codes, conflicts_with_all = OTHERS)]
    pub kv_dtype: Option<Codes>,
    /// Only cases with descales of K or V in this form: none, head, sequence_head, token_head
    #[arg(long, value_name = "FORM", value_parser = parse_descale, conflicts_with_all = OTHERS)]
    pub kv_descale: Option<DescaleForm>,
    /// Only cases whose keys begin with their values (MLA)
    #[arg(long, conflicts_with_all = OTHERS)]
    pub latent: bool,
    /// Validate the one kernel in this file (RON, or JSON as in the kernel cache)
    #[arg(long, value_name = "FILE")]
    pub spec: Option<PathBuf>,
    /// Runs of each repeated case, which must give the same bits [default: 100, with --full 1000]
    #[arg(long, value_name = "N", conflicts_with_all = ["soak", "sanitize", "all_configs"])]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub repeat: Option<u32>,
    /// Run random problems for this long instead of the grid
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["full", "spec", "filter"],
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub soak: Option<u32>,
    /// Seed of the random problems
    #[arg(long, default_value_t = 1, requires = "soak", conflicts_with_all = OF_GRID)]
    #[arg(conflicts_with_all = ["all_configs", "deterministic", "headdim"], value_parser = whole::<u64>)]
    pub seed: u64,
    /// Run a small part of the grid under compute-sanitizer: memcheck, racecheck, initcheck, synccheck
    #[arg(long, conflicts_with_all = ["soak", "full", "spec", "all_configs", "watchdog"])]
    pub sanitize: bool,
    /// Compile, validate and measure every configuration that the planner lists, and compare with its
    /// predictions
    #[arg(long, conflicts_with_all = ["soak", "spec", "full", "filter"])]
    pub all_configs: bool,
    /// Only backward configurations whose gradients have the same bits in every run
    #[arg(long, requires = "all_configs", conflicts_with_all = OF_GRID)]
    #[arg(conflicts_with = "soak")]
    pub deterministic: bool,
    /// Head dims of --all-configs, each D or D-DV
    #[arg(
        long,
        value_name = "D[-DV],..",
        value_delimiter = ',',
        requires = "all_configs",
        conflicts_with_all = OF_GRID,
        conflicts_with = "soak",
        default_value = HEAD_DIMS
    )]
    pub headdim: Vec<HeadDim>,
    /// Write a record of --all-configs to the results folder
    #[arg(long, requires = "all_configs", conflicts_with_all = OF_GRID)]
    #[arg(conflicts_with_all = ["soak", "seed", "headers"])]
    pub record: bool,
    /// Folder of the records
    #[arg(long, value_name = "DIR", default_value = "docs/results", requires = "record")]
    #[arg(conflicts_with_all = OF_GRID, conflicts_with_all = ["soak", "seed"])]
    pub results: PathBuf,
    /// Time after which a case on the GPU counts as hung: it is reported, and the others go on
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub watchdog: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  fa validate                                   numerics, strides, streams, graphs: below a minute
  fa validate --full                            all of it
  fa validate --family sm80 --filter windows/   the kernels for every GPU, one group of cases
  fa validate --spec kernel.ron                 one kernel
  fa validate --mode bwd --family sm90          gradients
  fa validate --group packed,used,paged,split   packed batches, caches, pages, keys split over CTAs
  fa validate --kv-dtype e4m3                   caches of codes: decode, splits, prefill, appends
  fa validate --dtype e4m3 --full               Q, K and V in e4m3
  fa validate --group known --mode bwd          problems on which other libraries failed
  fa validate --soak 600 --seed 7               random problems for ten minutes
  fa validate --all-configs                     predicted and measured rates of every configuration

Each case fills its outputs with NaN, runs on the GPU and is compared with an f64 computation of the same \
(rounded) inputs: max|out - ref| <= 2 max|low - ref| + one rounding step, where low is the same formula in \
the kernel's precision; LSEs within 1e-3, of Q and K in e4m3 and 2^-10 of the largest score. Of large \
problems, rows from everywhere are compared, and all must be written.
Memory that is no sequence's (gaps, rows behind the last sequence, unused pages) holds NaN, unused entries \
of page tables hold garbage, and nothing may be written there.
A case that hangs or crashes is reported as such and the others go on. Exit code 1 when any case fails.";

impl ValidateArgs {
    /// What is validated.
    ///
    /// # Errors
    /// A deterministic forward, and a spec that cannot be read or is for the other pass.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        let pass = pass_of(self.mode, self.deterministic)?;
        let (extent, repeats) = if self.full { (Extent::Full, 1000) } else { (Extent::Quick, 100) };
        let repeat = self.repeat.unwrap_or(repeats) as usize;
        let cases = match (&self.spec, self.soak) {
            _ if self.sanitize => Cases::Sanitize,
            _ if self.all_configs => Cases::Configs { head_dims: self.headdim.clone() },
            (_, Some(seconds)) => Cases::Soak { seconds, seed: self.seed },
            (Some(path), None) => Cases::Spec { spec: Box::new(read_spec_of(path, self.mode)?), repeat },
            (None, None) => Cases::Grid { extent, repeat },
        };
        let family = match &cases {
            Cases::Spec { spec, .. } => Some(spec.kernel.family()),
            Cases::Grid { .. }
            | Cases::Units { .. }
            | Cases::Soak { .. }
            | Cases::Sanitize
            | Cases::Configs { .. } => self.family,
        };
        let kind = Kind {
            dtype: self.dtype,
            kv_dtype: self.kv_dtype.map(Codes::dtype),
            kv_descale: self.kv_descale,
            latent: self.latent,
        };
        let (filter, watchdog) = (self.filter.clone(), self.watchdog);
        Ok(Options { family, pass, cases, groups: self.groups.clone(), kind, filter, watchdog })
    }

    /// What the names of records say about the pass.
    pub(crate) fn suffix(&self) -> &'static str {
        match (self.mode, self.deterministic) {
            (Pass::Forward, _) => "",
            (Pass::Backward { .. }, false) => "-bwd",
            (Pass::Backward { .. }, true) => "-bwd-deterministic",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn a_kernel_of_a_file_is_validated_as_one_of_its_family() {
        let spec = concat!(env!("CARGO_MANIFEST_DIR"), "/../fa-kernels/specs/sm80/hd64-causal-bf16.ron");
        let cli = Cli::try_parse_from(["fa", "validate", "--spec", spec]).unwrap();
        let Command::Validate(args) = cli.command else { panic!("another command") };
        assert_eq!(args.options().unwrap().family, Some(Family::Sm80));
    }
}
