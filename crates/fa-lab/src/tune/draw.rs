//! Problems drawn at random, to judge the planner's choices by: its constants were not fitted to them.
//!
//! The same seed, number and architecture give the same problem. Passes and families take turns in such a way
//! that the even- and the odd-numbered problems have as many of each.
//!
//! Drawn are dense tensors: lengths, batches, groups of heads, head dims, full and causal masks, windows,
//! soft caps, both types, and one to sixteen queries on many keys. Packed and paged sequences, ALiBi and
//! sinks are not: the planner ranks their kernels by the same model, and nothing says yet how well.

use fa_core::{Arch, Dtype, Family, Lengths, Mask, Pass, Problem, ScoreMod};
use fa_planner::plan::{PlanOptions, plan};

use super::wanted::Wanted;
use crate::error::{Error, Result};
use crate::random::Random;

/// What to draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawing {
    /// How many.
    pub count: usize,
    /// Each seed gives different problems.
    pub seed: u64,
    /// The passes, which take turns.
    pub passes: Vec<Pass>,
    /// The families, which take turns; all that the GPU runs, if empty.
    pub families: Vec<Family>,
}

/// Floating-point operations of a pass: below the first the launch is most of the time, above the second
/// sixteen kernels take seconds.
const FLOPS: [f64; 2] = [1e9, 8e11];

/// The most bytes that a pass of a problem reads and writes.
const MOST_BYTES: f64 = (1u64 << 30) as f64;

/// The most scores of a head: gradients are judged by an exact head, which the CPU computes.
const MOST_PAIRS: usize = 1 << 26;

/// Attempts to draw a problem that is within the bounds and has a plan.
const ATTEMPTS: usize = 10_000;

const HEAD_DIMS: [(usize, usize); 16] = [
    (64, 64),
    (64, 64),
    (64, 64),
    (128, 128),
    (128, 128),
    (128, 128),
    (128, 128),
    (96, 96),
    (96, 96),
    (256, 256),
    (256, 256),
    (192, 128),
    (32, 32),
    (72, 72),
    (80, 80),
    (88, 88),
];

const HEADS: [usize; 10] = [4, 8, 12, 16, 24, 28, 32, 40, 48, 64];

impl Drawing {
    /// The problems, valid and planned on `arch`.
    ///
    /// # Errors
    /// [`Error::Request`] without a pass, and for a family that computes nothing on `arch`.
    pub fn draw(&self, arch: Arch) -> Result<Vec<Wanted>> {
        let runs = |family: &Family| *family == Family::Sm80 || *family == Family::native(arch);
        let families = if self.families.is_empty() {
            Family::ALL.into_iter().filter(runs).collect()
        } else {
            self.families.clone()
        };
        let turn = |number: usize| {
            let pass = *self.passes.get(number / 2 % self.passes.len().max(1))?;
            Some((pass, *families.get(number / 2 / self.passes.len() % families.len().max(1))?))
        };
        let draw = |number: usize| {
            let (pass, family) = turn(number)
                .ok_or_else(|| Error::Request("there is no pass to draw problems of".to_owned()))?;
            let mut random = Random::new(self.seed.wrapping_mul(0x9e37_79b9) ^ number as u64);
            // The first bits of neighbouring seeds depend on one another.
            random.bits();
            let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
            let fits = |problem: &Problem| within(problem, pass) && plan(problem, arch, &options).is_ok();
            let problem = (0..ATTEMPTS).map(|_| problem(&mut random, pass)).find(fits).ok_or_else(|| {
                let (family, pass) = (family.name(), pass.name());
                Error::Request(format!("no problem was found that {family} computes on {arch} ({pass})"))
            })?;
            Ok(Wanted { problem, family: Some(family), pass })
        };
        (0..self.count).map(draw).collect()
    }
}

/// Whether the problem is valid and of a size that is quickly measured.
fn within(problem: &Problem, pass: Pass) -> bool {
    let flops = problem.flops(pass);
    problem.check().is_ok()
        && (FLOPS[0]..=FLOPS[1]).contains(&flops)
        && problem.bytes_held(pass) <= MOST_BYTES
        && problem.lengths.max_q() * problem.lengths.max_k() <= MOST_PAIRS
}

/// A length from `least` to `most`, every doubling as likely: any, a multiple of 64, or a power of two.
fn length(random: &mut Random, least: usize, most: usize) -> usize {
    let doublings = (most as f64 / least as f64).log2();
    let any = least as f64 * (doublings * random.below(1 << 20) as f64 / f64::from(1 << 20)).exp2();
    let any = any as usize;
    match random.below(8) {
        0 => any.next_power_of_two().min(most),
        1 | 2 => any.next_multiple_of(64).min(most),
        3 | 4 => (any | 1).min(most),
        _ => any,
    }
}

fn problem(random: &mut Random, pass: Pass) -> Problem {
    let (head_dim, head_dim_v) = random.of(&HEAD_DIMS);
    let seqlen_k = length(random, 128, 16384);
    let seqlen_q = match random.below(8) {
        // Chunks of a prompt, and cross attention.
        0 => length(random, 64, seqlen_k.max(65)),
        // One token or a few, for the forward only.
        1 if !pass.is_backward() => 1 + random.below(16),
        _ => seqlen_k,
    };
    let tokens = length(random, 1024, 32768);
    let batch = (tokens / seqlen_q.max(seqlen_k)).max(1);
    let heads_q = random.of(&HEADS);
    let group = random.of(&[1, 1, 2, 4, 8, 16, heads_q]);
    let heads_kv = if heads_q.is_multiple_of(group) { heads_q / group } else { heads_q };
    let mask = match random.below(8) {
        0..=3 => Mask::CAUSAL,
        4 | 5 => Mask::FULL,
        6 if seqlen_q > 1 => Mask::causal_window(length(random, 64, seqlen_k.max(65)) as u32),
        _ => Mask::FULL,
    };
    let dtype = if random.below(4) == 0 { Dtype::F16 } else { Dtype::Bf16 };
    let score = if random.below(16) == 0 { ScoreMod::softcap(50.0) } else { ScoreMod::NONE };
    let square = Problem::square(batch, seqlen_q, heads_q, head_dim, mask, dtype);
    let lengths = Lengths::uniform(batch, seqlen_q, seqlen_k);
    square.with_lengths(lengths).with_heads_kv(heads_kv).with_head_dim_v(head_dim_v).with_score(score)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawing(count: usize, seed: u64) -> Drawing {
        Drawing { count, seed, passes: vec![Pass::Forward, Pass::BACKWARD], families: Vec::new() }
    }

    #[test]
    fn a_seed_gives_the_same_problems_and_another_seed_others() {
        let [first, again, longer, other] =
            [(24, 7), (24, 7), (40, 7), (24, 8)].map(|(count, seed)| drawing(count, seed).draw(Arch::Sm90));
        let [first, again, longer, other] = [first, again, longer, other].map(|drawn| drawn.expect("drawn"));
        assert_eq!(first, again);
        assert_eq!(first, longer[..24], "a longer run begins with the shorter one");
        assert!(first.iter().zip(&other).all(|(a, b)| a.problem != b.problem));
    }

    #[test]
    fn all_problems_are_valid_planned_and_soon_measured() {
        for arch in [Arch::Sm90, Arch::Sm80] {
            for Wanted { problem, family, pass } in drawing(60, 1).draw(arch).expect("drawn") {
                problem.check().expect("valid");
                let options = PlanOptions::default().with_family(family).with_pass(pass);
                plan(&problem, arch, &options).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
                assert!(
                    problem.flops(pass) <= FLOPS[1] && problem.bytes_held(pass) <= MOST_BYTES,
                    "{problem:?}"
                );
            }
        }
    }

    #[test]
    fn both_halves_see_every_pass_and_family_alike_and_all_kinds_of_problems() {
        let drawn = drawing(80, 3).draw(Arch::Sm90).expect("drawn");
        for odd in [0, 1] {
            let half: Vec<&Wanted> = drawn.iter().skip(odd).step_by(2).collect();
            for family in [Family::Sm80, Family::Sm90] {
                for pass in [Pass::Forward, Pass::BACKWARD] {
                    let same = |wanted: &&&Wanted| (wanted.family, wanted.pass) == (Some(family), pass);
                    assert_eq!(half.iter().filter(same).count(), 10, "{family:?} {pass:?}");
                }
            }
            let any = |is: &dyn Fn(&Problem) -> bool| half.iter().any(|wanted| is(&wanted.problem));
            assert!(any(&|p| p.lengths.max_k() % 2 == 1) && any(&|p| p.lengths.max_k() % 64 == 0));
            assert!(any(&|p| p.group_size() > 1) && any(&|p| p.group_size() == 1));
            assert!(any(&|p| p.mask == Mask::FULL) && any(&|p| p.mask.is_causal()));
            assert!(any(&|p| p.mask.left.is_some()), "a window");
        }
        assert!(drawn.iter().any(|wanted| wanted.problem.score.softcap.is_some()));
    }

    #[test]
    fn what_no_problem_is_drawn_of_is_an_error() {
        let none = Drawing { passes: Vec::new(), ..drawing(1, 1) };
        assert!(none.draw(Arch::Sm90).expect_err("no pass").to_string().contains("no pass"));
    }
}
