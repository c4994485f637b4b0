//! What arrays hold that stand for loads ([`Direct`]), and where their gradients go: by the interpreter.

use super::direct::Direct;
use super::eval::{Inputs, Point, RowValues};
use super::node::Node;
use super::ops::{Precision, Value};
use super::types::Var;
use super::whole::Program;
use crate::Problem;

/// The scores of a call whose sequences have one length: what [`Direct`] arrays are indexed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    sequences: usize,
    heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    off: i64,
}

impl Places {
    /// Those of a problem; `None` where sequences differ in length.
    pub fn of(problem: &Problem) -> Option<Places> {
        let lengths = &problem.lengths;
        let (queries, keys) = (lengths.max_q(), lengths.max_k());
        lengths.is_uniform().then(|| Places {
            sequences: lengths.sequences(),
            heads: problem.heads_q,
            group: problem.group_size().max(1),
            queries,
            keys,
            off: keys as i64 - queries as i64 + problem.mask.offset,
        })
    }

    /// The extents of the array that stands for a load.
    pub fn extents(&self, load: &Direct) -> Vec<usize> {
        let axes: Vec<usize> = load.axes.iter().map(|&axis| self.len(axis)).collect();
        // An array has an axis, if only of one element.
        if axes.is_empty() { vec![1] } else { axes }
    }

    fn len(&self, axis: Var) -> usize {
        match axis {
            Var::B => self.sequences,
            Var::H => self.heads,
            Var::Q => self.queries,
            Var::K => self.keys,
            // What no direct array is indexed by.
            Var::S | Var::Hk | Var::Sq | Var::Sk | Var::Off => 1,
        }
    }
}

impl Program {
    /// The elements of the array that stands for `load`, packed.
    pub fn gathered(&self, load: &Direct, inputs: &Inputs<'_>, places: &Places) -> Vec<f32> {
        let mut found = Vec::with_capacity(places.extents(load).iter().product());
        self.visit(load, inputs, places, |values| found.push(values[load.load.index()].float() as f32));
        found
    }

    /// Adds the gradient of the array that stands for `load`, packed, to that of the array that it reads,
    /// packed too. The sums are always made in one order.
    pub fn scatter(
        &self,
        load: &Direct,
        inputs: &Inputs<'_>,
        places: &Places,
        gradient: &[f32],
        to: &mut [f64],
    ) {
        let Node::Load(array, indices) = self.nodes()[load.load.index()] else { return };
        let extents = inputs.arrays()[usize::from(array)].extents;
        let mut gradient = gradient.iter();
        self.visit(load, inputs, places, |values| {
            let mut at = 0;
            for (index, &extent) in indices.iter().flatten().zip(&extents) {
                let index = values[index.index()].int().min(extent - 1).max(0);
                at = at * extent.max(0) as usize + index as usize;
            }
            if let (Some(to), Some(&own)) = (to.get_mut(at), gradient.next()) {
                *to += f64::from(own);
            }
        });
    }

    /// The values of all nodes at each place of a load's array, in its order.
    fn visit(&self, load: &Direct, inputs: &Inputs<'_>, places: &Places, mut see: impl FnMut(&[Value])) {
        let range = |axis: Var| 0..if load.axes.contains(&axis) { places.len(axis) as i32 } else { 1 };
        for b in range(Var::B) {
            for h in range(Var::H) {
                for q in range(Var::Q) {
                    let at = Point {
                        b,
                        h,
                        hk: h / places.group as i32,
                        q,
                        sq: places.queries as i32,
                        sk: places.keys as i32,
                        off: places.off as i32,
                        ..Point::default()
                    };
                    let mut row = RowValues::new(self, inputs, &at, Precision::F32);
                    for k in range(Var::K) {
                        see(row.at(k, 0.0));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::eval::{ArrayData, ArrayView};
    use super::*;
    use crate::{Dtype, Lengths, Mask};

    #[test]
    fn loads_are_gathered_and_their_gradients_added_up() {
        let text = "array t: f32[_, _] grad; array c: i32[_]; score = s + t[hk, q - k + 2] * t[c[q], 1];";
        let program = Program::parse(text).unwrap();
        let problem =
            Problem::square(1, 3, 4, 64, Mask::FULL, Dtype::Bf16).with_lengths(Lengths::uniform(1, 3, 4));
        let places = Places::of(&problem).unwrap();
        let table: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let array = ArrayView::contiguous(ArrayData::F32(&table), &[4, 5]);
        let other = ArrayView::contiguous(ArrayData::I32(&[3, -9, 99]), &[3]);
        let inputs = Inputs::new(&program, vec![other, array], Vec::new()).unwrap();
        let (_, loads) = program.with_direct_gradients().unwrap().unwrap();
        assert_eq!(loads.len(), 2);
        for load in &loads {
            let found = program.gathered(load, &inputs, &places);
            let extents = places.extents(load);
            let gradient: Vec<f32> = (0..found.len()).map(|i| 1.0 + i as f32).collect();
            let mut sums = vec![0.0; 20];
            program.scatter(load, &inputs, &places, &gradient, &mut sums);
            let mut want = vec![0.0; 20];
            if load.axes == [Var::Q] {
                assert_eq!(extents, [3]);
                assert_eq!(found, [16.0, 1.0, 16.0]);
                (want[16], want[1]) = (1.0 + 3.0, 2.0);
            } else {
                assert_eq!(extents, [4, 3, 4]);
                for (at, (&value, own)) in found.iter().zip(gradient).enumerate() {
                    let (h, q, k) = (at / 12, at / 4 % 3, at % 4);
                    let index = h * 5 + (q + 2).saturating_sub(k).min(4);
                    assert_eq!(value, index as f32);
                    want[index] += f64::from(own);
                }
            }
            assert_eq!(sums, want);
        }
    }
}
