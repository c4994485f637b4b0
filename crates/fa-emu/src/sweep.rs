//! A kernel on the shapes at which kernels fail, under several schedules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fa_core::{Arch, Kernel, KernelSpec, Lengths, Problem, TensorLayout};

use crate::batches::batches;
pub use crate::case::Case;
use crate::case::problem;
use crate::error::Error;
use crate::options::Options;
use crate::planned::Planned;
use crate::proof::{Placing, Proof, Trial};
use crate::unit::Unit;

/// Seeds of a sweep: an eager schedule, a lazy one, and one by chance.
pub const SEEDS: [u64; 3] = [0, 1, 2];

/// `(seqlen_q, seqlen_k)` with heads: single rows, fewer rows than a tile, more queries than keys and fewer,
/// several tiles in both directions, groups of heads. Shapes of `fa_cpu::grid`, the shorter ones, and one of
/// several tiles.
const SHAPES: [(usize, usize, usize, usize); 7] = [
    (1, 1, 2, 2),
    (3, 3, 2, 1),
    (64, 32, 1, 1),
    (239, 1, 1, 1),
    (113, 203, 4, 2),
    (300, 300, 4, 1),
    (108, 256, 1, 1),
];

/// The cases of a kernel: every shape, one of them with two sequences, one with rows apart, one with head
/// dims that the kernel pads; for a kernel that reads lengths on the device its batches.
pub fn cases(spec: &KernelSpec) -> Vec<Case> {
    if spec.reads.varied {
        return batches(spec).iter().map(|own| own.case(spec)).collect();
    }
    let mut cases = Vec::new();
    let few_queries: &[_] = if spec.split { &[(1, 700, 4, 1), (5, 1030, 2, 2)] } else { &[] };
    for (turn, &(seqlen_q, seqlen_k, heads_q, heads_kv)) in SHAPES.iter().chain(few_queries).enumerate() {
        let mut problem = problem(spec, Lengths::uniform(1, seqlen_q, seqlen_k), (heads_q, heads_kv));
        let mut placing = Placing::PACKED;
        match turn {
            1 => problem.lengths = Lengths::uniform(2, seqlen_q, seqlen_k),
            2 => placing = Placing { layout: TensorLayout::Bhsd, gap: 8 },
            6 => {
                problem.head_dim -= 8;
                problem.head_dim_v -= 8;
            }
            _ => {}
        }
        cases.push(Case::of(&problem, placing));
    }
    cases
}

/// Trials that have been made, for specs that share them.
#[derive(Debug, Default)]
pub struct Trials(Mutex<BTreeMap<String, Arc<Trial>>>);

impl Trials {
    /// The trial of a case.
    pub fn get(&self, case: &Case, spec: &KernelSpec) -> Arc<Trial> {
        let mut pass = spec.kernel.pass();
        // Deterministic or not, gradients are the same.
        if let fa_core::Pass::Backward { deterministic } = &mut pass {
            *deterministic = false;
        }
        let key = format!("{case:?} {pass:?}");
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.unwrap_or_else(|| {
            let trial = Arc::new(Trial::with(&case.problem, pass, case.placing, &case.extras));
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, trial.clone());
            trial
        })
    }
}

/// What a sweep of one kernel gave.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Passes that were run.
    pub runs: usize,
    /// What was wrong, with the case and the seed.
    pub faults: Vec<String>,
}

/// Runs a kernel on cases under all seeds; a deterministic kernel's outputs must be the same bits in all of
/// them.
///
/// # Errors
/// Those of [`Unit::run`].
pub fn sweep(unit: &Unit, cases: &[Case], seeds: &[u64], trials: &Trials) -> Result<Verdict, Error> {
    let mut verdict = Verdict::default();
    for case in cases {
        let trial = trials.get(case, unit.spec());
        let mut bits: Option<String> = None;
        for &seed in seeds {
            let proof = trial.run(unit, &Options::of(unit.spec(), seed))?;
            verdict.runs += 1;
            let mut faults = proof.faults();
            if faults.is_empty() && seed == seeds[0] {
                faults.extend(beside_the_plan(unit, &case.problem, &proof));
            }
            if unit.spec().kernel.pass().deterministic() && faults.is_empty() {
                let first = bits.get_or_insert_with(|| proof.bits.clone());
                if *first != proof.bits {
                    faults.push("not deterministic: other bits than under the first seed".into());
                }
            }
            if !faults.is_empty() {
                let problem = &case.problem;
                verdict.faults.push(format!(
                    "{problem:?}, {:?}, seed {seed}:\n{}",
                    case.placing,
                    faults.join("\n")
                ));
                break;
            }
        }
    }
    Ok(verdict)
}

/// What the main kernel did that the planner does not count on.
fn beside_the_plan(unit: &Unit, problem: &Problem, proof: &Proof) -> Vec<String> {
    let spec = unit.spec();
    let sms = Options::sms_of(spec);
    let Some(planned) = Planned::of(spec, problem, unit.arch(), sms) else { return Vec::new() };
    let main = proof.outcome.launches.iter().find(|launch| launch.entry == fa_kernels::ENTRY);
    main.map_or_else(Vec::new, |launch| planned.faults(spec, &launch.counters))
}

/// The architectures of `archs` for which a kernel's unit differs: SM80-class backwards add vectors from 9.0
/// on.
pub fn distinct(spec: &KernelSpec, archs: &[Arch]) -> Vec<Arch> {
    let vector = |arch: &Arch| match &spec.kernel {
        Kernel::Sm80Bwd(_) => arch.compute_capability().0 >= 9,
        Kernel::Sm80Fwd(_) | Kernel::Sm90Fwd(_) | Kernel::Sm90Bwd(_) => false,
    };
    let mut found: Vec<Arch> = Vec::new();
    for &arch in archs {
        if !found.iter().any(|own| vector(own) == vector(&arch)) {
            found.push(arch);
        }
    }
    found
}
