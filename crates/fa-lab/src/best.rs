//! The planner's best few kernels for every kind of problem, and what the compiler makes of them: no kernel
//! that it spills should be among them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fa_attn::atomic_file;
use fa_core::{
    Alibi, Arch, DescaleForm, Descales, Dtype, Family, KernelSpec, Lengths, Mask, Pass, Problem, ScoreMod,
    Side,
};
use fa_kernels::{CompileFailure, Compiler, Headers, Source, smem_bytes};
use fa_planner::account::Reason;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanOptions, PlanSet, explore};
use rayon::prelude::*;

use crate::error::{Error, Result, read_record};
use crate::grid::soak;

/// The number of best kernels of which none may spill.
pub const BEST: usize = 10;

/// A kind of problem, by an example, and the kernels for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    /// The problem.
    pub problem: Problem,
    /// The pass.
    pub pass: Pass,
    /// The kernels.
    pub family: Family,
    /// The architecture that they are compiled for.
    pub arch: Arch,
}

/// Families with the architectures for which theirs are compiled: what spills differs.
const KERNELS: [(Family, Arch); 3] =
    [(Family::Sm90, Arch::Sm90), (Family::Sm80, Arch::Sm80), (Family::Sm80, Arch::Sm90)];

const HEAD_DIMS: [(usize, usize); 10] = [
    (128, 128),
    (64, 64),
    (80, 80),
    (96, 96),
    (256, 256),
    (192, 128),
    (192, 192),
    (128, 64),
    (64, 128),
    (32, 32),
];

const MASKS: [Mask; 3] = [Mask::CAUSAL, Mask::FULL, Mask::causal_window(512)];

const PASSES: [Pass; 3] =
    [Pass::Forward, Pass::Backward { deterministic: false }, Pass::Backward { deterministic: true }];

/// Every kind of problem: passes, families, head dims, masks; short and long sequences of both types; lengths
/// on the device, pages, decoding; soft caps, slopes and sinks, each and some together; K and V in codes,
/// and Q as well.
pub fn kinds() -> Vec<Kind> {
    let mut kinds = Vec::new();
    for pass in PASSES {
        for (family, arch) in KERNELS {
            for (head_dim, head_dim_v) in HEAD_DIMS {
                for mask in MASKS {
                    let square = Problem::square(2, 8192, 32, head_dim, mask, Dtype::Bf16);
                    let long = square.with_head_dim_v(head_dim_v).with_heads_kv(8);
                    kinds.extend(of(&long, pass).into_iter().map(|problem| Kind {
                        problem,
                        pass,
                        family,
                        arch,
                    }));
                }
            }
        }
    }
    kinds
}

/// Kinds of `count` problems for each family and architecture, drawn at random as those that `fa validate
/// --soak` runs: forwards and gradients in turn, dense ones and others. The same `seed` draws the same.
pub fn drawn(count: usize, seed: u64) -> Vec<Kind> {
    let of = |(family, arch), turn: u64| {
        let draw = if turn.is_multiple_of(2) { soak::case } else { soak::gradients };
        let case = draw(seed, turn / 2, family);
        Kind { problem: case.problem, pass: case.pass, family, arch }
    };
    KERNELS.into_iter().flat_map(|kernels| (0..count as u64).map(move |turn| of(kernels, turn))).collect()
}

fn of(long: &Problem, pass: Pass) -> Vec<Problem> {
    let alike = |batch, q, k| long.with_lengths(Lengths::uniform(batch, q, k));
    let of_lengths = |q, k| long.with_lengths(Lengths::of(16, q, k));
    let of_score = |problem: &Problem, score| problem.with_score(score);
    let f16 = |problem: &Problem| problem.with_types(fa_core::Types::same(Dtype::F16));
    let alone = |problem: &Problem| problem.with_heads_kv(problem.heads_q);
    let [short, middle] = [alike(16, 1024, 1024), alike(4, 4096, 4096)];
    let packed = of_lengths(Side::packed(16_384, 2048), Side::packed(16_384, 2048));
    // An image model's windows, texts of a few hundred tokens, and documents, by tiles of other sizes.
    let [windows, texts, documents] = [(16_384, 64), (8192, 512), (65_536, 16_384)]
        .map(|(total, longest)| of_lengths(Side::packed(total, longest), Side::packed(total, longest)));
    let (capped, sunk) = (ScoreMod::softcap(30.0), ScoreMod::NONE.with_sinks(true));
    let sloped = ScoreMod::NONE.with_alibi(Some(Alibi::PerHead));
    let capped_and_sloped = capped.with_alibi(sloped.alibi);
    let mut all = vec![*long, short, middle, alone(&short), f16(long), f16(&short), packed, f16(&packed)];
    for score in [capped, sloped, sunk, capped_and_sloped] {
        all.extend([of_score(&middle, score), of_score(&packed, score)]);
    }
    all.extend([alone(&windows), texts, documents, alone(&documents), f16(&of_score(&middle, capped))]);
    if long.mask.left.is_some() {
        // Wide windows, whose tiles have more steps.
        let wide = |problem: &Problem| problem.with_mask(Mask::causal_window(2047));
        all.extend([wide(&middle), wide(long), wide(&alone(&middle))]);
    }
    if pass == Pass::Forward {
        let pages = |page: usize| Side::paged(page, 16 * 4096 / page, 4096);
        let prefill = |page| of_lengths(Side::packed(8192, 512), pages(page));
        let token = |page| of_lengths(Side::padded(1), pages(page));
        let decode = alike(16, 1, 8192);
        // A chunk of a prompt on one of several GPUs, which divides its keys.
        let chunk = alike(1, 512, 16_384).with_heads(8, 1);
        let paged_chunk =
            chunk.with_lengths(Lengths::of(1, Side::packed(512, 512), Side::paged(16, 1024, 16_384)));
        all.extend([prefill(64), prefill(1), token(16), token(1), decode, f16(&decode), chunk, paged_chunk]);
        all.extend([capped, sloped, sunk].map(|score| of_score(&prefill(16), score)));
        all.extend([capped, sloped, sunk].map(|score| of_score(&token(64), score)));
        let caches = [prefill(64), token(16), decode, *long, middle, packed];
        all.extend(caches.iter().flat_map(in_8_bits));
        // Other codes, another Q, and a soft cap: of one each, since all take long to compile.
        let [of_codes, fp8] = in_8_bits(&middle);
        let types = [(Dtype::Bf16, Dtype::Int8), (Dtype::F16, Dtype::E4m3)];
        let types = types.map(|(q, kv)| fa_core::Types::same(q).with_kv(kv));
        all.extend(types.map(|types| of_codes.with_types(types)));
        all.extend([of_codes, fp8].map(|problem| of_score(&problem, capped)));
    }
    all
}

/// `problem` with K and V in e4m3, and with Q as well.
fn in_8_bits(problem: &Problem) -> [Problem; 2] {
    use fa_core::Types;
    let codes = problem.with_types(Types::same(Dtype::Bf16).with_kv(Dtype::E4m3));
    [
        codes.with_descales(Descales::both(DescaleForm::Head)),
        problem.with_types(Types::fp8(Dtype::Bf16)).with_descales(Descales::all(DescaleForm::Head)),
    ]
}

impl Kind {
    /// All that the planner tries for it; `None` for kernels that do not compute it.
    pub fn explored(&self) -> Option<PlanSet> {
        let options = PlanOptions::default().with_family(Some(self.family)).with_pass(self.pass);
        explore(&self.problem, self.arch, &options).ok()
    }
}

/// Step between the kinds that are visited: a prime, so that the first few cover all passes and forms.
const STRIDE: usize = 1009;

/// The best `count` kernels of every kind, each once: all first choices, then all second ones, and so on;
/// `and_refused` those that would be among them if they were not known to be refused as well.
pub fn best(kinds: &[Kind], count: usize, and_refused: bool) -> Vec<(Arch, KernelSpec)> {
    let of_kind = |kind: &Kind| -> Vec<(Arch, KernelSpec)> {
        let Some(set) = kind.explored() else { return Vec::new() };
        let last = set.plans.get(count - 1).map_or(f64::INFINITY, |plan| plan.cost.seconds);
        let constants = CostConstants::of(kind.arch);
        let refused = set.rejected.into_iter().filter(|own| matches!(own.reason, Reason::Spills { .. }));
        let ahead = refused
            .filter(|own| {
                and_refused && predict(&kind.problem, &own.spec, kind.arch, &constants).seconds <= last
            })
            .map(|own| own.spec);
        let plans = set.plans.into_iter().take(count).map(|plan| plan.spec);
        plans.chain(ahead).map(|spec| (kind.arch, spec)).collect()
    };
    let strided = (0..kinds.len()).map(|at| &kinds[at * STRIDE % kinds.len()]);
    let kinds: Vec<&Kind> = strided.collect();
    let of_kinds: Vec<Vec<(Arch, KernelSpec)>> = kinds.par_iter().map(|kind| of_kind(kind)).collect();
    let mut seen = BTreeSet::new();
    let most = of_kinds.iter().map(Vec::len).max().unwrap_or(0);
    let ranks = (0..most).flat_map(|rank| of_kinds.iter().filter_map(move |own| own.get(rank)));
    ranks.filter(|(arch, spec)| seen.insert(name(*arch, spec))).cloned().collect()
}

/// A kernel for an architecture as lines have it: `sm90 sm90_bwd-bf16-..`.
pub fn name(arch: Arch, spec: &KernelSpec) -> String {
    format!("{arch} {spec}")
}

/// What the compiler said of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// [`name`] of the kernel.
    pub kernel: String,
    /// What the compiler has against it.
    pub verdict: Verdict,
}

/// What the compiler has against a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Clean,
    /// Bytes of spills, stores and loads.
    Spills(u32),
    /// Another fault, as ptxas numbers it, or the compiler's error.
    Fault(String),
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.verdict {
            Verdict::Clean => write!(f, "0 {}", self.kernel),
            Verdict::Spills(bytes) => write!(f, "{bytes} {}", self.kernel),
            Verdict::Fault(fault) => write!(f, "{fault} {}", self.kernel),
        }
    }
}

impl FromStr for Said {
    type Err = String;

    fn from_str(line: &str) -> Result<Said, String> {
        let (verdict, kernel) =
            line.split_once(' ').ok_or_else(|| format!("'{line}' is not `VERDICT ARCH KERNEL`"))?;
        let verdict = match verdict.parse() {
            Ok(0) => Verdict::Clean,
            Ok(bytes) => Verdict::Spills(bytes),
            Err(_) => Verdict::Fault(verdict.to_owned()),
        };
        Ok(Said { kernel: kernel.to_owned(), verdict })
    }
}

/// The file of what `compiler` has against kernels, below the folder of results:
/// `configs/refused-nvrtc-13.0.txt`.
///
/// # Errors
/// Those of the compiler.
pub fn file(results: &Path, compiler: &Compiler) -> Result<PathBuf> {
    let version = compiler.version()?.replace(' ', "-");
    Ok(results.join("configs").join(format!("refused-{version}.txt")))
}

/// Reads a file of a line for each kernel, and comments; empty where there is no file.
///
/// # Errors
/// A file that cannot be read, or an invalid line.
pub fn read(path: &Path) -> Result<Vec<Said>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = read_record(path)?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let said = lines.map(|line| line.parse().map_err(|e| Error::Request(format!("{}: {e}", path.display()))));
    said.collect()
}

/// Writes the kernels that are not clean to a file of results, sorted, with those that it has already.
///
/// # Errors
/// A file that cannot be read or written.
pub fn keep(path: &Path, said: &[Said]) -> Result<()> {
    let refused = said.iter().filter(|own| own.verdict != Verdict::Clean).cloned();
    let known = read(path)?.into_iter().chain(refused);
    let of: BTreeMap<String, Said> = known.map(|own| (own.kernel.clone(), own)).collect();
    let head = "# What the compiler has against kernels among the planner's best: bytes of spills or a \
                fault, architecture, kernel. By `fa build --best`.\n";
    let text: String = of.into_values().map(|own| format!("{own}\n")).collect();
    atomic_file::write(path, format!("{head}{text}").as_bytes())?;
    Ok(())
}

/// Compiles a kernel without storing it.
///
/// # Errors
/// Those of the compiler itself; what it says against the kernel is a verdict.
pub fn compile(compiler: &Compiler, (arch, spec): &(Arch, KernelSpec), headers: &Headers) -> Result<Said> {
    let source = Source::new(spec, *arch, Some(smem_bytes(spec)), headers)?;
    let verdict = match compiler.compile(&source) {
        Ok(compiled) => {
            let report = compiled.report;
            let coded = |fault: String| {
                let codes = fault.split(['(', ')']).find(|part| part.starts_with("C7"));
                codes.map_or_else(|| "fault".to_owned(), str::to_owned)
            };
            match (report.spill_stores + report.spill_loads, report.fault()) {
                (0, None) => Verdict::Clean,
                (0, Some(fault)) => Verdict::Fault(coded(fault.to_string())),
                (bytes, _) => Verdict::Spills(bytes),
            }
        }
        Err(CompileFailure::Log(_)) => Verdict::Fault("error".to_owned()),
        Err(CompileFailure::Compiler(error)) => return Err(error.into()),
    };
    Ok(Said { kernel: name(*arch, spec), verdict })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> BTreeMap<String, Verdict> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/configs");
        let said = read(&folder.join("refused-nvrtc-13.0.txt")).expect("lines");
        assert!(said.len() > 300, "{}", said.len());
        said.into_iter().map(|own| (own.kernel, own.verdict)).collect()
    }

    #[test]
    fn none_of_the_best_ten_is_known_to_spill() {
        let known = known();
        let wrong = |kind: &Kind| -> Vec<String> {
            let Some(set) = kind.explored() else { return Vec::new() };
            let of = |spec: &KernelSpec| known.get(&name(kind.arch, spec));
            let best = set.plans.iter().take(BEST).filter_map(|plan| match of(&plan.spec)? {
                Verdict::Clean => None,
                verdict @ (Verdict::Spills(_) | Verdict::Fault(_)) => {
                    Some(format!("{} is among the best ten: {verdict:?}", plan.spec))
                }
            });
            best.collect()
        };
        let wrong: BTreeSet<String> = kinds().par_iter().flat_map_iter(wrong).collect();
        assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
    }

    #[test]
    fn the_same_seed_draws_the_same_kinds_of_both_passes() {
        let kinds = drawn(40, 7);
        assert_eq!((kinds.len(), &kinds), (40 * KERNELS.len(), &drawn(40, 7)));
        assert_ne!(kinds, drawn(40, 8));
        let gradients = kinds.iter().filter(|kind| kind.pass.is_backward()).count();
        assert_eq!(gradients, kinds.len() / 2);
        let planned = kinds.iter().filter(|kind| kind.explored().is_some_and(|set| !set.plans.is_empty()));
        assert!(planned.count() > kinds.len() * 3 / 4);
    }

    #[test]
    fn lines_are_read_as_they_are_written() {
        for (verdict, line) in [
            (Verdict::Clean, "0 sm90 kernel"),
            (Verdict::Spills(24), "24 sm90 kernel"),
            (Verdict::Fault("C7512".into()), "C7512 sm90 kernel"),
        ] {
            let said = Said { kernel: "sm90 kernel".into(), verdict };
            assert_eq!((said.to_string().as_str(), line.parse()), (line, Ok(said)));
        }
        assert!("kernel".parse::<Said>().expect_err("no verdict").contains("VERDICT ARCH KERNEL"));
    }

    #[test]
    fn what_is_not_clean_is_kept_once_and_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("refused.txt");
        let said = |kernel: &str, verdict| Said { kernel: kernel.to_owned(), verdict };
        keep(&path, &[said("sm90 b", Verdict::Spills(8)), said("sm90 c", Verdict::Clean)]).expect("kept");
        keep(&path, &[said("sm90 a", Verdict::Fault("C7512".into()))]).expect("kept");
        let kept = [said("sm90 a", Verdict::Fault("C7512".into())), said("sm90 b", Verdict::Spills(8))];
        assert_eq!(read(&path).expect("lines"), kept);
    }

    #[test]
    fn first_choices_come_first_and_each_kernel_once() {
        let kinds: Vec<Kind> = kinds().into_iter().step_by(97).collect();
        let (one, three) = (best(&kinds, 1, false), best(&kinds, 3, false));
        assert!(one.len() > 5 && three.len() > one.len() && three[..one.len()] == one[..]);
        let names: BTreeSet<String> = three.iter().map(|(arch, spec)| name(*arch, spec)).collect();
        assert_eq!(names.len(), three.len());
    }
}
