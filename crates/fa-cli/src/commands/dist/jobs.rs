//! What ranks are asked to do, and what they answer.

use fa_core::lengths::Side;
use fa_core::program::{OwnedInputs, Program};
use fa_core::{Alibi, DescaleForm, Descales, Dropout, Dtype, Lengths, Mask, Problem, ScoreMod};
use fa_dist::{Error, Layout, Scheme, ShardPlan};
use serde::{Deserialize, Serialize};

/// The variable by which the parent says how long to wait.
pub(super) const DEADLINE_VARIABLE: &str = "FA_DIST_DEADLINE";
/// That by which it says what ranks send by.
pub(super) const TRANSPORT_VARIABLE: &str = "FA_DIST_TRANSPORT";
/// That by which it says how many ranks are threads of the process.
pub(super) const THREADS_VARIABLE: &str = "FA_DIST_THREADS";

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
    /// The last rank stops at this stage, and waits to be killed.
    Ends(Stage),
    /// The last rank gives a tensor of another shape.
    Fails,
}

/// Where a rank is when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stage {
    /// The ranks are connected.
    Joined,
    /// They have agreed on the plan.
    Planned,
    /// A forward is enqueued.
    Forward,
    /// The forward is done.
    Between,
    /// A backward is enqueued.
    Backward,
    /// One forward follows the other.
    Running,
}

impl Stage {
    /// In words that follow `rank 1 killed`.
    pub(super) fn words(self) -> &'static str {
        match self {
            Stage::Joined => "after joining",
            Stage::Planned => "before the forward",
            Stage::Forward => "in the forward",
            Stage::Between => "after the forward",
            Stage::Backward => "in the backward",
            Stage::Running => "among forwards",
        }
    }
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
    /// Whether there is a backward, too.
    pub backward: bool,
    /// What is done.
    pub kind: Kind,
    /// Whether O and LSE have the bits of one process.
    pub same_bits: bool,
    /// Runs whose bits are compared.
    pub repeat: usize,
    /// A rank that takes one row less: ranks that disagree.
    pub odd_rank: Option<usize>,
    /// Where packed sequences begin, and the last one ends.
    pub starts: Option<Vec<i32>>,
    /// Whether the backward takes the gradient of the LSE.
    pub dlse: bool,
    /// Of a decode on caches the keys in use: of each rank, and there of each sequence.
    pub used: Vec<Vec<i32>>,
}

impl Job {
    /// The plan of `problem`, which is that of the job, or a rank's that disagrees.
    pub(super) fn plan(&self, problem: &Problem, world: usize) -> Result<ShardPlan, Error> {
        let (scheme, layout) = (self.scheme, self.layout);
        let plan = match &self.starts {
            Some(starts) => ShardPlan::packed(problem, starts, world, scheme, layout),
            None => ShardPlan::new(problem, world, scheme, layout),
        };
        let plan = plan?.with_dlse(self.dlse);
        if !self.has_arrays() {
            return Ok(plan);
        }
        let inputs = OwnedInputs::drawn(problem, 0);
        let arrays = inputs.iter().flat_map(|inputs| &inputs.arrays);
        plan.with_arrays(&arrays.map(|array| array.extents).collect::<Vec<_>>())
    }

    /// Whether the backward has gradients of arrays.
    pub(super) fn has_arrays(&self) -> bool {
        let program = self.problem.score.program;
        program.is_some_and(|program| program.arrays().iter().any(|array| array.gradient))
    }

    /// What the problem has besides a mask, in words that follow its shape.
    pub(super) fn words(&self) -> String {
        let (score, keys) = (self.problem.score, self.problem.lengths.k());
        let named = [
            (self.starts.is_some(), "packed"),
            (keys.used && self.problem.lengths.page().is_none(), "in-use"),
            (self.problem.lengths.page().is_some(), "paged"),
            (self.problem.types.kv == Dtype::E4m3, "e4m3"),
            (self.problem.types.kv == Dtype::Int8, "int8"),
            (score.sinks, "sinks"),
            (score.alibi.is_some(), "alibi"),
            (self.has_arrays(), "arrays"),
            (score.program.is_some() && score.dropout.is_none(), "program"),
            (score.dropout.is_some(), "dropout"),
            (self.dlse, "dlse"),
            (self.layout == Layout::Contiguous && self.scheme != Scheme::Decode, "contiguous"),
        ];
        named.iter().filter(|(is_so, _)| *is_so).map(|(_, word)| format!(" {word}")).collect()
    }
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
    /// Largest difference of O, dQ, dK, dV and the gradients of arrays from one GPU's, over the largest
    /// value.
    pub errors: Vec<f64>,
    /// The gradient of the sinks: the rank's part, and all of one GPU's.
    pub dsinks: [Vec<f32>; 2],
    /// The first run with other bits than the first one, and the tensor: `run 17: dK`.
    pub differs: Option<String>,
    /// Seconds of a pass over all ranks: forward, and backward.
    pub seconds: Vec<f64>,
    /// Seconds of one GPU with the whole problem.
    pub one_gpu: Vec<f64>,
    /// The model's share of one GPU for each pass.
    pub model: Vec<f64>,
    /// Device memory of the plan, in bytes.
    pub memory: usize,
    /// Seconds of the host to enqueue a forward.
    pub host: f64,
    /// The steps of a forward, and of a backward: what each does, when it begins and how long it takes, in
    /// seconds.
    pub steps: [Vec<(String, f64, f64)>; 2],
}

impl Answer {
    /// Of a rank that has found nothing yet.
    pub(super) fn of(job: usize, rank: usize) -> Answer {
        Answer {
            job,
            rank,
            error: None,
            same_bits: None,
            errors: Vec::new(),
            dsinks: [Vec::new(), Vec::new()],
            differs: None,
            seconds: Vec::new(),
            one_gpu: Vec::new(),
            model: Vec::new(),
            memory: 0,
            host: 0.0,
            steps: [Vec::new(), Vec::new()],
        }
    }

    /// Of a rank that fails.
    pub(super) fn failed(job: usize, rank: usize, error: &Error) -> Answer {
        let debug = format!("{error:?}");
        let variant = debug.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
        Answer { error: Some((variant, error.to_string())), ..Answer::of(job, rank) }
    }
}

fn problem(len: (usize, usize), heads: (usize, usize), mask: Mask) -> Problem {
    Problem::square(1, len.0, heads.0, 128, mask, Dtype::Bf16)
        .with_heads_kv(heads.1)
        .with_lengths(Lengths::uniform(1, len.0, len.1))
}

fn job(problem: Problem, scheme: Scheme, kind: Kind) -> Job {
    let backward = scheme != Scheme::Decode;
    let layout = if scheme == Scheme::Decode { Layout::Contiguous } else { Layout::Zigzag };
    let same_bits = matches!(scheme, Scheme::Gather | Scheme::Ulysses) && problem.score.program.is_none();
    Job {
        problem,
        scheme,
        layout,
        backward,
        kind,
        same_bits,
        repeat: 2,
        odd_rank: None,
        starts: None,
        dlse: false,
        used: Vec::new(),
    }
}

/// The same scores, changed.
fn scored(problem: Problem, of: impl Fn(ScoreMod) -> ScoreMod) -> Problem {
    problem.with_score(of(problem.score))
}

/// A program of masks and scores, which fits every problem.
fn with_program(problem: Problem, text: &str) -> Problem {
    let program = Program::parse(text).ok().and_then(|program| program.intern().ok());
    scored(problem, |score| score.with_program(program))
}

/// Masks that no window is, and scores that the caller changes.
const MASKED: &str = "scalar w: i32; let d = q + off - k; mask = 0 <= d and (d < w or k % 7 == 0);";
const DOCUMENTS: &str = "mask = q // 5000 == k // 5000;";
const SHORT_DOCUMENTS: &str = "mask = q // 700 == k // 700;";
/// Arrays of rows, of keys and of pairs, whose gradients kernels sum, and one by distance, which none does.
const ROWS: &str = "array row: f32[_, _] grad; score = s * row[h, q];";
const KEYS: &str =
    "array key: f32[_] grad; array bias: f32[_, _, _] grad; score = s + key[k] + bias[hk, q, k];";
const TABLE: &str = "array table: f32[_, _] grad; score = s + table[h, min(abs(q + off - k), 40)];";
const CHANGED: &str = "array bias: f32[_, _]; score = s + bias[q, k] + 0.01 * f32(h);";

/// Sequences of `len` rows, of which one is long, one is empty and one has a single row.
fn packed(job: Job) -> Job {
    let len = job.problem.lengths.max_q();
    let starts: Vec<i32> = [0, len / 8, len / 8, len / 2 + 3, len - 1, len].map(|row| row as i32).to_vec();
    let longest = starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(len);
    let problem = job.problem.with_lengths(Lengths::packed(starts.len() - 1, len, len, longest, longest));
    // Tiles of packed sequences begin elsewhere in each.
    let same_bits = job.same_bits && job.scheme != Scheme::Gather;
    Job { problem, same_bits, starts: Some(starts), ..job }
}

/// Two sequences of queries on caches of `keys` rows on each rank: in pages, or in a row.
fn cached(problem: Problem, (queries, keys): (usize, usize), page: Option<usize>, world: usize) -> Job {
    let side = match page {
        Some(page) => Side::paged(page, 2 * keys.div_ceil(page) + 1, keys),
        None => Side::padded(keys).with_used(),
    };
    let mask = if queries == 1 { Mask::CAUSAL } else { Mask::FULL };
    let problem = problem.with_lengths(Lengths::of(2, Side::padded(queries), side)).with_mask(mask);
    // The last rank has nothing of the second sequence.
    let used =
        |rank: usize| vec![(keys - rank) as i32, if rank + 1 == world { 0 } else { (keys / 3) as i32 }];
    Job { used: (0..world).map(used).collect(), ..job(problem, Scheme::Decode, Kind::Check) }
}

fn check(problem: Problem, scheme: Scheme) -> Job {
    job(problem, scheme, Kind::Check)
}

/// Problems that are more than a mask of one sequence, over all schemes that compute them.
fn forms(of: impl Fn(Mask) -> Problem, keys: usize, world: usize) -> Vec<Job> {
    const ALL: [Scheme; 3] = [Scheme::Gather, Scheme::Ulysses, Scheme::Ring];
    let (causal, mut jobs) = (of(Mask::CAUSAL), Vec::new());
    for scheme in ALL {
        jobs.push(packed(check(causal, scheme)));
        let sinks = check(scored(causal, |score| score.with_sinks(true)), scheme);
        jobs.push(packed(sinks.clone()));
        jobs.push(Job { dlse: true, ..sinks });
    }
    jobs.push(packed(check(of(Mask::FULL), Scheme::Ring)));
    for layout in [Layout::Zigzag, Layout::Contiguous] {
        for scheme in [Scheme::Gather, Scheme::Ring] {
            // Of both ends of the keys some are seen by no row of a rank.
            let sinks = scored(with_program(of(Mask::FULL), SHORT_DOCUMENTS), |score| score.with_sinks(true));
            jobs.push(Job { layout, ..check(with_program(causal, SHORT_DOCUMENTS), scheme) });
            jobs.push(Job { layout, ..check(sinks, scheme) });
        }
    }
    for scheme in ALL {
        jobs.push(check(scored(causal, |score| score.with_alibi(Some(Alibi::PerHead))), scheme));
        jobs.push(check(with_program(of(Mask::FULL), MASKED), scheme));
        jobs.push(Job { dlse: true, ..check(with_program(causal, CHANGED), scheme) });
        jobs.push(check(with_program(causal, ROWS), scheme));
        jobs.push(check(with_program(of(Mask::FULL), KEYS), scheme));
        let dropped =
            |score: ScoreMod| Dropout::new(0.2, 7, 11).and_then(|own| own.of(score)).unwrap_or(score);
        jobs.push(check(scored(causal, dropped), scheme));
    }
    // Distances that no corner of a part keeps.
    let alibi = scored(of(Mask::FULL), |score| score.with_alibi(Some(Alibi::PerHead)));
    jobs.push(Job { same_bits: false, ..check(alibi, Scheme::Gather) });
    for (queries, page) in [(1, Some(16)), (1, None), (3, Some(16)), (3, None)] {
        let sinks = scored(causal, |score| score.with_sinks(queries == 3));
        jobs.push(cached(sinks, (queries, keys), page, world));
    }
    let form = DescaleForm::SequenceHead;
    for (codes, page) in [(Dtype::E4m3, Some(16)), (Dtype::Int8, None)] {
        let types = causal.types.with_kv(codes);
        let coded = causal.with_types(types).with_descales(Descales::new(form, form));
        jobs.push(cached(coded, (1, keys), page, world));
    }
    jobs
}

/// What `fa dist check` compares.
pub(super) fn checks(world: usize, quick: bool, repeat: usize) -> Vec<Job> {
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
    jobs.extend(forms(|mask| problem((4096, 4096), (8 * world, 2 * world), mask), 4000, world));
    jobs.into_iter().map(|job| Job { repeat, ..job }).collect()
}

/// Rows and keys that a thread takes at a time.
pub(super) const TILE: usize = 64;

/// What `fa dist check --transport memory` compares: f32 on the CPU, where one process computes it as well.
pub(super) fn checks_in_memory(world: usize, quick: bool, repeat: usize) -> Vec<Job> {
    let len = 2 * TILE * if world <= 4 { world } else { 2 };
    let of = |(q, k): (usize, usize), mask, scheme| {
        let problem = Problem::square(1, q, 2 * world, 32, mask, Dtype::F32).with_heads_kv(world);
        let job = job(problem.with_lengths(Lengths::uniform(1, q, k)), scheme, Kind::Check);
        // One process takes keys by tiles, too, which shards cut elsewhere.
        let is_cut = scheme == Scheme::Gather && q % (2 * TILE * world) != 0;
        Job { repeat, same_bits: job.same_bits && !is_cut, ..job }
    };
    let mut jobs = Vec::new();
    for scheme in [Scheme::Gather, Scheme::Ulysses, Scheme::Ring] {
        jobs.push(of((len, len), Mask::CAUSAL, scheme));
        if !quick {
            jobs.push(of((len, len), Mask::FULL, scheme));
            jobs.push(of((203, 203), Mask::causal_window(50), scheme));
        }
    }
    jobs.push(of((1, 1000), Mask::CAUSAL, Scheme::Decode));
    let small = |mask| Problem::square(1, len, 2 * world, 32, mask, Dtype::F32).with_heads_kv(world);
    let mut forms = if quick { Vec::new() } else { forms(small, 70, world) };
    for scheme in [Scheme::Gather, Scheme::Ulysses, Scheme::Ring].into_iter().filter(|_| !quick) {
        let table = check(with_program(small(Mask::CAUSAL), TABLE), scheme);
        forms.extend([packed(table.clone()), table]);
    }
    jobs.extend(forms.into_iter().map(|job| Job { repeat, ..job }));
    jobs
}

/// What `fa dist bench` measures.
pub(super) fn benches(quick: bool) -> Vec<Job> {
    let causal = |len, heads| problem((len, len), heads, Mask::CAUSAL);
    let lengths: &[usize] = if quick { &[32_768] } else { &[8192, 16_384, 32_768, 65_536, 131_072] };
    let all: &[(usize, usize)] = if quick { &[(32, 8)] } else { &[(32, 8), (64, 8), (32, 32)] };
    let iterations = |len: usize| match len {
        0..=20_000 => 20,
        20_001..=40_000 => 10,
        _ => 3,
    };
    let mut jobs = Vec::new();
    for (&len, &heads) in lengths.iter().flat_map(|len| all.iter().map(move |heads| (len, heads))) {
        for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Ulysses] {
            jobs.push(job(causal(len, heads), scheme, Kind::Bench { iterations: iterations(len) }));
        }
    }
    for scheme in [Scheme::Gather, Scheme::Ring] {
        jobs.push(packed(job(causal(65_536, (32, 8)), scheme, Kind::Bench { iterations: 3 })));
    }
    for &len in if quick { lengths } else { &[32_768, 65_536] } {
        let masked = with_program(causal(len, (32, 8)), DOCUMENTS);
        let of = |scheme| job(masked, scheme, Kind::Bench { iterations: 10 });
        jobs.extend([Scheme::Gather, Scheme::Ulysses, Scheme::Ring].map(of));
        jobs.push(Job { layout: Layout::Contiguous, ..of(Scheme::Gather) });
    }
    for keys in [131_072, 1 << 18, 1 << 20] {
        let decode = problem((1, keys), (32, 8), Mask::CAUSAL);
        jobs.push(job(decode, Scheme::Decode, Kind::Bench { iterations: 50 }));
    }
    jobs
}

/// The share of one GPU that each of two is to reach, in percent: by the scheme that is the fastest.
pub(super) fn mark(job: &Job, world: usize) -> Option<f64> {
    let Problem { lengths, heads_q, heads_kv, .. } = job.problem;
    let is_grouped = heads_q >= 4 * heads_kv;
    if !job.words().is_empty() {
        return None;
    }
    let (_, mark) = [
        ((1, 1 << 20, true), 95.0),
        ((1, 131_072, true), 75.0),
        ((131_072, 131_072, true), 99.3),
        ((65_536, 65_536, true), 98.5),
        ((32_768, 32_768, true), 97.0),
        ((16_384, 16_384, false), 92.0),
        ((8192, 8192, false), 82.0),
    ]
    .into_iter()
    .find(|(of, _)| *of == (lengths.max_q(), lengths.max_k(), is_grouped))?;
    (world == 2).then_some(mark)
}

/// Ranks of which the last is killed at each stage.
pub(super) fn ends(quick: bool) -> Vec<(Stage, Job)> {
    use Stage::{Backward, Between, Forward, Joined, Planned, Running};
    let heads = |scheme| if scheme == Scheme::Decode { (1, 65_536) } else { (8192, 8192) };
    let of = |scheme| {
        move |stage| (stage, job(problem(heads(scheme), (16, 16), Mask::CAUSAL), scheme, Kind::Ends(stage)))
    };
    // Before the forward the scheme is nothing yet.
    let mut all: Vec<_> =
        [Joined, Planned, Forward, Between, Backward, Running].into_iter().map(of(Scheme::Gather)).collect();
    if quick {
        all.push(of(Scheme::Ring)(Running));
        return all;
    }
    for scheme in [Scheme::Ulysses, Scheme::Ring] {
        all.extend([Forward, Backward, Running].into_iter().map(of(scheme)));
    }
    all.extend([Forward, Running].into_iter().map(of(Scheme::Decode)));
    // Gradients of arrays are summed after those of Q, K and V.
    let learned = with_program(problem((4096, 4096), (16, 16), Mask::CAUSAL), ROWS);
    for scheme in [Scheme::Gather, Scheme::Ulysses, Scheme::Ring] {
        all.push((Backward, job(learned, scheme, Kind::Ends(Backward))));
    }
    all
}

/// Ranks of which the last gives another tensor than its plan has.
pub(super) fn fails() -> Job {
    job(problem((4096, 4096), (16, 16), Mask::CAUSAL), Scheme::Gather, Kind::Fails)
}

/// Ranks of which the last has another problem.
pub(super) fn odd(world: usize) -> Job {
    let job = job(problem((4096, 4096), (16, 16), Mask::CAUSAL), Scheme::Gather, Kind::Check);
    Job { odd_rank: Some(world - 1), ..job }
}
