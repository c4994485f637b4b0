//! Kernels that a compiler is known to refuse though the account has room for them: they spill, wgmma is
//! serialised or setmaxnreg ignored. ptxas allocates registers after its own scheduling, and near the limit
//! no count of live values predicts which.
//!
//! A set for one compiler ships with the program, written by `fa build --best N --refusals FILE` from what it
//! made of the planner's kernels. What another compiler refuses is found when it compiles, and is remembered
//! in the cache of kernels under the compiler's version, flags and sources.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::str::{FromStr, Split};
use std::sync::OnceLock;

use fa_core::{Arch, Dtype, KernelSpec};

/// The compiler of the set that ships.
pub const COMPILER: &str = "NVRTC 13.0";

/// The set that ships.
pub const SHIPPED: &str = include_str!("refusals/nvrtc-13.0.txt");

/// Parameters by which refusals are found: every refusal names them.
pub const KEYS: [&str; 4] = ["head_dim", "head_dim_v", "tile_m", "tile_n"];

/// The parameter that says which codes K and V are: `e4m3` (`e5m2` as well), `int8`, `int4`, or [`NO_CODES`].
pub const KV_DTYPE: &str = "kv_dtype";

/// The value of [`KV_DTYPE`] where K and V have Q's type.
pub const NO_CODES: &str = "same";

/// The parameters of a kernel by which it is told from others, with their values as refusals have them: those
/// of its spec, and [`KV_DTYPE`].
pub fn params_of(spec: &KernelSpec) -> Vec<(&'static str, String)> {
    // Codes of e5m2 are converted as those of e4m3.
    let kv = if spec.types.kv == Dtype::E5m2 { Dtype::E4m3 } else { spec.types.kv };
    let kv = if spec.reads_codes() { kv.to_string() } else { NO_CODES.to_owned() };
    let own = spec.params().into_iter().map(|param| (param.name, param.value.to_string()));
    own.chain([(KV_DTYPE, kv)]).collect()
}

/// Kernels that are refused: those whose parameters have one of these values each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The architecture that they are compiled for.
    pub arch: Arch,
    /// The kernel's name, as in `sm90_fwd`.
    pub kernel: String,
    /// Parameters by name, and values as a spec's text has them; the others may have any. Those of [`KEYS`]
    /// come first.
    pub params: Vec<(String, Vec<String>)>,
}

/// `sm90 sm90_fwd head_dim=128 head_dim_v=128 tile_m=128 tile_n=144|192 mask=full`.
impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.arch, self.kernel)?;
        self.params.iter().try_for_each(|(name, values)| write!(f, " {name}={}", values.join("|")))
    }
}

impl FromStr for Refusal {
    type Err = String;

    fn from_str(line: &str) -> Result<Refusal, String> {
        let Line { arch, kernel, params } = Line::of(line)?;
        let params = params.map(|word| {
            let (name, values) =
                word.split_once('=').ok_or_else(|| format!("'{line}': '{word}' has no ="))?;
            Ok((name.to_owned(), values.split('|').map(str::to_owned).collect()))
        });
        let params = params.collect::<Result<Vec<(String, Vec<String>)>, String>>()?;
        if !params.iter().map(|(name, _)| name.as_str()).take(KEYS.len()).eq(KEYS) {
            return Err(format!("'{line}' does not begin with {}", KEYS.join(", ")));
        }
        Ok(Refusal { arch, kernel: kernel.to_owned(), params })
    }
}

/// A refusal as text, its parameters not yet read.
struct Line<'a> {
    arch: Arch,
    kernel: &'a str,
    params: Split<'a, char>,
}

impl<'a> Line<'a> {
    fn of(line: &'a str) -> Result<Line<'a>, String> {
        let mut words = line.split(' ');
        let (Some(arch), Some(kernel)) = (words.next(), words.next()) else {
            return Err(format!("'{line}' is not `ARCH KERNEL PARAMETER=VALUE ..`"));
        };
        let arch = arch.parse().map_err(|error| format!("'{line}': {error}"))?;
        Ok(Line { arch, kernel, params: words })
    }

    /// Names, and values with `|` between them.
    fn params(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.params.filter_map(|word| word.split_once('='))
    }
}

/// Reads a set: a refusal on each line, and comments.
///
/// # Errors
/// The first line that is none.
pub fn read(text: &str) -> Result<Vec<Refusal>, String> {
    lines(text).map(str::parse).collect()
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// The values of [`KEYS`].
type Key = [u32; KEYS.len()];

/// Refusals by what each names. They are kept as text, of which a search reads the lines of its key: reading
/// all takes ten times as long as a process needs to plan its first kernel.
#[derive(Debug, Default)]
pub struct Refusals {
    lines: Vec<Cow<'static, str>>,
    found: HashMap<(Arch, Key), Vec<usize>>,
}

impl Refusals {
    /// That of a list.
    pub fn of(list: &[Refusal]) -> Refusals {
        Refusals::of_lines(list.iter().map(|refusal| refusal.to_string().into()))
    }

    fn of_lines(lines: impl Iterator<Item = Cow<'static, str>>) -> Refusals {
        let mut refusals = Refusals { lines: lines.collect(), ..Refusals::default() };
        for (number, line) in refusals.lines.iter().enumerate() {
            let Ok(line) = Line::of(line) else { continue };
            let arch = line.arch;
            for key in keys(line.params()) {
                refusals.found.entry((arch, key)).or_default().push(number);
            }
        }
        refusals
    }

    /// The set that ships.
    pub fn shipped() -> &'static Refusals {
        static REFUSALS: OnceLock<Refusals> = OnceLock::new();
        // A test reads every line.
        REFUSALS.get_or_init(|| Refusals::of_lines(lines(SHIPPED).map(Cow::Borrowed)))
    }

    /// Whether the kernel of `spec` is refused on `arch`.
    pub fn has(&self, spec: &KernelSpec, arch: Arch) -> bool {
        let (tile_m, tile_n) = spec.tile();
        let Some(numbers) = self.found.get(&(arch, [spec.head_dim, spec.head_dim_v, tile_m, tile_n])) else {
            return false;
        };
        let (name, own) = (spec.kernel.name(), params_of(spec));
        let covers = |(param, values): (&str, &str)| {
            own.iter().any(|(own, value)| *own == param && values.split('|').any(|one| one == value))
        };
        let mut lines = numbers.iter().filter_map(|&number| Line::of(&self.lines[number]).ok());
        lines.any(|line| line.kernel == name && line.params().skip(KEYS.len()).all(covers))
    }
}

/// Every combination of values of [`KEYS`], the first of the parameters.
fn keys<'a>(params: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Key> {
    let mut keys = vec![[0; KEYS.len()]];
    for (at, (_, values)) in params.take(KEYS.len()).enumerate() {
        let with = |key: &Key| {
            let key = *key;
            values.split('|').filter_map(move |value| {
                let mut key = key;
                key[at] = value.parse().ok()?;
                Some(key)
            })
        };
        keys = keys.iter().flat_map(with).collect();
    }
    keys
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fa_core::spec::Scheduler;
    use fa_core::{Alibi, Family, Kernel, Mask, MaskKind, Problem, ScoreMod, Sm90Fwd};

    use super::*;
    use crate::account::Reason;
    use crate::plan::{PlanOptions, explore};

    #[test]
    fn every_line_that_ships_is_read_and_names_a_kernel_with_such_parameters() {
        let all = read(SHIPPED).expect("a set");
        assert!(all.len() > 1000, "{}", all.len());
        let lines: BTreeSet<String> = all.iter().map(ToString::to_string).collect();
        assert_eq!(lines.len(), all.len(), "none is there twice");
        assert!(lines.iter().eq(SHIPPED.lines().filter(|line| !line.starts_with('#'))), "in order");
        for refusal in &all {
            let of_name = |kernel: &Kernel| kernel.name() == refusal.kernel;
            let kernel = Kernel::defaults().into_iter().find(of_name).expect("its name is a kernel's");
            let problem = Problem::square(1, 64, 1, 64, Mask::FULL, Dtype::Bf16);
            let params = params_of(&KernelSpec::for_problem(&problem, [64, 64], kernel));
            for (name, values) in &refusal.params {
                assert!(params.iter().any(|(own, _)| own == name), "{refusal}");
                assert!(!values.is_empty() && !values.contains(&String::new()), "{refusal}");
            }
            let found = Refusals::of(std::slice::from_ref(refusal)).found;
            assert!(found.keys().all(|(arch, _)| *arch == refusal.arch) && !found.is_empty(), "{refusal}");
        }
    }

    /// A line without a type of K and V is of all; one with it is of those codes alone.
    #[test]
    fn codes_are_told_from_what_they_stand_for() {
        let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
        let of = |kv| {
            let types = fa_core::Types::same(Dtype::Bf16).with_kv(kv);
            let kernel = Sm90Fwd { tile_m: 128, tile_n: 96, num_wg: 2, ..Sm90Fwd::default() };
            KernelSpec::for_problem(&problem.with_types(types), [128, 128], kernel)
        };
        let line = "sm90 sm90_fwd head_dim=128 head_dim_v=128 tile_m=128 tile_n=96";
        for (more, covered) in [
            ("", [true; 3]),
            (" kv_dtype=e4m3", [false, true, false]),
            (" kv_dtype=e4m3|int8", [false, true, true]),
            (" kv_dtype=same", [true, false, false]),
        ] {
            let refusals = Refusals::of(&[format!("{line}{more}").parse().expect("a refusal")]);
            let has = [Dtype::Bf16, Dtype::E4m3, Dtype::Int8].map(|kv| refusals.has(&of(kv), Arch::Sm90));
            assert_eq!(has, covered, "{more}");
        }
    }

    #[test]
    fn lines_that_are_no_refusals_are_named() {
        for (line, part) in [
            ("sm90", "is not `ARCH KERNEL"),
            ("sm7 sm90_fwd head_dim=64", "sm7"),
            ("sm90 sm90_fwd head_dim", "has no ="),
            ("sm90 sm90_fwd tile_m=64 head_dim=64", "does not begin with head_dim, head_dim_v"),
        ] {
            let error = line.parse::<Refusal>().expect_err(line);
            assert!(error.contains(part), "{error}");
        }
    }

    /// Neighbours as compiled: the first tile spills, the second does not, for any type and scheduler.
    #[test]
    fn wide_tiles_spill_and_their_neighbours_do_not() {
        let has = |num_wg: u32, tile_n: u32, head_dim: usize, mask: Mask, dtype, scheduler| {
            let kernel = Sm90Fwd {
                tile_m: 64 * num_wg,
                tile_n,
                num_wg,
                pv_is_rs: true,
                overlap_wg: true,
                scheduler,
                ..Sm90Fwd::default()
            };
            let problem = Problem::square(2, 4096, 16, head_dim, mask, dtype);
            let spec = KernelSpec::for_problem(&problem, [head_dim as u32; 2], kernel);
            assert_eq!(spec.mask, MaskKind::of(&mask));
            Refusals::shipped().has(&spec, Arch::Sm90)
        };
        for (num_wg, head_dim, [spills, fits], mask) in [
            (1, 128, [160, 144], Mask::CAUSAL),
            (2, 64, [176, 160], Mask::FULL),
            (2, 128, [144, 160], Mask::FULL),
            (2, 128, [160, 144], Mask::CAUSAL),
            (3, 64, [112, 80], Mask::CAUSAL),
        ] {
            for (dtype, scheduler) in [(Dtype::Bf16, Scheduler::Dynamic), (Dtype::F16, Scheduler::Static)] {
                let of = |tile_n| has(num_wg, tile_n, head_dim, mask, dtype, scheduler);
                assert!(of(spills) && !of(fits), "{num_wg} warpgroups, {head_dim}: {spills}, {fits}");
            }
        }
    }

    #[test]
    fn a_soft_cap_beside_alibi_is_not_given_tiles_that_spill() {
        let square = Problem::square(64, 4096, 128, 88, Mask::window(u32::MAX, 3), Dtype::Bf16);
        let score = ScoreMod::softcap(30.0).with_alibi(Some(Alibi::PerHead));
        let options = PlanOptions { family: Some(Family::Sm80), ..PlanOptions::default() };
        for mask in [Mask::FULL, Mask::CAUSAL, square.mask] {
            let problem = square.with_mask(mask).with_score(score);
            let set = explore(&problem, Arch::Sm90, &options).expect("candidates");
            let is_wide = |spec: &KernelSpec| spec.tile() == (128, 64) && spec.threads() == 128;
            assert!(set.plans.iter().all(|plan| !is_wide(&plan.spec)), "{mask}");
            let why = set.rejected.iter().find(|rejected| is_wide(&rejected.spec));
            let why = why.map(|rejected| &rejected.reason);
            assert!(matches!(why, Some(Reason::Spills { .. })), "{mask}: {why:?}");
            assert!(why.expect("refused").to_string().ends_with("but it spills in NVRTC 13.0"));
        }
    }
}
