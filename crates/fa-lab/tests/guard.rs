//! What the library chooses and launches, held to a record: kernel, splits, cluster, workspace, launches and
//! the order of tiles, for every shape of the marks and for 5,000 random problems. A change that is meant to
//! alter no launch leaves the record as it is. It takes no GPU.
//!
//! The ordinary test looks at every 16th line; with `FA_GUARD=all` it looks at all of them, and with
//! `FA_GUARD=write` it writes the record anew. What code the kernels have is the ledger's (`fa prove`).

use std::fmt::Write;
use std::path::Path;

use fa_attn::tune::Tuned;
use fa_core::{
    Alibi, Arch, Division, Dtype, Family, KernelSpec, Lengths, Mask, Pass, Problem, ScoreMod, Side,
    TensorLayout,
};
use fa_kernels::launch::{Addresses, Launches, Params, Step};
use fa_kernels::{RawExtras, RawTensor};
use fa_lab::marks::Marks;
use fa_lab::random::Random;
use fa_planner::divide;
use fa_planner::plan::{PlanOptions, best};
use rayon::prelude::*;

/// Random problems in the record.
const COUNT: usize = 5000;

/// The ordinary test looks at every such line.
const STRIDE: usize = 16;

/// GPUs that launches are planned for, with their SMs.
const H100: (Arch, u32) = (Arch::Sm90, 132);
const OTHERS: [(Arch, u32); 6] = [
    (Arch::Sm80, 108),
    (Arch::Sm86, 84),
    (Arch::Sm89, 128),
    (Arch::Sm100, 148),
    (Arch::Sm120, 170),
    (Arch::Sm90, 114),
];

/// One call to plan.
#[derive(Clone, Copy, Debug)]
struct Call {
    problem: Problem,
    pass: Pass,
    family: Option<Family>,
    division: Division,
    arch: Arch,
    sms: u32,
}

impl Call {
    /// The kernel that the library takes for it: a tuned one, or else the planner's best.
    fn spec(&self, tuned: &Tuned) -> Option<KernelSpec> {
        let Call { problem, pass, family, division, arch, .. } = *self;
        let native = Family::native(arch);
        if arch == Arch::Sm90 && division == Division::PLANNED {
            let wanted = family.unwrap_or(native);
            if let Some(entry) = tuned.find("NVIDIA H100 80GB HBM3", &problem, wanted, pass) {
                return Some(entry.spec);
            }
        }
        let of = |family| {
            let options =
                PlanOptions::default().with_family(Some(family)).with_pass(pass).with_division(division);
            best(&problem, arch, &options).ok().map(|plan| plan.spec)
        };
        match family {
            Some(family) => of(family),
            None => of(native).or_else(|| of(Family::Sm80)),
        }
    }

    fn launches(&self, spec: &KernelSpec) -> Result<Launches, fa_kernels::Error> {
        let Call { problem, division, arch, sms, .. } = self;
        Launches::of(&divide(problem, spec, *arch, *sms, division.splits), problem, *arch, *sms)
    }

    /// Kernel, division, memory, launches and order of tiles as text; "none" where no kernel computes it.
    fn line(&self, tuned: &Tuned) -> String {
        let Some(spec) = self.spec(tuned) else { return "none".to_owned() };
        let mut line = format!("{spec} {:08x}", fnv(&spec.to_ron()) as u32);
        match self.launches(&spec) {
            Ok(launches) => describe(&launches, &mut line),
            Err(error) => line += &format!(" refused: {error}"),
        }
        line
    }
}

fn describe(launches: &Launches, line: &mut String) {
    write!(line, " ws{}", launches.workspace.bytes).expect("written");
    for step in &launches.steps {
        let (kind, launch) = match step {
            Step::Clear(part) => {
                write!(line, " clear:{}+{}", part.offset, part.bytes).expect("written");
                continue;
            }
            Step::ClearGradient => {
                line.push_str(" clear:gradient");
                continue;
            }
            Step::Plan(launch) => ("plan:", launch),
            Step::Launch(launch) => ("", launch),
        };
        let early = if launch.starts_early { "e" } else { "" };
        let (entry, grid, threads) = (launch.entry, launch.grid, launch.threads);
        let (smem, cluster) = (launch.smem, launch.cluster);
        write!(line, " {kind}{entry}:{grid}x{threads}:{smem}:{cluster}{early}").expect("written");
    }
    let tensor = |shape: &fa_kernels::launch::Shape| RawTensor {
        address: 1 << 40,
        strides: TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim),
    };
    let tensors: Vec<RawTensor> = launches.tensors.iter().map(|own| tensor(&own.shape)).collect();
    let at = Addresses {
        tensors: &tensors,
        lse: Some(1 << 41),
        workspace: Some(1 << 42),
        extras: RawExtras::default(),
    };
    let order = match launches.params(&at) {
        Params::Forward(own) => format!(
            " splits{} rows{} tiles{}x{} order{}x{} plan{:?}",
            own.split.splits,
            own.split.slot_rows,
            own.num_tiles,
            own.tile_queries,
            own.heads_per_section,
            own.sections,
            plan_sizes(&own.plan),
        ),
        Params::Backward(own) => format!(
            " splits{} tiles{} order{}x{} stores{} plan{:?}",
            own.head_splits,
            own.num_tiles,
            own.heads_per_section,
            own.sections,
            own.stores_dq,
            plan_sizes(&own.plan),
        ),
    };
    *line += &order;
}

fn plan_sizes(plan: &fa_kernels::params::PlanParams) -> [i32; 7] {
    [plan.items, plan.split_items, plan.m_tiles, plan.n_tiles, plan.heads, plan.slots, plan.shift]
}

/// The calls of all marks on an H100, by the names of their rows.
fn marks() -> Vec<(String, Call)> {
    let mut calls = Vec::new();
    for marks in Marks::ALL {
        for pass in [Pass::Forward, Pass::BACKWARD, Pass::DETERMINISTIC_BACKWARD] {
            if marks.check_pass(pass).is_err() {
                continue;
            }
            let (name, kind) = (marks.name(), if pass.deterministic() { "det" } else { pass.short_name() });
            let (arch, sms) = H100;
            let family = marks.family();
            calls.extend(marks.shapes().into_iter().enumerate().map(|(i, wanted)| {
                let (problem, division) = (wanted.problem, Division::PLANNED);
                (format!("{name},{kind},{i}"), Call { problem, pass, family, division, arch, sms })
            }));
        }
    }
    calls
}

/// The random call of this number: dense, packed, used and paged lengths, all passes, and every
/// architecture.
fn random(number: usize) -> Call {
    let mut random = Random::new(0x6775_6172_6400 ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    random.bits();
    let pass = random.of(&[Pass::Forward, Pass::Forward, Pass::BACKWARD, Pass::DETERMINISTIC_BACKWARD]);
    let (arch, sms) = if random.below(8) < 5 { H100 } else { random.of(&OTHERS) };
    let head_dims = [(64, 64), (128, 128), (128, 128), (96, 96), (256, 256), (192, 128), (80, 80), (32, 32)];
    let (head_dim, head_dim_v) = random.of(&head_dims);
    let heads_kv = random.of(&[1, 2, 4, 8, 16, 40]);
    let group = random.of(&[1, 1, 2, 4, 7, 8, 16]);
    let length = |random: &mut Random, doublings: usize| {
        let power = 1usize << random.below(doublings + 1);
        let any = power + random.below(power);
        random.of(&[power, power, any, (power + 1).next_multiple_of(64)])
    };
    let decodes = pass == Pass::Forward && random.below(2) == 0;
    let k = length(&mut random, 15);
    let other = length(&mut random, 13);
    let q = if decodes { 1 + random.below(16) } else { random.of(&[k, k, other]) };
    let batch = random.of(&[1, 1, 2, 3, 4, 8, 17, 64]);
    let share = |random: &mut Random, all: usize| all - random.below(all / 2 + 1);
    let lengths = match random.below(8) {
        0..=3 => Lengths::uniform(batch, q, k),
        4 | 5 => {
            let (total_q, total_k) = (share(&mut random, batch * q), share(&mut random, batch * k));
            Lengths::packed(batch, total_q, total_k, q, k)
        }
        6 => Lengths::of(batch, Side::padded(q), Side::padded(k).with_used()),
        _ => {
            let page = random.of(&[1, 16, 64, 128, 256]);
            let queries =
                if random.below(2) == 0 { Side::padded(q) } else { Side::packed(batch * q, q).with_used() };
            Lengths::of(batch, queries, Side::paged(page, batch * k.div_ceil(page) + 1, k))
        }
    };
    let window = length(&mut random, 10) as u32;
    let mask = random.of(&[
        Mask::FULL,
        Mask::FULL,
        Mask::CAUSAL,
        Mask::CAUSAL,
        Mask::causal_window(window),
        Mask::window(window, 64),
    ]);
    let mut score = if random.below(8) == 0 { ScoreMod::softcap(30.0) } else { ScoreMod::NONE };
    score.sinks = random.below(8) == 0;
    score.alibi = (random.below(8) == 0).then_some(Alibi::PerHead);
    let dtype = random.of(&[Dtype::Bf16, Dtype::Bf16, Dtype::F16]);
    let mut division = Division::PLANNED;
    if pass == Pass::Forward && random.below(6) == 0 {
        division.splits = Some(random.of(&[1, 2, 3, 8, 16, 64, 96, 300]));
    }
    if pass == Pass::Forward && random.below(12) == 0 {
        division.pack_gqa = Some(random.below(2) == 0);
    }
    let family = random.of(&[None, None, None, Some(Family::Sm80)]);
    let square = Problem::square(batch, 1, heads_kv * group, head_dim, mask, dtype);
    let problem =
        square.with_lengths(lengths).with_heads_kv(heads_kv).with_head_dim_v(head_dim_v).with_score(score);
    Call { problem, pass, family, division, arch, sms }
}

/// FNV-1a in 64 bits.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn launches_are_those_of_the_record() {
    let mode = std::env::var("FA_GUARD").unwrap_or_default();
    let is_write = mode == "write";
    let stride = if mode == "all" || is_write { 1 } else { STRIDE };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let read = |name: &str| {
        let text = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let tuned = Tuned::shipped();

    let calls = marks();
    let rows: Vec<(usize, String)> = calls
        .par_iter()
        .enumerate()
        .filter(|(i, _)| i % stride == 0)
        .map(|(i, (name, call))| (i, format!("{name},{}", call.line(&tuned))))
        .collect();
    let digests: Vec<(usize, String)> = (0..COUNT)
        .into_par_iter()
        .filter(|i| i % stride == 0)
        .map(|i| (i, format!("{:016x}", fnv(&random(i).line(&tuned)))))
        .collect();
    if is_write {
        let lines =
            |rows: &[(usize, String)]| rows.iter().map(|(_, row)| row.clone() + "\n").collect::<String>();
        std::fs::write(folder.join("guard-marks.csv"), lines(&rows)).expect("written");
        std::fs::write(folder.join("guard-random.txt"), lines(&digests)).expect("written");
    }
    let (known_rows, known_digests) = (read("guard-marks.csv"), read("guard-random.txt"));
    assert_eq!((known_rows.len(), known_digests.len()), (calls.len(), COUNT), "lines of the record");
    for (i, row) in &rows {
        assert_eq!(*row, known_rows[*i], "{:?}", calls[*i].1);
    }
    for (i, digest) in &digests {
        let call = random(*i);
        assert_eq!(*digest, known_digests[*i], "{call:?}: {}", call.line(&tuned));
    }
}
