//! A program's mask and change of scores in the formula, by the interpreter.

use std::collections::BTreeMap;
use std::ops::Range;

use fa_core::program::{Inputs, Node, NodeId, Point, Precision, Program, RowValues, Value};

use crate::batch::Batch;
use crate::real::Real;

/// The program of one query head of one sequence.
pub(super) struct OwnProgram<'a> {
    program: &'static Program,
    inputs: &'a Inputs<'a>,
    at: Point,
    precision: Precision,
}

/// What the program makes of one query's scores.
pub(super) struct OwnRow<R> {
    /// Of each key, whether it is hidden; empty without a program.
    pub hidden: Vec<bool>,
    /// The changed scores.
    pub scores: Vec<R>,
    /// Their derivatives by the scores.
    pub slopes: Vec<R>,
    /// What their probabilities are multiplied by.
    pub weights: Vec<R>,
}

impl<R> OwnRow<R> {
    /// Without a program.
    pub(super) const NONE: OwnRow<R> =
        OwnRow { hidden: vec![], scores: vec![], slopes: vec![], weights: vec![] };
}

/// Gradients of arrays by the places of their elements, in the order of a packed array.
pub(super) type ArraySums<R> = Vec<BTreeMap<usize, R>>;

impl<'a> OwnProgram<'a> {
    pub(super) fn of<R: Real>(
        batch: &'a Batch<'a>,
        s: usize,
        h: usize,
        kv_head: usize,
        offset: i64,
    ) -> Option<OwnProgram<'a>> {
        let (program, inputs) = batch.program()?;
        let at = batch.point(s, [h, kv_head], offset);
        let precision = if size_of::<R>() == 4 { Precision::F32 } else { Precision::F64 };
        Some(OwnProgram { program: program.get(), inputs, at, precision })
    }

    /// Whether scores are changed.
    pub(super) fn changes(&self) -> bool {
        self.program.score().is_some()
    }

    fn point(&self, i: usize, j: usize, s: f64) -> Point {
        Point { q: self.at.q + i as i32, k: j as i32, s, ..self.at }
    }

    /// What becomes of query `i`'s scores of `keys`. A score of -inf hides its key.
    pub(super) fn row<R: Real>(&self, i: usize, keys: Range<usize>, scores: &[R]) -> OwnRow<R> {
        let mut row = OwnRow::NONE;
        let mut found = RowValues::new(self.program, self.inputs, &self.point(i, 0, 0.0), self.precision);
        for (j, score) in keys.zip(scores) {
            found.at(j as i32, score.to_f64());
            let changed = R::from_f64(found.score());
            row.hidden.push(!found.visible() || changed == R::NEG_INFINITY);
            row.scores.push(changed);
            row.slopes.push(R::from_f64(found.slope()));
            row.weights.push(R::from_f64(found.weight()));
        }
        row
    }

    /// Sums to add to, one list for each array.
    pub(super) fn sums<R>(&self) -> ArraySums<R> {
        self.program.arrays().iter().map(|_| BTreeMap::new()).collect()
    }

    /// Adds to the gradients of arrays what a score's gradient `ds` gives them; `signed` or in magnitude.
    pub(super) fn add<R: Real>(
        &self,
        (i, j): (usize, usize),
        score: R,
        ds: R,
        signed: bool,
        to: &mut ArraySums<R>,
    ) {
        if self.program.gradients().is_empty() {
            return;
        }
        let values = self.program.values(self.inputs, &self.point(i, j, score.to_f64()), self.precision);
        for gradient in self.program.gradients() {
            let slope = match values[gradient.slope.index()] {
                Value::F32(slope) => R::from_f64(if signed { slope } else { slope.abs() }),
                Value::I32(_) | Value::Bool(_) => R::ZERO,
            };
            let place = self.place(gradient.load, &values);
            *to[gradient.array].entry(place).or_insert(R::ZERO) += ds * slope;
        }
    }

    /// The place of a loaded element in its array, packed.
    fn place(&self, load: NodeId, values: &[Value]) -> usize {
        let Node::Load(array, indices) = self.program.nodes()[load.index()] else { return 0 };
        let extents = self.inputs.arrays()[usize::from(array)].extents;
        let index = |node: NodeId, extent: i32| match values[node.index()] {
            Value::I32(index) => index.min(extent - 1).max(0) as usize,
            Value::F32(_) | Value::Bool(_) => 0,
        };
        let found = indices.into_iter().zip(extents).filter_map(|(node, extent)| Some((node?, extent)));
        found.fold(0, |place, (node, extent)| place * extent as usize + index(node, extent))
    }
}

/// The sums of all heads, each array packed; empty for arrays without gradients.
pub(super) fn gathered<'r, R: Real + 'r>(
    batch: &Batch<'_>,
    heads: impl Iterator<Item = &'r ArraySums<R>>,
) -> Vec<Vec<R>> {
    let Some((program, inputs)) = batch.program() else { return vec![] };
    let mut sums: Vec<Vec<R>> = program
        .arrays()
        .iter()
        .zip(inputs.arrays())
        .map(|(decl, array)| {
            let len = array.extents[..decl.rank].iter().map(|&extent| extent as usize).product();
            if decl.gradient { vec![R::ZERO; len] } else { vec![] }
        })
        .collect();
    for head in heads {
        for (sum, own) in sums.iter_mut().zip(head) {
            own.iter().for_each(|(&place, &value)| sum[place] += value);
        }
    }
    sums
}
