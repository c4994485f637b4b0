//! Kernels and problems drawn at random: the planner's first choices, its other candidates, and kernels with
//! a switch or two turned, each on problems that it serves.
//!
//! A seed and a turn give the same kernel and the same problems, as long as the planner lists the same
//! candidates.

use std::time::Instant;

use fa_core::lengths::SideRows;
use fa_core::{Arch, Family, KernelSpec, Lengths, Pass, Problem, Side};
use fa_cpu::check::q_shape;
use fa_kernels::Headers;
use fa_lab::grid::{self, Form, small};
use fa_lab::random::Random;
use fa_planner::plan::{PlanOptions, plan, plan_spec};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::emulator::Emulator;
use crate::error::Error;
use crate::kernels;
use crate::options::Options;
use crate::proof::Trial;
use crate::sweep::{Attempts, try_all};

/// The kernels that are drawn, in turns.
pub const KERNELS: [&str; 7] =
    ["sm80_fwd", "sm80_bwd", "sm90_fwd", "sm90_bwd", "sm100_fwd", "sm90_fwd_fp8", "sm90_wide"];

/// Problems of a kernel: what it is planned for, and others that it serves.
const PROBLEMS: usize = 4;

/// A kernel with problems for it.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The architecture that it is compiled for.
    pub arch: Arch,
    /// The kernel.
    pub spec: KernelSpec,
    /// Where it is from: `first choice`, `candidate 7 of 120`, and what is turned of it.
    pub origin: String,
    /// The problems.
    pub problems: Vec<Drawing>,
}

/// A problem, and how it is run.
#[derive(Clone, Debug)]
pub struct Drawing {
    /// The problem, its sequences, values and layout.
    pub case: grid::Case,
    /// Whether the LSE has a gradient.
    pub has_dlse: bool,
    /// SMs of the emulated GPU.
    pub sms: u32,
    /// CTAs that run at a time.
    pub resident: u32,
    /// Of the schedules.
    pub seeds: [u64; 3],
}

/// What came of a kernel on its problems.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tried {
    /// The seed and the turn that it was drawn by.
    pub seed: u64,
    /// See above.
    pub turn: u64,
    /// The kernel by its spec's name; of which architecture; where it is from.
    pub kernel: String,
    /// See above.
    pub arch: String,
    /// See above.
    pub origin: String,
    /// Runs of all its problems.
    pub runs: usize,
    /// How many problems there were.
    pub problems: usize,
    /// Seconds of all.
    pub seconds: f64,
    /// What was wrong, with the problem and the schedule.
    pub faults: Vec<String>,
}

impl Tried {
    /// `sm90_bwd` of the kernel's name.
    pub fn family(&self) -> &str {
        let name = self.kernel.split('-').next().unwrap_or(&self.kernel);
        KERNELS.into_iter().find(|own| *own == name).unwrap_or(&self.kernel)
    }
}

/// The kernel that a turn draws.
pub fn kernel_of(turn: u64) -> &'static str {
    KERNELS[(turn % KERNELS.len() as u64) as usize]
}

/// Number `turn` of the kernels of `seed`; `None` where no problem was found for it.
pub fn draw(seed: u64, turn: u64) -> Option<Drawn> {
    let random = &mut Random::new(seed.wrapping_mul(0xa076_1d64_78bd_642f) ^ turn);
    // The first bits of neighbouring seeds depend on one another.
    random.bits();
    let kernel = kernel_of(turn);
    let family = Family::ALL.into_iter().find(|family| kernel.starts_with(family.name()))?;
    let arch = match family {
        Family::Sm80 if random.below(2) == 0 => Arch::Sm80,
        Family::Sm80 | Family::Sm90 => Arch::Sm90,
        Family::Sm100 => Arch::Sm100,
    };
    let pass = match kernel.ends_with("bwd") {
        true => Pass::Backward { deterministic: random.below(3) == 0 },
        false => Pass::Forward,
    };
    let form = match kernel {
        "sm90_fwd_fp8" => Form::Fp8,
        "sm90_wide" => Form::Wide,
        _ => Form::Half,
    };
    let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
    // A problem may have no kernel: head dims whose tiles do not fit.
    let (first, plans) = (0..20).find_map(|_| {
        let case = small(random, (family, form), pass, None)?;
        // Kernels are listed for long sequences as well, whose tiles are larger.
        let planned = if random.below(2) == 0 { case.problem } else { longer(&case.problem, random) };
        Some((case, plan(&planned, arch, &options).ok()?))
    })?;
    let best = random.below(4) == 0;
    let number = if best { 0 } else { random.below(plans.len()) };
    let mut spec = plans[number].spec.clone();
    let mut origin =
        if best { "first choice".to_owned() } else { format!("candidate {number} of {}", plans.len()) };
    for _ in 0..random.below(3) {
        let (what, other) = changed(&spec, random);
        if other != spec && plan_spec(&first.problem, &other, arch, &options).is_ok() {
            origin += &format!(", {what}");
            spec = other;
        }
    }
    let own = spec.serves(&first.problem).is_ok().then_some(first);
    let others = (0..PROBLEMS).filter_map(|_| small(random, (family, form), pass, Some(&spec)));
    let cases: Vec<grid::Case> = own.into_iter().chain(others).take(PROBLEMS).collect();
    let problems: Vec<Drawing> = cases
        .into_iter()
        .map(|case| Drawing {
            case,
            has_dlse: pass.is_backward() && random.below(3) == 0,
            sms: if spec.split { random.of(&[2, 7, 64, 132]) } else { random.of(&[1, 2, 2, 3, 7]) },
            resident: random.of(&[1, 2, 2, 3]),
            seeds: [0, 1, 2 + random.bits() % 1000],
        })
        .collect();
    (!problems.is_empty()).then_some(Drawn { arch, spec, origin, problems })
}

/// The same kind of problem of a size that large tiles are listed for.
fn longer(problem: &Problem, random: &mut Random) -> Problem {
    let (times, lengths) = (random.of(&[4, 16, 64]), problem.lengths);
    let stretched = |side: Side| {
        let rows = match side.rows {
            SideRows::Padded { len } => SideRows::Padded { len: times * len },
            SideRows::Packed { total, max } => SideRows::Packed { total: times * total, max: times * max },
            SideRows::Paged { page, pages, max } => {
                SideRows::Paged { page, pages: times * pages, max: times * max }
            }
        };
        Side { rows, ..side }
    };
    let (q, k) = (lengths.q(), lengths.k());
    // A few tokens stay a few.
    let q = if q.max() > 16 { stretched(q) } else { q };
    problem.with_lengths(Lengths::of(lengths.sequences(), q, stretched(k)))
}

/// The name of a random switch, and the kernel with it changed, which may contradict itself.
fn changed(spec: &KernelSpec, random: &mut Random) -> (&'static str, KernelSpec) {
    match kernels::of(&spec.kernel).changed(random) {
        Some((name, kernel)) => (name, KernelSpec { kernel, ..spec.clone() }),
        None => ("split", KernelSpec { split: !spec.split, ..spec.clone() }),
    }
}

/// Compiles the kernel and runs all its problems.
///
/// # Errors
/// Those of [`Emulator::unit`]; what the library or the machine says of a problem is a fault.
pub fn attempt(
    emulator: &Emulator,
    (seed, turn): (u64, u64),
    drawn: &Drawn,
    headers: &Headers,
) -> Result<Tried, Error> {
    let Drawn { arch, spec, origin, problems } = drawn;
    let began = Instant::now();
    let unit = emulator.unit(spec, *arch, headers)?;
    let (mut runs, mut faults) = (0, Vec::new());
    for Drawing { case, has_dlse, sms, resident, seeds } in problems {
        let trial = trial(case, *has_dlse);
        let schedules = seeds.map(|seed| Options { sms: *sms, resident: *resident, ..Options::seed(seed) });
        let of_case = |text: String| {
            let dlse = if *has_dlse { " dlse" } else { "" };
            format!("{}{dlse}, {sms} SMs, {resident} resident, {text}", case.problem_name())
        };
        match try_all(&unit, &trial, &schedules) {
            Ok(Attempts { runs: some, faults: found }) => {
                runs += some;
                faults.extend(
                    found.map(|(seed, found)| of_case(format!("schedule {seed}:\n{}", found.join("\n")))),
                );
            }
            Err(error) => faults.push(of_case(format!("refused: {error}"))),
        }
    }
    Ok(Tried {
        seed,
        turn,
        kernel: spec.to_string(),
        arch: arch.to_string(),
        origin: origin.clone(),
        runs,
        problems: problems.len(),
        seconds: began.elapsed().as_secs_f64(),
        faults,
    })
}

fn trial(case: &grid::Case, has_dlse: bool) -> Trial {
    let (values, mut extras) = case.bits().expect("types that kernels compute in");
    if has_dlse {
        let [batch, seqlen, heads, _] = q_shape(&case.problem);
        let of = |row: usize| (row % 13) as f32 / 4.0 - 1.5;
        extras.dlse = Some((0..batch * seqlen * heads).map(of).collect());
    }
    let placement = Case::of_grid(case).expect("no tensor is drawn far apart").placement;
    Trial::of_values(&case.problem, case.pass, placement, &extras, &values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_turn_give_the_same_kernel_and_problems() {
        let drawn = |seed, turn| draw(seed, turn).expect("drawn");
        for turn in 0..12 {
            let (one, again, other) = (drawn(3, turn), drawn(3, turn), drawn(4, turn));
            assert_eq!(one.spec, again.spec);
            assert_eq!(one.spec.kernel.name(), kernel_of(turn));
            let names = |own: &Drawn| own.problems.iter().map(|d| d.case.name()).collect::<Vec<_>>();
            assert_eq!(names(&one), names(&again));
            assert_ne!(names(&one), names(&other));
            for problem in &one.problems {
                assert!(one.spec.serves(&problem.case.problem).is_ok(), "{}", problem.case.name());
            }
        }
    }

    #[test]
    fn kernels_are_first_choices_others_and_turned() {
        let all: Vec<Drawn> = (0..80).filter_map(|turn| draw(1, turn)).collect();
        assert!(all.len() > 75, "{}", all.len());
        let of = |part: &str| all.iter().filter(|own| own.origin.contains(part)).count();
        for part in ["first choice", "candidate", ", "] {
            assert!(of(part) > 5, "{part}: {}", of(part));
        }
        assert!(all.iter().any(|own| own.problems.iter().any(|problem| problem.has_dlse)));
    }
}
