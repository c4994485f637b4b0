//! What ranks are asked to do, and what they answer.

use fa_core::{Dtype, Lengths, Mask, Problem};
use fa_dist::{Layout, Scheme};
use serde::{Deserialize, Serialize};

/// The variable by which the parent says how long to wait.
pub(super) const DEADLINE_VARIABLE: &str = "FA_DIST_DEADLINE";

/// What a job is about.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// Compares the rank's rows with those of its own GPU alone.
    Check,
    /// Measures so many passes, beside as many of one GPU alone.
    Bench {
        /// Passes of one measurement.
        iterations: usize,
    },
    /// Forwards without end: until the rank, or another one, is killed.
    Endless,
}

/// One thing that all ranks do together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    /// The whole problem.
    pub problem: Problem,
    /// The scheme.
    pub scheme: Scheme,
    /// How rows are dealt.
    pub layout: Layout,
    /// Stages; `None` for the scheme's own number.
    pub stages: Option<usize>,
    /// Whether there is a backward, too.
    pub backward: bool,
    /// What is done.
    pub kind: Kind,
    /// A rank that takes one row less: ranks that disagree.
    pub odd_rank: Option<usize>,
}

/// What a rank found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Answer {
    /// The job, by its number.
    pub job: usize,
    /// The rank.
    pub rank: usize,
    /// What went wrong: the error's variant, and its text.
    pub error: Option<(String, String)>,
    /// Whether O and LSE have the bits of one GPU.
    pub same_bits: Option<bool>,
    /// Largest difference of O, dQ, dK and dV from one GPU's, over the largest value.
    pub errors: Vec<f64>,
    /// Whether a second run gave the same bits.
    pub repeats: Option<bool>,
    /// Seconds of a pass over all ranks: forward, and backward.
    pub seconds: Vec<f64>,
    /// Seconds of one GPU with the whole problem.
    pub one_gpu: Vec<f64>,
    /// Device memory of the plan, in bytes.
    pub memory: usize,
}

fn problem(len: (usize, usize), heads: (usize, usize), mask: Mask) -> Problem {
    Problem::square(1, len.0, heads.0, 128, mask, Dtype::Bf16)
        .with_heads_kv(heads.1)
        .with_lengths(Lengths::uniform(1, len.0, len.1))
}

fn job(problem: Problem, scheme: Scheme, kind: Kind) -> Job {
    let backward = scheme != Scheme::Decode;
    let layout = if scheme == Scheme::Decode { Layout::Contiguous } else { Layout::Zigzag };
    Job { problem, scheme, layout, stages: None, backward, kind, odd_rank: None }
}

/// What `fa dist check` compares.
pub(super) fn checks(world: usize, quick: bool) -> Vec<Job> {
    let of = |len, heads, mask, scheme| job(problem((len, len), heads, mask), scheme, Kind::Check);
    let mut jobs = Vec::new();
    let schemes = [Scheme::Gather, Scheme::Ulysses, Scheme::Ring];
    let wide = if quick { 4096 } else { 8192 };
    for scheme in schemes {
        jobs.push(of(wide, (8 * world, 2 * world), Mask::CAUSAL, scheme));
        jobs.push(of(4096, (2 * world, 2 * world), Mask::FULL, scheme));
    }
    // Lengths that nothing divides, and a window.
    jobs.push(of(5003, (8 * world, 2 * world), Mask::CAUSAL, Scheme::Gather));
    jobs.push(of(8192, (8 * world, 2 * world), Mask::causal_window(1000), Scheme::Gather));
    jobs.push(of(5003, (8 * world, 2 * world), Mask::CAUSAL, Scheme::Ulysses));
    jobs.push(job(problem((1, 65_536), (32, 8), Mask::CAUSAL), Scheme::Decode, Kind::Check));
    jobs
}

/// What `fa dist bench` measures.
pub(super) fn benches(quick: bool) -> Vec<Job> {
    let causal = |len, heads| problem((len, len), heads, Mask::CAUSAL);
    let long: &[usize] = if quick { &[32_768] } else { &[32_768, 65_536, 131_072] };
    let iterations = |len: usize| if len > 40_000 { 3 } else { 10 };
    let mut jobs = Vec::new();
    for &len in long {
        for scheme in [Scheme::Gather, Scheme::Ulysses] {
            jobs.push(job(causal(len, (32, 8)), scheme, Kind::Bench { iterations: iterations(len) }));
        }
    }
    jobs.push(job(causal(32_768, (32, 8)), Scheme::Ring, Kind::Bench { iterations: 10 }));
    if !quick {
        for len in [32_768, 65_536] {
            jobs.push(job(causal(len, (64, 8)), Scheme::Gather, Kind::Bench { iterations: 3 }));
        }
        for len in [8192, 16_384] {
            for scheme in [Scheme::Gather, Scheme::Ulysses] {
                jobs.push(job(causal(len, (32, 32)), scheme, Kind::Bench { iterations: 20 }));
            }
        }
    }
    for keys in [131_072, 1 << 20] {
        let decode = problem((1, keys), (32, 8), Mask::CAUSAL);
        jobs.push(job(decode, Scheme::Decode, Kind::Bench { iterations: 50 }));
    }
    jobs
}

/// Ranks that run until one is killed.
pub(super) fn endless(scheme: Scheme) -> Job {
    job(problem((8192, 8192), (16, 16), Mask::CAUSAL), scheme, Kind::Endless)
}

/// Ranks of which the last has another problem.
pub(super) fn odd(world: usize) -> Job {
    let job = job(problem((4096, 4096), (16, 16), Mask::CAUSAL), Scheme::Gather, Kind::Check);
    Job { odd_rank: Some(world - 1), ..job }
}
