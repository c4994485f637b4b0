//! One shape of a list.

use fa_core::{Pass, Problem};
use serde::Serialize;

use crate::sequences::Sequences;
use crate::shape::Shape;

/// Calls in a graph of decoding: as many as a small model has layers.
pub(super) const DECODE_CALLS: usize = 16;

/// A shape to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The model that it is from, or a description, for tables.
    pub name: Option<&'static str>,
    /// The problem.
    pub problem: Problem,
    /// The lengths of its sequences, where the problem only has bounds.
    pub sequences: Option<Sequences>,
    /// The group that its rows are summarised with.
    pub group: &'static str,
    /// The unit of its rates, by what bounds it.
    pub unit: Unit,
    /// Calls captured as one CUDA graph, whose replays are timed; 0 for single launches.
    pub graph: usize,
    /// What its time is compared for: shapes of one comparison are timed in turns, unless peers run beside.
    pub comparison: Option<&'static str>,
}

/// The unit of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// 10^12 operations on visible pairs, a second.
    #[serde(rename = "TFLOP/s")]
    Flops,
    /// 10^12 bytes of K and V, a second.
    #[serde(rename = "TB/s")]
    KvBytes,
    /// Milliseconds of all calls of a graph together.
    #[serde(rename = "ms per step")]
    StepMs,
    /// Microseconds of the kernel that plans a batch's work, without the attention.
    #[serde(rename = "us per plan")]
    PlanUs,
}

impl Unit {
    /// As tables have it.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Flops => "TFLOP/s",
            Unit::KvBytes => "TB/s",
            Unit::StepMs => "ms per step",
            Unit::PlanUs => "us per plan",
        }
    }

    /// The ratio of a figure to another, above 1 if it is better.
    pub fn ratio(self, ours: f64, other: f64) -> f64 {
        match self {
            Unit::Flops | Unit::KvBytes => ours / other,
            Unit::StepMs | Unit::PlanUs => other / ours,
        }
    }

    /// The better of two figures.
    pub fn better(self, a: f64, b: f64) -> f64 {
        match self {
            Unit::Flops | Unit::KvBytes => a.max(b),
            Unit::StepMs | Unit::PlanUs => a.min(b),
        }
    }
}

impl Wanted {
    /// A shape of a problem of uniform lengths.
    pub fn new(problem: Problem, group: &'static str) -> Wanted {
        Wanted { name: None, problem, sequences: None, group, unit: Unit::Flops, graph: 0, comparison: None }
    }

    /// A shape of few queries on a long cache, as replays of a CUDA graph of as many calls as a small model
    /// has layers.
    pub fn decoding(problem: Problem, group: &'static str) -> Wanted {
        Wanted { unit: Unit::KvBytes, graph: DECODE_CALLS, ..Wanted::new(problem, group) }
    }

    /// Name, group, batch, heads, lengths, head dims and mask in a line.
    pub fn label(&self) -> String {
        let shape = Shape::from(&self.problem);
        let (heads, seqlens, head_dims) = (shape.heads(), shape.seqlens(), shape.head_dims());
        let name = self.name.map_or_else(String::new, |name| format!("{name}, "));
        let Wanted { group, .. } = self;
        format!("{name}{group}: {} x {seqlens}, {heads}, hd {head_dims}, {}", shape.batch, shape.mask)
    }

    /// A shape of sequences of different lengths.
    pub fn of(problem: Problem, sequences: Sequences, group: &'static str) -> Wanted {
        let problem = problem.with_lengths(sequences.lengths());
        Wanted { sequences: Some(sequences), ..Wanted::new(problem, group) }
    }

    /// The shapes of each comparison, by their places in `shapes`, and each other shape by itself.
    pub fn comparisons(shapes: &[Wanted]) -> Vec<Vec<usize>> {
        let mut found: Vec<Vec<usize>> = Vec::new();
        let key = |i: usize| shapes[i].comparison.map(|name| (name, shapes[i].problem.types));
        for i in 0..shapes.len() {
            match found.iter_mut().find(|others| key(i).is_some() && key(others[0]) == key(i)) {
                Some(others) => others.push(i),
                None => found.push(vec![i]),
            }
        }
        found
    }

    /// The sequences.
    pub fn sequences(&self) -> Sequences {
        self.sequences.clone().unwrap_or_else(|| Sequences::filling(&self.problem.lengths))
    }

    /// Operations on visible pairs of a pass, by the field's convention ([`Problem::flops_forward`]).
    pub fn flops(&self, pass: Pass) -> f64 {
        let Problem { heads_q, head_dim, head_dim_v, mask, .. } = self.problem;
        let forward = 2.0 * heads_q as f64 * self.sequences().pairs(&mask) * (head_dim + head_dim_v) as f64;
        if pass.is_backward() { 2.5 * forward } else { forward }
    }

    /// Bytes of the sequences' keys and values.
    pub fn kv_bytes(&self) -> f64 {
        let Problem { heads_kv, head_dim, head_dim_v, types, .. } = self.problem;
        let rows = self.sequences().k.total() * heads_kv;
        (rows * (head_dim + head_dim_v)) as f64 * types.kv.bytes_per_number()
    }

    /// The rate of calls that take `ms` each, in the shape's unit.
    pub fn rate(&self, ms: f64, pass: Pass) -> f64 {
        match self.unit {
            Unit::Flops => self.flops(pass) / (ms * 1e9),
            Unit::KvBytes => self.kv_bytes() / (ms * 1e9),
            Unit::StepMs => ms * self.graph.max(1) as f64,
            Unit::PlanUs => ms * 1e3,
        }
    }
}
