//! The cases: shapes, head dims, heads, masks and placements, and the places where known implementations failed.

mod backward;

use fa_core::{Dtype, Lengths, Mask, Pass, Problem, ScoreMod, Strides, TensorLayout, Types};
use fa_cpu::grid::{BATCHES, HEAD_DIMS, HEADS, PADDED_HEAD_DIMS, SHAPES};

use crate::cuda::{Half, Inputs, Place, shapes};
use crate::shape::{head_dims, pair};

pub use backward::gradients;

/// One thing to be right about.
#[derive(Clone, Debug)]
pub struct Case {
    /// What the case is about; the first part of its name.
    pub group: &'static str,
    /// The problem.
    pub problem: Problem,
    /// Where its tensors lie.
    pub placing: Placing,
    /// What they hold.
    pub values: Values,
    /// What is done with it.
    pub action: Action,
    /// The kernel, where not the library chooses.
    pub kernel: Option<NamedSpec>,
    /// What is computed and judged: a backward after the library's forward.
    pub pass: Pass,
}

/// A kernel of the case's choice.
#[derive(Clone, Debug)]
pub struct NamedSpec {
    /// What it is called in the case's name.
    pub name: String,
    /// The kernel.
    pub spec: fa_core::KernelSpec,
}

/// Where tensors lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// Packed `[batch, seqlen, heads, dim]`.
    Bshd,
    /// Packed `[batch, heads, seqlen, dim]`.
    Bhsd,
    /// BSHD with this many elements behind every row.
    Gap(usize),
    /// BHSD with this many elements behind every row.
    BhsdGap(usize),
    /// One K and V for the whole batch (batch stride 0).
    SharedBatch,
    /// One K and V for all heads (head stride 0).
    SharedHeads,
    /// One K and V row for all positions (seq stride 0).
    SharedRows,
    /// Batch entries more than 2^31 elements apart, in every tensor.
    FarBatch,
    /// Keys and values 2^25 + 8 elements apart, so that offsets within a head exceed 2^31.
    FarKeys,
}

/// What Q, K and V hold. Where maxima are tracked, guessed or left behind, the course of scores along the keys matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Independent, of unit variance.
    Normal,
    /// Keys grow along the sequence: each step of a walk from the front finds a new maximum.
    Rising,
    /// Keys shrink along the sequence: the same for a walk from the back.
    Falling,
    /// Every 97th key is 30 times as large.
    Spikes,
    /// All keys are 0: every weight is the same.
    Equal,
    /// Queries and keys are 8 times as large: nearly all weight is on one key.
    Sharp,
}

/// What is done with a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// One run.
    Once,
    /// This many runs, whose outputs must be bit-equal.
    Repeat(usize),
    /// A run captured as a CUDA graph and replayed.
    Graph,
    /// A run on a stream of the caller's.
    OwnStream,
    /// Two threads at once, each with a stream, tensors and many runs of its own.
    Threads,
    /// Timed runs, whose outputs are not compared.
    Measure,
}

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Below a minute.
    Quick,
    /// Everything.
    Full,
}

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
const MASKS: [Mask; 2] = [Mask::CAUSAL, Mask::FULL];

/// A problem that cases differ from by what they are about.
pub const BASE: Problem = Problem::square(2, 256, 4, 128, Mask::CAUSAL, Dtype::Bf16);

/// A case of one run on packed BSHD tensors of normal values by the library's kernel.
pub fn case(group: &'static str, problem: Problem) -> Case {
    Case {
        group,
        problem,
        placing: Placing::Bshd,
        values: Values::Normal,
        action: Action::Once,
        kernel: None,
        pass: Pass::Forward,
    }
}

/// The cases of the library's own choice of kernel.
pub fn library(extent: Extent, repeat: usize) -> Vec<Case> {
    let full = extent == Extent::Full;
    let mut cases = shapes_and_dims(full);
    cases.extend(padded(full));
    cases.extend(heads());
    cases.extend(windows(full));
    cases.extend(scores());
    cases.extend(values());
    cases.extend(placings(full));
    cases.extend(empties());
    cases.extend(sizes(full));
    cases.extend(actions(repeat));
    cases
}

/// Every shape with every mask; what else varies goes round so that all of it meets all shapes' kinds.
fn shapes_and_dims(full: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut turn = 0usize;
    for (index, (seqlen_q, seqlen_k)) in SHAPES.into_iter().enumerate() {
        // Quick takes two of the head dims for each shape, others for its neighbours.
        let dims: Vec<(usize, usize)> =
            if full { HEAD_DIMS.into() } else { [0, 1].map(|i| HEAD_DIMS[(3 * index + 4 * i) % 8]).into() };
        for (head_dim, head_dim_v) in dims {
            for mask in MASKS {
                turn += 1;
                let (heads_q, heads_kv) = HEADS[turn / 2 % 5];
                let batch = if seqlen_q.max(seqlen_k) >= 1023 { 1 } else { BATCHES[turn / 3 % 3] };
                let problem = Problem {
                    lengths: Lengths::uniform(batch, seqlen_q, seqlen_k),
                    heads_q,
                    heads_kv,
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(DTYPES[turn / 5 % 2]),
                    ..BASE
                };
                cases.push(case("shapes", problem));
            }
        }
    }
    cases
}

fn padded(full: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (head_dim, head_dim_v)) in PADDED_HEAD_DIMS.into_iter().enumerate() {
        for (turn, mask) in MASKS.into_iter().enumerate() {
            let lengths = [(113, 203), (256, 256), (300, 77)];
            let lengths = if full { &lengths[..] } else { &lengths[index % 2..=index % 2] };
            for &(seqlen_q, seqlen_k) in lengths {
                let dtype = DTYPES[(index + turn) % 2];
                let problem = Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
                cases.push(case("padded", problem));
            }
        }
    }
    cases
}

fn heads() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads_q, heads_kv) in HEADS {
        for mask in MASKS {
            for (turn, (seqlen_q, seqlen_k)) in [(113, 203), (1, 300), (20, 500)].into_iter().enumerate() {
                let dtype = DTYPES[turn % 2];
                let problem = Problem {
                    heads_q,
                    heads_kv,
                    lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
                cases.push(case("heads", problem));
            }
        }
    }
    cases
}

fn windows(full: bool) -> Vec<Case> {
    let masks = [
        Mask::window(0, 0),
        Mask::window(64, 0),
        Mask::causal_window(33),
        Mask::window(70, 9),
        Mask::window(0, 100),
        Mask { left: Some(50), right: None },
        Mask { left: None, right: Some(40) },
        Mask::window(5000, 5000),
    ];
    let lengths = [(256, 256), (113, 203), (500, 128), (1, 400), (203, 1), (777, 1500)];
    let mut cases = Vec::new();
    for (index, mask) in masks.into_iter().enumerate() {
        for (turn, (seqlen_q, seqlen_k)) in lengths.into_iter().enumerate() {
            if !full && (index + turn) % 2 == 1 {
                continue;
            }
            let (head_dim, head_dim_v) =
                [(128, 128), (64, 64), (192, 128), (256, 256)][(index + turn) / 2 % 4];
            let problem = Problem {
                lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                mask,
                head_dim,
                head_dim_v,
                ..BASE
            };
            cases.push(case("windows", problem));
        }
    }
    cases
}

/// Scores that are capped, flat, and large.
fn scores() -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, mask) in [Mask::CAUSAL, Mask::FULL, Mask::window(70, 9)].into_iter().enumerate() {
        let dtype = DTYPES[turn % 2];
        let problem = Problem {
            lengths: Lengths::uniform(BASE.lengths.sequences(), 200, 333),
            mask,
            types: Types::same(dtype),
            ..BASE
        };
        for cap in [1.0, 5.0, 50.0] {
            cases.push(case("softcap", Problem { score: ScoreMod::softcap(cap), ..problem }));
        }
        for scale in [1e-6, 0.3, 1.0, 4.0] {
            cases.push(case("scale", Problem { softmax_scale: Some(scale), ..problem }));
        }
        let both = Problem { softmax_scale: Some(1.0), score: ScoreMod::softcap(3.0), ..problem };
        cases.push(case("softcap", Problem { head_dim: 64, head_dim_v: 64, ..both }));
    }
    cases
}

fn values() -> Vec<Case> {
    let mut cases = Vec::new();
    let all = [Values::Rising, Values::Falling, Values::Spikes, Values::Equal, Values::Sharp];
    for (turn, values) in all.into_iter().enumerate() {
        for mask in MASKS {
            for (head_dim, head_dim_v) in [(64, 64), (128, 128), (256, 256)] {
                let dtype = DTYPES[turn % 2];
                let problem = Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), 700, 900),
                    heads_q: 2,
                    heads_kv: 2,
                    head_dim,
                    head_dim_v,
                    mask,
                    types: Types::same(dtype),
                    ..BASE
                };
                cases.push(Case { values, ..case("values", problem) });
            }
        }
    }
    cases
}

fn placings(full: bool) -> Vec<Case> {
    let placings = [
        Placing::Bhsd,
        Placing::Gap(8),
        Placing::Gap(72),
        Placing::BhsdGap(8),
        Placing::SharedBatch,
        Placing::SharedHeads,
        Placing::SharedRows,
    ];
    let mut problems = vec![
        Problem {
            lengths: Lengths::uniform(BASE.lengths.sequences(), 113, 203),
            heads_q: 6,
            heads_kv: 3,
            ..BASE
        },
        Problem { head_dim: 72, head_dim_v: 40, mask: Mask::FULL, types: Types::same(Dtype::F16), ..BASE },
    ];
    if full {
        problems.push(Problem {
            head_dim: 256,
            head_dim_v: 256,
            lengths: Lengths::uniform(BASE.lengths.sequences(), 300, BASE.lengths.max_k()),
            ..BASE
        });
        problems.push(Problem {
            head_dim: 192,
            lengths: Lengths::uniform(BASE.lengths.sequences(), BASE.lengths.max_q(), 999),
            mask: Mask::window(100, 3),
            ..BASE
        });
    }
    let mut cases = Vec::new();
    for problem in problems {
        cases.extend(placings.map(|placing| Case { placing, ..case("strides", problem) }));
    }
    cases
}

/// What may be empty is; what may be one is.
fn empties() -> Vec<Case> {
    let mut cases = Vec::new();
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(3, 3)] {
        let problem = Problem { mask, ..BASE };
        cases.extend(
            [
                Problem {
                    lengths: Lengths::uniform(problem.lengths.sequences(), problem.lengths.max_q(), 0),
                    ..problem
                },
                Problem {
                    lengths: Lengths::uniform(problem.lengths.sequences(), 0, problem.lengths.max_k()),
                    ..problem
                },
                Problem {
                    lengths: Lengths::uniform(0, problem.lengths.max_q(), problem.lengths.max_k()),
                    ..problem
                },
                Problem { lengths: Lengths::uniform(problem.lengths.sequences(), 0, 0), ..problem },
                Problem { lengths: Lengths::uniform(1, 1, 1), heads_q: 1, heads_kv: 1, ..problem },
                // Whole tiles of queries without a key.
                Problem { lengths: Lengths::uniform(problem.lengths.sequences(), 1000, 5), ..problem },
                // Many more tiles than blocks, nearly all of them empty: a pipeline's phase must not flip in them.
                Problem { lengths: Lengths::uniform(9, 3000, 40), heads_q: 6, heads_kv: 3, ..problem },
            ]
            .map(|problem| case("empty", problem)),
        );
    }
    cases
}

/// Counts and offsets beyond what 16 and 32 bits hold.
fn sizes(full: bool) -> Vec<Case> {
    let small = Problem { lengths: Lengths::uniform(8300, 17, 33), heads_q: 2, heads_kv: 2, ..BASE };
    let mut cases = vec![
        case("sizes", Problem { head_dim: 64, head_dim_v: 64, ..small }),
        case(
            "sizes",
            Problem { lengths: Lengths::uniform(1, 65, 65), heads_q: 3000, heads_kv: 1000, ..BASE },
        ),
        Case {
            placing: Placing::FarBatch,
            ..case(
                "sizes",
                Problem {
                    lengths: Lengths::uniform(BASE.lengths.sequences(), 200, BASE.lengths.max_k()),
                    ..BASE
                },
            )
        },
    ];
    if full {
        let far = Problem {
            lengths: Lengths::uniform(1, BASE.lengths.max_q(), 128),
            heads_q: 2,
            heads_kv: 2,
            ..BASE
        };
        cases.push(Case { placing: Placing::FarKeys, ..case("sizes", far) });
        let narrow = Problem { head_dim: 64, head_dim_v: 64, mask: Mask::FULL, ..BASE };
        cases.push(Case { placing: Placing::FarBatch, ..case("sizes", narrow) });
        let long = Problem { lengths: Lengths::uniform(1, 16, 4 << 20), heads_q: 1, heads_kv: 1, ..narrow };
        cases.push(case("sizes", long));
        cases.push(case("sizes", Problem { mask: Mask::CAUSAL, ..long }));
    }
    cases
}

fn actions(repeat: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let ragged = Problem { lengths: Lengths::uniform(BASE.lengths.sequences(), 1111, 1111), ..BASE };
    for problem in [
        ragged,
        Problem { mask: Mask::FULL, head_dim: 64, head_dim_v: 64, ..ragged },
        Problem { head_dim: 256, head_dim_v: 256, types: Types::same(Dtype::F16), ..ragged },
    ] {
        cases.push(Case { action: Action::Repeat(repeat), ..case("repeat", problem) });
        for action in [Action::Graph, Action::OwnStream, Action::Threads] {
            cases.push(Case { action, ..case("launch", problem) });
        }
    }
    cases
}

/// What a kernel of a given spec is tried on: every trap that its fields let it meet.
pub fn of_spec(group: &'static str, name: &str, spec: &fa_core::KernelSpec, extent: Extent) -> Vec<Case> {
    use fa_core::MaskKind;
    let masks: &[Mask] = match spec.mask {
        MaskKind::Full => &[Mask::FULL],
        MaskKind::Causal => &[Mask::CAUSAL],
        MaskKind::Window => &[Mask::window(70, 9), Mask::causal_window(130)],
    };
    let lengths: &[(usize, usize)] = match extent {
        Extent::Quick => &[(113, 203), (1000, 1000), (300, 70)],
        Extent::Full => &SHAPES,
    };
    let mut cases = Vec::new();
    for &mask in masks {
        for (turn, &(seqlen_q, seqlen_k)) in lengths.iter().enumerate() {
            // Some problems narrower than the tile.
            let narrow = if turn % 3 == 2 { 8 } else { 0 };
            let (heads_q, heads_kv) = [(4, 4), (6, 3), (8, 1)][turn % 3];
            let problem = Problem {
                lengths: Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k),
                heads_q,
                heads_kv,
                head_dim: spec.head_dim as usize - narrow,
                head_dim_v: spec.head_dim_v as usize - narrow,
                mask,
                types: Types::same(spec.types.qkv),
                score: ScoreMod { softcap: spec.score.softcap.then_some(7.0) },
                ..BASE
            };
            let placing = [Placing::Bshd, Placing::Bhsd, Placing::Gap(8)][turn % 3];
            let kernel = Some(NamedSpec { name: name.to_owned(), spec: spec.clone() });
            // Gradients of long problems take the oracle seconds a head.
            if !spec.kernel.is_backward() || seqlen_q * seqlen_k <= 1 << 20 {
                cases.push(Case { placing, kernel, pass: spec.kernel.pass(), ..case(group, problem) });
            }
        }
    }
    let steep = cases.iter().max_by_key(|case| case.problem.lengths.max_k().min(1024)).cloned();
    cases.extend(
        steep
            .into_iter()
            .flat_map(|case| [Values::Rising, Values::Falling].map(|values| Case { values, ..case.clone() })),
    );
    cases
}

impl Case {
    /// `group/what it is`, unique among the cases of a run.
    pub fn name(&self) -> String {
        let mut name = format!("{}/{}", self.group, self.problem_name());
        if self.action != Action::Once {
            name += &format!(" {:?}", self.action).to_lowercase();
        }
        name += match self.pass {
            Pass::Forward => "",
            Pass::Backward { deterministic: false } => " gradients",
            Pass::Backward { deterministic: true } => " deterministic gradients",
        };
        if let Some(kernel) = &self.kernel {
            name += &format!(" by {}", kernel.name);
        }
        name
    }

    /// The problem and where its tensors lie; cases of one such name share their inputs and the oracle's results.
    pub fn problem_name(&self) -> String {
        let p = &self.problem;
        let mut name = format!(
            "b{} {}x{} h{} hd{} {} {}",
            p.lengths.sequences(),
            p.lengths.max_q(),
            p.lengths.max_k(),
            pair(p.heads_q, p.heads_kv, ':'),
            head_dims(p),
            p.mask,
            p.types.qkv
        );
        if let Some(cap) = p.score.softcap {
            name += &format!(" cap {cap}");
        }
        if let Some(scale) = p.softmax_scale {
            name += &format!(" scale {scale}");
        }
        if self.values != Values::Normal {
            name += &format!(" {:?}", self.values).to_lowercase();
        }
        if self.placing != Placing::Bshd {
            name += &format!(" {:?}", self.placing).to_lowercase();
        }
        name
    }

    /// Where Q, K, V and O lie.
    pub fn places(&self) -> [Place; 4] {
        let shapes = shapes(&self.problem);
        let all = |place: fn([usize; 4], usize) -> Place, gap| shapes.map(|shape| place(shape, gap));
        let bshd = |shape, gap| Place::padded(shape, TensorLayout::Bshd, gap);
        let bhsd = |shape, gap| Place::padded(shape, TensorLayout::Bhsd, gap);
        let packed = all(bshd, 0);
        let with_kv = |change: fn(Strides) -> Strides| {
            let [q, k, v, out] = packed;
            let changed = |place: Place| Place { strides: change(place.strides), ..place };
            [q, changed(k), changed(v), out]
        };
        match self.placing {
            Placing::Bshd => packed,
            Placing::Bhsd => all(bhsd, 0),
            Placing::Gap(gap) => all(bshd, gap),
            Placing::BhsdGap(gap) => all(bhsd, gap),
            Placing::SharedBatch => with_kv(|strides| Strides { batch: 0, ..strides }),
            Placing::SharedHeads => with_kv(|strides| Strides { head: 0, ..strides }),
            Placing::SharedRows => with_kv(|strides| Strides { seq: 0, ..strides }),
            Placing::FarBatch => packed
                .map(|place| Place { strides: Strides { batch: (1 << 31) + 64, ..place.strides }, ..place }),
            Placing::FarKeys => with_kv(|strides| Strides { seq: (1 << 25) + 8, ..strides }),
        }
    }

    /// The seed of the inputs, another for every problem.
    pub fn seed(&self) -> u64 {
        // FNV-1a.
        self.problem_name()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    /// The inputs.
    pub fn inputs<T: Half>(&self) -> Inputs<T> {
        let mut inputs = Inputs::<T>::placed(&self.problem, self.places(), self.seed());
        let Problem { heads_kv, head_dim, .. } = self.problem;
        let seqlen_k = self.problem.lengths.max_k();
        let mut scale = |tensor: usize, factor: &(dyn Fn(usize) -> f32 + Sync)| {
            for (row, values) in inputs.values[tensor].chunks_mut(head_dim).enumerate() {
                let factor = factor(row);
                let scaled =
                    |value: &mut T| *value = <T as fa_cpu::Element>::from_f32(value.to_f32() * factor);
                values.iter_mut().for_each(scaled);
            }
        };
        let key = |row: usize| row / heads_kv % seqlen_k;
        let share = |row: usize| key(row) as f32 / seqlen_k as f32;
        match self.values {
            Values::Normal => {}
            Values::Rising => scale(1, &|row| 0.1 + 12.0 * share(row)),
            Values::Falling => scale(1, &|row| 12.1 - 12.0 * share(row)),
            Values::Spikes => scale(1, &|row| if key(row) % 97 == 50 { 30.0 } else { 1.0 }),
            Values::Equal => scale(1, &|_| 0.0),
            Values::Sharp => (0..2).for_each(|tensor| scale(tensor, &|_| 8.0)),
        }
        inputs
    }

    /// Bytes of device memory that the tensors take.
    pub fn device_bytes(&self) -> u64 {
        let elements: u64 = self.places().iter().map(|place| place.len() as u64).sum();
        let tensors = elements * self.problem.types.qkv.bytes() as u64;
        if !self.pass.is_backward() {
            return tensors;
        }
        // Gradients are as large as their tensors, and dQ's accumulators are f32 in rows as wide as a tile.
        let columns = self.problem.head_dim.next_multiple_of(64) as f64;
        2 * tensors + (4.0 * self.problem.rows() * columns) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_problems_valid() {
        for extent in [Extent::Quick, Extent::Full] {
            let cases: Vec<Case> = [library(extent, 10), gradients(extent, 10)].concat();
            let names: HashSet<String> = cases.iter().map(Case::name).collect();
            let mut seen = HashSet::new();
            let twice: Vec<String> =
                cases.iter().map(Case::name).filter(|name| !seen.insert(name.clone())).collect();
            assert_eq!(names.len(), cases.len(), "{twice:?}");
            for case in &cases {
                case.problem.check().unwrap_or_else(|error| panic!("{}: {error}", case.name()));
            }
        }
    }

    #[test]
    fn every_shape_head_dim_and_ratio_of_heads_is_met_by_both_types() {
        for cases in [library(Extent::Full, 10), gradients(Extent::Full, 10)] {
            for dtype in DTYPES {
                let of = |f: &dyn Fn(&Problem) -> bool| {
                    cases.iter().any(|case| case.problem.types.qkv == dtype && f(&case.problem))
                };
                for (q, k) in SHAPES {
                    assert!(of(&|p| (p.lengths.max_q(), p.lengths.max_k()) == (q, k)), "{q}x{k} {dtype}");
                }
                for (d, dv) in HEAD_DIMS.into_iter().chain(PADDED_HEAD_DIMS) {
                    assert!(of(&|p| (p.head_dim, p.head_dim_v) == (d, dv)), "{d}-{dv} {dtype}");
                }
                for (q, kv) in HEADS {
                    assert!(of(&|p| (p.heads_q, p.heads_kv) == (q, kv)), "{q}:{kv} {dtype}");
                }
            }
        }
    }
}
